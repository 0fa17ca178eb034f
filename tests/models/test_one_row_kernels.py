"""Kernels that start early, as they are compiled for a GPU: they signal before all else, and write nothing unwaited."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from beheld.attention import triton_decode
from beheld.models import one_row_kernel

SINGLE = {"num_inputs": 1, "num_outputs": 1, "bias_ptr": None, "residual_ptr": None}
LONG = {"N": 4, "K": 4096, "J": 1024, "STAGES": 4}
DECODE = {
    "KV_HEADS": 2,
    "GROUP": 4,
    "SIZE": 64,
    "V_SIZE": 64,
    "BLOCK_SIZE": 16,
    "SOFTCAP": False,
    "ROWS": 16,
    "TILE": 64,
}
DECODE |= {"WIDTH": 64, "V_WIDTH": 64, "PARTS": 4}
TYPES = {"items": "*i32", "tables": "*i32", "arrived": "*i32", "slots": "*i64", "acc": "*fp32", "sums": "*fp32"}


def order(kernel: Any, fixed: dict[str, Any]) -> list[str]:
    """What it does, in the order of its instructions: "launch_dependents", "wait", "read" and "write"."""
    signature = {}
    for name in kernel.arg_names:
        kind = "*bf16" if name.endswith("_ptr") else "fp32" if name in ("scale", "softcap") else "i32"
        signature[name] = "constexpr" if name in fixed else TYPES.get(name.removesuffix("_ptr"), kind)
    places = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
    source = ASTSource(kernel, signature=signature, constexprs=places)
    made = compile(source, target=GPUTarget("cuda", 90, 32), options={"launch_pdl": True, "enable_fp_fusion": True})
    found = re.findall(r"griddepcontrol\.(\w+)|(ld\.global|cp\.async\.c[ag])|(st\.global|atom\.)", made.asm["ptx"])
    return [control or ("read" if read else "write") for control, read, _ in found]


@pytest.mark.parametrize(
    ("kernel", "fixed", "ahead"),
    [
        (one_row_kernel._short_rows, {"K": 512}, True),
        (
            one_row_kernel._short_rows,
            {"K": 16, "num_inputs": 1, "num_outputs": 1, "bias_ptr": None, "residual_ptr": None},
            True,
        ),
        (one_row_kernel._long_rows, LONG, True),
        (triton_decode._decode, {**DECODE, "AHEAD": True}, True),
        (triton_decode._decode, {**DECODE, "AHEAD": False}, False),
    ],
    ids=["short rows", "a single weight", "long rows", "decode, settled", "decode"],
)
def test_signal_wait_write(kernel: Any, fixed: dict[str, Any], ahead: bool) -> None:
    done = order(kernel, {**fixed, "EARLY": True})
    assert done[0] == "launch_dependents"
    assert done.count("launch_dependents") == done.count("wait") == 1
    wait = done.index("wait")
    assert ("read" in done[:wait]) == ahead
    assert "write" not in done[:wait]
    assert {"read", "write"} <= set(done[wait:])


def test_without_it_nothing_is_signaled() -> None:
    assert set(order(one_row_kernel._short_rows, {"K": 512, "EARLY": False})) == {"read", "write"}
