"""Linear layers joined to one: what they give stays, and where it would not, they stay apart."""

from __future__ import annotations

import logging

import pytest
import torch

from beheld.lora import layers
from beheld.lora.layers import LoRALinear, Switch
from beheld.models.surgery import joined
from beheld.models.surgery import linears as fuse
from beheld.models.surgery.operation import Changes
from beheld.quant.float8 import Float8Linear, rounded_rows


def test_a_fused_group_takes_biases_where_only_some_have_them() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj = torch.nn.Linear(8, 12)
            self.k_proj = torch.nn.Linear(8, 4, bias=False)
            self.v_proj = torch.nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)

    layer, x = Layer(), torch.randn(3, 8)
    before = layer(x)
    assert joined.fuse_linears(layer, Changes()) == 1
    torch.testing.assert_close(layer(x), before)


@pytest.mark.parametrize(
    "names", [("q_proj", "k_proj", "v_proj"), ("q", "k", "v"), ("query", "key", "value"), ("wi_0", "wi_1")], ids=str
)
def test_layers_of_one_input_are_joined_by_each_of_their_names(names: tuple[str, ...]) -> None:
    """T5's, BERT's, and those of most others; as packed products, two or three become one."""
    layer = torch.nn.ModuleDict({name: torch.nn.Linear(8, 4 + index) for index, name in enumerate(names)})
    x = torch.randn(3, 8)
    before = [layer[name](x) for name in names]
    changes = Changes()
    assert joined.fuse_linears(layer, changes) == 1
    assert fuse.replace_linears(layer, fuse.PackedLinear, torch.float32, changes) == 1
    torch.testing.assert_close([layer[name](x) for name in names], before)
    changes.take_back()
    assert all(type(layer[name]) is torch.nn.Linear for name in names)
    torch.testing.assert_close([layer[name](x) for name in names], before)


@pytest.mark.parametrize("packing", [False, True], ids=["plain", "packed"])
def test_a_fused_group_that_is_asked_about_different_inputs(packing: bool) -> None:
    """Attention to what lies beside the text: queries of one, keys and values of the other."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (torch.nn.Linear(8, n) for n in (12, 4, 4))

        def forward(self, x: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.q_proj(x), self.k_proj(beside), self.v_proj(beside)], -1)

    layer, x, beside = Layer(), torch.randn(3, 8), torch.randn(3, 8)
    before, same = layer(x, beside), layer(x, x)
    assert joined.fuse_linears(layer, Changes()) == 1
    if packing:
        assert fuse.replace_linears(layer, fuse.PackedLinear, torch.float32, Changes()) == 1
    torch.testing.assert_close(layer(x, beside), before)
    torch.testing.assert_close(layer(x, x), same)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, beside), before)
    torch.testing.assert_close(compiled(x, x), same)


def test_layers_that_are_called_in_another_order_are_one_product() -> None:
    """Kosmos 2.5 multiplies by keys, values and queries in turn: each of the first two computed the whole product."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (torch.nn.Linear(8, n) for n in (12, 4, 5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.k_proj(x), self.v_proj(x), self.q_proj(x)], -1)

    layer, x, changes = Layer(), torch.randn(3, 8), Changes()
    before = layer(x)
    assert joined.fuse_linears(layer, changes) == 1
    assert fuse.replace_linears(layer, fuse.PackedLinear, torch.float32, changes) == 1
    products = []
    assert isinstance(layer.k_proj, joined.FirstOfFused)
    layer.k_proj.product.register_forward_hook(lambda module, given, y: products.append(y))
    torch.testing.assert_close(layer(x), before)
    assert len(products) == 1
    changes.take_back()
    torch.testing.assert_close(layer(x), before)


class Gated(torch.nn.Module):
    """The part of an MLP that is joined."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.gate_proj = torch.nn.Linear(64, 96, bias=False, dtype=dtype)
        self.up_proj = torch.nn.Linear(64, 96, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_layers_whose_output_a_program_changes_stay_apart(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook on one of the layers would be lost in the product."""
    monkeypatch.setattr(logging.getLogger("beheld"), "propagate", True)
    changed, plain = Gated(dtype), Gated(dtype)
    changed.up_proj.register_forward_hook(lambda module, args, out: 1.5 * out)
    x = torch.randn(3, 64, dtype=dtype)
    before = changed(x)
    assert joined.fuse_linears(torch.nn.ModuleList([changed, plain]), Changes()) == 1
    assert type(plain.gate_proj) is joined.FirstOfFused
    assert type(changed.gate_proj) is torch.nn.Linear
    assert torch.equal(changed(x), before)
    assert "('gate_proj', 'up_proj') of a Gated stay separate: joined, they give other results" in caplog.text


def test_weights_that_are_not_numbers_are_joined_as_they_are() -> None:
    """What the model then answers is for others to find; the product gives what the layers gave."""
    layer = Gated()
    with torch.no_grad():
        layer.gate_proj.weight[3] = torch.nan
        layer.up_proj.weight[4] = torch.inf
    assert joined.fuse_linears(layer, Changes()) == 1


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ({"q_a_proj": 12, "kv_a_proj_with_mqa": 7}, 1),
        ({"q_proj": 12, "kv_a_proj_with_mqa": 7}, 1),
        ({"in_proj_qkv": 12, "in_proj_z": 6, "in_proj_b": 3, "in_proj_a": 3}, 1),
        ({"in_proj_qkvz": 18, "in_proj_ba": 6}, 1),
    ],
)
def test_what_else_is_joined(sizes: dict[str, int], groups: int) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, size in sizes.items():
                setattr(self, name, torch.nn.Linear(8, size, bias=False))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([getattr(self, name)(x) for name in sizes], -1)

    layer, x, changes = Layer(), torch.randn(3, 8), Changes()
    before = layer(x)
    assert joined.fuse_linears(layer, changes) == groups
    assert type(getattr(layer, next(iter(sizes)))) is joined.FirstOfFused
    torch.testing.assert_close(layer(x), before)
    changes.take_back()
    assert all(type(getattr(layer, name)) is torch.nn.Linear for name in sizes)
    torch.testing.assert_close(layer(x), before)


def test_of_four_layers_in_two_forms_pairs_are_joined() -> None:
    """Of a quantized mixer, the small gates keep their type."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.in_proj_qkv, self.in_proj_z = (torch.nn.Linear(64, n, bias=False) for n in (96, 32))
            self.in_proj_b, self.in_proj_a = (torch.nn.Linear(64, 4, bias=False) for _ in range(2))
            for name in ("in_proj_qkv", "in_proj_z"):
                rows_NK, scale_N = rounded_rows(getattr(self, name).weight.data)
                setattr(self, name, Float8Linear(rows_NK, scale_N, None, torch.float32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            layers = self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a
            return torch.cat([layer(x) for layer in layers], -1)

    layer, x = Layer(), torch.randn(3, 64)
    before = layer(x)
    assert joined.fuse_linears(layer, Changes()) == 2
    torch.testing.assert_close(layer(x), before)


def test_adapters_reach_layers_that_are_called_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Falcon-H1 multiplies by the second of two joined layers first."""
    layer, switch = torch.nn.Module(), Switch()
    layer.gate_proj, layer.up_proj = (torch.nn.Linear(8, size, bias=False) for size in (5, 3))
    x = torch.randn(2, 8)
    wanted = layer.up_proj(x), layer.gate_proj(x)
    assert joined.fuse_linears(layer, Changes()) == 1
    base, sizes = layer.gate_proj.product, layer.gate_proj.sizes
    room = {"max_loras": 1, "max_rank": 1, "dtype": x.dtype, "device": x.device}
    layer.gate_proj.product = LoRALinear(base, ["gate", "up"], sizes, switch=switch, **room)
    monkeypatch.setattr(layers, "_add", lambda y, *given: y.add_(1.0))
    for on in (False, True):
        switch.on = on
        given = x.clone()
        with torch.no_grad():
            found = layer.up_proj(given), layer.gate_proj(given)
        for own, plain in zip(found, wanted, strict=True):
            torch.testing.assert_close(own, plain + on)
