"""Kernels of a single row in Triton's interpreter, on a CPU; test_one_row.py runs this in a process of its own."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from beheld.core.errors import EngineDeadError
from beheld.models import one_row_kernel
from beheld.models.expert_row_kernel import inner, outer
from beheld.models.one_row import OneRowFloat8Linear, OneRowLinear
from beheld.models.one_row_kernel import gate, norm, one_row, turn
from beheld.models.surgery import compiled_parts, conditions, one_row_layer, rank_trial
from beheld.models.surgery.expert_row import use_expert_rows
from beheld.models.surgery.joined import fuse_linears
from beheld.models.surgery.linears import replace_linears
from beheld.models.surgery.one_row_layer import OneRowLayer, one_row_layers, one_row_norm
from beheld.models.surgery.operation import Changes
from beheld.models.surgery.parts import text_model
from beheld.models.surgery.rank_trial import RankTrial
from beheld.models.surgery.sharded import SummedOverRanks
from beheld.parallel.group import RankGroup
from beheld.quant.float8 import Float8Linear, rounded_rows
from beheld.quant.slot_order_kernel import slots, summed
from tests import tiny


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [(1, 1), (5, 7), (13, 64), (40, 1000), (24, 4096), (5, 4097), (6, 5120), (9, 11008), (1, 18944)],
)
def test_equals_float64(outputs: int, inputs: int, bias: bool) -> None:
    chance = torch.Generator().manual_seed(outputs)
    x_K = torch.randn(inputs, generator=chance)
    weight_NK = torch.randn(outputs, inputs, generator=chance)
    bias_N = torch.randn(outputs, generator=chance) if bias else None
    want = weight_NK.double() @ x_K.double() + (0.0 if bias_N is None else bias_N.double())
    got = one_row(x_K, weight_NK, bias_N, early=False)
    assert got.shape == (outputs,)
    torch.testing.assert_close(got.double(), want, atol=2e-6 * inputs**0.5, rtol=1e-5)


@pytest.mark.parametrize("inputs", [60, 4100])
def test_a_strided_row_and_a_strided_bias(inputs: int) -> None:
    """A row that was cut out of something may be a view whose elements do not lie side by side."""
    chance = torch.Generator().manual_seed(1)
    x = torch.randn(1, inputs, 3, generator=chance)[..., 1]
    weight_NK = torch.randn(7, inputs, generator=chance)
    bias_N = torch.randn(7, 2, generator=chance)[:, 0]
    got = torch.ops.beheld.one_row_linear(x, weight_NK, bias_N)
    want = torch.nn.functional.linear(x.double(), weight_NK.double(), bias_N.double())
    assert got.shape == (1, 7)
    torch.testing.assert_close(got.double(), want, atol=2e-6 * inputs**0.5, rtol=1e-5)
    with pytest.raises(AssertionError):
        one_row(x[0], weight_NK, None, early=False)


@pytest.mark.parametrize("inputs", [64, 5000])
def test_a_residual_is_added_after_rounding(inputs: int) -> None:
    chance = torch.Generator().manual_seed(2)
    x_K, weight_NK = torch.randn(inputs, generator=chance), torch.randn(9, inputs, generator=chance)
    residual_N = torch.randn(9, generator=chance)
    got = one_row(x_K, weight_NK, None, early=False, residual_N=residual_N)
    torch.testing.assert_close(got, residual_N + weight_NK @ x_K, atol=1e-5 * inputs**0.5, rtol=1e-5)


@pytest.mark.parametrize(("outputs", "inputs"), [(16, 64), (48, 1008), (32, 5040)])
def test_products_with_float8_weights(outputs: int, inputs: int) -> None:
    """Of a row that FP8 holds: the interpreter's own rounding to FP8 loses what is carried into the exponent."""
    chance = torch.Generator().manual_seed(inputs)
    rows_NK, scale_N = rounded_rows(torch.randn(outputs, inputs, generator=chance))
    bias_N = torch.randn(outputs, generator=chance)
    layer = OneRowFloat8Linear.of(Float8Linear(rows_NK, scale_N, bias_N, torch.float32))
    x_K = 0.25 * rounded_rows(torch.randn(1, inputs, generator=chance))[0].float()[0]
    residual_N = torch.randn(outputs, generator=chance)
    want_N = layer(x_K)
    tolerance = {"atol": 1e-5 * float(want_N.abs().max()), "rtol": 1e-5}
    got_N = torch.ops.beheld.one_row_float8_linear(x_K, layer.rows_NK, layer.scale_N, layer.bias)
    torch.testing.assert_close(got_N, want_N, **tolerance)
    torch.testing.assert_close(layer.added(x_K, residual_N), want_N + residual_N, **tolerance)
    zeros_N = torch.ops.beheld.one_row_float8_linear(torch.zeros(inputs), layer.rows_NK, layer.scale_N, layer.bias)
    torch.testing.assert_close(zeros_N, layer.bias.data)


@pytest.mark.parametrize("from_one", [False, True])
@pytest.mark.parametrize("size", [7, 64, 1000])
@pytest.mark.parametrize("added", [False, True])
def test_norms(size: int, from_one: bool, added: bool) -> None:
    chance = torch.Generator().manual_seed(size)
    x_H, weight_H, residual_H = (torch.randn(size, generator=chance) for _ in range(3))
    got = norm(x_H, weight_H, 1e-6, from_one=from_one, early=False, residual_H=residual_H if added else None)
    want = nn.functional.rms_norm(x_H.double(), (size,), eps=1e-6) * (weight_H.double() + from_one)
    torch.testing.assert_close(got.double(), want + (residual_H.double() if added else 0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("size", "turned"), [(16, 16), (24, 16), (80, 80)])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("from_one", [False, True])
def test_rotations(size: int, turned: int, normed: bool, from_one: bool) -> None:
    chance = torch.Generator().manual_seed(size)
    q_heads, k_heads = 4, 2
    qkv = torch.randn((q_heads + 2 * k_heads) * size, generator=chance)
    weights_2C, angles = torch.randn(2, size, generator=chance), torch.randn(turned, generator=chance)
    want_HC = qkv.view(-1, size).double().clone()
    if normed:
        both = (weights_2C.double() + from_one).repeat_interleave(torch.tensor([q_heads, k_heads]), 0)
        want_HC[: q_heads + k_heads] = nn.functional.rms_norm(want_HC[: q_heads + k_heads], (size,), eps=1e-6) * both
    x_HC = want_HC[: q_heads + k_heads, :turned]
    first, second = x_HC.chunk(2, -1)
    other = torch.cat([-second, first], -1)
    cos_C, sin_C = angles.cos(), angles.sin()
    want_HC[: q_heads + k_heads, :turned] = x_HC * cos_C + other * sin_C
    norms = (weights_2C, 1e-6) if normed else None
    turn(qkv, (q_heads, k_heads), cos_C, sin_C, norms, from_one=from_one, early=False)
    torch.testing.assert_close(qkv.view(-1, size).double(), want_HC, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tanh", [False, True])
def test_gates(tanh: bool) -> None:
    x = torch.randn(2 * 300, generator=torch.Generator().manual_seed(1)) * 4
    first, second = x.double().chunk(2)
    act = nn.functional.gelu(first, approximate="tanh") if tanh else nn.functional.silu(first)
    torch.testing.assert_close(gate(x, tanh=tanh, early=False).double(), act * second, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("hidden", "units"), [(7, 5), (16, 12), (20, 40)])
def test_experts_of_a_row(hidden: int, units: int, bias: bool) -> None:
    """Of sizes that fill their lanes and that do not; the last choice names no expert."""
    chance = torch.Generator().manual_seed(hidden)
    choices, shares_C = [4, 0, 1, 5], torch.rand(4, generator=chance)
    up_ENH, down_EHN = (torch.randn(5, *size, generator=chance) for size in ((units, hidden), (hidden, units)))
    up_bias, down_bias = (torch.randn(5, n, generator=chance) if bias else None for n in (units, hidden))
    x_H, x_CN = torch.randn(hidden, generator=chance), torch.randn(4, units, generator=chance)
    got_CN = inner(x_H, up_ENH, up_bias, torch.tensor(choices), early=False)
    for got_N, expert in zip(got_CN, choices[:3], strict=False):
        want_N = up_ENH[expert].double() @ x_H.double() + (0.0 if up_bias is None else up_bias[expert])
        torch.testing.assert_close(got_N.double(), want_N, atol=2e-6 * hidden**0.5, rtol=1e-5)
    want_H = torch.zeros(hidden, dtype=torch.float64)
    for x_N, share, expert in zip(x_CN, shares_C, choices[:3], strict=False):
        want_H += share * (down_EHN[expert].double() @ x_N.double() + (0.0 if down_bias is None else down_bias[expert]))
    got_H = outer(x_CN, down_EHN, down_bias, torch.tensor(choices), shares_C, early=False)
    torch.testing.assert_close(got_H.double(), want_H, atol=1e-5 * units**0.5, rtol=1e-5)


@pytest.mark.parametrize("wrong", [False, True])
@torch.inference_mode()
def test_experts_of_a_model_are_tried(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float16: the interpreter rounds to bfloat16 by cutting."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny.checkpoint("glm4_moe_lite"), dtype=torch.float16).eval()
    text, changes = text_model(model), Changes()
    # One block of experts is enough.
    text = next(layer.mlp for layer in text.layers if hasattr(layer.mlp, "experts"))
    experts: Any = text.experts
    x_TH = torch.randn(3, experts.gate_up_proj.shape[2]).half()
    choices_TC, shares_TC = torch.tensor([[1, 0], [0, 1], [1, 0]]), torch.rand(3, 2)
    want_TH = experts(x_TH, choices_TC, shares_TC)
    want_1H = experts(x_TH[:1], choices_TC[:1], shares_TC[:1])
    if wrong:
        monkeypatch.setattr(type(experts), "forward", lambda self, x, choices, shares: x)
    found = use_expert_rows(text, changes, RankTrial(None))
    if wrong:
        assert found == 0
        assert "forward" not in vars(experts)
        return
    assert found > 0
    assert torch.equal(experts(x_TH, choices_TC, shares_TC), want_TH)
    got_1H = experts(x_TH[:1], choices_TC[:1], shares_TC[:1])
    assert got_1H.dtype == torch.float16
    assert (got_1H.double() - want_1H.double()).norm() <= 2e-3 * want_1H.double().norm()
    # Not by the former way: that rounds each expert's result.
    monkeypatch.setattr(type(experts), "forward", lambda self, *given: None)
    assert torch.equal(experts(x_TH[:1], choices_TC[:1], shares_TC[:1]), got_1H)
    monkeypatch.undo()
    changes.take_back()
    assert torch.equal(experts(x_TH[:1], choices_TC[:1], shares_TC[:1]), want_1H)


def fused(family: str) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = AutoModelForImageTextToText if family in tiny.IMAGE_FAMILIES else AutoModelForCausalLM
    text = text_model(kind.from_pretrained(tiny.checkpoint(family), dtype=torch.float32).eval())
    fuse_linears(text, Changes())
    return text


def layers_of(family: str) -> tuple[Any, dict[nn.Module, OneRowLayer]]:
    text = fused(family)
    replace_linears(text, OneRowLinear, torch.float32, Changes())
    return text, one_row_layers(text, OneRowLayer)


# With norms of heads, windows, capped scores, norms after attention and MLP, GELU, several axes of positions.
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma3_text", "qwen2_5_vl"])
def test_usual_layers_are_found_and_the_model_is_as_before(family: str) -> None:
    text, found = layers_of(family)
    assert set(found) == set(text.layers)
    assert one_row_norm(text.norm) is not None
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in text.layers)
    assert text.config._attn_implementation != "beheld_probe"


@pytest.mark.parametrize("change", ["activation", "residual", "rotation", "norm"])
def test_a_layer_that_computes_something_else_is_not_taken(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    if change == "rotation":
        plain = modeling_llama.apply_rotary_pos_emb
        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin, **_: plain(q, k, cos, -sin))
    if change == "activation":
        monkeypatch.setattr(modeling_llama, "ACT2FN", {"silu": nn.ReLU()})
    if change == "residual":
        attend = modeling_llama.LlamaAttention.forward
        halved = lambda self, *a, **k: (0.5 * (y := attend(self, *a, **k))[0], y[1])  # noqa: E731
        monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", halved)
    if change == "norm":
        monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", lambda self, x: self.weight * x)
    assert layers_of("llama")[1] == {}


def _compiled_by_rank(rank: int, text: Any, folder: Path, failing: dict[int, str], told: Any) -> None:
    """Compile the text model as rank `rank` of two does, and say how many layers got the form."""
    group = RankGroup(rank, 2, folder, None, lambda: None)
    for layer in text.layers:
        layer.mlp.down_proj = SummedOverRanks(layer.mlp.down_proj, group)
    how, turn = failing.get(rank), one_row_layer.OneRowLayer.__call__

    def called(self: Any, hidden_states: Any, *given: Any, **more: Any) -> Any:
        if how == "fails":
            # Before the sum, in which the other rank waits.
            raise RuntimeError("no memory here")
        return turn(self, hidden_states, *given, **more) + (1.0 if how == "differs" and self.layer == 0 else 0.0)

    def turned(qkv: Any, heads: tuple[int, int], cos_C: Any, sin_C: Any, norms: Any, **more: Any) -> None:
        x_HC = qkv.view(-1, cos_C.numel())[: sum(heads)]
        first, second = x_HC.chunk(2, -1)
        x_HC.copy_(x_HC * cos_C + torch.cat([-second, first], -1) * sin_C)

    def normed(x_H: Any, weight_H: Any, eps: float, *, from_one: bool, residual_H: Any = None, **more: Any) -> Any:
        made = nn.functional.rms_norm(x_H, x_H.shape, weight_H + from_one, eps)
        return made if residual_H is None else residual_H + made

    def gated(x: Any, **more: Any) -> Any:
        return nn.functional.silu(x.chunk(2)[0]) * x.chunk(2)[1]

    patch = pytest.MonkeyPatch()
    # What the kernels compute, without the interpreter, which takes seconds.
    for name, function in (("turn", turned), ("norm", normed), ("gate", gated)):
        patch.setattr(one_row_kernel, name, function)
    patch.setattr(one_row_layer.OneRowLayer, "__call__", called)
    patch.setattr(rank_trial, "_ALIKE_S", 0.3 if len(failing) == 1 else 5.0)
    patch.setattr(conditions, "fuses_on_gpu", lambda target: True)
    patch.setattr(conditions, "float32", lambda target: False)
    patch.setattr(compiled_parts, "text_model", lambda model: model)
    patch.setattr(conditions, "platform_of", lambda device: SimpleNamespace(one_row_kernels=True))
    found: list[int] = []

    def compiled(layers: Any, changes: Any, one_row: Any = None, **more: Any) -> None:
        found.append(sum(layer in (one_row or {}) for layer in layers))

    patch.setattr(compiled_parts, "compile_layers", compiled)
    target: Any = SimpleNamespace(model=text, config=SimpleNamespace(device="cpu"), ranks=group)
    try:
        compiled_parts.compile_text(target, Changes())
        told.send(found)
    except Exception as error:
        told.send(f"{type(error).__name__}: {error}")
    told.recv()
    group.abort()


@pytest.mark.parametrize(
    "failing", [{1: "differs"}, {1: "fails"}, {0: "fails", 1: "fails"}], ids=["differs", "one", "both"]
)
def test_ranks_agree_on_a_layers_form(failing: dict[int, str], tmp_path: Path) -> None:
    text = fused("llama")
    forking = multiprocessing.get_context("fork")
    pipes = [forking.Pipe() for _ in range(2)]
    both = [
        forking.Process(target=_compiled_by_rank, args=(rank, text, tmp_path, failing, pipes[rank][1]), daemon=True)
        for rank in range(2)
    ]
    for process in both:
        process.start()
    try:
        if len(failing) == 1 and failing[1] == "fails":
            assert pipes[1][0].poll(20)
            said = pipes[1][0].recv()
            assert said.startswith(EngineDeadError.__name__)
            assert "on rank 1 alone (no memory here)" in said
            # The watchdog then ends the other one, which waits.
            assert not pipes[0][0].poll(0.1)
            return
        assert all(ours.poll(20) for ours, _ in pipes)
        # Layers, recurrent ones, the rotation, the norm.
        wanted = [0, 0, 0, 0] if len(failing) == 2 else [len(text.layers) - 1, 0, 0, 1]
        assert [ours.recv() for ours, _ in pipes] == [wanted] * 2
    finally:
        for process in both:
            process.kill()
            process.join()


@pytest.mark.parametrize(("tokens", "choices", "experts"), [(1, 8, 128), (40, 4, 8), (300, 8, 5)])
def test_slots_are_ordered_and_summed(tokens: int, choices: int, experts: int) -> None:
    """As sorting orders them; some have no expert, by more than one number, and what no expert gave is not read."""
    chance = torch.Generator().manual_seed(tokens)
    chosen = torch.randint(0, experts + 3, (tokens, choices), generator=chance)
    order, starts, places = slots(chosen, experts)
    in_order, want = chosen.flatten().clamp(max=experts).sort(stable=True)
    assert torch.equal(order, want)
    assert torch.equal(starts.long(), torch.searchsorted(in_order, torch.arange(experts + 1)))
    assert torch.equal(places[order].long(), torch.arange(tokens * choices))
    y = torch.randn(tokens * choices, 1100, generator=chance)
    y[starts[-1] :] = float("nan")
    # Tokens are summed apart from each other; those of many blocks take the interpreter long.
    some, places = chosen[-20:], places[-20 * choices :]
    shares = torch.rand(some.shape, generator=chance)
    rows = y[places.long()].view(*some.shape, -1).double() * shares.unsqueeze(-1).double()
    want = torch.where((some < experts).unsqueeze(-1), rows, 0.0).sum(1)
    found = summed(y, places, some, shares, experts)
    torch.testing.assert_close(found.double(), want, atol=1e-5, rtol=1e-5)
    in_slots = torch.empty_like(y)
    in_slots[order] = y
    assert torch.equal(summed(in_slots[-20 * choices :], None, some, shares, experts), found)
