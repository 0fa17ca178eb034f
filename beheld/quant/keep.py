"""Brings FP8 weights through transformers' loader as they are: each row carries its scale with it.

The loader renames weights, stacks those of experts and joins gate with up; scales must follow all of that. So a weight
goes in as rows of bytes: the numbers of a row, then the four bytes of its scale. Whatever is done to whole rows is then
done to both, and behind the loader they are parted again:

    file      gate (N, K), scale (N, 1)    up (N, K), scale (N, 1)      of each expert
    loader    gate (N, K + 4)              up (N, K + 4)           ->   gate_up (G, 2N, K + 4)
    model                                                               rows (G, 2N, K) in FP8, scales (G, 2N)

Shapes: G experts, N outputs, K inputs.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from beheld.quant.compressed_tensors import Dequantized
from beheld.quant.float8 import FP8, Float8Experts, Float8Linear

_SCALE_BYTES = 4
# What a GPU's products of FP8 numbers want sizes to be a multiple of.
_ALIGNED = 16
_EXPERTS = ("gate_up_proj", "down_proj")
# What the loader may do to rows that carry their scale: put them together.
_JOINS = ("MergeModulelist", "Concatenate")


class CarryingRows:
    """A weight as the loader is given it, in place of a slice of a file: rows of bytes that carry their scale."""

    def __init__(self, weight: Dequantized) -> None:
        self._weight = weight

    def __getitem__(self, index: Any) -> Tensor:
        """The part `index` of the rows (N, K + 4)."""
        weight_NK, scale_N1 = self._weight.stored()
        scale = scale_N1.expand(weight_NK.shape[0], 1).contiguous()
        return torch.cat([weight_NK.view(torch.uint8), scale.view(torch.uint8)], dim=-1)[index]


@dataclass(frozen=True)
class Kept:
    """Which modules of a model take their weights as rows that carry their scale.

    Attributes:
        linears: names of linear layers.
        experts: names of modules with experts.
        left: parameters made of FP8 weights that could not be kept so.
    """

    linears: tuple[str, ...]
    experts: tuple[str, ...]
    left: tuple[str, ...]


def keeping(model_class: Any, weights: dict[str, Any]) -> Any:
    """A class like `model_class` whose models, when the loader makes them, have room for rows that carry their scale.

    They say which in `kept_float8`, and replace those entries of `weights`, which the loader must be given.
    """

    class Keeping(model_class):
        def __init__(self, config: Any, *args: Any, **keywords: Any) -> None:
            super().__init__(config, *args, **keywords)
            self.kept_float8 = _make_room(self, weights)

    # The loader chooses what to rename by the name of the class, and by where it comes from.
    Keeping.__name__, Keeping.__qualname__ = model_class.__name__, model_class.__qualname__
    Keeping.__module__ = model_class.__module__
    return Keeping


def settle(model: Any, model_class: Any, dtype: torch.dtype) -> Kept:
    """Part rows and scales of a loaded model, one weight at a time, and put modules that multiply them in place."""
    kept: Kept = model.kept_float8
    del model.kept_float8
    model.__class__ = model_class
    for name in kept.linears:
        linear = model.get_submodule(name)
        rows, scale = _parted(linear, "weight")
        bias = None if linear.bias is None else linear.bias.data
        model.set_submodule(name, Float8Linear(rows, scale, bias, dtype))
    for name in kept.experts:
        experts = model.get_submodule(name)
        gate_up, down = (_parted(experts, each) for each in _EXPERTS)
        model.set_submodule(name, Float8Experts(experts, gate_up, down))
    return kept


def _parted(module: nn.Module, name: str) -> tuple[Tensor, Tensor]:
    """Rows in FP8 and scales in float32 of the module's parameter, which is then gone."""
    carrying = getattr(module, name).data
    delattr(module, name)
    rows = carrying[..., :-_SCALE_BYTES].contiguous().view(FP8)
    scale = carrying[..., -_SCALE_BYTES:].contiguous().view(torch.float32).squeeze(-1)
    return rows, scale


def _make_room(model: Any, weights: dict[str, Any]) -> Kept:
    """Widen the parameters of a model without memory that are to take such rows, and say so in `weights`."""
    names_by_target, joined = _sources(model, weights)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    shared = {*tied, *tied.values()}
    whole = {
        target: names
        for target, names in names_by_target.items()
        if target not in shared and all(isinstance(weights[name], Dequantized) for name in names)
    }
    linears = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and f"{name}.weight" in whole and joined[f"{name}.weight"] is None
        and len(whole[f"{name}.weight"]) == 1 and _fits(module.weight)
    ]  # fmt: skip
    experts = [name for name, module in model.named_modules() if _are_experts(name, module, whole, joined)]
    targets = [(name, "weight") for name in linears] + [(name, each) for name in experts for each in _EXPERTS]
    for name, each in targets:
        module = model.get_submodule(name)
        plain = getattr(module, each)
        wide = torch.empty((*plain.shape[:-1], plain.shape[-1] + _SCALE_BYTES), dtype=torch.uint8, device=plain.device)
        setattr(module, each, nn.Parameter(wide, requires_grad=False))
        for source in whole[f"{name}.{each}"]:
            weights[source] = CarryingRows(weights[source])
    taken = {f"{name}.{each}" for name, each in targets}
    known = model.state_dict()
    left = tuple(sorted(target for target in whole if target in known and target not in taken))
    return Kept(tuple(linears), tuple(experts), left)


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


def _fits(parameter: Tensor) -> bool:
    return all(size % _ALIGNED == 0 for size in parameter.shape[-2:])


def _are_experts(name: str, module: nn.Module, whole: dict[str, list[str]], joined: dict[str, Any]) -> bool:
    """True of experts in transformers' common form whose weights the loader only stacks and joins."""
    form = {"has_gate": True, "has_bias": False, "is_transposed": False}
    if any(getattr(module, attribute, None) is not value for attribute, value in form.items()):
        return False
    # Older versions know no such norm.
    if getattr(module, "has_post_expert_norm", False) or not hasattr(module, "_apply_gate"):
        return False
    for each in _EXPERTS:
        parameter, target = getattr(module, each, None), f"{name}.{each}"
        rule = joined.get(target)
        if parameter is None or target not in whole or rule is None or parameter.dim() != 3 or not _fits(parameter):
            return False
        if any(type(step).__name__ not in _JOINS or step.dim not in (0, 1) for step in rule.operations):
            return False
    return True
