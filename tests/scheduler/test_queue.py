"""WaitingQueue and Sequence: order, lazy removal, and where a span takes embeddings."""

from __future__ import annotations

import pytest

from beheld.core.media import MediaSpan
from beheld.scheduler.queue import WaitingQueue
from beheld.scheduler.sequence import EmbedRange, Sequence, Status, embed_range
from tests.fakes import fake_item, fake_request


def sequence(order: int, priority: int = 0) -> Sequence:
    return Sequence.born(fake_request(f"{priority}.{order}", 5), (priority, 0.0, order), 1, 99, 99)


def test_smaller_orders_leave_first_whenever_they_came() -> None:
    queue = WaitingQueue()
    late, early, urgent = sequence(3), sequence(1), sequence(9, priority=-1)
    for one in (late, early, urgent):
        queue.push(one)
    assert [queue.pop("") for _ in range(3)] == [urgent, early, late]
    assert queue.peek("") is None
    with pytest.raises(AssertionError, match="empty"):
        queue.pop("")


def test_what_ended_is_skipped_counted_out_and_swept() -> None:
    queue = WaitingQueue()
    many = [sequence(number) for number in range(100)]
    for one in many:
        queue.push(one)
    for one in many[:99]:
        one.status = Status.FINISHED
        queue.discard(one)
        queue.check()
    assert len(queue) == 1
    assert len(queue._lines[""].heap) < 50
    assert queue.pop("") is many[99]
    assert len(queue) == 0


def found(num_tokens: int, mask: list[bool] | None = None) -> EmbedRange | None:
    return embed_range(MediaSpan(fake_item("a", num_tokens, mask), 10, 10 + num_tokens))


def test_places_of_spans() -> None:
    whole = found(4)
    assert whole is not None
    assert (whole.first, whole.last) == (10, 14)
    assert whole.needed(13, 20)
    assert not whole.needed(14, 20)
    assert not whole.needed(0, 10)
    assert whole.next_embed(0) == 10
    assert found(2, [False, False]) is None


def test_places_with_gaps() -> None:
    gaps = found(6, [False, True, False, False, True, False])
    assert gaps is not None
    assert (gaps.first, gaps.last) == (11, 15)
    assert [gaps.needed(p, p + 1) for p in range(10, 16)] == [False, True, False, False, True, False]
    assert [gaps.next_embed(p) for p in range(10, 15)] == [11, 11, 14, 14, 14]


def test_a_sequence_knows_how_far_it_may_grow() -> None:
    request = fake_request("1", range(10), max_tokens=20)
    born = Sequence.born(request, (0, 0.0, 0), 1, 99, 99)
    assert (born.most_tokens, born.most_positions) == (30, 29)
    assert Sequence.born(request, (0, 0.0, 0), 1, 16, 99).most_tokens == 16
    assert Sequence.born(request, (0, 0.0, 0), 1, 99, 12).most_positions == 12
