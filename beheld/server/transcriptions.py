"""POST /v1/audio/transcriptions and /v1/audio/translations: an audio's words, in OpenAI's formats."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from starlette.responses import JSONResponse, PlainTextResponse, Response

from beheld.api.async_llm import AsyncLLM
from beheld.api.transcribe import Fallback
from beheld.core.beams import BeamSearchParams
from beheld.core.outputs import RequestOutput
from beheld.core.params import SamplingParams
from beheld.core.speech import LANGUAGES, SpeechOrder, SpeechPiece, SpeechSegment
from beheld.server import limits
from beheld.server.chat import ChunkHead
from beheld.server.errors import HttpError
from beheld.server.speech_schema import Speech, TranscriptionLink, TranscriptionRequest
from beheld.server.stream import Chunk

# Formats that say when a segment is spoken.
_TIMED = ("srt", "vtt", "verbose_json")
_DELTA, _DONE = "transcript.text.delta", "transcript.text.done"
_SAME = (
    "seed", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
)  # fmt: skip


def chunks(
    llm: AsyncLLM,
    body: Speech,
    head: ChunkHead,
    salt: str | None,
    decoded: Callable[[int], None],
    *,
    translate: bool,
    tells_usage: bool = False,
    max_answers: int = limits.MAX_ANSWERS,
) -> AsyncGenerator[Chunk, None]:
    """The transcript as OpenAI's events: texts as they come, and at the end the whole with its segments.

    Args:
        decoded: called with the bytes of the audio's samples, which are kept to the end.
        translate: whether the words are to be English.
        tells_usage: streams end with a chunk that has no choices, and the tokens that were used.
        max_answers: the most beams.

    Raises:
        HttpError, ParamsError: fields contradict each other, or the model cannot do it.
    """
    timed = body.response_format in _TIMED or bool(granularities(body))
    if granularities(body) and body.response_format != "verbose_json":
        raise HttpError(
            400,
            "timestamp_granularities needs response_format verbose_json.",
            "Set it.",
            param="timestamp_granularities",
        )
    if body.stream and timed:
        raise HttpError(
            400, f"{body.response_format} is not streamed.", "Set response_format to json or text.", param="stream"
        )
    for name in ("stream_include_usage", "stream_continuous_usage_stats"):
        if getattr(body, name) and not body.stream:
            raise HttpError(400, f"{name} is for streams.", "Set stream, or leave it out.", param=name)
    words = "word" in granularities(body)
    used = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}

    def ended(output: RequestOutput, count: int) -> None:
        used["prompt_tokens"] += output.usage.prompt_tokens
        used["completion_tokens"] += count
        used["total_tokens"] = used["prompt_tokens"] + used["completion_tokens"]
        head.ended(output, count)

    order = SpeechOrder((body.language or "").lower(), body.prompt or "", translate, timed, words)
    given = {name: getattr(body, name) for name in _SAME if getattr(body, name) is not None}
    params = SamplingParams(temperature=body.temperature or 0.0, max_tokens=body.max_completion_tokens, **given)
    pieces = llm.transcribe(
        body.audio,
        order,
        params,
        head.id,
        fallback=Fallback(),
        beams=_beams(body, llm.config.max_model_len, max_answers),
        lora_request=head.lora,
        client=head.client,
        cache_salt=salt,
        ended=ended,
        decoded=decoded,
    )
    kind = "translation.chunk" if translate else "transcription.chunk"
    base = {"id": head.id, "object": kind, "created": head.created, "model": head.model}
    made = _chunks(pieces, base, used if body.stream_continuous_usage_stats else None)
    return _counted(made, base, used) if body.stream and (body.stream_include_usage or tells_usage) else made


def _beams(body: Speech, most: int, max_answers: int) -> BeamSearchParams | None:
    """The search that a form asks for.

    Raises:
        HttpError: it is malformed, or too wide.
    """
    if not body.use_beam_search:
        for name, usual in (("n", 1), ("length_penalty", 1.0)):
            if getattr(body, name) not in (None, usual):
                raise HttpError(400, f"{name} is for beams.", "Set use_beam_search, or leave it out.", param=name)
        return None
    if (body.n or 1) > max_answers:
        raise HttpError(400, f"n is {body.n}; at most {max_answers} beams are kept.", "Ask for fewer.", param="n")
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    return BeamSearchParams(body.n or 1, body.max_completion_tokens or most, length_penalty=penalty)


def granularities(body: Speech) -> Sequence[str]:
    """What times are asked for: those of words, of segments, or both; nothing if the form does not say."""
    given = body.timestamp_granularities if isinstance(body, TranscriptionRequest | TranscriptionLink) else None
    return given or ()


async def _counted(
    chunks: AsyncGenerator[Chunk, None], base: Chunk, used: dict[str, int]
) -> AsyncGenerator[Chunk, None]:
    """The chunks, and one more that has the tokens that were used by then."""
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            yield chunk
    yield {**base, "choices": [], "usage": dict(used)}


async def _chunks(
    pieces: AsyncGenerator[SpeechPiece, None], base: Chunk, used: dict[str, int] | None
) -> AsyncGenerator[Chunk, None]:
    """The events; each text has the tokens that were `used` in windows which ended, if that is asked."""
    text, last = "", SpeechPiece("")
    segments: list[SpeechSegment] = []
    async with contextlib.aclosing(pieces) as found:
        async for piece in found:
            last = piece
            text += piece.text
            segments += piece.segments
            if piece.text:
                more = {} if used is None else {"usage": dict(used)}
                yield {"type": _DELTA, "delta": piece.text, **base, "choices": [_choice(piece.text, None)], **more}
    yield {
        "type": _DONE,
        **base,
        "choices": [_choice("", "stop")],
        "text": text.strip(),
        "usage": {"type": "duration", "seconds": math.ceil(last.seconds)},
        "language": last.language,
        "duration": last.seconds,
        "segments": segments,
    }


def _choice(text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}


async def shown(events: AsyncGenerator[Chunk, None]) -> AsyncGenerator[Chunk, None]:
    """The events of a stream: OpenAI's fields, and the choices of a chat chunk, which vLLM's clients read."""
    async with contextlib.aclosing(events):
        async for event in events:
            yield {name: value for name, value in event.items() if name not in ("language", "duration", "segments")}


async def fold(events: AsyncGenerator[Chunk, None]) -> dict[str, Any]:
    """The last event, which has everything."""
    last: Chunk = {}
    async for event in events:
        last = event
    return last


def response(found: dict[str, Any], body: Speech, warnings: list[dict[str, Any]], task: str) -> Response:
    """The whole transcript in the format that was asked for."""
    segments: Sequence[SpeechSegment] = found["segments"]
    warned = {"warnings": warnings} if warnings else {}
    if body.response_format == "text":
        return PlainTextResponse(found["text"] + "\n")
    if body.response_format == "srt":
        return PlainTextResponse(subtitles(segments))
    if body.response_format == "vtt":
        return PlainTextResponse("WEBVTT\n\n" + subtitles(segments, web=True), media_type="text/vtt")
    if body.response_format == "verbose_json":
        name = LANGUAGES.get(found["language"], found["language"]).lower()
        made = {
            "task": task,
            "language": name,
            "duration": found["duration"],
            "text": found["text"],
            "usage": found["usage"],
        }
        wanted = granularities(body) or ("segment",)
        if "segment" in wanted:
            made["segments"] = [_segment(one) for one in segments]
        if "word" in wanted:
            made["words"] = [
                {"word": word.text, "start": word.start_s, "end": word.stop_s} for one in segments for word in one.words
            ]
        return JSONResponse(made | warned)
    return JSONResponse({"text": found["text"], "usage": found["usage"], **warned})


def _segment(one: SpeechSegment) -> dict[str, Any]:
    """A segment as OpenAI has it; what is not known is null."""
    return {
        "id": one.index,
        "seek": round(100 * one.window_s),
        "start": one.start_s,
        "end": one.stop_s,
        "text": one.text,
        "tokens": list(one.token_ids),
        "temperature": one.temperature,
        "avg_logprob": one.average_logprob,
        "compression_ratio": one.compression,
        "no_speech_prob": one.silence,
    }


def subtitles(segments: Sequence[SpeechSegment], *, web: bool = False) -> str:
    """The segments as subtitles: SubRip's, or with `web` the cues of WebVTT."""
    lines = []
    for number, one in enumerate(segments, 1):
        times = f"{_clock(one.start_s, web=web)} --> {_clock(one.stop_s, web=web)}"
        # A blank line or an arrow would begin another cue.
        text = " ".join(one.text.split()).replace("-->", "->")
        lines.append(f"{times}\n{text}\n" if web else f"{number}\n{times}\n{text}\n")
    return "\n".join(lines)


def _clock(seconds: float, *, web: bool) -> str:
    milliseconds = round(1000 * seconds)
    hours, rest = divmod(milliseconds, 3_600_000)
    minutes, rest = divmod(rest, 60_000)
    return f"{hours:02d}:{minutes:02d}:{rest // 1000:02d}{'.' if web else ','}{rest % 1000:03d}"
