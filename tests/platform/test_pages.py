"""Memory in huge pages."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
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


@pytest.fixture(autouse=True)
def many_weights_are_expected() -> Iterator[None]:
    """Whatever engine was started before."""
    before = pages._shared._usual
    pages.expect(1 << 30)
    yield
    pages._shared.expect(usual=before)


@needs_pages
def test_few_weights_lie_in_usual_pages_and_many_after_them_do_not() -> None:
    pages.expect(pages._FEW)
    few = pages.empty((3 << 20,), torch.uint8)
    pages.expect(pages._FEW + 1)
    many = pages.empty((3 << 20,), torch.uint8)
    assert [asked_for(each.data_ptr()) for each in (few, many)] == [False, True]


@needs_pages
@pytest.mark.parametrize("size", [1000, 3 << 20, pages.OWN + 100])
def test_tensors_lie_in_huge_pages_at_lines_of_their_own(size: int) -> None:
    made = [pages.empty((size,), torch.uint8) for _ in range(3)]
    for number, each in enumerate(made):
        each.fill_(number)
        assert asked_for(each.data_ptr())
        assert each.data_ptr() % 64 == 0
    assert [each.unique().tolist() for each in made] == [[0], [1], [2]]


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


@needs_pages
@pytest.mark.parametrize("bits", [4, 8])
def test_weights_move_there_and_give_the_same_bits(bits: int) -> None:
    made = rounded(torch.randn(48, 128, generator=torch.Generator().manual_seed(0)), bits, 64)
    weights = PackedWeights(made.numbers_NK, made.scale_NG, made.low_NG, bits)
    x_TK = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))
    want = weights.product(x_TK)
    weights.use_pages()
    places = [each.data_ptr() for each in (weights.packed, weights.scales_BG2L)]
    assert all(map(asked_for, places))
    assert torch.equal(weights.product(x_TK), want)
    weights.use_pages()
    assert [each.data_ptr() for each in (weights.packed, weights.scales_BG2L)] == places
    joined = PackedWeights.joined([weights, weights], 96)
    assert asked_for(joined.packed.data_ptr())
    assert torch.equal(joined.product(x_TK), torch.cat([want, want], 1))


def resident_bytes(address: int) -> int:
    """Bytes in memory of the mapping of an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if found:
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("Rss:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the address is mapped")


@needs_pages
def test_memory_comes_before_it_is_taken_and_what_is_not_taken_goes_back() -> None:
    num_bytes = pages._FEW + (8 << 20)
    with pages.ahead(num_bytes):
        assert pages._now is not None
        pages._now._thread.join()
        whole = pages._now._whole.data_ptr()
        came = resident_bytes(whole)
        made = [pages.empty((3 << 20,), torch.uint8).fill_(number) for number in (1, 2)]
        too_large = pages.empty((num_bytes,), torch.uint8)
    # Where the system has no huge page left, the first small page of each came.
    assert came >= num_bytes / 512
    assert [each.data_ptr() - whole for each in made] == [0, 3 << 20]
    assert resident_bytes(whole) <= 6 << 20
    assert [each.unique().tolist() for each in made] == [[1], [2]]
    assert not whole <= too_large.data_ptr() < whole + num_bytes
    assert not whole <= pages.empty((100,), torch.uint8).data_ptr() < whole + num_bytes


@needs_pages
def test_the_thread_that_brings_memory_writes_nothing_into_what_is_taken() -> None:
    for _ in range(5):
        with pages.ahead(128 << 20):
            made = pages.empty((100 << 20,), torch.uint8).fill_(1)
        assert made.min() == 1


@pytest.mark.parametrize("num_bytes", [0, pages._FEW])
def test_few_bytes_do_not_come_ahead(num_bytes: int) -> None:
    with pages.ahead(num_bytes):
        assert pages._now is None


def test_memory_comes_ahead_for_one_engine_at_a_time_and_goes_back_after_an_error() -> None:
    def refused() -> None:
        with pages.ahead(pages._FEW + 1):
            first = pages._now
            with pages.ahead(pages._FEW + 1):
                assert pages._now is first
            assert pages._now is first
            raise ValueError

    with pytest.raises(ValueError):
        refused()
    assert pages._now is None
