"""EncoderBudget: what is held stays, what is idle goes, the oldest first."""

from __future__ import annotations

import pytest

from beheld.scheduler.encoder_budget import EncoderBudget
from tests.fakes import fake_item

A, B, C = fake_item("a", 4), fake_item("b", 4), fake_item("c", 4)


def test_an_item_is_encoded_once_however_many_hold_it() -> None:
    budget = EncoderBudget(10)
    assert budget.hold(A)
    assert not budget.hold(A)
    budget.check([A.digest, A.digest])
    budget.release(A.digest)
    assert budget.is_held(A.digest)
    budget.release(A.digest)
    assert not budget.is_held(A.digest)
    assert A.digest in budget
    assert not budget.hold(A)
    assert (budget.num_encoded, budget.num_reused) == (1, 2)


def test_the_least_recently_used_is_forgotten_when_room_is_wanted() -> None:
    budget = EncoderBudget(8)
    for item in (A, B):
        budget.hold(item)
        budget.release(item.digest)
    assert not budget.hold(A)
    budget.release(A.digest)
    assert budget.take_forgotten() == ()
    assert budget.hold(C)
    assert budget.take_forgotten() == (B.digest,)
    assert budget.take_forgotten() == ()
    assert A.digest in budget
    budget.check([C.digest])


def test_held_items_leave_no_room() -> None:
    budget = EncoderBudget(8)
    budget.hold(A)
    assert budget.has_room(4)
    assert not budget.has_room(5)
    budget.hold(B)
    assert not budget.has_room(1)
    budget.release(A.digest)
    assert budget.has_room(4)


@pytest.mark.parametrize("held", [True, False])
def test_what_was_lost_is_not_there(held: bool) -> None:
    budget = EncoderBudget(8)
    budget.hold(A)
    if not held:
        budget.release(A.digest)
    budget.lose(A.digest)
    budget.lose(A.digest)
    assert A.digest not in budget
    assert budget.num_used == 0
    budget.check([])
    assert budget.hold(A)


def test_check_sees_a_holder_too_many() -> None:
    budget = EncoderBudget(8)
    budget.hold(A)
    with pytest.raises(AssertionError, match="holders"):
        budget.check([])
