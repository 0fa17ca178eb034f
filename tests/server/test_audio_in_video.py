"""The option of reading a video with its audio, from clients that are trusted with no other option."""

from __future__ import annotations

from typing import Any

import pytest

from beheld.server.chat_messages import message_of
from beheld.server.errors import HttpError
from beheld.server.options import ServerOptions
from beheld.server.schema import ChatRequest
from beheld.server.template_options import check_processor_options

UNTRUSTED = ServerOptions()


def message(**more: Any) -> Any:
    part = {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}, **more}
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": [part]}]}).messages[0]


@pytest.mark.parametrize("name", ["use_audio_in_video", "load_audio_from_video"])
def test_the_option_is_taken_from_all(name: str) -> None:
    check_processor_options({name: True}, UNTRUSTED)
    (part,) = message_of(message(**{name: True}), 0, UNTRUSTED)["content"]
    assert part[name] is True


def test_others_beside_it_are_not() -> None:
    with pytest.raises(HttpError, match="does not accept processor options"):
        check_processor_options({"use_audio_in_video": True, "max_pixels": 10**9}, UNTRUSTED)
    with pytest.raises(HttpError, match="'max_pixels' is unknown"):
        message_of(message(use_audio_in_video=True, max_pixels=10**9), 0, UNTRUSTED)
