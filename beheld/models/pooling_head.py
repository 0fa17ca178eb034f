"""From pooled hidden states to vectors or scores, before they are truncated and activated.

Shapes: S hidden states, H hidden size, D numbers of a vector, or classes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from beheld.checkpoint.weights import weight_files
from beheld.core.config import ModelInfo
from beheld.core.errors import ModelError, first_line
from beheld.core.pooling import DenseLayer
from beheld.families import registry

# Names of the module that decoders with classes have after their layers, in transformers or in their publisher's code.
_SCORES = ("score", "classifier", "v_head")
# Names of a linear layer's weights in sentence-transformers' files.
_PREFIXES = ("linear.", "dense.", "")
# The module with rows of the generating head, or with sentence-transformers' layers.
_OWN = "pooling_head"


class NoHead(nn.Identity):
    """Stands where a generating head was."""

    # Models with a bias of their own share it with the head.
    bias = None


def unneeded(model: Any, info: ModelInfo) -> frozenset[str]:
    """Return the names of weights that pooling does not use and that the checkpoint may lack."""
    pooler = info.pooler
    assert pooler is not None
    parts = [] if pooler.scores == "tokens" else [model.get_output_embeddings()]
    if pooler.encodes and not pooler.scores:
        # The layer on the first token's state, which only some heads read.
        parts.append(getattr(model.base_model, "pooler", None))
    own = {id(parameter) for part in parts if part is not None for parameter in part.parameters()}
    return frozenset(name for name, parameter in model.named_parameters() if id(parameter) in own)


def read_apart(info: ModelInfo) -> tuple[str, ...]:
    """Return how the names of weights begin that lie among the model's and are this head's."""
    pooler = info.pooler
    if pooler is None:
        return ()
    if pooler.scores == "head":
        return tuple(f"{name}." for name in _SCORES)
    return tuple(prefix for prefix in _PREFIXES if prefix and any(not entry.folder for entry in pooler.dense))


def give(model: Any, info: ModelInfo) -> None:
    """Give a loaded model the head of its pooler, and take its generating head away.

    Raises:
        ModelError: the checkpoint's layers after pooling cannot be loaded.
    """
    pooler = info.pooler
    assert pooler is not None
    head = model.get_output_embeddings()
    if pooler.scores == "tokens":
        rows_DH = head.weight[list(pooler.token_ids)].detach()
        own = nn.Linear(rows_DH.shape[1], pooler.width, bias=False, device=rows_DH.device, dtype=rows_DH.dtype)
        # Of the two logits' softmax, the second is the sigmoid of the difference.
        chosen_DH = rows_DH[1:].float() - rows_DH[:1].float() if pooler.difference else rows_DH
        own.weight = nn.Parameter(chosen_DH.to(rows_DH.dtype))
        model.add_module(_OWN, own)
    elif pooler.dense:
        embedding = model.get_input_embeddings().weight
        layers = [layer for entry in pooler.dense for layer in _dense(Path(info.path), entry)]
        model.add_module(_OWN, nn.Sequential(*layers).to(embedding.device, embedding.dtype))
    elif pooler.scores == "head" and registry.model(info.family).scores is None and not _has_scores(model):
        # transformers has no class with classes for this configuration; the checkpoint has their layer.
        embedding = model.get_input_embeddings().weight
        stored = _stored_scores(Path(info.path), info.hidden_size, pooler.width)
        if stored is not None:
            model.add_module(_OWN, stored.to(embedding.device, embedding.dtype))
    if head is not None:
        model.set_output_embeddings(NoHead())
    model.requires_grad_(False)


def head_of(model: Any, info: ModelInfo) -> Callable[[Tensor], Tensor]:
    """Return what makes (S, D) of pooled hidden states (S, H).

    Raises:
        ModelError: the model has no classes where its configuration says so.
    """
    pooler = info.pooler
    assert pooler is not None
    own = getattr(model, _OWN, None)
    if own is not None:
        return own
    family = registry.model(info.family)
    made = family.scores if pooler.scores else family.vectors
    if made is not None:
        return partial(made, model)
    if not pooler.scores:
        return nn.Identity()
    found = next((getattr(model, name) for name in _SCORES if hasattr(model, name)), None)
    if not isinstance(found, nn.Module):
        raise ModelError(
            f"{type(model).__name__} has no head of its classes that is known.",
            f"Models with one of these can be run: {', '.join(_SCORES)}.",
        )
    return found


def _has_scores(model: Any) -> bool:
    return any(isinstance(getattr(model, name, None), nn.Module) for name in _SCORES)


def _stored_scores(path: Path, width: int, count: int) -> nn.Module | None:
    """Return the head of `count` classes from the files of the model's weights; None if they have none.

    It is one layer, or two with a ReLU between them.

    Raises:
        ModelError: it is of another shape.
    """
    stored = _tensors(path, tuple(f"{name}." for name in _SCORES))
    for name in _SCORES:
        if f"{name}.weight" in stored:
            return _linear(stored, name, width, count, "classes")
        if f"{name}.2.weight" in stored:
            first = _linear(stored, f"{name}.0", width, width, "outputs")
            return nn.Sequential(first, nn.ReLU(), _linear(stored, f"{name}.2", width, count, "classes"))
    return None


def _tensors(path: Path, beginnings: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the tensors of the model's weights whose names begin so."""
    from safetensors import safe_open

    made: dict[str, Tensor] = {}
    for file in (path / name for name in weight_files(path) if name.endswith(".safetensors")):
        with safe_open(file, framework="pt", device="cpu") as stored:
            names = set(stored.keys())
            made |= {name: stored.get_tensor(name) for name in names if name.startswith(beginnings)}
    return made


def _linear(stored: dict[str, Tensor], name: str, width: int, count: int, noun: str) -> nn.Linear:
    """Return a linear layer with its weights.

    Raises:
        ModelError: they are missing, or of another shape.
    """
    weight_DH, bias_D = stored.get(f"{name}.weight"), stored.get(f"{name}.bias")
    if weight_DH is None or weight_DH.shape != (count, width):
        found = "is missing" if weight_DH is None else f"has the shape {tuple(weight_DH.shape)}"
        raise ModelError(
            f"{name}.weight {found}, and the configuration describes {count} {noun} of {width} numbers.",
            "Check num_labels or id2label in config.json.",
        )
    layer = nn.Linear(width, count, bias=bias_D is not None)
    layer.weight = nn.Parameter(weight_DH, requires_grad=False)
    if bias_D is not None:
        layer.bias = nn.Parameter(bias_D, requires_grad=False)
    return layer


def _dense(path: Path, entry: DenseLayer) -> list[nn.Module]:
    """Return a linear layer with its weights, and what follows it.

    Raises:
        ModelError: the file is missing, or does not fit.
    """
    from safetensors import SafetensorError, safe_open

    layer = nn.Linear(entry.width_in, entry.width_out, bias=entry.bias)
    file = path / entry.folder / "model.safetensors"
    activation = getattr(nn, entry.activation, None)
    if not (isinstance(activation, type) and issubclass(activation, nn.Module)):
        raise ModelError(f"{entry.folder}/config.json names the activation {entry.activation!r}, which is not known.")
    try:
        with safe_open(file, framework="pt", device="cpu") as stored:
            names = set(stored.keys())
            prefix = next(prefix for prefix in _PREFIXES if f"{prefix}weight" in names)
            layer.load_state_dict({name: stored.get_tensor(f"{prefix}{name}") for name in layer.state_dict()})
        return [layer, activation()]
    except (OSError, StopIteration, KeyError, RuntimeError, TypeError, SafetensorError) as error:
        raise ModelError(
            f"The layer in {entry.folder or 'the checkpoint'} cannot be loaded: {first_line(error)}.",
            "Fetch the checkpoint again; the layer's weights are read from its model.safetensors.",
        ) from error
