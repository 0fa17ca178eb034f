"""A cancel token calls what waits for it, once, and never after its block."""

from __future__ import annotations

import pytest

from beheld.utils.cancellation import Cancelled, CancelToken


def test_it_is_told_within_the_block_and_not_behind_it() -> None:
    cancel, told = CancelToken(), []
    with cancel.calling(lambda: told.append("before")):
        pass
    with cancel.calling(lambda: told.append("outer")), cancel.calling(lambda: told.append("inner")):
        cancel.check()
        cancel.cancel()
        assert sorted(told) == ["inner", "outer"]
        assert cancel.cancelled
    with pytest.raises(Cancelled), cancel.calling(lambda: told.append("after")):
        told.append("inside")
    with pytest.raises(Cancelled):
        cancel.check()
    assert sorted(told) == ["inner", "outer"]


def test_no_handler_of_errors_takes_it_for_one() -> None:
    cancel = CancelToken()
    cancel.cancel()

    def careless() -> None:
        try:
            cancel.check()
        except Exception:
            pytest.fail("it was taken for an error")

    with pytest.raises(Cancelled):
        careless()
