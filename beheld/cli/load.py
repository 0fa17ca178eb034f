"""A load generator: many clients with streamed requests, and the latencies and throughput they measure."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import ssl
import statistics
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

from beheld.cli.events import END, EventReader, chunk_of
from beheld.cli.remote import words_of

# Longer than any answer of a live server takes.
TIMEOUT_S = 600.0


@dataclass
class LoadResult:
    """What the clients measured.

    Attributes:
        first_s, between_s, total_s: seconds to the first text, between pieces, and to the end, of completed answers.
        refused_s: seconds to the end of answers with status 429 or 503.
        tokens: of all answers, as the server counts them.
        errors: other errors and their counts.
        said: the server's message for the first error, if any.
        texts: answers by request number, for numbered requests.
    """

    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    tokens: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    said: str | None = None
    texts: dict[int, str] = field(default_factory=dict)

    def failed(self, what: str, said: str | None = None) -> None:
        """Count an error, with the server's message if there is one."""
        self.errors[what] = self.errors.get(what, 0) + 1
        self.said = self.said or said


def random_image_url(side: int, rng: random.Random) -> str:
    """A new random image of `side` by `side` pixels, as a data URL of a PNG."""
    from PIL import Image

    # Blocks of colour: noise would measure how PNG stores noise.
    small = Image.frombytes("RGB", (8, 8), rng.randbytes(8 * 8 * 3)).resize((side, side), Image.Resampling.NEAREST)
    file = io.BytesIO()
    small.save(file, format="PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def bodies(count: int, tokens: int, side: int | None, model: str | None, seed: int) -> Iterator[bytes]:
    """Yield request bodies, each with a new image of `side` pixels (None: no image) and `tokens` greedy tokens."""
    rng = random.Random(seed)
    for number in range(count):
        content: list[dict[str, Any]] = [{"type": "text", "text": f"What do you see in scene {number}?"}]
        if side is not None:
            content.insert(0, {"type": "image_url", "image_url": {"url": random_image_url(side, rng)}})
        yield body([{"role": "user", "content": content}], tokens, model, ignore_eos=True)


def body(messages: Sequence[dict[str, Any]], tokens: int, model: str | None = None, **options: Any) -> bytes:
    """Return the body of a streamed greedy request that asks for usage."""
    made = {
        "messages": messages,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **options,
    }
    return json.dumps(made if model is None else made | {"model": model}).encode()


async def ask(url: str, key: str, data: bytes, result: LoadResult, number: int | None = None) -> None:
    """Send one request over its own connection, without a client library, whose overhead would be measured too.

    Errors are counted in `result`. The text is kept in `result.texts` if the request has a number.
    """
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await _ask(urlsplit(url), key, data, result, number)
    except TimeoutError:
        result.failed("no end")
    except OSError as error:
        result.failed(type(error).__name__)
    except ValueError:
        result.failed("not OpenAI's API")


async def _ask(at: SplitResult, key: str, data: bytes, result: LoadResult, number: int | None) -> None:
    """See `ask`. Raises ValueError if the server does not speak OpenAI's API."""
    begin = time.perf_counter()
    # Most servers answer an HTTP/1.0 request without chunks: the answer ends with the connection.
    head = (
        f"POST {at.path}/chat/completions HTTP/1.0\r\nHost: {at.netloc}\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {key}\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    trust = ssl.create_default_context() if at.scheme == "https" else None
    port = at.port or (443 if trust else 80)
    reader, writer = await asyncio.open_connection(at.hostname, port, limit=1 << 22, ssl=trust)
    try:
        writer.write(head.encode() + data)
        await writer.drain()
        status = b"".join((await reader.readline()).split(b" ")[1:2])
        if status == b"200":
            await _answer(reader, begin, result, number)
        elif status in (b"429", b"503"):
            result.refused_s.append(time.perf_counter() - begin)
        elif status.isdigit():
            said = b"".join([piece async for piece in _body(reader)])
            result.failed(f"status {status.decode()}", words_of(said))
        else:
            raise ValueError("no status of HTTP")
    finally:
        writer.close()


async def _answer(reader: asyncio.StreamReader, begin: float, result: LoadResult, number: int | None) -> None:
    """Read a stream, headers first; `begin` is the time of the request."""
    last = begin
    text: list[str] = []
    times: list[float] = []
    tokens = 0
    async for chunk in _chunks(reader):
        if chunk is None:
            break
        if chunk.get("error"):
            result.failed(chunk["error"].get("code", "error")[:64], chunk["error"].get("message"))
            return
        if chunk.get("usage"):
            tokens += chunk["usage"]["completion_tokens"]
        words = [word for choice in chunk["choices"] if (word := choice["delta"].get("content"))]
        if words:
            now = time.perf_counter()
            times.append(now - last)
            last = now
            text += words
    else:
        result.failed("cut")
        return
    if not tokens and not text:
        result.failed("empty")
        return
    result.tokens += tokens
    result.total_s.append(time.perf_counter() - begin)
    result.first_s += times[:1]
    result.between_s += times[1:]
    if number is not None:
        result.texts[number] = "".join(text)


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any] | None]:
    """Yield the chunks of an answer after its headers; None marks the end."""
    events = EventReader()
    async for piece in _body(reader):
        for data in events.push(piece):
            yield None if data == END else chunk_of(data)


async def _body(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the body after the headers. Some servers use chunked encoding even for HTTP/1.0 requests."""
    chunked = False
    while line := (await reader.readline()).strip().lower():
        name, _, value = line.partition(b":")
        chunked |= name == b"transfer-encoding" and value.strip() == b"chunked"
    if not chunked:
        while piece := await reader.read(1 << 16):
            yield piece
        return
    while size := int((await reader.readline()).partition(b";")[0] or b"0", 16):
        try:
            yield (await reader.readexactly(size + 2))[:size]
        except asyncio.IncompleteReadError:
            return


async def closed_loop(url: str, key: str, requests: Sequence[bytes], clients: int) -> tuple[LoadResult, float]:
    """Send all requests from `clients` clients, each waiting for its answer; returns the figures and the seconds."""
    result = LoadResult()
    waiting = iter(enumerate(requests))

    async def client() -> None:
        for number, data in waiting:
            await ask(url, key, data, result, number)

    begin = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return result, time.perf_counter() - begin


def even_times(rate: float, seconds: float) -> Iterator[float]:
    """Yield the times of `rate` requests a second, one after the other, in seconds from the first."""
    return (number / rate for number in range(int(rate * seconds)))


def poisson_times(rate: float, seconds: float, rng: random.Random) -> Iterator[float]:
    """Yield the times of requests that come independently of each other, `rate` a second in the mean."""
    at = rng.expovariate(rate)
    while at < seconds:
        yield at
        at += rng.expovariate(rate)


async def open_loop(url: str, key: str, requests: Sequence[bytes], times: Iterable[float]) -> tuple[LoadResult, float]:
    """Send a request at each of these times, in seconds from now, without waiting for answers.

    Returns their results, and the seconds until the last answer ended.
    """
    result = LoadResult()
    tasks: set[asyncio.Task[None]] = set()

    begin = time.perf_counter()
    for number, at in enumerate(times):
        await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
        task = asyncio.create_task(ask(url, key, requests[number % len(requests)], result))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    return result, time.perf_counter() - begin


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return mean and percentiles in milliseconds of values in seconds."""
    ranked = sorted(values) or [0.0]
    at = {p: 1e3 * ranked[min(len(ranked) - 1, int(p / 100 * len(ranked)))] for p in (50, 90, 99)}
    return {"mean": round(1e3 * statistics.fmean(ranked), 2), **{f"p{p}": round(v, 2) for p, v in at.items()}}


def report(result: LoadResult, seconds: float, clients: int) -> dict[str, Any]:
    """Return the figures of one run."""
    return {
        "clients": clients,
        "requests": len(result.total_s),
        "refused": len(result.refused_s),
        "errors": result.errors,
        "tokens_per_s": round(result.tokens / seconds, 1),
        "requests_per_s": round(len(result.total_s) / seconds, 2),
        "first_token_ms": percentiles(result.first_s),
        "between_tokens_ms": percentiles(result.between_s),
        "total_ms": percentiles(result.total_s),
    }
