"""Clients in a process of their own, without a library: as many as may be at once, or so many a second.

    python tests/server/crowd.py PORT HOW NUMBER SECONDS MAX_TOKENS

HOW is `closed` (NUMBER clients, each asks again when it is answered or, a second later, when it is refused) or `open`
(NUMBER requests a second, whatever becomes of them). One JSON object: seconds until the last answer, seconds each
answer took and each refusal took, and what was neither.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time


class Crowd:
    """What became of requests to one port."""

    def __init__(self, port: int, max_tokens: int) -> None:
        body = json.dumps({"prompt": "x", "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        self._sent = head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body
        self._port, self._tokens = port, max_tokens
        self.answered: list[float] = []
        self.refused: list[float] = []
        self.wrong: list[str] = []

    async def ask(self) -> None:
        """One request."""
        begin = time.perf_counter()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            writer.write(self._sent)
            answer = await reader.read()
            writer.close()
        except OSError as error:
            self.wrong.append(repr(error))
            return
        spent = time.perf_counter() - begin
        head = answer.partition(b"\r\n\r\n")[0].lower()
        if head.startswith(b"http/1.1 200") and b'"completion_tokens":%d' % self._tokens in answer.replace(b" ", b""):
            self.answered.append(spent)
        elif head.startswith(b"http/1.1 503") and b"\r\nretry-after: 1" in head:
            self.refused.append(spent)
        else:
            self.wrong.append(answer[:300].decode(errors="replace"))

    async def closed(self, clients: float, end: float) -> None:
        """So many clients at once until `end`."""

        async def client() -> None:
            while time.perf_counter() < end:
                before = len(self.refused)
                await self.ask()
                await asyncio.sleep(1.0 if len(self.refused) > before else 0)

        await asyncio.gather(*(client() for _ in range(int(clients))))

    async def open(self, rate: float, end: float) -> None:
        """So many requests a second until `end`."""
        tasks: list[asyncio.Task[None]] = []
        due = time.perf_counter()
        while due < end:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(self.ask()))
            due += 1 / rate
        await asyncio.gather(*tasks)


def main(port: str, how: str, number: str, seconds: str, max_tokens: str) -> None:
    """Run one crowd and print what became of it."""
    crowd = Crowd(int(port), int(max_tokens))
    begin = time.perf_counter()
    run = {"closed": crowd.closed, "open": crowd.open}[how]
    asyncio.run(run(float(number), begin + float(seconds)))
    found = {"answered": crowd.answered, "refused": crowd.refused, "wrong": crowd.wrong}
    print(json.dumps({"seconds": time.perf_counter() - begin, **found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
