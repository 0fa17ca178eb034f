"""Brings stored weights through transformers' loader as they are: each row of bytes carries all that belongs to it.

The loader renames weights, stacks those of experts and joins gate with up; scales must follow all of that. So a weight
goes in as rows of bytes: the numbers of a row, then its scale (or scales, or zero points). Whatever is done to whole
rows is then done to all of it, and after the loader they are parted again. Of FP8 with a scale for each row:

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

from beheld.quant.linear import StoredExperts, StoredLinear
from beheld.quant.method import Replace

_EXPERTS = ("gate_up_proj", "down_proj")
# What the loader may do to rows that carry what belongs to them: put them together.
_JOINS = ("MergeModulelist", "Concatenate")


class StoredWeight(Protocol):
    """A weight as a checkpoint stores it, read when it is asked for."""

    def __getitem__(self, index: Any) -> Tensor:
        """The part `index` of the numbers that it stands for, (N, K) as a whole."""

    def fields(self) -> Sequence[Tensor]:
        """What each row carries, on the CPU: (N, *) each, of the types and sizes of RowForm.layout."""


class RowForm(Protocol):
    """How a method's weights lie in rows, and which layers multiply them."""

    def layout(self, inputs: int) -> Sequence[tuple[torch.dtype, int]]:
        """Of a row of so many inputs: the type of each field, and how many of it there are."""

    def takes(self, parameter: Tensor) -> bool:
        """True if a product takes weights of this shape, (..., N, K)."""

    def linear(self, fields: Sequence[Tensor], bias_N: Tensor | None) -> StoredLinear:
        """A layer of fields (N, *)."""

    def experts(self, shell: nn.Module, gate_up: Sequence[Tensor], down: Sequence[Tensor]) -> StoredExperts:
        """Experts of fields (G, N, *); `shell` is transformers' module, without its weights."""


class CarryingRows:
    """A weight as the loader is given it, in place of a slice of a file: rows of bytes."""

    def __init__(self, weight: StoredWeight) -> None:
        self._weight = weight

    def __getitem__(self, index: Any) -> Tensor:
        """The part `index` of the rows (N, B)."""
        return torch.cat([each.contiguous().view(torch.uint8) for each in self._weight.fields()], dim=-1)[index]


@dataclass(frozen=True)
class Kept:
    """Which modules of a model take their weights as rows of bytes.

    Attributes:
        linears: names of linear layers.
        experts: names of modules with experts.
        left: parameters made of stored weights that could not be kept so.
        inputs: K of each parameter that is kept, by its name.
    """

    linears: tuple[str, ...]
    experts: tuple[str, ...]
    left: tuple[str, ...]
    inputs: dict[str, int] = field(default_factory=dict)


def keeping(model_class: Any, weights: dict[str, Any], form: RowForm) -> Any:
    """A class like `model_class` whose models, when the loader makes them, have room for rows of bytes.

    They say which in `kept_rows`, and replace those entries of `weights`, which the loader must be given.
    """

    class Keeping(model_class):
        def __init__(self, config: Any, *args: Any, **keywords: Any) -> None:
            super().__init__(config, *args, **keywords)
            self.kept_rows = _make_room(self, weights, form)

    # The loader chooses what to rename by the name of the class, and by where it comes from.
    Keeping.__name__, Keeping.__qualname__ = model_class.__name__, model_class.__qualname__
    Keeping.__module__ = model_class.__module__
    return Keeping


def settle(model: Any, model_class: Any, form: RowForm, replace: Replace) -> Kept:
    """Part the rows of a loaded model, one weight at a time, and put modules that multiply them in place."""
    kept: Kept = model.kept_rows
    del model.kept_rows
    model.__class__ = model_class
    for name in kept.linears:
        linear = model.get_submodule(name)
        bias = None if linear.bias is None else linear.bias.data
        _put(model, name, form.linear(_parted(linear, "weight", kept, name, form), bias), replace)
    for name in kept.experts:
        experts = model.get_submodule(name)
        gate_up, down = (_parted(experts, each, kept, name, form) for each in _EXPERTS)
        _put(model, name, form.experts(experts, gate_up, down), replace)
    return kept


def _put(model: nn.Module, name: str, new: StoredLinear | StoredExperts, replace: Replace) -> None:
    parent, _, own = name.rpartition(".")
    replace(model.get_submodule(parent), own, new, lambda module: module.restored())  # type: ignore[operator]


def _parted(module: nn.Module, parameter: str, kept: Kept, name: str, form: RowForm) -> list[Tensor]:
    """The fields of the module's parameter, which is then gone."""
    carrying = getattr(module, parameter).data
    setattr(module, parameter, None)
    found, start = [], 0
    for dtype, count in form.layout(kept.inputs[f"{name}.{parameter}"]):
        stop = start + count * dtype.itemsize
        found.append(carrying[..., start:stop].contiguous().view(dtype))
        start = stop
    return found


def _make_room(model: Any, weights: dict[str, Any], form: RowForm) -> Kept:
    """Widen the parameters of a model without memory that are to take such rows, and say so in `weights`."""
    names_by_target, joined = _sources(model, weights)
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
        and len(whole[f"{name}.weight"]) == 1 and form.takes(module.weight)
    ]  # fmt: skip
    experts = [name for name, module in model.named_modules() if _are_experts(name, module, whole, joined, form)]
    targets = [(name, "weight") for name in linears] + [(name, each) for name in experts for each in _EXPERTS]
    inputs: dict[str, int] = {}
    for name, each in targets:
        module = model.get_submodule(name)
        plain = getattr(module, each)
        inputs[f"{name}.{each}"] = plain.shape[-1]
        num_bytes = sum(dtype.itemsize * count for dtype, count in form.layout(plain.shape[-1]))
        wide = torch.empty((*plain.shape[:-1], num_bytes), dtype=torch.uint8, device=plain.device)
        setattr(module, each, nn.Parameter(wide, requires_grad=False))
        for source in whole[f"{name}.{each}"]:
            weights[source] = CarryingRows(weights[source])
    known = model.state_dict()
    left = tuple(sorted(target for target in whole if target in known and target not in inputs))
    return Kept(tuple(linears), tuple(experts), left, inputs)


def _sources(model: Any, weights: dict[str, Any]) -> tuple[dict[str, list[str]], dict[str, Any]]:
    """By parameter: the names of the weights that the loader makes it of, and the conversion that does it, if any."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix, known = model.base_model_prefix, model.state_dict()
    names_by_target: dict[str, list[str]] = defaultdict(list)
    joined: dict[str, Any] = {}
    for name in weights:
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:
            target, pattern = rename_source_key(name, [], [], prefix, known)
        names_by_target[target].append(name)
        joined[target] = None if pattern is None else by_pattern[pattern]
    return names_by_target, joined


def _are_experts(
    name: str, module: nn.Module, whole: dict[str, list[str]], joined: dict[str, Any], form: RowForm
) -> bool:
    """True of experts in transformers' common form whose weights the loader only stacks and joins."""
    usual = {"has_gate": True, "has_bias": False, "is_transposed": False}
    if any(getattr(module, attribute, None) is not value for attribute, value in usual.items()):
        return False
    # Older versions know no such norm.
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
            or not form.takes(parameter)
        ):
            return False
        if any(type(step).__name__ not in _JOINS or step.dim not in (0, 1) for step in rule.operations):
            return False
    return True
