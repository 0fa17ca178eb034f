"""Whoever leaves is heard of within the blocks that asked for it, once, and never behind them."""

from __future__ import annotations

import pytest

from beheld.utils.cancellation import Departed, Departure


def test_it_is_told_within_the_block_and_not_behind_it() -> None:
    departure, told = Departure(), []
    with departure.told(lambda: told.append("before")):
        pass
    with departure.told(lambda: told.append("outer")), departure.told(lambda: told.append("inner")):
        departure.check()
        departure.leave()
        assert sorted(told) == ["inner", "outer"]
        assert departure.gone
    with pytest.raises(Departed), departure.told(lambda: told.append("after")):
        told.append("inside")
    with pytest.raises(Departed):
        departure.check()
    assert sorted(told) == ["inner", "outer"]


def test_no_handler_of_errors_takes_it_for_one() -> None:
    departure = Departure()
    departure.leave()

    def careless() -> None:
        try:
            departure.check()
        except Exception:
            pytest.fail("it was taken for an error")

    with pytest.raises(Departed):
        careless()
