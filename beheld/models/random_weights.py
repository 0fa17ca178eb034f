"""Models with random weights, which need no files ("dummy"): the same numbers in every run and on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from beheld.parallel.shard_plan import ShardPlan
from beheld.platform.registry import platform_of

# Of weights, so that numbers keep a moderate size.
_DEVIATION = 0.02


def random_model(
    model_class: Any,
    hf_config: Any,
    dtype: torch.dtype,
    device: str,
    shard: Callable[[Any], ShardPlan] | None = None,
) -> Any:
    """Make a model with random weights.

    Args:
        shard: cuts a model's weights, which may be on the meta device, to what one rank holds; `shard_plan` then says
            which. Each weight is made whole, so that ranks together have what one device would, but only one at a time.
    """
    place = torch.device(device)
    with _own_numbers(place):
        with place, _WithoutMemory():
            model = model_class._from_config(hf_config, dtype=dtype)
        if any(buffer.is_meta for buffer in model.buffers()):
            # What its definition computes at the start needs memory.
            torch.manual_seed(0)
            with place:
                model = model_class._from_config(hf_config, dtype=dtype)
        plan = None
        if shard is not None:
            plan = model.shard_plan = shard(model)
        torch.manual_seed(0)
        _fill(model, plan, place)
    return model


def _fill(model: Any, plan: ShardPlan | None, place: torch.device) -> None:
    """Fill in the weights of two dimensions and more, in the order of the model's parameters."""
    owners: dict[int, list[tuple[nn.Module, str, str]]] = {}
    for path, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((module, own, f"{path}.{own}" if path else own))
    cuts, shapes = ({}, {}) if plan is None else (plan.cuts, plan.shapes)
    for parameter in list(model.parameters()):
        names = [name for _, _, name in owners[id(parameter)]]
        # A tied weight is cut under one of its names.
        cut = next((cuts[name] for name in names if name in cuts and name in shapes), None)
        shape = next((shapes[name] for name in names if name in shapes), tuple(parameter.shape))
        if len(shape) < 2 and not parameter.is_meta:
            continue
        values = torch.empty(shape, dtype=parameter.dtype, device=place).normal_(0.0, _DEVIATION)
        if cut is not None:
            values = cut.of(values, shape).clone()
        if not parameter.is_meta:
            parameter.data = values
            continue
        made = nn.Parameter(values, requires_grad=False)
        for module, own, _ in owners[id(parameter)]:
            setattr(module, own, made)


@contextlib.contextmanager
def _own_numbers(place: torch.device) -> Iterator[None]:
    """Within the block, random numbers begin anew; the caller's own are left as they were."""
    devices = [] if platform_of(place).shares_host_memory else [place]
    with torch.random.fork_rng(devices, device_type=place.type):
        torch.manual_seed(0)
        yield


class _WithoutMemory(TorchFunctionMode):
    """Within it, weights of two dimensions and more that a definition makes have sizes and no memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        sizes = args[0] if len(args) == 1 and not isinstance(args[0], int) else args
        if func is torch.empty and len(sizes) > 1 and given.get("device") is None:
            given["device"] = "meta"
        return func(*args, **given)
