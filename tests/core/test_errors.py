"""What an error says to somebody who has the engine, and that it says the same behind a process border."""

from __future__ import annotations

import copy

import pytest

from beheld.core.errors import BeheldError, LimitError, PlaceholderError, PromptError, PromptTooLongError
from beheld.wire.codec import Codec


@pytest.mark.parametrize(
    ("remedy", "or_engine", "said"),
    [
        ("", "", "It is too long."),
        ("Shorten it.", "", "It is too long. Shorten it."),
        ("", "raise max_model_len", "It is too long. Raise max_model_len."),
        ("Shorten it.", "raise max_model_len", "It is too long. Shorten it, or raise max_model_len."),
    ],
)
def test_whoever_has_the_engine_is_told_what_helps_there(remedy: str, or_engine: str, said: str) -> None:
    assert str(PromptTooLongError("It is too long.", remedy, or_engine=or_engine)) == said


def test_an_item_and_its_place_are_said_once() -> None:
    error = LimitError("It is too large.", "Send a smaller one.", or_engine="raise max_pixels")
    named = error.for_item("image 2", "messages.0.content.1.image_url").for_item("image 3", "messages.9")
    assert (named.item, named.param) == ("image 2", "messages.0.content.1.image_url")
    assert str(named) == "image 2: It is too large. Send a smaller one, or raise max_pixels."
    # An option that is at fault is named rather than the place of what it was for.
    assert LimitError("x", param="fps").for_item("video 1", "messages.0").param == "fps"


def test_an_error_says_the_same_behind_a_border() -> None:
    error = PlaceholderError("a", "b", stage="c", param="d", item="e", detail="f", or_engine="g")
    codec = Codec(())
    for other in (copy.copy(error), codec.decode(b"".join(codec.encode(error)))):
        assert isinstance(other, PlaceholderError)
        assert isinstance(other, PromptError)
        assert isinstance(other, BeheldError)
        assert (other.arguments(), str(other)) == (error.arguments(), str(error))
