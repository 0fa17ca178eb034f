"""The kernel for long prompts, without a GPU: that it compiles for one, and which prompts it is for."""

from __future__ import annotations

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from beheld.attention import hopper_prefill
from tests.attention.naive import make_case
from tests.long import LONG


@pytest.mark.parametrize(
    ("kind", "size"), [("bf16", 128), ("fp16", 64), *([("bf16", 64), ("fp16", 128)] if LONG else [])]
)
def test_compiles_for_hopper(kind: str, size: int) -> None:
    """Copies by the copy engine, products by the asynchronous instructions, registers handed to the consumers."""
    kernel = hopper_prefill._prefill
    fixed = {"KV_HEADS": 2, "GROUP": 7, "SIZE": size, "BLOCK_SIZE": 16}
    layout = gl.NVMMASharedLayout(128, 16, 2)
    signature, divisible = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in fixed:
            signature[name] = "constexpr"
        elif name.endswith(("_tiles", "_pieces")):
            lines = 128 if name.endswith("_tiles") else 16
            signature[name] = f"tensordesc<{kind}[{lines}, {size}],{layout!r}>"
        elif name.endswith("_ptr"):
            signature[name] = "*i32" if name in ("tiles_ptr", "tables_ptr") else f"*{kind}"
        else:
            signature[name] = "fp32" if name == "scale" else "i32"
        if (name.endswith(("_ptr", "_token", "_head"))) and name != "tables_ptr":
            divisible[(place,)] = [["tt.divisibility", 16]]
    places = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
    source = GluonASTSource(kernel, signature=signature, constexprs=places, attrs=divisible)
    # As every launch does: see test_launches.py.
    options = {"num_warps": 4, "enable_fp_fusion": True}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    text = made.asm["ptx"]
    assert "wgmma.mma_async.sync.aligned.m64n128k16" in text
    assert "cp.async.bulk.tensor.2d" in text
    assert "setmaxnreg.inc.sync.aligned.u32 \t240" in text or "setmaxnreg.inc.sync.aligned.u32 240" in text
    assert made.metadata.shared <= 227 * 1024, "what a program may have of a multiprocessor's shared memory"


@pytest.mark.parametrize(
    ("pieces", "long"),
    [
        ([(0, 1024)], False),
        ([(0, 1024)] * 16, False),
        ([(0, 2048)], True),
        ([(900, 1000)], False),
        ([(2000, 2600)], True),
        # Guessed tokens that are checked.
        ([(9000, 9005)], False),
        ([(0, 8192), *[(0, 100)] * 8], True),
    ],
)
def test_long_is_how_many_keys_a_query_sees(pieces: list[tuple[int, int]], long: bool) -> None:
    assert hopper_prefill.is_long(pieces) == long


@pytest.mark.parametrize(
    "options",
    [{"dtype": torch.float32}, {"size": 96}, {"size": 256}, {"block_size": 8}, {"heads": 2, "kv_heads": 1, "size": 32}],
    ids=str,
)
def test_what_it_does_not_compute(options: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_prefill, "_works", lambda *args: True)
    usual = {"size": 64, "block_size": 16, "dtype": torch.bfloat16}
    case = make_case([(0, 64)], **usual)  # type: ignore[arg-type]
    assert hopper_prefill.takes(case.q_THC, case.k_TKC, case.v_TKC, case.kv)
    case = make_case([(0, 64)], **(usual | options))  # type: ignore[arg-type]
    assert not hopper_prefill.takes(case.q_THC, case.k_TKC, case.v_TKC, case.kv)


def test_how_heads_may_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_prefill, "_works", lambda *args: True)
    case = make_case([(0, 64)], size=64, block_size=16, dtype=torch.bfloat16)
    k_TKC = case.k_TKC
    joined = torch.cat([case.q_THC, k_TKC, k_TKC], 1)[:, -2:]
    apart = k_TKC.transpose(0, 1).contiguous().transpose(0, 1)
    for given in (k_TKC, joined, apart):
        assert hopper_prefill.takes(case.q_THC, given, case.v_TKC, case.kv)
    assert hopper_prefill._between_heads(joined) == (0, 64)
    assert hopper_prefill._between_heads(apart) == (64, 0)
    unaligned = torch.zeros(k_TKC.numel() + 1, dtype=torch.bfloat16)[1:].view(k_TKC.shape)
    overlapping = torch.zeros(64 * 80, dtype=torch.bfloat16).as_strided((64, 2, 64), (72, 8, 1))
    for given in (unaligned, overlapping):
        assert not hopper_prefill.takes(case.q_THC, given, case.v_TKC, case.kv)
