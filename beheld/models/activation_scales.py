"""Scales of layers' inputs by how large these are (AWQ): chosen from questions, and folded into what makes the inputs.

A fold divides a norm's weight (or an output of the linear layer before) by a scale for each channel, and multiplies the
next layers' weights by it. Which layers belong together is found by what they are given, and tried: with scales that
are powers of two, which lose nothing, the model's answer must stay the same.

Shapes: T rows, K channels, N outputs.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from beheld.models.surgery.parts import text_model
from beheld.models.write_quantized import Change, RoundingChoice
from beheld.quant.written_awq import AWQForm, best_scales
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# Pairs of linear layers of one module that may have only products between them.
_PAIRS = (("v_proj", "o_proj"), ("up_proj", "down_proj"))
# Rows of a layer's inputs by which scales are compared.
_ROWS = 256
# The greatest difference of logits, as a share of the largest, that is rounding.
_SAME = 1e-4


@dataclass(frozen=True)
class Fold:
    """Layers whose inputs are scaled together.

    Attributes:
        source: the module that makes the inputs.
        layers: the linear layers that are given them.
        form: what folds have in common that are made alike: names within a decoder layer.
        plus: what the source adds to its weight, if it is a norm.
        by_rows: whether the source is a linear layer, whose outputs are divided.
    """

    source: str
    layers: tuple[str, ...]
    form: str
    plus: float = 0.0
    by_rows: bool = False


@dataclass(frozen=True)
class Asking:
    """How the unquantized model is asked.

    Attributes:
        once: asks a question, and returns the logits (V,) of the answer's first token.
        all: asks all questions, which are answered.
        count: of all questions.
    """

    once: Callable[[], Tensor]
    all: Callable[[], None]
    count: int


def changes(model: Any, chosen: RoundingChoice, asking: Asking) -> dict[str, Change]:
    """Return how the checkpoint's entries change before they are rounded.

    Args:
        model: the unquantized model, in float32.
        chosen: what is rounded, and how.
    """
    form = chosen.form
    assert isinstance(form, AWQForm), "no other form scales inputs"
    usable = {layer for layer in chosen.rounded.values() if layer is not None}
    folds = _kept(model, _candidates(model, usable, chosen.sources, asking), asking)
    logger.info("Inputs of %d layers are scaled.", sum(len(fold.layers) for fold in folds))
    inputs: dict[str, Tensor] = defaultdict(lambda: torch.ones(()))
    outputs: dict[str, Tensor] = {}
    found: dict[str, Change] = {}
    rows_by_layer, size_by_layer = _inputs(model, [fold.layers[0] for fold in folds], asking)
    for fold in folds:
        weights = [model.get_submodule(layer).weight.detach() for layer in fold.layers]
        first = fold.layers[0]
        scale_K = best_scales(form, weights, rows_by_layer.pop(first), size_by_layer[first])
        source = model.get_submodule(fold.source)
        if fold.by_rows:
            outputs[fold.source] = scale_K
        else:
            entry = chosen.sources[f"{fold.source}.weight"]
            scale_K = _as_stored(source.weight.detach(), scale_K, fold.plus, chosen.dtypes[entry])
            found[entry] = _divided(scale_K, fold.plus)
            if getattr(source, "bias", None) is not None:
                found[chosen.sources[f"{fold.source}.bias"]] = _divided(scale_K, 0.0)
        for layer in fold.layers:
            inputs[layer] = scale_K
    for layer in {*inputs, *outputs}:
        over_N = outputs.get(layer)
        found[chosen.sources[f"{layer}.weight"]] = _scaled(inputs[layer], over_N)
        if over_N is not None and model.get_submodule(layer).bias is not None:
            found[chosen.sources[f"{layer}.bias"]] = _divided(over_N, 0.0)
    return found


def _candidates(model: Any, usable: set[str], sources: Mapping[str, str], asking: Asking) -> list[Fold]:
    """Return the folds that names and shapes allow."""
    made, given = _traced(model, asking)
    names = {id(module): name for name, module in model.named_modules()}
    by_norm: dict[str, list[str]] = defaultdict(list)
    for layer, tensor in given.items():
        norm = next((name for name, output in made.items() if output is tensor), None)
        if norm is not None:
            by_norm[norm].append(layer)
    found = []
    for norm, layers in by_norm.items():
        parameters = [f"{norm}.{name}" for name, _ in model.get_submodule(norm).named_parameters()]
        if set(layers) <= usable and all(name in sources for name in parameters):
            form = " ".join((_within(norm), "->", *sorted(map(_within, layers))))
            found += [Fold(norm, tuple(layers), form, plus) for plus in (0.0, 1.0)]
    for parent in model.modules():
        for first, second in _PAIRS:
            before, after = (getattr(parent, name, None) for name in (first, second))
            pair = [f"{names[id(parent)]}.{name}" for name in (first, second)]
            if not isinstance(before, nn.Linear) or not isinstance(after, nn.Linear) or not set(pair) <= usable:
                continue
            if before.out_features == after.in_features and (before.bias is None or f"{pair[0]}.bias" in sources):
                found.append(Fold(pair[0], (pair[1],), f"{_within(pair[0])} -> {second}", by_rows=True))
    return found


def _within(name: str) -> str:
    """Return a module's name without that of its decoder layer."""
    parts = name.split(".")
    last = max((place for place, part in enumerate(parts) if part.isdigit()), default=-1)
    return ".".join(parts[last + 1 :])


def _traced(model: Any, asking: Asking) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what each norm of the text model makes of a prompt, and what each linear layer is given."""
    inside = {id(module) for module in text_model(model).modules()}
    made: dict[str, Tensor] = {}
    given: dict[str, Tensor] = {}

    def makes(name: str) -> Callable[[Any, Any, Any], None]:
        def note(module: Any, inputs: Any, output: Any) -> None:
            made.setdefault(name, output)

        return note

    def takes(name: str) -> Callable[[Any, Any], None]:
        def note(module: Any, inputs: Any) -> None:
            given.setdefault(name, inputs[0])

        return note

    handles = []
    for name, module in model.named_modules():
        if id(module) not in inside:
            continue
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Linear):
            handles.append(module.register_forward_pre_hook(takes(name)))
        elif isinstance(weight, nn.Parameter) and weight.dim() == 1:
            handles.append(module.register_forward_hook(makes(name)))
    try:
        asking.once()
    finally:
        for handle in handles:
            handle.remove()
    return made, given


def _kept(model: Any, candidates: Sequence[Fold], asking: Asking) -> list[Fold]:
    """Return the folds that leave the model's answer as it is, those of one form tried together."""
    meant = asking.once()
    by_form: dict[tuple[str, float], list[Fold]] = defaultdict(list)
    for fold in candidates:
        by_form[fold.form, fold.plus].append(fold)
    found: list[Fold] = []
    done = set[str]()
    for (form, _), folds in by_form.items():
        if form in done:
            continue
        with _folded(model, folds):
            other = asking.once()
        if float((other - meant).abs().max()) <= _SAME * float(meant.abs().max()):
            found += folds
            done.add(form)
    return found


@contextmanager
def _folded(model: Any, folds: Sequence[Fold]) -> Iterator[None]:
    """Scale by random powers of two, which lose nothing, and take it back."""
    chance = torch.Generator().manual_seed(0)
    undo: list[Callable[[], Any]] = []
    try:
        for fold in folds:
            source = model.get_submodule(fold.source)
            scale_K = 2.0 ** torch.randint(-1, 3, (source.weight.shape[0],), generator=chance)
            own = [(parameter, fold.plus if name == "weight" else 0.0) for name, parameter in source.named_parameters()]
            for parameter, plus in own:
                before = parameter.data
                over = scale_K if before.dim() == 1 else scale_K.unsqueeze(1)
                parameter.data = (before + plus) / over - plus
                undo.append(functools.partial(setattr, parameter, "data", before))
            for layer in fold.layers:
                weight = model.get_submodule(layer).weight
                weight.data.mul_(scale_K)
                undo.append(functools.partial(weight.data.div_, scale_K))
        yield
    finally:
        for each in reversed(undo):
            each()


def _inputs(model: Any, layers: Sequence[str], asking: Asking) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return some rows (T, K) of each layer's inputs, and the mean absolute value (K,) of all."""
    rows: dict[str, list[Tensor]] = defaultdict(list)
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = defaultdict(int)
    share = max(1, _ROWS // asking.count)

    def takes(name: str) -> Callable[[Any, Any], None]:
        def note(module: Any, inputs: Any) -> None:
            x_TK = inputs[0].detach().float().reshape(-1, inputs[0].shape[-1])
            sums[name] = sums.get(name, 0.0) + x_TK.abs().sum(0)
            counts[name] += len(x_TK)
            rows[name].append(x_TK[:: max(1, len(x_TK) // share)][:share].clone())

        return note

    handles = [model.get_submodule(name).register_forward_pre_hook(takes(name)) for name in layers]
    try:
        asking.all()
    finally:
        for handle in handles:
            handle.remove()
    found = {}
    for name, parts in rows.items():
        x_TK = torch.cat(parts)
        found[name] = x_TK[:: max(1, len(x_TK) // _ROWS)][:_ROWS]
    return found, {name: sums[name] / counts[name] for name in sums}


def _as_stored(weight_K: Tensor, scale_K: Tensor, plus: float, dtype: torch.dtype) -> Tensor:
    """Return the scale that the norm's weight has divided by, once it is rounded to the checkpoint's type.

    Channels that the type cannot hold divided keep their weight: 1 + w of a large scale may round to zero.
    """
    whole_K = weight_K.float() + plus
    rounded_K = (whole_K / scale_K - plus).to(dtype).float() + plus
    exact_K = whole_K / rounded_K
    return torch.where(exact_K.isfinite() & (exact_K > 0), exact_K, torch.ones(()))


def _divided(over: Tensor, plus: float) -> Change:
    return lambda tensor: ((tensor.float() + plus) / over - plus).to(tensor.dtype)


def _scaled(inputs_K: Tensor, over_N: Tensor | None) -> Change:
    def change(weight_NK: Tensor) -> Tensor:
        scaled_NK = weight_NK.float() * inputs_K
        return scaled_NK if over_N is None else scaled_NK / over_N.unsqueeze(1)

    return change
