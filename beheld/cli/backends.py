"""The backends of `beheld chat`: a model in this process, or a server with OpenAI's API."""

from __future__ import annotations

import base64
import itertools
import mimetypes
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from beheld.cli import remote
from beheld.cli.events import END, EventReader, chunk_of
from beheld.core.errors import ConfigError, FetchError
from beheld.core.media import MediaRef

if TYPE_CHECKING:
    from beheld.api.llm import LLM

Messages = list[dict[str, Any]]


@dataclass
class AnswerStats:
    """Statistics of one answer.

    Attributes:
        prompt_tokens, cached_tokens, answer_tokens: None if the server did not report them.
        receipts: one mapping per media item, as in the server's answers.
        reason: the finish reason.
        first_s, total_s: seconds to the first text, and to the end.
    """

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    answer_tokens: int | None = None
    receipts: Sequence[Mapping[str, Any]] = ()
    reason: str | None = None
    first_s: float | None = None
    total_s: float = 0.0


class ChatBackend(Protocol):
    """Answers conversations."""

    name: str

    def part(self, ref: MediaRef) -> dict[str, Any]:
        """Return a media item as a part of a message."""

    def answer(self, messages: Messages, stats: AnswerStats) -> Iterator[str]:
        """Yield the pieces of an answer and fill in `stats`; closing the iterator cancels the answer."""

    def close(self) -> None:
        """Release the backend's resources."""


class LocalBackend:
    """A model in this process.

    Args:
        llm: the model.
        options: fields of SamplingParams.
    """

    def __init__(self, llm: LLM, options: Mapping[str, Any]) -> None:
        from beheld.core.params import SamplingParams

        self.name = "the model in this process"
        self._llm = llm
        self._params = SamplingParams(**{**vars(llm.get_default_sampling_params()), **options})

    def part(self, ref: MediaRef) -> dict[str, Any]:
        """Return the item unchanged."""
        return {"type": ref.modality, ref.modality: ref.source}

    def answer(self, messages: Messages, stats: AnswerStats) -> Iterator[str]:
        """See ChatBackend.answer."""
        begin = time.monotonic()
        count = 0
        for output in self._llm.chat_stream(messages, self._params):
            (piece,) = output.outputs
            count += len(piece.token_ids)
            if stats.first_s is None and piece.text:
                stats.first_s = time.monotonic() - begin
            stats.prompt_tokens, stats.cached_tokens = output.usage.prompt_tokens, output.num_cached_tokens
            stats.answer_tokens, stats.reason = count, piece.finish_reason
            stats.receipts = [receipt.to_json() for receipt in output.media]
            stats.total_s = time.monotonic() - begin
            yield piece.text

    def close(self) -> None:
        """Free the model's memory."""
        self._llm.close()


class RemoteBackend:
    """A server with OpenAI's API.

    Args:
        url: with or without a final /v1.
        key: the API key; None uses OPENAI_API_KEY if set.
        model: the model's name there; None uses the first that the server lists.
        options: fields of requests.

    Raises:
        ConfigError: the server does not answer.
    """

    def __init__(self, url: str, key: str | None, model: str | None, options: Mapping[str, Any]) -> None:
        self._client = remote.connected(remote.address(url), remote.key_of(key))
        self._options = dict(options)
        # Also asked when the name is given: a server that does not answer is reported before the first question.
        first = remote.first_model(self._client)
        self.name = model or first

    def part(self, ref: MediaRef) -> dict[str, Any]:
        """Return an item as a message part: files as data URLs, URLs unchanged (the server fetches them)."""
        source, kind = ref.source, f"{ref.modality}/unknown"
        if isinstance(source, Path):
            kind = mimetypes.guess_type(source.name)[0] or kind
            source = source.read_bytes()
        if isinstance(source, bytes):
            source = f"data:{kind};base64,{base64.b64encode(source).decode()}"
        return {"type": f"{ref.modality}_url", f"{ref.modality}_url": {"url": source}}

    def answer(self, messages: Messages, stats: AnswerStats) -> Iterator[str]:
        """See ChatBackend.answer."""
        import httpx

        body = {
            "model": self.name,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._options,
        }
        begin = time.monotonic()
        try:
            with self._client.stream("POST", "/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise remote.refusal(response.status_code, response.read(), str(response.url))
                for chunk in _chunks(response.iter_bytes()):
                    if chunk.get("error"):
                        raise ConfigError(chunk["error"].get("message", "The server ended its answer with an error."))
                    yield from _pieces(chunk, stats, begin)
        except httpx.HTTPError as error:
            raise FetchError(f"The server went away ({type(error).__name__}).", "Ask again.") from error
        finally:
            stats.total_s = time.monotonic() - begin

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def _chunks(pieces: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a stream up to its end.

    Raises:
        FetchError: the stream is not OpenAI's format, or is cut off.
    """
    reader = EventReader()
    try:
        for data in itertools.chain.from_iterable(map(reader.push, pieces)):
            if data == END:
                return
            yield chunk_of(data)
    except ValueError as error:
        raise FetchError("The server's stream is not in OpenAI's format.", "Use a server with OpenAI's API.") from error
    raise FetchError("The server's answer was cut off.", "Ask again.")


def _pieces(chunk: Mapping[str, Any], stats: AnswerStats, begin: float) -> Iterator[str]:
    receipts = chunk.get("media") or ()
    if all(isinstance(one, dict) and one.keys() >= {"item", "tokens", "given", "used", "lost"} for one in receipts):
        stats.receipts = receipts or stats.receipts
    usage = chunk.get("usage")
    if usage:
        stats.prompt_tokens, stats.answer_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        stats.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    for choice in chunk["choices"]:
        stats.reason = choice.get("finish_reason") or stats.reason
        text = choice["delta"].get("content")
        if text:
            if stats.first_s is None:
                stats.first_s = time.monotonic() - begin
            yield text
