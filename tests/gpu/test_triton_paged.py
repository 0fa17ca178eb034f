"""The Triton backend on a GPU: against attention in float64, under a CUDA graph, and without waiting for the device.

Nearly all of the time goes into compiling kernels, one for each shape, type, window and soft cap that meet. So these
are not crossed: every value of each stands in some row, beside values of the others that differ from row to row.
"""

from __future__ import annotations

import dataclasses
import random
import warnings

import pytest
import torch
from torch import Tensor

from tests.attention.naive import Case, in_float8, make_case, share

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from beheld.attention import float8_kv
from beheld.attention.torch_ref import TorchBackend
from beheld.attention.triton_paged import TritonBackend
from beheld.attention.triton_tower import attend_windows

# What rounding of inputs, weights and output to the type costs, relative; float32 is exact but for its own rounding.
ROUNDING = {torch.float32: 3e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}
MIXED = [(0, 1), (63, 64), (64, 65), (999, 1000), (3000, 3001), (0, 2), (0, 129), (100, 300), (17, 600)]
FRESH = [(77, 78), (0, 2), (0, 63), (0, 64), (0, 65), (0, 700)]
LONG = [(8191, 8192), (1, 2), (0, 1024), (8000, 8192)]

HALF, FULL = torch.bfloat16, torch.float32

# Heads, key-value heads, size, block size.
Shape = tuple[int, int, int, int]
# What other tests take, too: its kernels are there already.
USUAL: Shape = (16, 2, 128, 16)
SHAPES: list[tuple[Shape, torch.dtype]] = [
    ((8, 8, 64, 16), FULL),
    ((14, 2, 64, 32), HALF),
    ((4, 2, 80, 16), HALF),
    ((4, 1, 80, 16), FULL),
    ((8, 2, 96, 64), HALF),
    ((6, 3, 96, 16), FULL),
    ((6, 2, 112, 16), FULL),
    ((16, 1, 112, 32), HALF),
    ((16, 1, 128, 16), HALF),
    (USUAL, HALF),
    ((8, 4, 256, 16), HALF),
    ((16, 2, 256, 32), FULL),
    # Gemma 4's layers that see everything.
    ((16, 4, 512, 16), HALF),
]


def reference(case: Case, scale: float, softcap: float | None) -> Tensor:
    """Attention (T, H, C) in float64 on the GPU, one sequence at a time."""
    window, chunk = case.metadata.groups[0].window, case.metadata.groups[0].chunk
    group = case.q_THC.shape[1] // case.k_TKC.shape[1]
    q = case.q_THC.double()
    out, token = [], 0
    for (k, v), start, stop in zip(case.history, case.metadata.starts, case.metadata.lengths, strict=True):
        k, v = (x.to("cuda").double().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        scores = q[token : token + stop - start].transpose(0, 1) @ k.transpose(1, 2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        position = torch.arange(start, stop, device="cuda")[:, None]
        key = torch.arange(stop, device="cuda")
        seen = key <= position
        if window is not None:
            seen &= key > position - window
        if chunk is not None:
            seen &= key >= position // chunk * chunk
        out.append((torch.softmax(scores.masked_fill(~seen, float("-inf")), -1) @ v).transpose(0, 1))
        token += stop - start
    return torch.cat(out)


def check(case: Case, out: Tensor, softcap: float | None = None, scale: float = 0.1) -> None:
    want = reference(case, scale, softcap)
    assert not out.isnan().any()
    error = (out.double() - want).norm(dim=-1)
    bound = ROUNDING[case.q_THC.dtype]
    assert error.norm() / want.norm() < bound
    assert (error / want.norm(dim=-1)).max() < 4 * bound, "one head of one token is wrong"
    group = case.metadata.groups[0]
    assert torch.equal(case.kv.keys.flatten(0, 1)[group.slots_T], case.k_TKC)
    assert torch.equal(case.kv.values.flatten(0, 1)[group.slots_T], case.v_TKC)
    assert (case.kv.keys[0] == 0).all()


def run(case: Case, softcap: float | None = None, scale: float = 0.1, layers: int = 2) -> Tensor:
    """Several layers of one step: what layers share must serve the second as it served the first."""
    backend = TritonBackend()
    backend.begin(case.metadata)
    for _ in range(layers):
        # Memory that a result is made in holds NaN: what is not written shows.
        torch.full((case.q_THC.numel(),), float("nan"), dtype=case.q_THC.dtype, device="cuda")
        out = backend.attend(case.q_THC, case.k_TKC, case.v_TKC, case.kv, case.metadata, scale, softcap)
    return out


def make(
    pieces: list[tuple[int, int]],
    shape: Shape,
    dtype: torch.dtype,
    window: int | None = None,
    chunk: int | None = None,
) -> Case:
    heads, kv_heads, size, block_size = shape
    return make_case(
        pieces,
        heads=heads,
        kv_heads=kv_heads,
        size=size,
        block_size=block_size,
        window=window,
        chunk=chunk,
        device="cuda",
        dtype=dtype,
        seed=size + heads,
    )


@pytest.mark.skipif(torch.cuda.get_device_capability() < (8, 9), reason="the GPU does not convert FP8")
@pytest.mark.parametrize(
    ("shape", "dtype", "window", "softcap"),
    [
        (USUAL, HALF, None, None),
        (USUAL, HALF, 150, 5.0),
        ((14, 2, 64, 32), HALF, None, None),
        ((8, 4, 256, 16), HALF, 6, None),
        ((16, 4, 512, 16), HALF, None, None),
        ((6, 3, 96, 16), FULL, None, None),
    ],
)
@pytest.mark.parametrize("pieces", [MIXED, FRESH, LONG], ids=["mixed", "fresh", "long"])
def test_keys_and_values_in_float8(
    pieces: list[tuple[int, int]], shape: Shape, dtype: torch.dtype, window: int | None, softcap: float | None
) -> None:
    case = in_float8(make(pieces, shape, dtype, window))
    out = run(case, softcap)
    want = reference(case, 0.1, softcap)
    assert not out.isnan().any()
    assert (out.double() - want).norm() / want.norm() < ROUNDING[dtype]
    kept = case.kv.keys.float().flatten(0, 1)[case.metadata.groups[0].slots_T]
    assert torch.equal(kept, float8_kv.rounded(case.k_TKC).float())


@pytest.mark.skipif(torch.cuda.get_device_capability() < (8, 9), reason="the GPU does not convert FP8")
def test_neighbours_share_a_prefix_in_float8() -> None:
    heads, kv_heads, size, block_size = USUAL
    lengths = [2048 + own for own in (1, 7, 30, 150, 2, 1, 9, 64, 1, 300, 2)]
    case = make_case(
        [(n - 1, n) for n in lengths],
        heads=heads, kv_heads=kv_heads, size=size, block_size=block_size, device="cuda", dtype=HALF,
    )  # fmt: skip
    case = in_float8(case)
    share(case, {1: ([2, 4, 5, 7], 2048), 8: ([10], 1024)})
    out, want = run(case), reference(case, 0.1, None)
    assert (out.double() - want).norm() / want.norm() < ROUNDING[HALF]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (USUAL, HALF),
        ((14, 2, 64, 32), HALF),
        ((8, 4, 256, 16), HALF),
        ((6, 3, 96, 16), FULL),
        ((28, 4, 128, 16), HALF),
        ((16, 4, 512, 16), HALF),
    ],
)
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_neighbours_share_a_prefix(shape: Shape, dtype: torch.dtype, softcap: float | None) -> None:
    heads, kv_heads, size, block_size = shape
    lengths = [2048 + own for own in (1, 7, 30, 150, 2, 1, 9, 64, 1, 300, 2)] + [3, 800]
    case = make_case(
        [(n - 1, n) for n in lengths],
        heads=heads,
        kv_heads=kv_heads,
        size=size,
        block_size=block_size,
        device="cuda",
        dtype=dtype,
    )
    share(case, {1: ([2, 4, 5, 7], 2048), 8: ([10], 512)})
    backend = TritonBackend()
    backend.begin(case.metadata)
    for _ in range(2):
        out = backend.attend(case.q_THC, case.k_TKC, case.v_TKC, case.kv, case.metadata, 0.1, softcap)
    check(case, out, softcap)


@pytest.mark.parametrize(("shape", "dtype"), SHAPES, ids=str)
def test_equals_float64(shape: Shape, dtype: torch.dtype) -> None:
    case = make(MIXED, shape, dtype)
    check(case, run(case))


@pytest.mark.parametrize("pieces", [MIXED, FRESH], ids=["mixed", "fresh"])
@pytest.mark.parametrize(
    ("shape", "dtype", "window", "softcap"),
    [
        ((28, 4, 128, 16), HALF, 1, None),
        ((32, 32, 128, 16), torch.float16, 33, None),
        ((16, 1, 128, 64), FULL, 512, 30.0),
        (USUAL, HALF, None, 5.0),
    ],
    ids=str,
)
def test_windows_and_soft_caps(
    shape: Shape, dtype: torch.dtype, window: int | None, softcap: float | None, pieces: list[tuple[int, int]]
) -> None:
    case = make(pieces, shape, dtype, window)
    check(case, run(case, softcap, 0.3), softcap, 0.3)


@pytest.mark.parametrize(
    ("shape", "window", "chunk", "softcap"),
    [
        ((14, 2, 64, 32), 33, None, 30.0),
        ((8, 2, 96, 64), 64, 64, None),
        ((8, 4, 256, 16), 512, None, 50.0),
        ((16, 2, 80, 8), 17, 17, 5.0),
        # Llama 4's heads and groups.
        ((40, 8, 128, 32), 1000, 1000, None),
    ],
)
def test_windows_chunks_and_soft_caps_of_other_shapes(
    shape: Shape, window: int, chunk: int | None, softcap: float | None
) -> None:
    case = make(MIXED, shape, torch.bfloat16, window, chunk)
    check(case, run(case, softcap, 0.3), softcap, 0.3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("pieces", [LONG, LONG[:1], [(4095, 4096)] * 3, [(0, 8192)], [(0, 1)], FRESH], ids=str)
def test_long_and_lonely(pieces: list[tuple[int, int]], dtype: torch.dtype) -> None:
    case = make(pieces, USUAL, dtype)
    check(case, run(case))


def test_strided_inputs() -> None:
    """Keys as a transposed view, values as part of one fused matrix, as models hand them over."""
    case = make(MIXED, USUAL, torch.bfloat16)
    k_TKC = case.k_TKC.transpose(0, 1).contiguous().transpose(0, 1)
    fused = torch.randn(len(case.v_TKC), 20, 128, dtype=torch.bfloat16, device="cuda")
    fused[:, 18:], fused[:, :16] = case.v_TKC, case.q_THC
    case = dataclasses.replace(case, q_THC=fused[:, :16], k_TKC=k_TKC, v_TKC=fused[:, 18:])
    check(case, run(case))


@pytest.mark.parametrize("pieces", [MIXED, FRESH], ids=["mixed", "fresh"])
@pytest.mark.parametrize("values", [12, 16])
def test_narrow_values_in_lines_of_any_length(values: int, pieces: list[tuple[int, int]]) -> None:
    """As the tiny DeepSeek-V3 has them: ptxas read such values at undefined addresses of shared memory."""
    case = make(pieces, (4, 4, 24, 16), torch.bfloat16)
    q, k, v = (torch.zeros(len(case.v_TKC), 4, 29, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    q[..., :24], k[..., :24], v[..., :values] = case.q_THC, case.k_TKC, case.v_TKC[..., :values]
    kv = dataclasses.replace(case.kv, values=case.kv.values[..., :values].contiguous())
    history = [(keys, of_keys[..., :values]) for keys, of_keys in case.history]
    given = {"q_THC": q[..., :24], "k_TKC": k[..., :24], "v_TKC": v[..., :values]}
    case = dataclasses.replace(case, kv=kv, history=history, **given)
    check(case, run(case))


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(
    "pieces", [[(9, 10), (50, 51), (0, 130), (0, 70), (64, 100)], [(0, 130), (0, 70), (0, 2)]], ids=str
)
def test_one_request_s_nan_stays_its_own(pieces: list[tuple[int, int]], window: int | None) -> None:
    case = make(pieces, USUAL, torch.bfloat16, window)
    want = run(case)
    for sequence in range(len(pieces)):
        own = slice(*case.metadata.cu_q_B1[sequence : sequence + 2].tolist())
        ill = dataclasses.replace(case, k_TKC=case.k_TKC.clone(), v_TKC=case.v_TKC.clone())
        ill.k_TKC[own], ill.v_TKC[own] = float("nan"), float("nan")
        out = run(ill)
        assert out[own].isnan().any()
        out[own] = want[own]
        assert torch.equal(out, want)
        run(case)


def test_agrees_with_torch_backend() -> None:
    case, same = (make(MIXED, *SHAPES[0]) for _ in range(2))
    backend = TorchBackend()
    backend.begin(same.metadata)
    want = backend.attend(same.q_THC, same.k_TKC, same.v_TKC, same.kv, same.metadata, 0.1, None)
    torch.testing.assert_close(run(case), want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("pieces", [[(77, 78), (0, 300), (40, 400)], [(0, 300), (0, 400)]], ids=["prefix", "fresh"])
@pytest.mark.parametrize("window", [None, 100])
def test_ranges_read_both_ways(window: int | None, pieces: list[tuple[int, int]]) -> None:
    case, same = (make(pieces, USUAL, FULL, window) for _ in range(2))
    ranges = (((0, 200), (201, 300)), ((64, 320),))
    for one in (case, same):
        one.metadata.both_ways = ((),) * (len(pieces) - 2) + ranges
    backend = TorchBackend()
    backend.begin(same.metadata)
    want = backend.attend(same.q_THC, same.k_TKC, same.v_TKC, same.kv, same.metadata, 0.1, None)
    torch.testing.assert_close(run(case), want, atol=1e-5, rtol=1e-4)
    half, whole = make(pieces, USUAL, HALF, window), run(case)
    half.metadata.both_ways = case.metadata.both_ways
    assert (run(half) - whole).norm() / whole.norm() < 0.02


def test_every_run_gives_the_same_bits() -> None:
    """Parts join in one order, whichever finishes last; a race would show here."""
    case = make([(8191, 8192), (700, 701), (5000, 5001)], USUAL, torch.bfloat16)
    first = run(case)
    assert all(torch.equal(first, run(case, layers=50)) for _ in range(20))


def test_never_waits_for_the_device() -> None:
    case = make(MIXED, USUAL, torch.bfloat16)
    run(case)
    decodes = make(MIXED[:5], USUAL, torch.bfloat16)
    run(decodes)
    # PyTorch's "error" mode, without its warning that it is a prototype.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        run(case)
        run(decodes)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("shape", "window", "softcap"),
    [((28, 4, 128, 16), None, None), ((32, 32, 80, 16), 100, None), ((16, 4, 256, 32), None, 7.0)],
    ids=str,
)
def test_a_crowd_of_rows(shape: Shape, window: int | None, softcap: float | None) -> None:
    """More programs than the device runs side by side: they have another shape."""
    chance = random.Random(1)
    pieces = [(n, n + 1) for n in (0, 1, 63, 64, 65, 2000, *(chance.randrange(900) for _ in range(250)))]
    case = make(pieces, shape, HALF, window=window)
    check(case, run(case, softcap), softcap)
    assert case.metadata.groups[0].extra["decode"].crowded


@pytest.mark.parametrize("rows", [8, 1])
def test_one_graph_serves_any_lengths(rows: int) -> None:
    """Captured once for eight rows at short lengths, replayed for others; unused rows have length 1 and slot 0.

    A single row's graph has its plan before any layer runs, and its kernels read their first tile before it is their
    turn, each while the one before it may still be storing and joining its parts.
    """
    shape = USUAL
    many = ([1, 1], [5000, 17, 300], [64] * 8, [8192], [2000, 8000, 1, 900, 65])
    alone = ([1], [2], [8192], [64], [65], [17], [5000])
    steps = [make([(n - 1, n) for n in lengths], shape, torch.bfloat16) for lengths in (many if rows > 1 else alone)]
    blocks = max(len(case.kv.keys) for case in steps)
    static = make([(0, 1)] * rows, shape, torch.bfloat16)
    static.kv.keys = torch.zeros(blocks, 16, 2, 128, dtype=torch.bfloat16, device="cuda")
    static.kv.values = torch.zeros_like(static.kv.keys)
    group = static.metadata.groups[0]
    group.kv_heads = shape[1] if rows == 1 else None
    group.tables_BN = torch.zeros(rows, 512, dtype=torch.int32, device="cuda")
    group.slots_T = torch.zeros(rows, dtype=torch.int64, device="cuda")
    backend, args = TritonBackend(), (static.q_THC, static.k_TKC, static.v_TKC, static.kv, static.metadata, 0.1, None)
    backend.begin(static.metadata)
    backend.attend(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.begin(static.metadata)
        # As what embeds tokens does in a model, this waits for the plan: no layer's kernel needs to.
        static.q_THC.mul_(1)
        for _ in range(3):
            out = backend.attend(*args)
    assert group.extra["decode"].settled == (rows == 1)
    for case in steps:
        count, own = len(case.q_THC), case.metadata.groups[0]
        for target, source in ((static.q_THC, case.q_THC), (static.k_TKC, case.k_TKC), (static.v_TKC, case.v_TKC)):
            target[:count] = source
        static.kv.keys[: len(case.kv.keys)] = case.kv.keys
        static.kv.values[: len(case.kv.values)] = case.kv.values
        group.tables_BN.zero_()
        group.tables_BN[:count, : own.tables_BN.shape[1]] = own.tables_BN
        group.slots_T.zero_()
        group.slots_T[:count] = own.slots_T
        static.metadata.lengths_B.fill_(1)
        static.metadata.lengths_B[:count] = case.metadata.lengths_B
        out.fill_(float("nan"))
        graph.replay()
        assert not out.isnan().any(), "rows that pad the graph must stay finite"
        case.kv.keys, case.kv.values = static.kv.keys, static.kv.values
        check(case, out[:count])
        eager = run(case)
        assert (eager - out[:count]).norm() / eager.norm() < 3e-3


# Long windows on average have a kernel of their own, but in float32.
LONG_WINDOWS = [[1024] * 3, [5000]]
SHORT_WINDOWS = [[64] * 40, [16, 64, 0, 33, 700, 1], [*range(1, 90)]]
TOWERS = [(64, HALF, "long"), (80, torch.float16, "long"), (128, FULL, "long")]
TOWERS += [(64, torch.float16, "short"), (72, HALF, "short"), (128, FULL, "short"), (128, HALF, "short")]


@pytest.mark.parametrize(
    ("size", "dtype", "lengths"),
    [(*tower, own) for *tower, kind in TOWERS for own in (LONG_WINDOWS if kind == "long" else SHORT_WINDOWS)],
    ids=lambda x: f"{len(x)} windows" if isinstance(x, list) else str(x),
)
def test_windows_of_a_tower(size: int, dtype: torch.dtype, lengths: list[int]) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = torch.randn(sum(lengths), 3, 5, size, generator=generator, device="cuda", dtype=dtype).unbind(1)
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    out = attend_windows(q, k, v, bounds, 0.2)
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        q_HLC, k_HLC, v_HLC = (x[start:stop].double().transpose(0, 1) for x in (q, k, v))
        want = (torch.softmax(q_HLC @ k_HLC.transpose(1, 2) * 0.2, -1) @ v_HLC).transpose(0, 1)
        assert (out[start:stop].double() - want).norm() <= ROUNDING[dtype] * want.norm()
