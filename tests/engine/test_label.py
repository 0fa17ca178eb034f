"""Labels name whom a message concerns, and are read with as little trust as its body."""

from __future__ import annotations

import pytest

from beheld.core.outputs import TokenEvent
from beheld.engine.label import label_of, unread_of
from beheld.engine.messages import Abort, ClearCache, Events, Message, Ping, Reply, Stop, Submit, Unread
from beheld.wire.link import MAX_LABEL_BYTES
from tests.fakes import fake_request


@pytest.mark.parametrize(
    ("message", "concerned"),
    [
        (Submit((fake_request("a#0", 1), fake_request("a#1", 1))), Unread(("a#0", "a#1"))),
        (Abort(("b", 'ü"\n')), Unread(("b", 'ü"\n'))),
        (Stop("c"), Unread(("c",))),
        (Events((TokenEvent("d", (1,)), TokenEvent("e", ()))), Unread(("d", "e"))),
        (Ping(7), Unread((), 7)),
        (ClearCache(), Unread(())),
    ],
)
def test_labels_name_whom_it_concerns(message: Message | Reply, concerned: Unread) -> None:
    assert unread_of(label_of(message)) == concerned


def test_ids_that_do_not_fit_are_left_out_and_the_others_are_not() -> None:
    label = label_of(Abort(("short", *("x" * 30_000 for _ in range(5)))))
    assert len(label) <= MAX_LABEL_BYTES
    assert unread_of(label).request_ids[0] == "short"
    assert unread_of(label_of(Stop("x" * 100_000))) == Unread(())
    many = tuple(f"chatcmpl-{number:032x}#0" for number in range(1024))
    assert unread_of(label_of(Abort(many))).request_ids == many


@pytest.mark.parametrize(
    "label", [None, b"", b"nope", b"[]", b"{}", b'["a"]', b"[true]", b"[null, 5]", b"[1.5]", b"\xff", b"[" * 60_000]
)
def test_what_is_no_label_is_refused(label: bytes | None) -> None:
    with pytest.raises(ValueError):
        unread_of(label)
