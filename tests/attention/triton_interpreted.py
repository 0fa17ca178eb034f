"""The Triton kernels in Triton's interpreter, on a CPU; test_triton.py runs this file in a process of its own."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from beheld.attention import float8_kv
from beheld.attention.backend import AttnMetadata, GroupMetadata
from beheld.attention.flash import FlashBackend
from beheld.attention.torch_ref import TorchBackend
from beheld.attention.triton_decode import plan_decode
from beheld.attention.triton_paged import TritonBackend
from beheld.attention.triton_prefill import make_tiles, make_tiles_on_device
from beheld.attention.triton_tower import attend_windows
from beheld.platform.registry import CPU
from tests.attention.naive import Case, expected, in_float8, make_case, share, sinks
from tests.long import LONG

MIXED = [(7, 8), (31, 32), (300, 301), (0, 9), (5, 21), (16, 24), (30, 33)]
SPLIT = [(0, 1), (600, 601), (130, 131)]


def run(case: Case, softcap: float | None = None, sinks_H: torch.Tensor | None = None) -> torch.Tensor:
    """Two layers of one step: the second finds what the first left behind."""
    backend = TritonBackend()
    backend.begin(case.metadata)
    for _ in range(2):
        out = backend.attend(case.q_THC, case.k_TKC, case.v_TKC, case.kv, case.metadata, 0.3, softcap, sinks_H)
    return out


def check(case: Case, out: torch.Tensor, softcap: float | None = None, sinks_H: torch.Tensor | None = None) -> None:
    want = expected(case, 0.3, softcap, sinks_H)
    torch.testing.assert_close(out.double(), want, atol=3e-6, rtol=1e-5)
    slots = case.metadata.groups[0].slots_T
    assert torch.equal(case.kv.keys.flatten(0, 1)[slots], case.k_TKC)
    assert torch.equal(case.kv.values.flatten(0, 1)[slots], case.v_TKC)
    assert (case.kv.keys[0] == 0).all(), "the null block stays empty"


@pytest.mark.parametrize("pieces", [MIXED, SPLIT, [(0, 33)]], ids=["mixed", "split", "prefill"])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (1, None), (6, 5.0), (150, None)])
def test_equals_naive(pieces: list[tuple[int, int]], window: int | None, softcap: float | None) -> None:
    case = make_case(pieces, heads=6, kv_heads=2, window=window)
    check(case, run(case, softcap), softcap)


@pytest.mark.parametrize("pieces", [SPLIT, [(5, 6)], [(0, 1)], [(63, 64)], [(64, 65)], [(65, 66)]], ids=str)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (1, None), (6, 5.0), (150, None)])
def test_a_plan_made_before_all_layers(
    pieces: list[tuple[int, int]], window: int | None, softcap: float | None
) -> None:
    """As in a single row's graph: the kernel reads its first tile before it is its turn."""
    case = make_case(pieces, heads=6, kv_heads=2, window=window)
    case.metadata.groups[0].kv_heads = 2
    check(case, run(case, softcap), softcap)
    assert case.metadata.groups[0].extra["decode"].settled


@pytest.mark.parametrize("pieces", [[(300, 301), (0, 1), (0, 9), (16, 24)], SPLIT], ids=["mixed", "split"])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (6, 5.0), (150, None)])
@pytest.mark.parametrize("early", [False, True], ids=["", "early"])
def test_sinks_take_a_share_of_every_query(
    pieces: list[tuple[int, int]], window: int | None, softcap: float | None, early: bool
) -> None:
    case, own = make_case(pieces, heads=6, kv_heads=2, window=window), sinks(6)
    case.metadata.groups[0].kv_heads = 2 if early else None
    check(case, run(case, softcap, own), softcap, own)


@pytest.mark.parametrize("pieces", [MIXED, SPLIT], ids=["mixed", "split"])
@pytest.mark.parametrize("chunk", [1, 6, 20, 150])
def test_a_chunk_hides_what_was_before_it(pieces: list[tuple[int, int]], chunk: int) -> None:
    case = make_case(pieces, heads=6, kv_heads=2, window=chunk, chunk=chunk)
    check(case, run(case))


@pytest.mark.parametrize(
    ("count", "heads", "kv_heads", "softcap"),
    [
        (count, heads, kv_heads, softcap)
        for count, (heads, kv_heads), softcap in itertools.product(
            [16, 296, 696], [(6, 2), (4, 4), (16, 1)], [None, 5.0]
        )
    ]
    if LONG
    else [(16, 6, 2, 5.0), (296, 4, 4, None)],
)
def test_neighbours_share_a_prefix(count: int, heads: int, kv_heads: int, softcap: float | None) -> None:
    lengths = [count + own for own in (1, 7, 30, 150, 2, 1, 9, 64, 1, 300, 2)]
    case = make_case([(n - 1, n) for n in lengths] + [(0, 5)], heads=heads, kv_heads=kv_heads)
    # Not all of the first eight share; of the second eight, two.
    share(case, {1: ([2, 4, 5, 7], count), 8: ([10], count // 16 * 8)})
    check(case, run(case, softcap), softcap)


def test_none_of_the_neighbours_shares_a_prefix() -> None:
    case = make_case(SPLIT, heads=6, kv_heads=2)
    share(case, {})
    check(case, run(case))


def check_float8(
    case: Case, out: torch.Tensor, softcap: float | None = None, sinks_H: torch.Tensor | None = None
) -> None:
    want = expected(case, 0.3, softcap, sinks_H)
    torch.testing.assert_close(out.double(), want, atol=3e-6, rtol=1e-5)
    slots = case.metadata.groups[0].slots_T
    for cache, new_TKC in ((case.kv.keys, case.k_TKC), (case.kv.values, case.v_TKC)):
        kept = cache.float().flatten(0, 1)[slots]
        assert torch.equal(kept, float8_kv.rounded(new_TKC).float())
        assert (cache[0].float() == 0).all(), "the null block stays empty"


@pytest.mark.parametrize("pieces", [MIXED, SPLIT, [(0, 33)]], ids=["mixed", "split", "prefill"])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (6, 5.0), (150, None)])
@pytest.mark.parametrize("early", [False, True], ids=["", "early"])
def test_keys_and_values_in_float8(
    pieces: list[tuple[int, int]], window: int | None, softcap: float | None, early: bool
) -> None:
    case, own = in_float8(make_case(pieces, heads=6, kv_heads=2, window=window)), sinks(6)
    case.metadata.groups[0].kv_heads = 2 if early else None
    check_float8(case, run(case, softcap, own), softcap, own)


def test_neighbours_share_a_prefix_in_float8() -> None:
    lengths = [296 + own for own in (1, 7, 30, 150, 2, 1, 9, 64, 1, 300, 2)]
    case = in_float8(make_case([(n - 1, n) for n in lengths] + [(0, 5)], heads=6, kv_heads=2))
    share(case, {1: ([2, 4, 5, 7], 296), 8: ([10], 144)})
    check_float8(case, run(case))


def test_numbers_beyond_the_largest_of_float8_become_that() -> None:
    case = in_float8(make_case(MIXED, heads=6, kv_heads=2), factor=300.0)
    assert (case.k_TKC.abs() > float8_kv.LARGEST).any()
    run(case)
    kept = case.kv.keys.flatten(0, 1)[case.metadata.groups[0].slots_T].float()
    assert kept.abs().max() == float8_kv.LARGEST
    assert torch.equal(kept, float8_kv.rounded(case.k_TKC).float())


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "block_size"), [(3, 3, 24, 16), (7, 1, 16, 32), (16, 1, 40, 64), (2, 1, 64, 16)]
)
def test_head_shapes(heads: int, kv_heads: int, size: int, block_size: int) -> None:
    case = make_case(MIXED[2:5], heads=heads, kv_heads=kv_heads, size=size, block_size=block_size)
    check(case, run(case))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "block_size", "window", "chunk", "softcap"),
    [
        (6, 2, 24, 4, 5, None, None),
        (5, 1, 48, 16, 17, None, 30.0),
        (3, 3, 16, 1, 7, None, 2.0),
        (4, 4, 40, 8, None, None, 20.0),
        (8, 2, 80, 32, 20, 20, None),
        (16, 1, 64, 16, 33, 33, 5.0),
        (17, 1, 16, 2, 9, 9, None),
    ],
)
def test_windows_chunks_and_soft_caps_of_other_shapes(
    heads: int,
    kv_heads: int,
    size: int,
    block_size: int,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
) -> None:
    pieces = [(40, 41), (66, 67), (0, 17), (20, 37)]
    case = make_case(
        pieces, heads=heads, kv_heads=kv_heads, size=size, block_size=block_size, window=window, chunk=chunk
    )
    check(case, run(case, softcap), softcap)


def test_values_of_another_size_and_strided_inputs() -> None:
    case = make_case(MIXED, size=24)
    case.v_TKC = case.v_TKC[..., :16]
    case.kv.values = case.kv.values[..., :16].contiguous()
    case.history = [(k, v[..., :16]) for k, v in case.history]
    case.q_THC = case.q_THC.transpose(0, 1).contiguous().transpose(0, 1)
    case.k_TKC = case.k_TKC.transpose(1, 2).contiguous().transpose(1, 2)
    check(case, run(case))


def test_padding_rows_touch_nothing() -> None:
    """Rows that fill up a graph: length 1 or 0, slot 0, a table of null blocks."""
    case = make_case(SPLIT)
    keys = case.kv.keys.clone()
    case.metadata.lengths_B = torch.tensor([1, 1, 0], dtype=torch.int32)
    case.metadata.groups[0].slots_T.zero_()
    case.metadata.groups[0].tables_BN.zero_()
    out = run(case)
    torch.testing.assert_close(out, case.v_TKC.repeat_interleave(2, dim=1))
    assert torch.equal(case.kv.keys.isnan(), keys.isnan())
    assert torch.equal(case.kv.keys.nan_to_num(), keys.nan_to_num())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_one_request_s_nan_stays_its_own() -> None:
    case = make_case([(9, 10), (0, 21), (4, 11)])
    want = run(case)
    for sequence in range(3):
        own = slice(*case.metadata.cu_q_B1[sequence : sequence + 2].tolist())
        ill = dataclasses.replace(case, k_TKC=case.k_TKC.clone(), v_TKC=case.v_TKC.clone())
        ill.k_TKC[own], ill.v_TKC[own] = float("nan"), float("nan")
        out = run(ill)
        assert out[own].isnan().any()
        out[own] = want[own]
        assert torch.equal(out, want)


@pytest.mark.parametrize(("window", "ahead"), [(None, "ranges"), (9, "ranges"), (9, "whole")])
def test_ranges_read_both_ways(window: int | None, ahead: str) -> None:
    """Pictures that see all of themselves, at either end of what a step computes and across tiles of rows."""
    pieces = [(11, 12), (0, 50), (5, 21)]
    case, same = (make_case(pieces, heads=3, kv_heads=1, window=window) for _ in range(2))
    for one in (case, same):
        one.metadata.both_ways = ((), ((0, 20), (21, 50)), ((7, 16),))
        one.metadata.groups[0].ahead = ahead
    oracle = TorchBackend()
    oracle.begin(same.metadata)
    want = oracle.attend(same.q_THC, same.k_TKC, same.v_TKC, same.kv, same.metadata, 0.3, None)
    torch.testing.assert_close(run(case), want, atol=3e-6, rtol=1e-5)
    case.metadata.groups[0].ahead = "never"
    ahead_never = run(case)
    assert not torch.allclose(ahead_never, want), "the ranges change nothing: the test cannot fail"
    case.metadata.both_ways = ()
    assert torch.equal(run(case), ahead_never)


@pytest.mark.parametrize(
    "lengths", [[16, 16, 16], [4, 16, 0, 9], [1], [64, 1, 1, 65, 1], [300, 20], [*range(1, 20)], [0, 7, 0, 0, 3, 0]]
)
@pytest.mark.parametrize("size", [20, 36, 72, 96] if LONG else [20, 96])
def test_windows_of_a_tower(lengths: list[int], size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    # Heads side by side within a token, as a tower's own product of q, k and v leaves them.
    q, k, v = torch.randn(sum(lengths), 3, 2, size, generator=generator).unbind(1)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    out = attend_windows(q, k, v, bounds, 0.3)
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        q_HLC, k_HLC, v_HLC = (x[start:stop].transpose(0, 1) for x in (q, k, v))
        alone = torch.nn.functional.scaled_dot_product_attention(q_HLC, k_HLC, v_HLC, scale=0.3)
        torch.testing.assert_close(out[start:stop], alone.transpose(0, 1), atol=3e-6, rtol=1e-5)


class Counting:
    """Stands for FlashAttention: causal attention of sequences one behind the other, and how many it was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(
        self,
        q_THC: torch.Tensor,
        k_TKC: torch.Tensor,
        v_TKC: torch.Tensor,
        bounds_B1: torch.Tensor,
        scale: float,
        *,
        causal: bool = False,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        assert causal
        assert not softcap
        bounds = bounds_B1.tolist()
        self.asked.append(len(bounds) - 1)
        return torch.cat(
            [
                torch.nn.functional.scaled_dot_product_attention(
                    *(x[a:b].transpose(0, 1) for x in (q_THC, k_TKC, v_TKC)),
                    is_causal=True,
                    scale=scale,
                    enable_gqa=True,
                ).transpose(0, 1)
                for a, b in itertools.pairwise(bounds)
            ]
        )


@pytest.mark.parametrize(
    ("pieces", "window", "taken"),
    [
        ([(0, 300), (0, 260)], None, True),
        ([(0, 300), (0, 260)], 40, False),
        ([(0, 300), (16, 290)], None, False),
        ([(40, 41), (0, 300)], None, False),
        ([(0, 300), (0, 20)], None, False),
    ],
    ids=["whole", "window", "prefix", "decodes", "short"],
)
def test_flash_attention_gets_whole_long_prompts(
    pieces: list[tuple[int, int]], window: int | None, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("beheld.attention.flash.computes", lambda *_: True)
    monkeypatch.setattr("beheld.attention.flash._LONG_PROMPT", 256)
    case = make_case(pieces, heads=4, kv_heads=2, size=32, block_size=16, window=window, dtype=torch.bfloat16)
    flash = Counting()
    backend = FlashBackend(flash, CPU)
    backend.begin(case.metadata)
    out = backend.attend(case.q_THC, case.k_TKC, case.v_TKC, case.kv, case.metadata, 0.3, None)
    assert bool(flash.asked) == taken
    slots = case.metadata.groups[0].slots_T
    assert torch.equal(case.kv.keys.flatten(0, 1)[slots], case.k_TKC)
    assert torch.equal(case.kv.values.flatten(0, 1)[slots], case.v_TKC)
    if taken:
        # The interpreter computes products of bfloat16 wrongly: kernels are compared in float32, above.
        torch.testing.assert_close(out.double(), expected(case, 0.3, None), atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    ("lengths", "programs", "parts"),
    [
        # Parts of the mean length, 1,344 positions, would be 256, of which 58 begin when the others end.
        ([4096] * 64, 198, 192),
        # 112 of 1,984 positions.
        ([12000] * 16, 99, 96),
        # So many rows that one part of each is too few, and two are too many.
        ([4096] * 128, 198, 256),
        # So few that the shortest parts are fewer than programs.
        ([1024] * 8, 99, 64),
        ([1, 1, 1, 4096, 300, 1, 1, 1], 24, 24),
        # A row alone has all programs: parts of 704 positions.
        ([131072], 198, 187),
        ([12289], 198, 192),
    ],
    ids=["most", "long", "many", "few", "mixed", "alone", "alone, short parts"],
)
def test_parts_are_as_many_as_programs(lengths: list[int], programs: int, parts: int) -> None:
    lengths_B = torch.tensor(lengths, dtype=torch.int32)
    group = GroupMetadata(torch.zeros(1), torch.zeros(1, 1, dtype=torch.int32), None)
    items_W8 = plan_decode(group, lengths_B, len(lengths), 2, 2 * programs).items_W8
    items_W8 = items_W8[items_W8[:, 4] > 0]
    assert len(items_W8) == parts
    for row, length in enumerate(lengths):
        own = items_W8[items_W8[:, 0] == row]
        assert own[0, 1] == 0
        assert torch.equal(own[1:, 1], own[:-1, 2]), "each part begins where the one before it stops"
        assert own[-1, 2] == length - 1
        assert own[:, 3].tolist() == list(range(len(own))), "parts are numbered"
        assert (own[:, 4] == len(own)).all()
        lot = int(own[0, 6])
        assert lot == len(own) if len(own) <= 16 else 8 <= lot <= 16, "parts are joined in lots of about equal number"


@pytest.mark.parametrize(
    "pieces", [[(1300, 1301)], [(1152, 1153), (0, 1), (90, 91), (1400, 1401)]], ids=["one", "four"]
)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (1200, 5.0)])
@pytest.mark.parametrize("early", [False, True], ids=["", "early"])
def test_many_parts_of_a_row_are_joined_in_two_rounds(
    pieces: list[tuple[int, int]],
    window: int | None,
    softcap: float | None,
    early: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("beheld.attention.triton_paged._PROGRAMS_PER_SM", 60)
    case, own = make_case(pieces, heads=6, kv_heads=2, window=window), sinks(6)
    group = case.metadata.groups[0]
    group.kv_heads = 2 if early else None
    check(case, run(case, softcap, own), softcap, own)
    plan = group.extra["decode"]
    assert (plan.items_W8[:, 4] > 16).any()
    assert (plan.items_W8[:, 6] < plan.items_W8[:, 4]).any()
    assert (plan.arrived_BK == 0).all(), "the next layer counts from zero"
    assert (plan.joined_LK == 0).all()


@pytest.mark.parametrize("decodes", [0, 3])
def test_tiles_made_on_the_device_are_those_made_on_the_host(decodes: int) -> None:
    """For a captured pass, padded with sequences and tokens that are not there."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        count = int(torch.randint(1, 7, (1,), generator=generator)) + decodes
        tokens = torch.randint(1, 70, (count,), generator=generator)
        tokens[:decodes] = 1
        starts = torch.randint(0, 99, (count,), generator=generator) * torch.randint(
            0, 2, (count,), generator=generator
        )
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), tokens.cumsum(0)]).int()
        total, lengths = int(bounds[-1]), starts + tokens
        known = AttnMetadata(decodes, tuple(starts.tolist()), tuple(lengths.tolist()), lengths.int(), bounds, (), 16)
        want = make_tiles(known, 8, 64, total)
        padded = AttnMetadata(
            num_decodes=decodes,
            starts=(0,) * (count + 4),
            lengths=(1,) * (count + 4),
            lengths_B=lengths.int(),
            cu_q_B1=torch.cat([bounds, bounds.new_full((4,), total)]),
            groups=(),
            block_size=16,
            starts_B=torch.cat([starts, torch.zeros(4, dtype=torch.int64)]).int(),
        )
        made = make_tiles_on_device(padded, 8, 64, total + 30)
        assert sorted(made[made[:, 3] > 0].tolist()) == sorted(want.tolist())
        assert (made[made[:, 3] == 0] == 0).all()
