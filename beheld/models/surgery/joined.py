"""Joins linear layers with the same input into one product: q, k and v; gate and up; what a mixer or a latent takes.

Shapes: M rows of activations, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from beheld.models.cross import CrossAttention
from beheld.models.surgery.linears import forward_text
from beheld.models.surgery.operation import Changes
from beheld.platform import host
from beheld.quant.linear import StoredLinear, join, part, same_form
from beheld.utils import allocator
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# Linear layers with the same input, in the order in which most of transformers' layers, or our mixers, call them. Of
# several groups with a layer in common, the first one whose layers have one form is joined.
_FUSABLE = (
    ("q_proj", "k_proj", "v_proj"),
    ("q", "k", "v"),
    ("query", "key", "value"),
    ("gate_proj", "up_proj"),
    ("wi_0", "wi_1"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("q_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
    ("in_proj_qkvz", "in_proj_ba"),
)


class FirstOfFused(nn.Module):
    """Computes several linear layers of one input as one product; returns the first output and keeps the others.

    Attributes:
        product: all layers as one linear layer.
        names, sizes: the layers' names in their parent, and their outputs.
    """

    def __init__(self, names: tuple[str, ...], linears: Sequence[nn.Linear | StoredLinear]) -> None:
        super().__init__()
        self.names = names
        self.sizes = [linear.out_features for linear in linears]
        self.product: nn.Module = join(linears)
        self.rest: tuple[Tensor, ...] = ()
        self.input: Tensor | None = None

    @property
    def weight(self) -> Any:
        """Return the joined weight, for models that ask for its type."""
        return self.product.weight

    @property
    def bias(self) -> Any:
        """Return the joined bias."""
        return self.product.bias

    def forward(self, x: Tensor) -> Tensor:
        """Compute x (..., I) -> the first layer's (..., O)."""
        first, *rest = self.product(x).split(self.sizes, dim=-1)
        self.rest, self.input = tuple(rest), x
        return first

    def alone(self, x: Tensor, index: int) -> Tensor:
        """Return the layer `index` of another input, such as the keys and values of cross-attention states."""
        # With room for adapters, the product is inside a LoRALinear, which alone knows those of a step.
        switch = getattr(self.product, "switch", None)
        if switch is not None and switch.on:
            adapted: tuple[Tensor, ...] = self.product(x).split(self.sizes, dim=-1)
            return adapted[index]
        product = getattr(self.product, "base", self.product)
        if isinstance(product, StoredLinear) and product.cuts_in_place:
            made: Tensor = product.part(self._outputs(index))(x)
            return made
        if not self.weight.numel():
            # Packed weights cannot be cut.
            whole: tuple[Tensor, ...] = self.product(x).split(self.sizes, dim=-1)
            return whole[index]
        outputs = self._outputs(index)
        return nn.functional.linear(x, self.weight[outputs], None if self.bias is None else self.bias[outputs])

    def _outputs(self, index: int) -> slice:
        start = sum(self.sizes[:index])
        return slice(start, start + self.sizes[index])

    def apart(self, biased: Sequence[bool]) -> list[nn.Module]:
        """Return the separate layers, sharing memory with the joined one.

        Args:
            biased: which of them had a bias.
        """
        layers: list[Any] = [part(self.product, self._outputs(index)) for index in range(len(self.sizes))]
        for layer, had in zip(layers, biased, strict=True):
            if not had:
                layer.bias = None
        return layers


class RestOfFused(nn.Module):
    """Takes the place of one of the other layers."""

    first: FirstOfFused

    def __init__(self, first: FirstOfFused, index: int) -> None:
        super().__init__()
        # Not a submodule: the weights have one owner.
        self.__dict__["first"] = first
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        """Return what the first layer computed for this one, if it was of the same x."""
        first = self.first
        if first.input is not x:
            return first.alone(x, self.index + 1)
        out = first.rest[self.index]
        if self.index == len(first.sizes) - 2:
            first.rest, first.input = (), None
        return out


def fuse_linears(model: nn.Module, changes: Changes) -> int:
    """Join the groups of layers wherever a module has them; returns the number of joined groups.

    A group stays separate if keys and values have another input than queries, or if a trial shows that the product
    gives other results than the layers, for example because a program changed what one of them does. At any time only
    one group's old weights are held beyond the new ones: `modules` yields children after their parent, so never the
    replaced layers.
    """
    fused = freed = 0
    pages = host.FilePages()
    for module in model.modules():
        groups = () if isinstance(module, CrossAttention) else _FUSABLE
        found = (_fuse_group(module, names, changes, pages) for names in groups)
        joined = [first for first in found if first is not None]
        fused += len(joined)
        freed += sum(getattr(first.product, "packed_bytes", 0) for first in joined)
        if freed > _FREED_AT_A_TIME:
            # Threads that rounded the layers took their memory from where this thread takes none.
            allocator.give_back_freed()
            freed = 0
    pages.end()
    return fused


def _fuse_group(
    module: nn.Module, names: tuple[str, ...], changes: Changes, pages: host.FilePages
) -> FirstOfFused | None:
    """Join the linear layers of these names, if the module has them all, of one kind and one input; returns them."""
    found: list[Any] = [getattr(module, name, None) for name in names]
    if not same_form(found):
        return None
    names = _as_called(module, names)
    found = [getattr(module, name) for name in names]
    first = FirstOfFused(names, found)
    layers = [first, *(RestOfFused(first, index) for index in range(len(names) - 1))]
    if not _alike(found, layers):
        logger.warning("%s of a %s stay separate: joined, they give other results.", names, type(module).__name__)
        return None
    biased = [linear.bias is not None for linear in found]
    for linear in found:
        pages.read(linear.weight.data_ptr(), linear.weight.nbytes)
    for name, layer in zip(names, layers, strict=True):
        setattr(module, name, layer)
    changes.undo_with(lambda: _part_again(module, names, biased))
    return first


def _as_called(module: nn.Module, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names in the order in which the module's forward calls these layers, as far as its text tells.

    What is called before the first of them is computed twice: Kosmos 2.5 multiplies by k, v and q, Falcon-H1 by up and
    gate.
    """
    kind: Any = type(module)
    text = forward_text(kind)
    places = {name: text.find(f"self.{name}(") for name in names}
    return names if -1 in places.values() else tuple(sorted(names, key=lambda name: places[name]))


def _part_again(module: nn.Module, names: tuple[str, ...], biased: Sequence[bool]) -> None:
    first: Any = getattr(module, names[0])
    for name, layer in zip(names, first.apart(biased), strict=True):
        setattr(module, name, layer)


# Bytes of joined weights before what their parts had goes back to the system.
_FREED_AT_A_TIME = 32 << 20
# The number of rows compared, and the number of roundings of the largest value that results may differ by: the order of
# sums changes.
_TRIED = 16
_ROUNDINGS = 64.0, 4.0


@torch.no_grad()
def _alike(apart: list[Any], joined: list[Any]) -> bool:
    """Return whether these layers give the same outputs for the same input, up to rounding in 32 or 16 bits."""
    weight = apart[0].weight
    size = _TRIED * apart[0].in_features
    x_MI = torch.arange(size, dtype=torch.float32, device=weight.device).sin().view(_TRIED, -1).to(weight.dtype)
    rounding = _ROUNDINGS[weight.dtype != torch.float32] * torch.finfo(weight.dtype).eps
    for layer, other in zip(apart, joined, strict=True):
        wanted = layer(x_MI).float()
        largest = float(wanted.nan_to_num(0.0, 0.0, 0.0).abs().amax())
        if not torch.allclose(other(x_MI).float(), wanted, rtol=0.0, atol=rounding * largest, equal_nan=True):
            return False
    return True
