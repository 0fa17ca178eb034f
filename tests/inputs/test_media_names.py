"""Names of media: an item that came with a name is found by it while it is cached, and only by those with its salt."""

from __future__ import annotations

from typing import Any

import pytest

from beheld.core.errors import DecodeError, PromptError
from beheld.inputs.pipeline import RequestOrder
from tests import tiny
from tests.inputs import pipes
from tests.tiny_media import picture

FIRST, SECOND = picture(84, 56, 31), picture(56, 84, 32)


def ask(images: Any, names: Any, count: int = 1, **more: Any) -> Any:
    prompt = {
        "prompt": tiny.prompt("llava", count, 0),
        "multi_modal_data": {"image": images},
        "multi_modal_uuids": {"image": names},
        **more,
    }
    return pipes.shared("llava").prepare(RequestOrder(prompt, pipes.ONE_TOKEN, request_id="0"))


def digests(request: Any) -> list[bytes]:
    return [span.item.digest for span in request.spans]


def test_a_name_stands_for_the_item_that_it_came_with() -> None:
    whole = ask([FIRST, SECOND], ["names first", "names second"], 2)
    assert digests(ask([None, None], ["names second", "names first"], 2)) == digests(whole)[::-1]
    assert digests(ask(None, "names first")) == digests(whole)[:1]
    mixed = ask([None, SECOND], ["names first", None], 2)
    assert digests(mixed) == digests(whole)
    receipt = mixed.receipts[0]
    assert (receipt.cached, receipt.given["source"], receipt.given["uuid"]) == (True, "uuid", "names first")


def test_the_latest_item_has_the_name() -> None:
    ask([FIRST], ["names moved"])
    second = ask([SECOND], ["names moved"])
    assert digests(ask(None, "names moved")) == digests(second)


def test_an_item_is_processed_anew_with_other_options_only_from_its_content() -> None:
    ask([FIRST], ["names salted"], cache_salt="mine")
    assert ask(None, "names salted", cache_salt="mine").spans
    for more in ({}, {"cache_salt": "other"}):
        with pytest.raises(DecodeError, match="Cache miss for image at index 0 but data is not provided"):
            ask(None, "names salted", **more)


def test_what_has_neither_content_nor_name_is_refused() -> None:
    with pytest.raises(DecodeError, match="is None, and has no name"):
        ask([None, FIRST], [None, "names first"], 2)
    with pytest.raises(DecodeError, match="Cache miss for image at index 1"):
        ask([FIRST, None], ["names here", "names nowhere"], 2)
    with pytest.raises(PromptError, match="holds 1 names for 2"):
        ask([FIRST, SECOND], ["names first"], 2)
