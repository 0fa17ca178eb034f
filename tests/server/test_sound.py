"""Sound in messages of the server: as bytes within the request and by address, heard and accounted for."""

from __future__ import annotations

import base64
from typing import Any

import openai
import pytest

from beheld.inputs.media import audio
from tests import tiny
from tests.server.running import Running

WAVE = tiny.sound(0.5, 70)
DATA = base64.b64encode(tiny.wav(WAVE)).decode()


def inline(data: str = DATA, **more: Any) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav", **more}}


def linked(url: str) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": url}}


def body(*parts: dict[str, Any]) -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": "What do you hear?"}]
    return {
        "model": "tiny", "messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 6
    }  # fmt: skip


def test_a_sound_in_the_request_and_one_by_address_are_the_same(hearing: Running) -> None:
    client = openai.OpenAI(base_url=hearing.url + "/v1", api_key="EMPTY")
    answers = [
        client.chat.completions.create(**body(part))
        for part in (inline(), linked("data:audio/wav;base64," + DATA), inline(DATA, format="mp3"))
    ]
    assert len({answer.choices[0].message.content for answer in answers}) == 1
    assert answers[0].usage is not None
    silent = client.chat.completions.create(**body())
    assert silent.usage is not None
    # 0.5 s: 50 frames of features, 12 embeddings, and what the template writes around them.
    assert answers[0].usage.prompt_tokens - silent.usage.prompt_tokens > 12
    hearing.idle()


@pytest.mark.case(31)
def test_no_sound_is_decoded_in_the_servers_own_process(hearing: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def here(*_: Any) -> None:
        raise AssertionError("decoded in the server's process")

    monkeypatch.setattr(audio, "open_bytes", here)
    unheard = base64.b64encode(tiny.wav(tiny.sound(0.5, 72))).decode()
    answer = hearing.post("/v1/chat/completions", body(inline(unheard)))
    assert answer.status_code == 200
    assert not answer.json()["media"][0]["cached"]


def test_two_sounds_in_their_order(hearing: Running) -> None:
    other = base64.b64encode(tiny.wav(tiny.sound(0.5, 71))).decode()
    texts = [
        hearing.post("/v1/chat/completions", body(inline(one), inline(two))).json()["choices"][0]["message"]["content"]
        for one, two in ((DATA, other), (other, DATA))
    ]
    assert texts[0] != texts[1]


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ([inline("no base64!")], 400),
        ([inline(base64.b64encode(b"no sound").decode())], 400),
        ([inline(base64.b64encode(tiny.wav(WAVE[:0])).decode())], 400),
        ([inline(base64.b64encode(b"ffconcat version 1.0\nfile README.md\n").decode())], 400),
        ([inline(rate=8000)], 400),
        ([{"type": "input_audio", "input_audio": {"format": "wav"}}], 400),
        ([linked("file:///etc/hostname")], 422),
        ([linked("http://127.0.0.1:9/sound.wav")], 422),
        ([inline()] * 3, 400),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}], 400),
    ],
)
def test_what_cannot_be_heard_is_refused(hearing: Running, parts: list[Any], status: int) -> None:
    answer = hearing.post("/v1/chat/completions", body(*parts))
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]
    hearing.idle()
