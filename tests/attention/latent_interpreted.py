"""The Triton kernels of latent attention in Triton's interpreter; test_triton.py runs this file in its own process."""

from __future__ import annotations

import itertools

import pytest
import torch

from beheld.attention.context import ForwardContext, forward_context
from beheld.attention.latent import Growth, LatentTurn, turned
from beheld.attention.op import attend_latent_row
from beheld.attention.triton_latent import tiles_of
from beheld.attention.triton_paged import TritonBackend
from tests.attention.naive import LatentCase, make_latent_case
from tests.long import LONG

MIXED = [(7, 8), (31, 32), (300, 301), (0, 9), (5, 21), (16, 24), (30, 33)]
SPLIT = [(0, 1), (600, 601), (130, 131)]


def run(case: LatentCase) -> torch.Tensor:
    """Two layers of one step: the second finds what the first left behind."""
    backend = TritonBackend()
    backend.begin(case.metadata)
    for _ in range(2):
        out = backend.attend_latent(case.q_THC, case.latent_TW, case.up_HDR, case.kv, case.metadata, 0.3)
    return out


def check(case: LatentCase, out: torch.Tensor) -> None:
    torch.testing.assert_close(out.double(), case.expected(0.3), atol=5e-6, rtol=2e-5)
    slots = case.metadata.groups[0].slots_T
    assert torch.equal(case.kv.latents.flatten(0, 1)[slots], case.latent_TW)
    assert (case.kv.latents[0] == 0).all(), "the null block stays empty"


STEPS = {
    "mixed": MIXED,
    "split": SPLIT,
    "prompt": [(0, 33)],
    "decodes and prompts": [(7, 8), (0, 9), (0, 40)],
    "one": [(20, 21)],
    "prefix": [(9, 60)],
}
SHAPES = {
    "": {},
    "odd": {"heads": 5, "rank": 16, "rotary": 4, "plain": 6, "values": 14},
    "tiles": {"heads": 40, "rank": 40, "block_size": 16},
}
# Forty heads take most of the time.
SLOW = {("mixed", "tiles"), ("prompt", "tiles"), ("prefix", "tiles")}
PAIRS = [pair for pair in itertools.product(STEPS, SHAPES) if LONG or pair not in SLOW]


@pytest.mark.parametrize(("step", "shape"), PAIRS)
def test_equals_naive(step: str, shape: str) -> None:
    case = make_latent_case(STEPS[step], **SHAPES[shape])
    check(case, run(case))


def test_strided_inputs() -> None:
    case = make_latent_case(MIXED)
    case.q_THC = case.q_THC.transpose(0, 1).contiguous().transpose(0, 1)
    case.latent_TW = case.latent_TW.t().contiguous().t()
    check(case, run(case))


def test_padding_rows_touch_nothing() -> None:
    """Rows that fill up a graph: length 1 or 0, slot 0, a table of null blocks."""
    case = make_latent_case(SPLIT)
    latents = case.kv.latents.clone()
    case.metadata.lengths_B = torch.tensor([1, 1, 0], dtype=torch.int32)
    case.metadata.groups[0].slots_T.zero_()
    case.metadata.groups[0].tables_BN.zero_()
    out = run(case)
    values_THV = torch.einsum("tr,hvr->thv", case.latent_TW[:, : case.kv.rank], case.up_HDR[:, 12:])
    torch.testing.assert_close(out, values_THV)
    assert torch.equal(case.kv.latents.nan_to_num(7.0), latents.nan_to_num(7.0))


def test_a_tail_stores_alone() -> None:
    case = make_latent_case(MIXED)
    TritonBackend().store_latent(case.latent_TW, case.kv, case.metadata)
    assert torch.equal(case.kv.latents.flatten(0, 1)[case.metadata.groups[0].slots_T], case.latent_TW)


@pytest.mark.parametrize(("interleaved", "grows"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("first", "shape"), [(0, ""), (20, ""), (20, "odd"), (32, ""), (100, "tiles")])
def test_a_row_is_turned_and_stored_in_the_launch_that_absorbs_it(
    first: int, shape: str, interleaved: bool, grows: bool
) -> None:
    case = make_latent_case([(first, first + 1)], **SHAPES[shape])
    rotary = case.latent_TW.shape[1] - case.kv.rank
    chance = torch.Generator().manual_seed(first)
    angles = torch.randn(rotary // 2, generator=chance).repeat(2)
    weight_R = torch.rand(case.kv.rank, generator=chance) + 0.5
    growth = Growth(torch.tensor([first]), 0.3, 7.0) if grows else None
    turn = LatentTurn(weight_R, 1e-5, angles.cos(), angles.sin(), interleaved, growth)
    given = case.q_THC[0], case.latent_TW[0], turn, case.up_HDR, case.kv, case.metadata, 0.3
    other = make_latent_case([(first, first + 1)], **SHAPES[shape])
    other.q_THC, other.latent_TW = turned(other.q_THC, other.latent_TW, turn)
    backend = TritonBackend()
    backend.begin(case.metadata)
    for _ in range(2):
        out_HV = backend.attend_latent_row(*given)
    torch.testing.assert_close(out_HV[None], run(other), atol=5e-6, rtol=2e-5)
    torch.testing.assert_close(case.kv.latents, other.kv.latents, atol=1e-6, rtol=1e-6, equal_nan=True)
    assert (case.kv.latents[0] == 0).all(), "the null block stays empty"


@pytest.mark.parametrize("decodes", [0, 1])
def test_the_operator_turns_what_the_kernel_does_not(decodes: int) -> None:
    """The last token of a prompt is no decoding row, and is turned before attention."""
    case, other = make_latent_case([(20, 21)]), make_latent_case([(20, 21)])
    case.metadata.num_decodes = other.metadata.num_decodes = decodes
    rotary = case.latent_TW.shape[1] - case.kv.rank
    angles = torch.arange(rotary // 2).float().repeat(2)
    turn = LatentTurn(torch.full((case.kv.rank,), 1.5), 1e-5, angles.cos(), angles.sin(), False)
    other.q_THC, other.latent_TW = turned(other.q_THC, other.latent_TW, turn)
    backend = TritonBackend()
    backend.begin(case.metadata)
    with forward_context(ForwardContext(backend, case.metadata, {0: case.kv})) as context:
        out_HV = attend_latent_row(0, case.q_THC[0], case.latent_TW[0], turn, case.up_HDR, 0.3)
    assert context.called == {0: 1}
    torch.testing.assert_close(out_HV[None], run(other), atol=5e-6, rtol=2e-5)
    torch.testing.assert_close(case.kv.latents, other.kv.latents, atol=1e-6, rtol=1e-6, equal_nan=True)


def test_a_row_of_the_null_block_is_not_stored() -> None:
    case = make_latent_case([(20, 21)])
    latents = case.kv.latents.clone()
    case.metadata.groups[0].slots_T.zero_()
    rotary = case.latent_TW.shape[1] - case.kv.rank
    turn = LatentTurn(torch.ones(case.kv.rank), 1e-5, torch.ones(rotary), torch.zeros(rotary), True)
    backend = TritonBackend()
    backend.begin(case.metadata)
    backend.attend_latent_row(case.q_THC[0], case.latent_TW[0], turn, case.up_HDR, case.kv, case.metadata, 0.3)
    assert torch.equal(case.kv.latents.nan_to_num(7.0), latents.nan_to_num(7.0))


@pytest.mark.parametrize(
    ("heads", "rows", "tiles"),
    [
        *((1, 1, 1), (20, 2, 1), (20, 1, 2), (16, 1, 1), (32, 2, 1), (32, 1, 2), (40, 2, 2), (40, 1, 2), (128, 1, 4)),
        *((64, 2, 2), (128, 2, 4), (37, 2, 37), (66, 2, 3), (25, 1, 1), (19, 1, 1)),
    ],
)
def test_heads_are_cut_into_equal_tiles(heads: int, rows: int, tiles: int) -> None:
    assert tiles_of(heads, rows) == tiles
