"""Carries stored weights through transformers' loader unchanged, as rows of bytes that include their scales.

The loader renames weights, stacks those of experts and joins gate with up, and scales must follow. So each weight goes
through the loader as rows of bytes: a row's numbers, then its scale (or scales, or zero points). What the loader does
to whole rows it does to their scales too; afterwards the two are separated. For FP8 with one scale per row:

    file      gate (N, K), scale (N, 1)    up (N, K), scale (N, 1)      of each expert
    loader    gate (N, K + 4)              up (N, K + 4)           ->   gate_up (G, 2N, K + 4)
    model                                                               rows (G, 2N, K) in FP8, scales (G, 2N, 1)

Shapes: G experts, N outputs, K inputs, B bytes of a row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from beheld.checkpoint.loader_rules import LoaderRules
from beheld.core.errors import ModelError
from beheld.quant.linear import StoredExperts, StoredLinear, bias_of
from beheld.quant.method import Replace
from beheld.quant.stored_entries import REFETCH
from beheld.utils.named_as import named_as

_EXPERTS = ("gate_up_proj", "down_proj")
# Loader operations that keep rows whole: they only concatenate or stack.
_JOINS = ("MergeModulelist", "Concatenate")
# Types of scales and of least numbers; those of numbers are narrower.
_SCALES = (torch.float32, torch.float16, torch.bfloat16)


class StoredWeight(Protocol):
    """A weight as the checkpoint stores it, read on use.

    A weight that has no `fields` is dequantized. One with a method `rank_part(cut)` gives the part that a rank holds,
    or None where it cannot be cut; of one without it ranks read the whole.
    """

    def __getitem__(self, index: Any) -> Tensor:
        """Return the part `index` of the dequantized numbers, (N, K) as a whole."""

    def fields(self) -> Sequence[Tensor]:
        """Return the fields of each row, on the CPU: (N, *) each, in the types and sizes of RowForm.layout."""


@dataclass(frozen=True)
class LoadedRows:
    """A parameter as it was loaded.

    Attributes:
        fields: of each row: (N, *), or (G, N, *) of experts.
        source: one of the weights that it was made of; all have its layout.
    """

    fields: Sequence[Tensor]
    source: Any


class RowForm(Protocol):
    """The layout of a method's weights in rows, and the layers that multiply them."""

    def layout(self, weight: Any, inputs: int) -> Sequence[tuple[torch.dtype, int]]:
        """Return each field's type and count for a row of `inputs` inputs of a StoredWeight."""

    def takes(self, parameter: Tensor, weights: Sequence[Any]) -> bool:
        """Return whether a product accepts a parameter, (..., N, K), made of these weights, which have `fields`."""

    def linear(self, rows: LoadedRows, bias_N: Tensor | None) -> StoredLinear:
        """Make a linear layer."""

    def experts(self, shell: nn.Module, gate_up: LoadedRows, down: LoadedRows) -> StoredExperts:
        """Make experts; `shell` is transformers' module without its weights."""


class CarryingRows:
    """A weight as rows of bytes, for the loader in place of a slice of a file.

    Args:
        name: of the weight, for errors.
    """

    def __init__(self, weight: StoredWeight, name: str) -> None:
        self._weight, self._name = weight, name

    def __getitem__(self, index: Any) -> Tensor:
        """Return the part `index` of the rows (N, B).

        Raises:
            ModelError: a scale is NaN or infinity, which nothing could tell of the bytes.
        """
        fields = self._weight.fields()
        if not all(each.isfinite().all() for each in fields if each.dtype in _SCALES):
            raise ModelError(f"The scales of {self._name!r} hold NaN or infinity.", REFETCH)
        return torch.cat([each.contiguous().view(torch.uint8) for each in fields], dim=-1)[index]


@dataclass(frozen=True)
class Kept:
    """The modules of a model whose weights are loaded as rows of bytes.

    Attributes:
        linears: names of linear layers.
        experts: names of expert modules.
        left: parameters that stored weights go into but that cannot keep them.
        layouts: of each kept parameter, by name.
        sources: one of the weights that it is made of, by name.
    """

    linears: tuple[str, ...]
    experts: tuple[str, ...]
    left: tuple[str, ...]
    layouts: dict[str, Sequence[tuple[torch.dtype, int]]] = field(default_factory=dict)
    sources: dict[str, Any] = field(default_factory=dict)


def keeping(model_class: Any, weights: dict[str, Any], form: RowForm) -> Any:
    """Return a subclass of `model_class` whose models have room for rows of bytes.

    A model lists its modules in `kept_rows`, and replaces those entries of `weights`, which the loader must receive.
    """

    class Keeping(model_class):
        def __init__(self, config: Any, *args: Any, **keywords: Any) -> None:
            super().__init__(config, *args, **keywords)
            self.kept_rows = _make_room(self, weights, form)

    return named_as(Keeping, model_class)


def settle(model: Any, model_class: Any, form: RowForm, replace: Replace) -> Kept:
    """Separate the rows of a loaded model, one weight at a time, and insert the modules that multiply them."""
    kept: Kept = model.kept_rows
    del model.kept_rows
    model.__class__ = model_class
    for name in kept.linears:
        linear = model.get_submodule(name)
        _put(model, name, form.linear(_parted(linear, "weight", kept, name), bias_of(linear)), replace)
    for name in kept.experts:
        experts = model.get_submodule(name)
        gate_up, down = (_parted(experts, each, kept, name) for each in _EXPERTS)
        _put(model, name, form.experts(experts, gate_up, down), replace)
    return kept


def _put(model: nn.Module, name: str, new: StoredLinear | StoredExperts, replace: Replace) -> None:
    parent, _, own = name.rpartition(".")
    replace(model.get_submodule(parent), own, new, lambda module: module.restored())  # type: ignore[operator]


def _parted(module: nn.Module, parameter: str, kept: Kept, name: str) -> LoadedRows:
    """Return the module's parameter in fields and delete it."""
    carrying = getattr(module, parameter).data
    setattr(module, parameter, None)
    found, start = [], 0
    own = f"{name}.{parameter}"
    for dtype, count in kept.layouts[own]:
        stop = start + count * dtype.itemsize
        found.append(carrying[..., start:stop].contiguous().view(dtype))
        start = stop
    return LoadedRows(found, kept.sources[own])


def _make_room(model: Any, weights: dict[str, Any], form: RowForm) -> Kept:
    """Widen the parameters of a model on the meta device that receive rows of bytes, and replace their `weights`."""
    names_by_target, joined = sources_of(model, weights)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    shared = {*tied, *tied.values()}
    whole = {
        target: names
        for target, names in names_by_target.items()
        if target not in shared and all(hasattr(weights[name], "fields") for name in names)
    }
    linears = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and f"{name}.weight" in whole and joined[f"{name}.weight"] is None
        and len(whole[f"{name}.weight"]) == 1
        and form.takes(module.weight, [weights[each] for each in whole[f"{name}.weight"]])
    ]  # fmt: skip
    experts = [
        name for name, module in model.named_modules() if _are_experts(name, module, whole, joined, weights, form)
    ]
    targets = [(name, "weight") for name in linears] + [(name, each) for name in experts for each in _EXPERTS]
    layouts: dict[str, Sequence[tuple[torch.dtype, int]]] = {}
    sources: dict[str, Any] = {}
    for name, each in targets:
        module = model.get_submodule(name)
        plain = getattr(module, each)
        own = f"{name}.{each}"
        sources[own] = weights[whole[own][0]]
        layouts[own] = form.layout(sources[own], plain.shape[-1])
        num_bytes = sum(dtype.itemsize * count for dtype, count in layouts[own])
        wide = torch.empty((*plain.shape[:-1], num_bytes), dtype=torch.uint8, device=plain.device)
        setattr(module, each, nn.Parameter(wide, requires_grad=False))
        for source in whole[own]:
            weights[source] = CarryingRows(weights[source], source)
    known = model.state_dict()
    left = tuple(sorted(target for target in whole if target in known and target not in layouts))
    return Kept(tuple(linears), tuple(experts), left, layouts, sources)


def sources_of(model: Any, weights: dict[str, Any]) -> tuple[dict[str, list[str]], dict[str, Any]]:
    """Return, by parameter, the names of the weights that the loader makes it from, and the conversion if any."""
    rules, known = LoaderRules(model), model.state_dict()
    names_by_target: dict[str, list[str]] = defaultdict(list)
    joined: dict[str, Any] = {}
    for name in weights:
        target, rule = rules.target(name, known)
        names_by_target[target].append(name)
        joined[target] = rule
    return names_by_target, joined


def _are_experts(
    name: str,
    module: nn.Module,
    whole: dict[str, list[str]],
    joined: dict[str, Any],
    weights: dict[str, Any],
    form: RowForm,
) -> bool:
    """Return whether experts have transformers' common layout, whose weights the loader only stacks and joins."""
    usual = {"has_gate": True, "has_bias": False, "is_transposed": False}
    if any(getattr(module, attribute, None) is not value for attribute, value in usual.items()):
        return False
    # Older versions of transformers have no such norm.
    if getattr(module, "has_post_expert_norm", False) or not hasattr(module, "_apply_gate"):
        return False
    for each in _EXPERTS:
        parameter, target = getattr(module, each, None), f"{name}.{each}"
        rule = joined.get(target)
        if (
            parameter is None
            or target not in whole
            or rule is None
            or parameter.dim() != 3
            or not form.takes(parameter, [weights[source] for source in whole[target]])
        ):
            return False
        if any(type(step).__name__ not in _JOINS or step.dim not in (0, 1) for step in rule.operations):
            return False
    return True
