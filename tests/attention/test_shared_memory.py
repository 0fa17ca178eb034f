"""The kernels' tiles fit the shared memory of the GPUs that they are for; Triton tells without one.

Triton is asked to translate a kernel for a GPU as far as it lays out shared memory. That is a fifth of the work of
compiling it: the machine code does not matter here.
"""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest
import torch

from tests.long import LONG

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

import triton
from triton._C.libtriton import ir, nvidia, passes
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from beheld.attention import triton_cross, triton_decode, triton_prefill, triton_shared
from beheld.attention.backend import GroupMetadata, LayerKV

# Compute capability -> the shared memory that one program may ask for (CUDA C++ Programming Guide, table of technical
# specifications). 8.6 is 8.0's code on less memory.
LIMITS = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
CODE = {80: 80, 86: 80, 89: 89, 90: 90, 100: 100}
TYPES = {"bf16": 2, "fp16": 2, "fp32": 4}
# Sizes between powers of two take the tiles of the next one.
SIZES = (64, 128, 256, 512)
STRIDES = ("q_token", "q_head", "k_token", "k_head", "v_token", "v_head")
ROWS = ("q_ptr", "k_ptr", "v_ptr", "keys_ptr", "values_ptr", "out_ptr")
GROUP = 4


def shared_bytes(kernel: Any, types: dict[str, str], constants: dict[str, Any], code: int, **options: Any) -> int:
    """What one program of the kernel takes of shared memory on GPUs of this kind."""
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in types if name in (*ROWS, *STRIDES)}
    source = ASTSource(kernel, signature, {(names.index(k),): v for k, v in constants.items()}, aligned)
    target = GPUTarget("cuda", code, 32)
    compiler = make_backend(target)
    chosen = compiler.parse_options({**options, "enable_fp_fusion": True, **source.parse_options()})
    stages: dict[str, Any] = {}
    compiler.add_stages(stages, chosen, source.language)
    context = ir.context()
    ir.load_dialects(context)
    compiler.load_dialects(context)
    metadata: dict[str, Any] = {"target": target, **chosen.__dict__}
    codegen, modules = compiler.get_codegen_implementation(chosen), compiler.get_module_map()
    module = source.make_ir(target, chosen, codegen, modules, context)
    for stage in ("ttir", "ttgir"):
        module = stages[stage](module, metadata)
    if LONG:
        stages["llir"](module, metadata)
        return int(metadata["shared"])
    # The first steps of the next stage, up to the one that lays out shared memory.
    steps = ir.pass_manager(context)
    passes.convert.add_scf_to_cf(steps)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(steps, code, 80)
    steps.run(module, "shared memory")
    return int(module.get_int_attr("ttg.shared"))


def common(dtype: str, size: int, cache: str = "") -> tuple[dict[str, str], dict[str, Any]]:
    """Types and constants that the kernels share, for heads of this size; `cache` is that of keys and values."""
    types = dict.fromkeys(ROWS, f"*{dtype}") | dict.fromkeys(("keys_ptr", "values_ptr"), f"*{cache or dtype}")
    types |= dict.fromkeys((*STRIDES, "table_row"), "i32")
    types |= {"tables_ptr": "*i32", "scale": "fp32", "softcap": "fp32"}
    width = triton.next_power_of_2(size)
    constants = {"KV_HEADS": 2, "GROUP": GROUP, "SIZE": size, "V_SIZE": size, "BLOCK_SIZE": 16, "SOFTCAP": True}
    return types, constants | {"WIDTH": width, "V_WIDTH": width}


def prefill_bytes(dtype: str, size: int, capability: int, cache: str = "") -> int:
    shape = triton_prefill.shape_of(size, TYPES[dtype], LIMITS[capability], "threads")
    types, constants = common(dtype, size, cache)
    types |= {"tiles_ptr": "*i32", "sees_ptr": "*i32"}
    constants |= {"k_tiles": None, "v_tiles": None, "PREFIX": True, "WINDOW": 0, "CHUNK": 0}
    constants |= {"ROWS": shape.rows, "TILE": shape.keys}
    options = {"num_warps": shape.warps, "num_stages": shape.stages}
    return shared_bytes(triton_prefill._prefill, types, constants, CODE[capability], **options)


def decode_bytes(dtype: str, size: int, capability: int, crowded: bool, cache: str = "") -> int:
    tile, warps, stages = triton_decode.shape_of(triton.next_power_of_2(size), TYPES[dtype], crowded)
    types, constants = common(dtype, size, cache)
    types |= {
        "items_ptr": "*i32",
        "slots_ptr": "*i64",
        "acc_ptr": "*fp32",
        "sums_ptr": "*fp32",
        "arrived_ptr": "*i32",
        "joined_ptr": "*i32",
    }
    constants |= {"ROWS": 16, "TILE": tile, "PARTS": triton_decode._JOINED, "EARLY": capability >= 90}
    options = {"num_warps": warps, "num_stages": stages}
    return shared_bytes(triton_decode._decode, types, constants, CODE[capability], **options)


def prefix_bytes(dtype: str, size: int, capability: int, group: int, cache: str = "") -> int:
    """That of the kernel for prefixes that sequences share."""
    rows, width = triton.next_power_of_2(triton_shared.NEIGHBOURS * group), triton.next_power_of_2(size)
    tile, warps, stages = triton_shared.shape_of(rows, width, TYPES[dtype])
    types, constants = common(dtype, size, cache)
    types |= dict.fromkeys(("shared_ptr", "lines_ptr", "arrived_ptr"), "*i32")
    types |= dict.fromkeys(("acc_ptr", "sums_ptr"), "*fp32") | dict.fromkeys(("num_rows", "max_parts"), "i32")
    constants |= {"min_part": triton_shared.MIN_PART, "GROUP": group, "SEQUENCES": triton_shared.NEIGHBOURS}
    constants |= {"ROWS": rows, "HEAD_ROWS": 16, "TILE": tile, "PARTS": 4}
    kernel = triton_shared._decode_shared
    types, constants = ({k: v for k, v in each.items() if k in kernel.arg_names} for each in (types, constants))
    return shared_bytes(kernel, types, constants, CODE[capability], num_warps=warps, num_stages=stages)


def cross_form(dtype: str, size: int, most: int) -> tuple[dict[str, str], dict[str, Any], dict[str, int]]:
    """Types, constants and options of the kernel for states beside the text, whose runs have `most` tokens at most."""
    shape = triton_cross.shape_of(most, GROUP, TYPES[dtype])
    types = dict.fromkeys(("q_ptr", "out_ptr"), f"*{dtype}") | dict.fromkeys(("acc_ptr", "sums_ptr"), "*fp32")
    types |= dict.fromkeys(("items_ptr", "pieces_ptr", "tokens_ptr"), "*i64") | {"arrived_ptr": "*i32", "scale": "fp32"}
    types |= dict.fromkeys(("layer", "q_token", "q_head"), "i32")
    constants = {"KV_HEADS": 2, "GROUP": GROUP, "SIZE": size, "WIDTH": triton.next_power_of_2(size)}
    constants |= {"ALIGNMENT": triton_cross.alignment_of(size, TYPES[dtype]), "TOKENS": shape.tokens}
    constants |= {"ROWS": shape.rows, "TILE": shape.states, "JOINED": shape.joined}
    return types, constants, {"num_warps": shape.warps, "num_stages": shape.stages}


# What comes nearest to the limits; the rest in the long form.
NEAR = [("bf16", 256), ("bf16", 512), ("fp32", 512)]
CASES = [(dtype, size) for dtype in TYPES for size in SIZES] if LONG else NEAR


@pytest.mark.parametrize("capability", [86, 90, 100])
@pytest.mark.parametrize(("dtype", "size"), CASES)
def test_prefill_fits(dtype: str, size: int, capability: int) -> None:
    needed = prefill_bytes(dtype, size, capability)
    assert 0 < needed <= LIMITS[capability]
    if capability == 86:
        # The larger one of the same code takes the same tiles.
        shapes = {triton_prefill.shape_of(size, TYPES[dtype], LIMITS[c], "threads") for c in (80, 86)}
        assert len(shapes) == 1


@pytest.mark.parametrize("capability", [86, 90, 100] if LONG else [86])
@pytest.mark.parametrize(("dtype", "size"), CASES if LONG else NEAR[1:])
@pytest.mark.parametrize("crowded", [False, True])
def test_decode_fits(dtype: str, size: int, capability: int, crowded: bool) -> None:
    assert 0 < decode_bytes(dtype, size, capability, crowded) <= LIMITS[capability]


@pytest.mark.parametrize("capability", [89, 90, 100])
@pytest.mark.parametrize("size", SIZES if LONG else [256, 512])
def test_keys_and_values_in_float8_fit(size: int, capability: int) -> None:
    assert 0 < prefill_bytes("bf16", size, capability, "fp8e4nv") <= LIMITS[capability]
    for crowded in (False, True):
        assert 0 < decode_bytes("bf16", size, capability, crowded, "fp8e4nv") <= LIMITS[capability]


# What `can_share` lets through: the most queries, of heads as large as they may be.
@pytest.mark.parametrize("cache", ["", "fp8e4nv"])
@pytest.mark.parametrize(("dtype", "size", "group"), [("bf16", 256, 8), ("fp32", 256, 4)])
def test_shared_prefixes_fit(dtype: str, size: int, group: int, cache: str) -> None:
    assert triton_decode.can_share(group, 1, size)
    assert 0 < prefix_bytes(dtype, size, 89, group, cache) <= LIMITS[89]


def test_shared_prefixes_in_float8_take_the_tiles_of_what_they_become(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[Any, ...]] = []

    class Kernel:
        """Notes with what it is launched."""

        def __getitem__(self, grid: Any) -> Any:
            return lambda *given, **options: launched.append((given[-4:], sorted(options.items())))

    monkeypatch.setattr(triton_shared, "_decode_shared", Kernel())
    shared_B = torch.zeros(8, dtype=torch.int32)
    group = GroupMetadata(torch.zeros(8, dtype=torch.int64), torch.zeros(8, 4, dtype=torch.int32), None)
    for cache in (torch.float32, torch.float8_e4m3fn, torch.bfloat16):
        keys = torch.zeros(2, 16, 1, 256).to(cache)
        kv = LayerKV(keys, keys, 0)
        q_THC = torch.zeros(8, 4, 256, dtype=torch.bfloat16 if cache == torch.bfloat16 else torch.float32)
        triton_shared.decode_shared(
            q_THC, q_THC, kv, group, shared_B, shared_B, shared_B, (shared_B, shared_B), 4, 1.0, None
        )
    wide, rounded, half = launched
    assert rounded == wide
    assert half != wide


@pytest.mark.parametrize("capability", [86, 90, 100] if LONG else [86])
@pytest.mark.parametrize("most", [1, 500])
@pytest.mark.parametrize("dtype", TYPES if LONG else ["bf16", "fp32"])
def test_cross_fits(dtype: str, most: int, capability: int) -> None:
    types, constants, options = cross_form(dtype, 128, most)
    assert 0 < shared_bytes(triton_cross._cross, types, constants, CODE[capability], **options) <= LIMITS[capability]


def test_states_are_fetched_by_16_bytes_though_their_addresses_come_from_a_table() -> None:
    types, constants, options = cross_form("bf16", 128, 1)
    kernel, names = triton_cross._cross, triton_cross._cross.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    source = ASTSource(kernel, signature, {(names.index(k),): v for k, v in constants.items()})
    made = triton.compile(source, target=GPUTarget("cuda", 80, 32), options={**options, "enable_fp_fusion": True})
    copies = re.findall(r"cp\.async\.\w+\.shared\.global .*, (\w+), ", made.asm["ptx"])
    assert set(copies) == {"0x10"}
