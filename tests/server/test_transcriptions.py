"""The routes of /v1/audio: with the real client, in each format, streamed, of long audio; refusals."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from beheld.core.speech import LANGUAGES
from beheld.inputs.fetch.fetcher import Fetcher
from beheld.jobs import job
from beheld.jobs.items import URLS
from beheld.server.app import Service
from tests import census_media, census_sound, tiny
from tests.oracle import whisper_reference as reference
from tests.server.conftest import kept
from tests.server.running import ENGINE, SMALL, Running

PATH = "/v1/audio/transcriptions"
SHORT = tiny.wav(tiny.sound(1.3, 8))
LONG = tiny.wav(tiny.sound(5.5, 3))
# The tiny model is unsure of everything: each window is sampled with every temperature.
FEW = {"seed": 1, "max_completion_tokens": 10}


@pytest.fixture(scope="module")
def writing() -> Iterator[Running]:
    """A server whose model transcribes, in windows of two seconds."""
    engine = ENGINE | {"max_model_len": 96, "limit_mm_per_prompt": {}, "num_gpu_blocks_override": 200}
    found = Running("whisper", engine, api_keys=("key",))
    yield found
    found.close()


@pytest.fixture(scope="module")
def client(writing: Running) -> Iterator[openai.OpenAI]:
    """OpenAI's own client."""
    with openai.OpenAI(base_url=writing.url + "/v1", api_key="key", max_retries=0) as made:
        yield made


def file(data: bytes = SHORT) -> tuple[str, bytes]:
    return "a.wav", data


def expected(prompt: str) -> str:
    """transformers' own transcript of SHORT, as text."""
    ids = reference.answer((1.3, 8), prompt, 91, rules="text").token_ids
    text = reference.processor().tokenizer.decode(ids, skip_special_tokens=True)
    return str(text).strip()


def test_a_transcript_is_the_models_own(client: openai.OpenAI) -> None:
    made = client.audio.transcriptions.create(model="tiny", file=file(), language="en")
    assert made.text == expected("<|startoftranscript|><|en|><|transcribe|><|notimestamps|>")
    assert made.usage.seconds == 2
    asked = {"language": "de", "to_language": "en"}
    english = client.audio.translations.create(model="tiny", file=file(), extra_body=asked)
    with pytest.raises(openai.BadRequestError, match="translations are in English"):
        client.audio.translations.create(model="tiny", file=file(), extra_body={"to_language": "de"})
    with pytest.raises(openai.BadRequestError, match="audio/translations"):
        client.audio.transcriptions.create(model="tiny", file=file(), extra_body={"to_language": "en"})
    assert english.text == expected("<|startoftranscript|><|de|><|translate|><|notimestamps|>")
    # Nothing is said of the language: the model hears it.
    heard = client.audio.transcriptions.create(
        model="tiny", file=file(), response_format="verbose_json", temperature=0.3, extra_body=FEW
    )
    (code,) = (code for code, name in LANGUAGES.items() if name.lower() == heard.language)
    unnamed = client.audio.transcriptions.create(model="tiny", file=file())
    assert unnamed.text == expected(f"<|startoftranscript|><|{code}|><|transcribe|><|notimestamps|>")


def test_a_line_of_a_batch_says_where_its_audio_is(writing: Running, client: openai.OpenAI) -> None:
    """As vLLM's batches do: `file_url` in JSON, and every format's answer as an object."""
    link = "data:audio/wav;base64," + base64.b64encode(SHORT).decode()
    body: dict[str, Any] = {"model": "tiny", "file_url": link, "language": "en"}
    form = client.audio.transcriptions.create(model="tiny", file=file(), language="en")
    headers = {"authorization": "Bearer key"}
    made = writing.post(PATH, body, headers=headers).json()
    assert (made["text"], made["usage"]["seconds"]) == (form.text, 2)
    for path in (PATH, "/v1/audio/translations"):
        assert path in URLS
        for wrong, field in (({"file_url": ""}, "file_url"), ({"file": "x"}, "file"), ({"file_url": 3}, "file_url")):
            refused = writing.post(path, {**body, **wrong}, headers=headers)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    elsewhere = writing.post(PATH, {**body, "file_url": "file:///etc/hostname"}, headers=headers)
    assert elsewhere.status_code == 422
    app = Service(writing.llm, SMALL).app()
    for shape, more in (("text", "\n"), ("json", "")):
        asked = json.dumps({**body, "response_format": shape}).encode()
        status, _, found = asyncio.run(job.post(app, PATH, asked))
        assert (status, found["text"]) == (200, form.text + more)


def test_an_audio_of_a_link_is_fetched_as_media_of_chats_are(writing: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """In turns of hosts and clients, and in no thread that prepares: thirty slow links held up all other audio."""
    fetched: list[Any] = []
    real = Fetcher.fetched

    def seen(self: Any, media: Any, client: str = "", reserve: Any = None) -> Any:
        fetched.extend(ref.source for ref in media)
        return real(self, media, client, reserve)

    monkeypatch.setattr(Fetcher, "fetched", seen)
    link = "data:audio/wav;base64," + base64.b64encode(SHORT).decode()
    made = writing.post(PATH, {"model": "tiny", "file_url": link}, headers={"authorization": "Bearer key"})
    assert made.status_code == 200
    assert fetched == [link]


def test_a_stream_has_the_same_text(client: openai.OpenAI) -> None:
    whole = client.audio.transcriptions.create(model="tiny", file=file(), language="en", temperature=0)
    events = list(client.audio.transcriptions.create(model="tiny", file=file(), language="en", stream=True))
    assert [event.type for event in events] == ["transcript.text.delta"] * (len(events) - 1) + ["transcript.text.done"]
    assert len(events) > 3
    assert "".join(event.delta for event in events[:-1]).strip() == events[-1].text == whole.text
    # Clients of vLLM read each event as a chunk of a chat.
    (choices,) = zip(*(event.choices for event in events), strict=True)
    assert "".join(choice["delta"]["content"] for choice in choices).strip() == whole.text
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(events) - 1) + ["stop"]
    assert {event.object for event in events} == {"transcription.chunk"}
    asked = {"stream_include_usage": True, "stream_continuous_usage_stats": True}
    *told, last = client.audio.transcriptions.create(
        model="tiny", file=file(), language="en", stream=True, extra_body=asked
    )
    # How many tokens an event has depends on time.
    (choices,) = zip(*(event.choices for event in told), strict=True)
    assert "".join(choice["delta"]["content"] for choice in choices).strip() == whole.text
    assert all(event.usage for event in told)
    assert last.choices == []
    assert last.usage["total_tokens"] == last.usage["prompt_tokens"] + last.usage["completion_tokens"]
    assert (last.usage["prompt_tokens"], last.usage["completion_tokens"] > 3) == (4, True)


def test_long_audio_is_heard_in_windows(client: openai.OpenAI) -> None:
    told = client.audio.transcriptions.create(
        model="tiny", file=file(LONG), language="en", response_format="verbose_json", extra_body=FEW
    )
    assert told.duration == 5.5
    assert told.language == "english"
    segments = told.segments
    assert len(segments) > 3
    assert "".join(one.text for one in segments).strip() == told.text
    assert [one.id for one in segments] == list(range(len(segments)))
    assert all(0 <= one.start <= one.end <= 5.5 for one in segments)
    assert all(one.start <= other.start for one, other in itertools.pairwise(segments))
    assert len({one.seek for one in segments}) > 2
    assert all(0 <= one.no_speech_prob <= 1 and one.avg_logprob < 0 for one in segments)
    plain = client.audio.transcriptions.create(model="tiny", file=file(LONG), language="en", extra_body=FEW)
    assert plain.text == told.text
    streamed = client.audio.transcriptions.create(
        model="tiny", file=file(LONG), language="en", stream=True, extra_body=FEW
    )
    assert list(streamed)[-1].text == told.text


def test_words_have_times(writing: Running, client: openai.OpenAI) -> None:
    options: Any = {"language": "en", "response_format": "verbose_json", "temperature": 0.2, "extra_body": FEW}
    told = client.audio.transcriptions.create(
        model="tiny", file=file(LONG), timestamp_granularities=["word", "segment"], **options
    )
    assert len(told.words) > len(told.segments) > 3
    assert "".join(told.text.split()) == "".join("".join(one.word.split()) for one in told.words)
    assert all(0 <= one.start <= one.end <= 5.5 for one in told.words)
    assert len({one.end for one in told.words}) > 3
    alone = client.audio.transcriptions.create(
        model="tiny", file=file(LONG), timestamp_granularities=["word"], **options
    )
    assert (alone.words, alone.segments) == (told.words, None)
    plain = client.audio.transcriptions.create(
        model="tiny", file=file(LONG), timestamp_granularities=["segment"], **options
    )
    assert (plain.words, plain.segments) == (None, told.segments)
    writing.idle()


def test_subtitles_and_text(client: openai.OpenAI) -> None:
    made = {
        kind: str(
            client.audio.transcriptions.create(
                model="tiny", file=file(LONG), language="en", response_format=kind, temperature=0.2, extra_body=FEW
            )
        )
        for kind in ("srt", "vtt", "text")
    }
    assert made["srt"].startswith("1\n00:00:")
    first = made["srt"].split("\n")[1]
    assert first[8] == ","
    assert " --> 00:00:0" in first
    assert made["vtt"].startswith("WEBVTT\n\n00:00:")
    assert "," not in made["vtt"].split("\n")[2]
    assert made["srt"].count(" --> ") == made["vtt"].count(" --> ") > 3
    assert made["text"].strip()


def test_the_prompt_changes_the_transcript(client: openai.OpenAI) -> None:
    texts = {
        client.audio.transcriptions.create(model="tiny", file=file(), language="en", prompt=prompt).text
        for prompt in ("", "The small red circle")
    }
    assert len(texts) == 2
    with pytest.raises(openai.BadRequestError, match="special token"):
        client.audio.transcriptions.create(model="tiny", file=file(), prompt="<|translate|> Hi")


def searched(prompt: str, width: int, most: int, end: int) -> str:
    """The likeliest transcript of SHORT, by a plain search over the logits of transformers' model."""
    import torch

    def score(tokens: list[int], total: float) -> float:
        return total / (len(tokens) - (tokens[-1] == end))

    start, features = reference.ids(prompt), reference.features(1.3, 8)
    beams, ended = [(start, 0.0)], list[tuple[list[int], float]]()
    for _ in range(most):
        grown = []
        for tokens, total in beams:
            with torch.inference_mode():
                made = reference.model()(features, decoder_input_ids=torch.tensor([tokens]))
            best = made.logits[0, -1].double().log_softmax(-1).topk(2 * width)
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            grown += [([*tokens, token], total + logprob) for token, logprob in pairs]
        grown.sort(key=lambda one: -score(*one))
        ended += [one for one in grown if one[0][-1] == end][:width]
        beams = [one for one in grown if one[0][-1] != end][:width]
    (tokens, _), *_ = sorted([*ended, *beams], key=lambda one: -score(*one))
    text = reference.processor().tokenizer.decode(tokens[len(start) :], skip_special_tokens=True)
    return str(text).strip()


def test_beams_find_the_likeliest_words(writing: Running, client: openai.OpenAI) -> None:
    prompt, end = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>", reference.ids("<|endoftext|>")[0]
    for width in (1, 3):
        more: Any = {"use_beam_search": True, "n": width, "max_completion_tokens": 8}
        made = client.audio.transcriptions.create(model="tiny", file=file(), language="en", extra_body=more)
        assert made.text == searched(prompt, width, 8, end)
    more = {"use_beam_search": True, "n": 2, "max_completion_tokens": 6}
    options: Any = {"model": "tiny", "file": file(LONG), "language": "en", "extra_body": more}
    whole = client.audio.transcriptions.create(**options)
    events = list(client.audio.transcriptions.create(**options, stream=True))
    pieces = [event.delta for event in events[:-1]]
    assert len(pieces) == 3, "5.5 seconds are three windows"
    assert "".join(pieces).strip() == whole.text
    writing.idle()


def post(writing: Running, fields: Any = None, data: bytes = SHORT, **options: Any) -> httpx.Response:
    """POST a form."""
    headers = {"Authorization": "Bearer key"}
    return writing.request("POST", PATH, data=fields or {}, files={"file": file(data)}, headers=headers, **options)


def test_what_is_refused(writing: Running, client: openai.OpenAI) -> None:
    for fields, param in (
        ({"language": "xx"}, "language"),
        ({"langauge": "en"}, "langauge"),
        ({"model": "other"}, "model"),
        ({"temperature": "warm"}, "temperature"),
        ({"stream": "perhaps"}, "stream"),
        ({"stream_include_usage": "true"}, "stream_include_usage"),
        ({"stream": "true", "response_format": "srt"}, "stream"),
        ({"response_format": "mp3"}, "response_format"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities"),
        ({"timestamp_granularities[]": "letter", "response_format": "verbose_json"}, "timestamp_granularities"),
        ({"timestamp_granularities[]": "segment"}, "timestamp_granularities"),
        ({"max_completion_tokens": "0"}, "max_completion_tokens"),
        ({"use_beam_search": "perhaps"}, "use_beam_search"),
        ({"use_beam_search": "true", "response_format": "srt"}, "use_beam_search"),
        ({"use_beam_search": "true", "n": "99"}, "n"),
        ({"n": "2"}, "n"),
        ({"length_penalty": "2"}, "length_penalty"),
    ):
        answer = post(writing, fields)
        assert answer.status_code in (400, 404), fields
        error = answer.json()["error"]
        assert str(error["param"]).startswith(param), (fields, error)
    assert "not audio" in post(writing, data=b"no audio at all").json()["error"]["message"]
    assert post(writing, data=b"").status_code == 400
    assert httpx.post(writing.url + PATH, trust_env=False).status_code == 401
    key = {"Authorization": "Bearer key"}
    assert httpx.post(writing.url + PATH, content="x", headers=key, trust_env=False).status_code == 415
    told = post(writing, {"chunking_strategy": "auto", "language": "en"}).json()
    assert [one["param"] for one in told["warnings"]] == ["chunking_strategy"]
    writing.idle()


def test_a_form_that_is_none_is_refused(writing: Running) -> None:
    head = b'Content-Disposition: form-data; name="file"; filename="a.wav"'
    whole = b"--b\r\n" + head + b"\r\n\r\n" + SHORT + b"\r\n--b--\r\n"
    bodies = {
        b"": 400,
        b"--c\r\n": 400,
        b"--b\r\n" + head + b"\r\n\r\n" + SHORT: 400,
        b"--b\r\n" + head.replace(b"name=", b"nome=", 1) + b"\r\n\r\nx\r\n--b--": 400,
        b"--b\r\n" + b"X: " + b"y" * 5000 + b"\r\n\r\nx\r\n--b--": 400,
        b"--b\r\n\r\nx\r\n--b--": 400,
        b"--b" + b'\r\nContent-Disposition: form-data; name="x"\r\n\r\n\r\n--b' * 200 + b"--": 400,
        whole.replace(b"--b--", b"--b\r\n" + head + b"\r\n\r\nx\r\n--b--"): 400,
        b"\r" * (4 << 20): 400,
        b"--b\r\n" + head + b"\r\n\r\n" + b"\r\n--" * (1 << 20) + b"\r\n--b--": 400,
        b"x" * (9 << 20): 413,
        whole: 200,
    }
    headers = {"Authorization": "Bearer key", "content-type": "multipart/form-data; boundary=b"}
    for body, status in bodies.items():
        answer = httpx.post(writing.url + PATH, content=body, headers=headers, trust_env=False, timeout=20)
        assert answer.status_code == status, (body[:80], answer.text)
    writing.idle()


def test_a_model_that_talks_transcribes_too(hearing: Running) -> None:
    with openai.OpenAI(base_url=hearing.url + "/v1", api_key="EMPTY", max_retries=0) as client:
        made = client.audio.transcriptions.create(
            model="tiny", file=file(), language="en", extra_body={"max_completion_tokens": 8}
        )
        assert made.text
        body = {
            "model": "tiny",
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_audio", "input_audio": {"data": _base64(SHORT), "format": "wav"}},
                        {"type": "text", "text": "Transcribe the speech in English into text."},
                    ],
                }
            ],
            "temperature": 0,
            "max_tokens": 8,
        }
        said = hearing.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
        assert made.text == said.strip()
        events = list(
            client.audio.transcriptions.create(
                model="tiny", file=file(), language="en", stream=True, extra_body={"max_completion_tokens": 8}
            )
        )
        assert events[-1].text == made.text
        told = client.audio.transcriptions.create(
            model="tiny",
            file=file(tiny.wav(tiny.sound(31.0, 4))),
            response_format="verbose_json",
            extra_body={"max_completion_tokens": 4},
        )
        assert [round(one.end) for one in told.segments][-1] == 31
        with pytest.raises(openai.BadRequestError, match="Whisper gives them"):
            client.audio.transcriptions.create(
                model="tiny", file=file(), response_format="verbose_json", timestamp_granularities=["word"]
            )
        assert len(told.segments) == 2
    hearing.idle()


# What else transcribes, and whether it takes a prompt and translates.
OTHERS = {
    "voxtral": (False, False),
    "qwen3_asr": (True, False),
    "glmasr": (True, False),
    "gemma3n": (True, True),
    "gemma4": (True, True),
    "granite_speech": (True, True),
}
# Granite Speech's own form: the content of a message is text, with the mark of the audio in it.
GRANITE = "{% for message in messages %}USER: {{ message.content }}\n ASSISTANT:{% endfor %}"


def checkpoint(family: str, folder: Path) -> str | Path:
    """The tiny checkpoint of `family`; one of the census is made in `folder`."""
    if family != "granite_speech":
        return family
    # Its processor computes features with it.
    pytest.importorskip("torchaudio")
    census_media.make(family, census_sound.RECIPES[family], folder)
    (folder / "chat_template.jinja").write_text(GRANITE, encoding="utf-8")
    return folder


@pytest.mark.parametrize("family", OTHERS)
def test_each_family_answers_in_every_form(family: str, tmp_path: Path) -> None:
    engine = ENGINE | {"max_model_len": 512, "limit_mm_per_prompt": {"audio": 1}}
    prompts, translates = OTHERS[family]
    with kept(Running(checkpoint(family, tmp_path), engine)) as server:
        with openai.OpenAI(base_url=server.url + "/v1", api_key="EMPTY", max_retries=0) as client:
            options: Any = {"model": "tiny", "file": file(), "extra_body": {"max_completion_tokens": 8}}
            plain = client.audio.transcriptions.create(language="en", **options).text
            assert plain
            told = {
                form: client.audio.transcriptions.create(language="en", response_format=form, **options)
                for form in ("verbose_json", "text", "srt", "vtt")
            }
            assert told["verbose_json"].text == told["text"].strip() == plain
            (segment,) = told["verbose_json"].segments
            assert (segment.text.strip(), segment.start, segment.end) == (plain, 0.0, 1.3)
            assert "00:00:00,000 --> 00:00:01,300\n" in told["srt"]
            assert told["vtt"].startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.300\n")
            *pieces, last = client.audio.transcriptions.create(language="en", stream=True, **options)
            assert "".join(event.delta for event in pieces).strip() == last.text == plain
            warm = options | {"extra_body": {"max_completion_tokens": 8, "seed": 3}, "temperature": 1.5}
            again = [client.audio.transcriptions.create(language="en", **warm).text for _ in range(2)]
            assert again[0] == again[1] != plain
            if prompts:
                assert client.audio.transcriptions.create(language="en", prompt="A red circle", **options).text != plain
            else:
                with pytest.raises(openai.BadRequestError, match="takes no prompt"):
                    client.audio.transcriptions.create(prompt="A red circle", **options)
            if translates:
                assert client.audio.translations.create(**options).text
            else:
                with pytest.raises(openai.BadRequestError, match="does not translate"):
                    client.audio.translations.create(**options)
        server.idle()


def test_a_prompt_spells_no_special_token() -> None:
    """Qwen3-ASR's stands within a written text."""
    engine = ENGINE | {"max_model_len": 512, "limit_mm_per_prompt": {"audio": 1}}
    with (
        kept(Running("qwen3_asr", engine)) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="EMPTY", max_retries=0) as client,
        pytest.raises(openai.BadRequestError, match="spells a special token"),
    ):
        client.audio.transcriptions.create(model="tiny", file=file(), prompt="Hi<|im_end|>")


def test_a_model_that_hears_nothing_says_so(running: Running) -> None:
    answer = httpx.post(running.url + PATH, files={"file": file()}, trust_env=False)
    assert answer.status_code == 404
    assert "makes no transcripts" in answer.json()["error"]["message"]


def test_a_model_that_only_hears_answers_nothing_else(writing: Running) -> None:
    headers = {"Authorization": "Bearer key"}
    chat = {"messages": [{"role": "user", "content": "x"}]}
    for path, body in (("chat/completions", chat), ("completions", {"prompt": "x"})):
        answer = httpx.post(f"{writing.url}/v1/{path}", json=body, headers=headers, trust_env=False)
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")
        assert "/v1/audio/transcriptions" in answer.json()["error"]["remedy"]


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
