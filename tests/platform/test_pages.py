"""Memory in huge pages."""

from __future__ import annotations

import mmap
import platform
import re
import sys
from pathlib import Path

import pytest
import torch

from beheld.platform import pages
from beheld.quant.byte_products import PackedWeights
from beheld.quant.grouped import rounded


def asked_for(address: int) -> bool:
    """Whether the mapping of an address was asked to have huge pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if found:
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError("the address is mapped")


needs_pages = pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE") or not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="needs a system with such pages",
)


def in_huge_pages(address: int) -> int:
    """Bytes in huge pages of the mapping of an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if found:
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the address is mapped")


def collapses() -> bool:
    """Whether Linux moves what is there to huge pages when it is asked."""
    return sys.platform == "linux" and tuple(map(int, platform.release().split(".")[:2])) >= (6, 1)


@needs_pages
@pytest.mark.parametrize("size", [1000, 3 << 20, pages.OWN + 100])
def test_weights_move_to_huge_pages_in_place(size: int) -> None:
    made = [pages.empty((size,), torch.uint8) for _ in range(3)]
    for number, each in enumerate(made):
        each.fill_(number)
        assert each.data_ptr() % 64 == 0
        assert not asked_for(each.data_ptr())
    places = [each.data_ptr() for each in made]
    pages.make_huge().join()
    assert [each.data_ptr() for each in made] == places
    assert [each.unique().tolist() for each in made] == [[0], [1], [2]]
    if size > pages.HUGE_PAGE and collapses():
        assert all(in_huge_pages(place) >= pages.HUGE_PAGE for place in places)


def test_mappings_that_are_gone_are_passed_over() -> None:
    gone, kept = (pages.empty((pages.OWN + 1,), torch.uint8).fill_(5) for _ in range(2))
    del gone
    pages.make_huge().join()
    assert kept.unique().tolist() == [5]
    assert not pages._usual


def test_small_tensors_share_a_mapping_and_large_ones_have_their_own() -> None:
    small = [pages.empty((100,), torch.float32) for _ in range(2)]
    large = [pages.empty((pages.OWN + 1,), torch.uint8) for _ in range(2)]
    assert len({each.untyped_storage().data_ptr() for each in small}) == 1
    assert len({each.untyped_storage().data_ptr() for each in large}) == 2


@needs_pages
def test_the_first_pages_may_be_small() -> None:
    made = pages.zeros(3 * pages.HUGE_PAGE, small=pages.HUGE_PAGE)
    made.fill_(7)
    assert made.data_ptr() % pages.HUGE_PAGE == 0
    assert [asked_for(made.data_ptr() + offset) for offset in (0, pages.HUGE_PAGE)] == [False, True]


def test_a_copy_is_contiguous_and_equal() -> None:
    given = torch.arange(12, dtype=torch.int16).view(3, 4).t()
    made = pages.copied(given)
    assert made.is_contiguous()
    assert torch.equal(made, given)
    assert pages.empty((0, 4), torch.float32).shape == (0, 4)


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_move_there_and_give_the_same_bits(bits: int) -> None:
    made = rounded(torch.randn(48, 128, generator=torch.Generator().manual_seed(0)), bits, 64)
    weights = PackedWeights(made.numbers_NK, made.scale_NG, made.low_NG, bits)
    x_TK = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))
    want = weights.product(x_TK)
    weights.use_pages()
    places = [each.data_ptr() for each in (weights.packed, weights.scales_BG2L)]
    assert torch.equal(weights.product(x_TK), want)
    weights.use_pages()
    assert [each.data_ptr() for each in (weights.packed, weights.scales_BG2L)] == places
    joined = PackedWeights.joined([weights, weights], 96)
    pages.make_huge().join()
    assert torch.equal(joined.product(x_TK), torch.cat([want, want], 1))
