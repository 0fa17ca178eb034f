"""Kernels that start early, as they are compiled for a GPU: they signal before all else, and write nothing unwaited."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from beheld.attention import triton_decode, triton_delta, triton_latent
from beheld.models import expert_row_kernel, one_row_kernel, route_row_kernel
from beheld.quant import float8_kernel, float8_row_kernel, mxfp4_row_kernel

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
LATENT = {"RANK": 512, "ROTARY": 64}
TILES = {"TILES": 1, "GROUP": 20, "BLOCK_SIZE": 16, "ROWS": 32, "TILE": 32, "WIDTH": 512, "ROTARY_WIDTH": 64}
ABSORBED = {**LATENT, "HEADS": 20, "PLAIN": 192, "BLOCK_SIZE": 16, "N": 256, "A": 64, "B": 64, "WIDTH": 512}
# Queries that are rotated already, which do not grow with positions.
ABSORBED |= {f"{name}_ptr": None for name in ("own", "weight", "cos", "sin", "cache", "slots", "position")}
ABSORBED |= {"INTERLEAVED": False}
JOIN = {"HEADS": 20, "RANK": 512, "WIDTH": 128, "MAX_PARTS": 128, "AT_ONCE": 8}
CONVOLVED = {"CHANNELS": 8192, "LENGTH": 4, "BLOCK_SIZE": 16, "HAS_BIAS": False, "WIDTH": 256, "PLACES": 4}
DELTA = {"HEADS": 32, "SHARE": 2, "KEY": 128, "VALUE": 128, "SCALE": 0.1, "EPS": 1e-6, "BLOCK_SIZE": 16}
DELTA |= {"KEYS": 128, "VALUES": 32}
FLOAT8 = {"A": 8, "ASSEMBLY": True}
LANES = {"A": 1024, "B": 512}
PACKED = {"C": 4, "R": 4, "ASSEMBLY": True}
TYPES = {
    "choice": "*i64",
    "exponent": "*u16",
    "items": "*i32",
    "tables": "*i32",
    "arrived": "*i32",
    "slots": "*i64",
    "lengths": "*i32",
    "lines": "*i32",
    "states": "*fp32",
    "acc": "*fp32",
    "sums": "*fp32",
}


# Of a multiprocessor of all GPUs since compute capability 7.0.
REGISTERS = 65_536


def compiled(kernel: Any, fixed: dict[str, Any], **options: int) -> Any:
    """The kernel for a Hopper GPU."""
    signature = {}
    for name in kernel.arg_names:
        kind = "*bf16" if name.endswith("_ptr") else "fp32" if name in ("scale", "softcap") else "i32"
        known = TYPES.get(name.removesuffix("_ptr"), kind)
        if kernel in (mxfp4_row_kernel._row, float8_row_kernel._row) and name in ("x_ptr", "weight_ptr"):
            known = "*i32"
        if kernel is float8_row_kernel._row and name in ("x_scale_ptr", "scale_ptr"):
            known = "*fp32"
        signature[name] = "constexpr" if name in fixed else known
    places = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
    source = ASTSource(kernel, signature=signature, constexprs=places)
    options |= {"launch_pdl": True, "enable_fp_fusion": True}
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def order(kernel: Any, fixed: dict[str, Any]) -> list[str]:
    """What it does, in the order of its instructions: "launch_dependents", "wait", "read" and "write"."""
    made = compiled(kernel, fixed)
    found = re.findall(r"griddepcontrol\.(\w+)|(ld\.global|cp\.async\.c[ag])|(st\.global|atom\.)", made.asm["ptx"])
    return [control or ("read" if read else "write") for control, read, _ in found]


@pytest.mark.parametrize(
    ("kernel", "fixed", "ahead"),
    [
        (one_row_kernel._short_rows, {"K": 512, "L": 0}, True),
        (one_row_kernel._short_rows, {"K": 2048, "L": 512}, True),
        (
            one_row_kernel._short_rows,
            {"K": 16, "L": 0, "num_inputs": 1, "num_outputs": 1, "bias_ptr": None, "residual_ptr": None},
            True,
        ),
        (one_row_kernel._long_rows, LONG, True),
        (float8_row_kernel._row, FLOAT8, True),
        (float8_kernel._rounded_rows, {"K": 4096}, False),
        (expert_row_kernel._outer, LANES, True),
        (mxfp4_row_kernel._row, {**PACKED, "SUMMED": True}, True),
        (route_row_kernel._choose, {"G": 8, "S": 32, "SIGMOID": True}, True),
        (route_row_kernel._choose, {"G": 1, "S": 128, "SIGMOID": False, "correction_ptr": None}, False),
        (triton_latent._absorb, ABSORBED, True),
        (triton_latent._raise, {"RANK": 512, "PLAIN": 192, "VALUES": 256, "V": 16, "A": 512}, True),
        (triton_latent._decode, {**LATENT, **TILES}, False),
        (triton_latent._join, JOIN, False),
        (triton_delta._convolve_decodes, CONVOLVED, True),
        (triton_delta._step, DELTA, True),
        (triton_decode._decode, {**DECODE, "AHEAD": True}, True),
        (triton_decode._decode, {**DECODE, "AHEAD": False}, False),
    ],
    ids=[
        "short rows",
        "parted rows",
        "a single weight",
        "long rows",
        "FP8",
        "rounded to FP8",
        "experts",
        "MXFP4",
        "choice by groups",
        "choice",
        "absorbed",
        "raised",
        "latents",
        "joined latents",
        "convolution",
        "delta rule",
        "decode, settled",
        "decode",
    ],
)
def test_signal_wait_write(kernel: Any, fixed: dict[str, Any], ahead: bool) -> None:
    done = order(kernel, {**fixed, "EARLY": True})
    assert done[0] == "launch_dependents"
    assert done.count("launch_dependents") == done.count("wait") == 1
    wait = done.index("wait")
    assert ("read" in done[:wait]) == ahead
    assert "write" not in done[:wait]
    assert {"read", "write"} <= set(done[wait:])


@pytest.mark.parametrize(
    ("kernel", "fixed"),
    [
        (expert_row_kernel._inner, LANES),
        (mxfp4_row_kernel._row, {**PACKED, "C": 1, "SUMMED": False, "share_ptr": None}),
    ],
    ids=["experts", "MXFP4"],
)
def test_what_follows_starts_once_choices_are_there(kernel: Any, fixed: dict[str, Any]) -> None:
    """The second product of experts reads the choices before it waits."""
    done = order(kernel, {**fixed, "EARLY": True})
    assert done[:2] == ["wait", "launch_dependents"]
    assert done.count("launch_dependents") == done.count("wait") == 1
    assert {"read", "write"} <= set(done)


def test_without_it_nothing_is_signaled() -> None:
    assert set(order(one_row_kernel._short_rows, {"K": 512, "L": 0, "EARLY": False})) == {"read", "write"}


@pytest.mark.parametrize("inputs", [2048, 2560, 2880, 4096])
def test_all_programs_for_short_rows_fit_at_once(inputs: int, tmp_path: Path) -> None:
    """One more than fits would wait for the others' end; versions of Triton differ in the registers that they take."""
    reader = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not reader.exists():
        pytest.skip("this Triton has no cuobjdump")
    lanes = one_row_kernel._lanes(inputs)
    programs, options = one_row_kernel._short_options(lanes)
    fixed = {"K": lanes[0], "L": lanes[1], "EARLY": True, "bias_ptr": None}
    made = compiled(one_row_kernel._short_rows, fixed, **options)
    file = tmp_path / "kernel.cubin"
    file.write_bytes(made.asm["cubin"])
    said = subprocess.run([reader, "-res-usage", file], capture_output=True, text=True, check=True).stdout
    registers, spilled = (int(re.search(rf"{name}:(\d+)", said)[1]) for name in ("REG", "LOCAL"))  # type: ignore[index]
    # Registers are given out by eights.
    program = -(-registers // 8) * 8 * 32 * options["num_warps"]
    assert REGISTERS // program >= programs
    assert spilled == 0


@pytest.mark.parametrize(
    ("kernel", "fixed", "lanes", "warps"),
    [
        (mxfp4_row_kernel._row, {**PACKED, "C": 1, "SUMMED": False}, 32 * PACKED["R"], 1),
        (mxfp4_row_kernel._row, {**PACKED, "C": 4, "SUMMED": True}, 128 * PACKED["R"], 16),
        (mxfp4_row_kernel._row, {**PACKED, "C": 8, "SUMMED": True}, 256 * PACKED["R"], 16),
        (float8_row_kernel._row, FLOAT8, 256, 8),
        (float8_row_kernel._row, {**FLOAT8, "A": 16}, 512, 16),
    ],
    ids=["a choice of MXFP4", "four choices", "eight choices", "FP8", "few outputs of FP8"],
)
def test_each_lane_has_the_element_that_the_tensor_cores_expect(
    kernel: Any, fixed: dict[str, Any], lanes: int, warps: int
) -> None:
    """Element m of a flat tensor is in lane m % 32. Another placing gives NaN on a GPU."""
    made = compiled(kernel, {**fixed, "EARLY": True}, num_warps=warps).asm["ttgir"]
    placed = dict(re.findall(r"^(#\w+) = #ttg\.blocked<\{(.*)\}>", made, re.M))
    found = re.findall(r"elementwise_inline_asm .* -> tensor<(\d+)xf32, (#\w+)>", made)
    found += re.findall(r"elementwise_inline_asm .* -> tensor<(\d+)xf32, (#\w+)>, tensor", made)
    sizes = {int(size) for size, _ in found}
    assert len(found) >= 2
    assert sizes == {lanes}
    for _, name in found:
        assert placed[name].startswith("sizePerThread = [1], threadsPerWarp = [32], "), placed[name]
