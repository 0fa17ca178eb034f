"""Dense copies of decoding sequences against attention written out plainly, step after step."""

from __future__ import annotations

import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from beheld.attention import dense_decode_cache
from beheld.attention.backend import AttnMetadata, GroupMetadata, LayerKV
from beheld.attention.torch_ref import TorchBackend
from tests.attention.naive import Case, beside, biases, expected, sinks

BLOCK = 4
BLOCKS_EACH = 12


class Story:
    """Sequences that decode in steps, each in blocks of its own, with their whole history for the oracle."""

    def __init__(self, heads: int = 4, kv_heads: int = 2, window: int | None = None, chunk: int | None = None) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.heads, self.kv_heads, self.window, self.chunk = heads, kv_heads, window, chunk
        shape = (16 * BLOCKS_EACH + 1, BLOCK, kv_heads)
        # Values are narrower than keys; what no sequence wrote is NaN, but for the null block.
        self.kv = LayerKV(torch.full((*shape, 8), float("nan")), torch.full((*shape, 6), float("nan")), 0)
        self.kv.keys[0], self.kv.values[0] = 0.0, 0.0
        self.backend = TorchBackend()
        self.history: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.tables: dict[int, torch.Tensor] = {}
        self.dense = 0

    def admit(self, number: int, place: int, length: int) -> None:
        """A sequence of `length` positions in the blocks of `place`, all in the cache."""
        order = torch.randperm(BLOCKS_EACH, generator=torch.Generator().manual_seed(place))
        self.tables[number] = (order + 1 + place * BLOCKS_EACH).int()
        k = torch.randn(length, self.kv_heads, 8, generator=self.generator)
        v = torch.randn(length, self.kv_heads, 6, generator=self.generator)
        for p in range(length):
            block = self.tables[number][p // BLOCK]
            self.kv.keys[block, p % BLOCK], self.kv.values[block, p % BLOCK] = k[p], v[p]
        self.history[number] = (k, v)

    def step(
        self,
        numbers: list[int],
        softcap: float | None = None,
        fails: bool = False,
        sinks_H: torch.Tensor | None = None,
        further: bool = False,
    ) -> None:
        """Each of these sequences gets one token; `fails`: the step is launched, and what it did forgotten.

        `further`: scores have a bias by distance, and attention covers something else, too.
        """
        before = dict(self.history)
        slots, new_k, new_v = [], [], []
        for number in numbers:
            k, v = self.history[number]
            new_k.append(torch.randn(1, self.kv_heads, 8, generator=self.generator))
            new_v.append(torch.randn(1, self.kv_heads, 6, generator=self.generator))
            slots.append(int(self.tables[number][len(k) // BLOCK]) * BLOCK + len(k) % BLOCK)
            self.history[number] = (torch.cat([k, new_k[-1]]), torch.cat([v, new_v[-1]]))
        lengths = tuple(len(self.history[number][0]) for number in numbers)
        tables = torch.stack([self.tables[number] for number in numbers])
        metadata = AttnMetadata(
            num_decodes=len(numbers),
            starts=tuple(n - 1 for n in lengths),
            lengths=lengths,
            lengths_B=torch.tensor(lengths).int(),
            cu_q_B1=torch.arange(len(numbers) + 1).int(),
            groups=(GroupMetadata(torch.tensor(slots), tables, self.window, chunk=self.chunk),),
            block_size=BLOCK,
            sequences=tuple(numbers),
        )
        q = torch.randn(len(numbers), self.heads, 8, generator=self.generator)
        case = Case(q, torch.cat(new_k), torch.cat(new_v), self.kv, metadata, [self.history[n] for n in numbers])
        self.backend.begin(metadata)
        more = (biases(self.heads), beside(len(numbers), self.heads, 6)) if further else (None, None)
        out = self.backend.attend(q, case.k_TKC, case.v_TKC, self.kv, metadata, 0.3, softcap, sinks_H, *more)
        assert not out.isnan().any()
        torch.testing.assert_close(out.double(), expected(case, 0.3, softcap, sinks_H, *more), atol=2e-6, rtol=1e-5)
        self.dense += "decode" not in metadata.groups[0].extra
        if fails:
            self.history = before


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 1, 6, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_steps_of_the_same_sequences(
    heads: int, kv_heads: int, window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense_decode_cache, "_ROOM", 5)
    story = Story(heads, kv_heads, window)
    for number, length in enumerate((3, 17, 9)):
        story.admit(number, number, length)
    for _ in range(20):
        story.step([0, 1, 2], softcap)
    assert story.dense == 19, "all but the first step read copies"


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_sinks_take_a_share_of_every_query(
    heads: int, kv_heads: int, window: int | None, softcap: float | None
) -> None:
    story = Story(heads, kv_heads, window)
    for number, length in enumerate((3, 17, 9)):
        story.admit(number, number, length)
    for _ in range(8):
        story.step([0, 1, 2], softcap, sinks_H=sinks(heads))
    assert story.dense == 7


@pytest.mark.parametrize("window", [None, 6])
def test_a_bias_by_distance_and_what_stands_beside(window: int | None) -> None:
    story = Story(6, 2, window)
    for number, length in enumerate((3, 17, 9)):
        story.admit(number, number, length)
    for _ in range(8):
        story.step([0, 1, 2], further=True)
    assert story.dense == 7


def test_sequences_of_one_length_need_no_mask() -> None:
    story = Story()
    for number in range(3):
        story.admit(number, number, 7)
    for _ in range(6):
        story.step([0, 1, 2])
    assert story.dense == 5


def test_a_chunk_is_gathered_once_a_sequence_has_left_its_first() -> None:
    story = Story(window=16, chunk=16)
    story.admit(0, 0, 3)
    story.admit(1, 1, 10)
    for _ in range(12):
        story.step([0, 1])
    assert story.dense == 5, "positions 11 to 15 of the longer one lie in its first chunk"


def test_others_come_and_go() -> None:
    story, dice, free, running, count = Story(window=10), random.Random(1), list(range(6)), {}, 0
    for _ in range(150):
        if free and (not running or dice.random() < 0.15):
            count += 1
            running[count] = free.pop()
            story.admit(count, running[count], dice.randrange(1, 20))
        story.step(sorted(running))
        for number in list(running):
            if dice.random() < 0.03 or len(story.history[number][0]) == BLOCK * BLOCKS_EACH:
                free.append(running.pop(number))
        if not running:
            free = list(range(6))
    assert story.dense > 50


def test_a_step_that_is_launched_again_is_not_taken_for_the_next() -> None:
    story = Story()
    for number, length in enumerate((3, 17)):
        story.admit(number, number, length)
    for fails in (False, False, True, False, False, True, True, False, False, False):
        story.step([0, 1], fails=fails)
    assert story.dense > 3


def test_another_sequence_in_the_same_blocks_is_another_one() -> None:
    story = Story()
    story.admit(0, 0, 8)
    for _ in range(4):
        story.step([0])
    story.admit(1, 0, 12)
    for _ in range(4):
        story.step([1])


def test_copies_take_half_of_the_cache_at_most() -> None:
    story = Story()
    for number in range(8):
        story.admit(number, number, 3)
    for _ in range(3):
        story.step(list(range(8)))
    # 8 sequences in 67 columns would need 536 of 772 positions.
    assert story.dense == 0
    for _ in range(3):
        story.step([0, 1])
    assert story.dense == 2


def test_layers_that_find_no_room_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Story(), Story()
    second.backend = first.backend
    # Two sequences, 73 columns, 2 heads, 8 + 6 numbers of 4 bytes, for one of the two layers.
    monkeypatch.setattr(dense_decode_cache, "_MOST_BYTES", 2 * 73 * 2 * 14 * 4)
    for story in (first, second):
        for number in range(2):
            story.admit(number, number, 6)
    for _ in range(4):
        first.step([0, 1])
    for _ in range(4):
        second.step([0, 1])
    assert first.dense == 3
    assert second.dense == 0


def test_elsewhere_than_on_a_cpu_nothing_is_copied() -> None:
    """Steps of the same sequences, one after the other, whose tables lie on a GPU: the cache is read as ever."""
    backend = TorchBackend()
    with FakeTensorMode():
        for step in range(3):
            starts = (7 + step, 9 + step)
            on_gpu = [torch.empty(2, dtype=kind, device="cuda") for kind in (torch.int64, torch.int32)]
            group = GroupMetadata(on_gpu[0], torch.empty(2, 4, dtype=torch.int32, device="cuda"), None)
            lengths = tuple(start + 1 for start in starts)
            metadata = AttnMetadata(2, starts, lengths, on_gpu[1], on_gpu[1], (group,), BLOCK, sequences=(1, 2))
            backend.begin(metadata)
            assert group.extra["columns"] is None
