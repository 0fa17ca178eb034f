"""Many clients at once: streamed requests over connections of their own, and the figures of what they saw."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import random
import ssl
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from beheld.cli.events import END, EventReader


@dataclass
class Seen:
    """What the clients saw.

    Attributes:
        first_s, between_s, total_s: to the first piece of text, between pieces, to the end; of answers that ended well.
        refused_s: to the end of answers with status 429 or 503.
        tokens: of all answers, as the server counts them.
        errors: what went wrong otherwise, and how often.
        texts: answer by number of the request, where wanted.
    """

    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    tokens: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)

    def failed(self, what: str) -> None:
        """Count an error."""
        self.errors[what] = self.errors.get(what, 0) + 1


def picture_url(side: int, rng: random.Random) -> str:
    """A picture of `side` by `side` pixels that nobody has seen before, as a data URL of a PNG."""
    from PIL import Image

    # Blocks of colour: noise would measure how PNG stores noise.
    small = Image.frombytes("RGB", (8, 8), rng.randbytes(8 * 8 * 3)).resize((side, side), Image.Resampling.NEAREST)
    file = io.BytesIO()
    small.save(file, format="PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def bodies(count: int, tokens: int, side: int | None, model: str | None, seed: int) -> Iterator[bytes]:
    """One request each, with a new picture of `side` pixels unless that is None; `tokens` new tokens, greedy."""
    rng = random.Random(seed)
    for number in range(count):
        content: list[dict[str, Any]] = [{"type": "text", "text": f"What do you see in scene {number}?"}]
        if side is not None:
            content.insert(0, {"type": "image_url", "image_url": {"url": picture_url(side, rng)}})
        yield body([{"role": "user", "content": content}], tokens, model, ignore_eos=True)


def body(messages: Sequence[dict[str, Any]], tokens: int, model: str | None = None, **options: Any) -> bytes:
    """A streamed greedy request with its usage."""
    made = {
        "messages": messages,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **options,
    }
    return json.dumps(made if model is None else made | {"model": model}).encode()


async def ask(url: str, key: str, data: bytes, seen: Seen, number: int | None = None) -> None:
    """One request over a connection of its own, without a client library that would take the time itself.

    The text is kept in `seen.texts` if the request has a number.

    Raises:
        OSError: the connection failed, or the server's certificate is not trusted.
    """
    parts = urlsplit(url)
    begin = last = time.perf_counter()
    # Asked in HTTP/1.0, most servers answer without chunks: the answer ends with the connection.
    head = (
        f"POST {parts.path}/chat/completions HTTP/1.0\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {key}\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    trust = ssl.create_default_context() if parts.scheme == "https" else None
    port = parts.port or (443 if trust else 80)
    reader, writer = await asyncio.open_connection(parts.hostname, port, limit=1 << 22, ssl=trust)
    text: list[str] = []
    times: list[float] = []
    done = False
    try:
        writer.write(head.encode() + data)
        await writer.drain()
        status = (await reader.readline()).split(b" ")[1:2]
        if status != [b"200"]:
            refused = status in ([b"429"], [b"503"])
            if refused:
                seen.refused_s.append(time.perf_counter() - begin)
            else:
                seen.failed(f"status {b''.join(status).decode() or 'none'}")
            return
        async for chunk in _chunks(reader):
            if chunk is None:
                done = True
                break
            if "error" in chunk:
                seen.failed(str(chunk["error"].get("code")))
                return
            if chunk.get("usage"):
                seen.tokens += chunk["usage"]["completion_tokens"]
            words = [word for choice in chunk["choices"] if (word := choice["delta"].get("content"))]
            if words:
                now = time.perf_counter()
                times.append(now - last)
                last = now
                text += words
    finally:
        writer.close()
    if not done:
        seen.failed("cut")
        return
    seen.total_s.append(time.perf_counter() - begin)
    seen.first_s += times[:1]
    seen.between_s += times[1:]
    if number is not None:
        seen.texts[number] = "".join(text)


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any] | None]:
    """The chunks of an answer, behind its headers; None is its end."""
    events = EventReader()
    async for piece in _body(reader):
        for data in events.push(piece):
            yield None if data == END else json.loads(data)


async def _body(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """What stands behind the headers. Some servers send it in HTTP's chunks although they were asked in HTTP/1.0."""
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


async def closed_loop(url: str, key: str, requests: Sequence[bytes], clients: int) -> tuple[Seen, float]:
    """All requests by so many clients, each of which asks when it has its answer: (what they saw, seconds)."""
    seen = Seen()
    waiting = iter(enumerate(requests))

    async def client() -> None:
        for number, data in waiting:
            try:
                await ask(url, key, data, seen, number)
            except OSError as error:
                seen.failed(type(error).__name__)

    begin = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return seen, time.perf_counter() - begin


async def open_loop(url: str, key: str, requests: Sequence[bytes], rate: float, seconds: float) -> tuple[Seen, float]:
    """`rate` new requests a second whatever becomes of them, for so many seconds: (what they saw, seconds to the end
    of the last answer)."""
    seen = Seen()
    tasks: set[asyncio.Task[None]] = set()

    async def one(data: bytes) -> None:
        try:
            await ask(url, key, data, seen)
        except OSError as error:
            seen.failed(type(error).__name__)

    begin = time.perf_counter()
    for number in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, begin + number / rate - time.perf_counter()))
        task = asyncio.create_task(one(requests[number % len(requests)]))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    return seen, time.perf_counter() - begin


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Mean, median and tails in milliseconds, of seconds."""
    ranked = sorted(values) or [0.0]
    at = {p: 1e3 * ranked[min(len(ranked) - 1, int(p / 100 * len(ranked)))] for p in (50, 90, 99)}
    return {"mean": round(1e3 * statistics.fmean(ranked), 2), **{f"p{p}": round(v, 2) for p, v in at.items()}}


def report(seen: Seen, seconds: float, clients: int) -> dict[str, Any]:
    """The figures of one run."""
    return {
        "clients": clients,
        "requests": len(seen.total_s),
        "refused": len(seen.refused_s),
        "errors": seen.errors,
        "tokens_per_s": round(seen.tokens / seconds, 1),
        "requests_per_s": round(len(seen.total_s) / seconds, 2),
        "first_token_ms": percentiles(seen.first_s),
        "between_tokens_ms": percentiles(seen.between_s),
        "total_ms": percentiles(seen.total_s),
    }


def key_of(given: str | None) -> str:
    """The API key to show."""
    return given or os.environ.get("OPENAI_API_KEY") or "EMPTY"
