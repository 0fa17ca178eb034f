"""A bounded share of an event loop for work that arrives in many small pieces."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

# Pause between two pieces; a piece takes about as long.
_REST_S = 0.001
# Pieces that are looked at for one that takes time.
_LOOKED_AT = 64

Piece = Callable[[], bool | None]
"""Work of about a millisecond; False if there was none to do, so that the next piece need not wait."""


class LoopShare:
    """Runs pieces of work one at a time, with a pause after each; clients take turns.

    A body that arrives in tiny parts takes far longer to parse than to send. Each connection's parser runs one piece
    and queues again, so others wait for at most one piece, and all pieces together leave half of the loop's time free.
    A client with hundreds of connections has one turn where another has one.

    Args:
        rest_s: the pause. Without one, a piece is done in each turn of the loop.
    """

    def __init__(self, rest_s: float | None = None) -> None:
        self._rest_s = rest_s
        # The client that was served last is the last.
        self._lines: dict[str, OrderedDict[Piece, None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def do(self, piece: Piece, client: str = "") -> None:
        """Call `piece` on the running loop when its turn comes."""
        self._lines.setdefault(client, OrderedDict())[piece] = None
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            loop.call_soon(self._next, loop)

    def drop(self, piece: Piece, client: str = "") -> None:
        """Let go of a piece that need not be done any more; of one that does not wait, this changes nothing."""
        line = self._lines.get(client)
        if line is not None and piece in line:
            del line[piece]
            if not line:
                del self._lines[client]

    def num_waiting(self, client: str) -> int:
        """How many pieces of a client wait."""
        return len(self._lines.get(client, ()))

    async def turn(self, client: str = "") -> None:
        """Wait for a turn. The caller's work until its next wait is its piece."""
        granted = asyncio.get_running_loop().create_future()

        def grant() -> None:
            if not granted.done():
                granted.set_result(None)

        self.do(grant, client)
        try:
            await granted
        finally:
            self.drop(grant, client)

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._lines:
            self._loop = None
            return
        # Also after a piece that fails, which the loop reports.
        loop.call_later(_REST_S if self._rest_s is None else self._rest_s, self._next, loop)
        for _ in range(_LOOKED_AT):
            client = next(iter(self._lines))
            line = self._lines.pop(client)
            piece, _ = line.popitem(last=False)
            if line:
                self._lines[client] = line
            if piece() is not False or not self._lines:
                return
