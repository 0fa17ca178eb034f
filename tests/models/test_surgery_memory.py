"""Surgery holds one group's old weights at a time: whoever replaces layers lets the old ones go as it goes on."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from beheld.models.one_row import OneRowLinear
from beheld.models.surgery import experts, joined, patches
from beheld.models.surgery import linears as fuse
from beheld.models.surgery.operation import Changes
from beheld.quant.float8 import FP8, Float8Linear

LAYERS = 6


class Layer(nn.Module):
    """A decoder layer's products, of such a kind."""

    def __init__(self, linear: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.attention = nn.Module()
        self.mlp = nn.Module()
        for name, outputs in (("q_proj", 32), ("k_proj", 8), ("v_proj", 8), ("o_proj", 32)):
            setattr(self.attention, name, linear(32, outputs))
        for name in ("gate_proj", "up_proj"):
            setattr(self.mlp, name, linear(32, 64))
        self.mlp.down_proj = linear(64, 32)


def stack(linear: Callable[[int, int], nn.Module] = nn.Linear) -> nn.Module:
    model = nn.Module()
    model.layers = nn.ModuleList(Layer(linear) for _ in range(LAYERS))
    return model


def float8(inputs: int, outputs: int) -> Float8Linear:
    return Float8Linear(torch.zeros(outputs, inputs, dtype=FP8), torch.ones(outputs), None, torch.bfloat16)


class Watch:
    """Which of a model's first weights are alive, counted each time that `look` is called."""

    def __init__(self, model: nn.Module) -> None:
        self._old = {name: weakref.ref(p.untyped_storage()) for name, p in model.named_parameters()}
        self.seen: list[int] = []

    def alive(self) -> set[str]:
        return {name for name, ref in self._old.items() if ref() is not None}

    def look(self) -> None:
        self.seen.append(len(self.alive()))


def replaced(seen: list[int]) -> list[int]:
    """How many more weights were gone at each look than at the one before."""
    return [before - after for before, after in itertools.pairwise(seen)]


@pytest.mark.parametrize("linear", [lambda i, o: nn.Linear(i, o, False), float8], ids=["plain", "float8"])
def test_fusing_holds_one_group(linear: Callable[[int, int], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    model = stack(linear)
    watch, as_one = Watch(model), joined.join

    def looked(linears: Any) -> nn.Module:
        made = as_one(linears)
        # Here the new weights of this group stand beside its old ones.
        watch.look()
        return made

    monkeypatch.setattr(joined, "join", looked)
    assert joined.fuse_linears(model, Changes()) == 2 * LAYERS
    each = len(watch.alive()) // (2 * LAYERS)
    # q, k and v, then gate and up, of every layer; only what no group has stays.
    assert replaced(watch.seen) == [3 * each, 2 * each] * (LAYERS - 1) + [3 * each]
    assert {name.split(".")[3] for name in watch.alive()} == {"o_proj", "down_proj"}


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.skipif(not fuse.can_pack(), reason="this PyTorch has no oneDNN")
def test_packing_holds_one_layer(fused: bool) -> None:
    model = stack(lambda i, o: nn.Linear(i, o, False))
    if fused:
        joined.fuse_linears(model, Changes())
    watch = Watch(model)

    class Packed(fuse.PackedLinear):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__(linear)
            watch.look()

    assert fuse.replace_linears(model, Packed, torch.float32, Changes()) == (4 if fused else 7) * LAYERS
    assert set(replaced(watch.seen)) == {1}
    assert not watch.alive()


def test_layers_that_share_their_weights_keep_them() -> None:
    model = stack()
    watch = Watch(model)
    assert fuse.replace_linears(model, OneRowLinear, torch.float32, Changes()) == 7 * LAYERS
    assert len(watch.alive()) == 14 * LAYERS


def test_convolutions_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleList(nn.Sequential(nn.Conv2d(3, 4, 2, 2, bias=False)) for _ in range(LAYERS))
    watch, packed = Watch(model), patches.PackedPatches

    def looked(conv: nn.Conv2d) -> nn.Module:
        made = packed(conv)
        watch.look()
        return made

    monkeypatch.setattr(patches, "PackedPatches", looked)
    assert patches.pack_patch_convolutions(model, torch.float32, Changes()) == LAYERS
    assert watch.seen == list(range(LAYERS, 0, -1))
    assert not watch.alive()


class OldExperts(nn.Module):
    """Gated experts as transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 12, 8))
        self.down_proj = nn.Parameter(torch.randn(4, 8, 6))
        self.act_fn = nn.SiLU()
        self.is_transposed = False


@pytest.mark.skipif(not fuse.can_pack(), reason="this PyTorch has no oneDNN")
def test_packing_holds_one_layer_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts of a layer are parts of one tensor, which goes with the last of them."""
    monkeypatch.setattr(experts, "_usual", lambda child, dtype: isinstance(child, OldExperts))
    model = nn.ModuleList(nn.Sequential(OldExperts()) for _ in range(LAYERS))
    watch = Watch(model)
    assert experts.replace_experts(model, torch.float32, Changes()) == LAYERS
    assert len(watch.alive()) == 2 * LAYERS

    class Packed(fuse.PackedLinear):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__(linear)
            watch.look()

    assert fuse.replace_linears(model, Packed, torch.float32, Changes()) == 8 * LAYERS
    assert set(replaced(watch.seen)) == {0, 1}
    assert not watch.alive()
