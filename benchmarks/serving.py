"""Serving: clients that stream answers about new pictures, beside the same requests in process; one JSON line.

    python -m benchmarks.serving --clients 32 --requests 128                 `beheld serve` is started and measured
    python -m benchmarks.serving --url http://127.0.0.1:8000 --clients 32    any server that speaks OpenAI's API
    python -m benchmarks.serving --ladder 1,4,16,32                          several numbers of clients, one line each

Every request has a picture of its own unless `--text` is given, greedy decoding, and `--tokens` new tokens. Without
`--url` the same requests are also answered by LLM in this process, and `ratio` is the server's throughput over it.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Seen:
    """What the clients saw."""

    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    tokens: int = 0
    errors: int = 0


def bodies(count: int, tokens: int, side: int | None, model: str | None, seed: int) -> list[bytes]:
    """One request each, with a picture of its own if `side` is given."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        content: list[dict[str, Any]] = [{"type": "text", "text": f"What do you see in scene {number}?"}]
        if side is not None:
            file = io.BytesIO()
            Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(file, format="PNG")
            url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
            content.insert(0, {"type": "image_url", "image_url": {"url": url}})
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        made.append(json.dumps(body if model is None else body | {"model": model}).encode())
    return made


async def ask(url: str, body: bytes, seen: Seen) -> None:
    """One streamed request over a connection of its own, without a client library that would take the time itself."""
    parts = urlsplit(url)
    begin = last = time.perf_counter()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {os.environ.get('OPENAI_API_KEY', 'EMPTY')}\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    done = False
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80, limit=1 << 22)
    try:
        writer.write(head.encode() + body)
        await writer.drain()
        async for line in reader:
            if line.startswith(b"data: [DONE]"):
                done = True
            elif line.startswith(b"data: "):
                chunk = json.loads(line[6:])
                now = time.perf_counter()
                if chunk.get("usage"):
                    seen.tokens += chunk["usage"]["completion_tokens"]
                if any(choice["delta"].get("content") for choice in chunk.get("choices", ())):
                    (seen.first_s if last == begin else seen.between_s).append(now - last)
                    last = now
    finally:
        writer.close()
    seen.total_s.append(time.perf_counter() - begin)
    seen.errors += not done


async def measure(url: str, requests: list[bytes], clients: int) -> tuple[Seen, float]:
    """All requests by so many clients: (what they saw, seconds)."""
    seen = Seen()
    waiting = iter(requests)

    async def client() -> None:
        for body in waiting:
            try:
                await ask(url, body, seen)
            except OSError:
                seen.errors += 1

    begin = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return seen, time.perf_counter() - begin


def offline(model: str | None, requests: list[bytes], options: dict[str, Any]) -> float:
    """Tokens a second of LLM in this process for the same requests."""
    from beheld import LLM, SamplingParams

    talks = [json.loads(body)["messages"] for body in requests]
    tokens = json.loads(requests[0])["max_tokens"]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    with LLM(model, **options) as llm:
        half = len(talks) // 2
        llm.chat(talks[:half], params, use_tqdm=False)
        begin = time.perf_counter()
        outputs = llm.chat(talks[half:], params, use_tqdm=False)
        return sum(output.usage.completion_tokens for output in outputs) / (time.perf_counter() - begin)


@contextmanager
def served(model: str | None, options: dict[str, Any], engine: str) -> Iterator[str]:
    """`beheld serve`, ready."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "beheld.cli.main", "serve", *([model] if model else []), "--engine", engine]
    process = subprocess.Popen(
        [*command, "--port", "0", *flags],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "BEHELD_LOG_LEVEL": "INFO"},
    )
    assert process.stderr is not None
    try:
        url = next(line.split(" at ")[1].split()[0] for line in process.stderr if "Serving" in line)
        # What it logs is of no interest any more, but somebody must read it.
        with subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL):
            yield url
            process.terminate()
            process.wait()
    finally:
        process.kill()


def report(seen: Seen, seconds: float, clients: int) -> dict[str, Any]:
    """The figures of one run."""

    def percentiles(values: list[float]) -> dict[str, float]:
        ranked = sorted(values) or [0.0]
        at = {p: 1e3 * ranked[min(len(ranked) - 1, int(p / 100 * len(ranked)))] for p in (50, 90, 99)}
        return {"mean": round(1e3 * statistics.fmean(ranked), 2), **{f"p{p}": round(v, 2) for p, v in at.items()}}

    return {
        "clients": clients,
        "requests": len(seen.total_s),
        "errors": seen.errors,
        "tokens_per_s": round(seen.tokens / seconds, 1),
        "requests_per_s": round(len(seen.total_s) / seconds, 2),
        "first_token_ms": percentiles(seen.first_s),
        "between_tokens_ms": percentiles(seen.between_s),
        "total_ms": percentiles(seen.total_s),
    }


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description="Measure a server under many clients.")
    parser.add_argument("--model", help="a folder; without it, the embedded model")
    parser.add_argument("--url", help="measure this server instead of starting one")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--ladder", help="several numbers of clients, as 1,4,16")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--side", type=int, default=224, help="of the pictures, in pixels")
    parser.add_argument("--text", action="store_true", help="no pictures")
    parser.add_argument("--engine", choices=("process", "thread"), default="process")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    given = parser.parse_args()
    side = None if given.text else given.side
    options = {"max_num_seqs": given.max_num_seqs, "seed": 0}
    ladder = [int(word) for word in given.ladder.split(",")] if given.ladder else [given.clients]

    def climb(url: str) -> list[dict[str, Any]]:
        asyncio.run(measure(url, bodies(ladder[-1], given.tokens, side, None, 999), ladder[-1]))
        lines = []
        for step, clients in enumerate(ladder):
            requests = bodies(given.requests, given.tokens, side, None, step)
            lines.append(report(*asyncio.run(measure(url, requests, clients)), clients))
        return lines

    if given.url:
        for line in climb(given.url):
            print(json.dumps(line))
        return
    with served(given.model, options, given.engine) as url:
        lines = climb(url)
    alone = offline(given.model, bodies(2 * given.requests, given.tokens, side, None, 7), options)
    for line in lines:
        line |= {"engine": given.engine, "offline_tokens_per_s": round(alone, 1)}
        print(json.dumps(line | {"ratio": round(line["tokens_per_s"] / alone, 3)}))


if __name__ == "__main__":
    main()
