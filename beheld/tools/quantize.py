"""`beheld quantize`: writes a checkpoint in fewer bits, calibrated by a few questions if the method wants them.

Shapes: T tokens, K inputs of a layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from beheld.checkpoint.info import read_config, read_info
from beheld.checkpoint.resolve import fetch_weights, resolve
from beheld.core.config import EngineArgs
from beheld.core.errors import UserError
from beheld.inputs.prompt.tokenizer import load_tokenizer
from beheld.models import activation_scales, write_gguf
from beheld.models.write_quantized import CALIBRATED, SCALED, check, choose, write
from beheld.tools.verify.reference import Reference
from beheld.tools.verify.trace import Question

# Second moments that are held at once; questions are asked again for each part of the layers.
_MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class Written:
    """What was written.

    Attributes:
        folder: the checkpoint; a file if it is one.
        layers: the number of weights that were rounded.
        bytes_before, bytes_after: of all weights.
    """

    folder: str
    layers: int
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        return (
            f"{self.folder}: {self.layers} weights are rounded, {self.bytes_after / 2**20:.1f} MiB in place of "
            f"{self.bytes_before / 2**20:.1f}."
        )


def quantize(args: EngineArgs, out: Path, method: str, questions: Sequence[Question]) -> Written:
    """Write the checkpoint of `args` to the folder `out`.

    Args:
        questions: what the methods calibrate by that do so; others take none.

    Raises:
        BeheldError: the checkpoint cannot be quantized, or the folder exists.
    """
    path = resolve(args)
    hf_config = read_config(path, args)
    info = read_info(path, args, hf_config)
    # Before weights are fetched and questions asked, which takes a while.
    check(out)
    if method in (*CALIBRATED, *SCALED) and not questions:
        raise UserError(f"{method!r} rounds by what the layers are given.", "Name a few files, or a --question.")
    fetch_weights(args, path)
    chosen = choose(info, hf_config, method)
    if method in SCALED:
        reference = Reference(args)
        found = activation_scales.changes(reference.model, chosen, _asking(reference, questions))
        before, after = write(info, chosen, out, lambda layer: None, found)
    elif method not in CALIBRATED:
        before, after = write(info, chosen, out, lambda layer: None)
    else:
        layers = [name for name in chosen.rounded.values() if name is not None]
        moments = _Moments(Reference(args), layers, questions)
        before, after = write(info, chosen, out, moments.of)
    return Written(str(out), len(chosen.rounded), before, after)


def write_file(args: EngineArgs, out: Path, kind: str) -> Written:
    """Write the checkpoint of `args` as the GGUF file `out`.

    Args:
        kind: the type of matrices, of models.write_gguf.TYPES.

    Raises:
        BeheldError: the checkpoint cannot be written so, or the file exists.
    """
    path = resolve(args)
    hf_config = read_config(path, args)
    info = read_info(path, args, hf_config)
    write_gguf.check(info, kind, out)
    fetch_weights(args, path)
    made = write_gguf.write(info, hf_config, lambda: load_tokenizer(info, args), kind, out)
    return Written(str(out), made.rounded, made.bytes_before, made.bytes_after)


def _asking(reference: Reference, questions: Sequence[Question]) -> activation_scales.Asking:
    """Return how the model is asked the questions; the first one is asked again and again."""

    def ask_all() -> None:
        for question in questions:
            reference.trace(question)

    first = dataclasses.replace(questions[0], max_tokens=1)
    return activation_scales.Asking(lambda: reference.trace(first).logits[0], ask_all, len(questions))


class _Moments:
    """Second moments of layers' inputs over the questions and the model's answers, for some layers at a time."""

    def __init__(self, reference: Reference, layers: Sequence[str], questions: Sequence[Question]) -> None:
        self._reference, self._layers, self._questions = reference, list(layers), questions
        self._found: dict[str, Tensor] = {}

    def of(self, layer: str) -> Tensor:
        """Return the second moments (K, K) of the inputs of a layer, which are then forgotten."""
        if layer not in self._found:
            self._measure(self._next_from(layer))
        return self._found.pop(layer)

    def _next_from(self, layer: str) -> list[str]:
        """Return layers that are not measured, `layer` first, as many as memory takes."""
        chosen, size = [layer], self._bytes(layer)
        for name in self._layers[self._layers.index(layer) + 1 :]:
            size += self._bytes(name)
            if size > _MOST_BYTES:
                break
            chosen.append(name)
        return [name for name in chosen if name not in self._found]

    def _bytes(self, layer: str) -> int:
        return 4 * int(self._reference.model.get_submodule(layer).in_features) ** 2

    def _measure(self, layers: Sequence[str]) -> None:
        model = self._reference.model
        for name in layers:
            inputs = model.get_submodule(name).in_features
            self._found[name] = torch.zeros(inputs, inputs)
        with _hooked({model.get_submodule(name): self._adding(name) for name in layers}):
            for question in self._questions:
                self._reference.trace(question)

    def _adding(self, name: str) -> Callable[[Any, Any], None]:
        def add(module: Any, given: Any) -> None:
            x_TK = given[0].detach().float().reshape(-1, given[0].shape[-1])
            self._found[name].addmm_(x_TK.t(), x_TK)

        return add


@contextmanager
def _hooked(hooks: dict[Any, Callable[[Any, Any], None]]) -> Iterator[None]:
    handles = [module.register_forward_pre_hook(hook) for module, hook in hooks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
