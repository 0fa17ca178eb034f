"""A bounded share of an event loop for work that arrives in many small pieces."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

# Pause between two pieces; a piece takes about as long.
_REST_S = 0.001


class LoopShare:
    """Runs pieces of work one at a time, in order, with a pause after each.

    A body that arrives in tiny parts takes far longer to parse than to send. Each client's parser runs one piece and
    queues again, so others wait for at most one piece, and all pieces together leave half of the loop's time free.
    """

    def __init__(self) -> None:
        self._line: deque[Callable[[], None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None

    def do(self, piece: Callable[[], None]) -> None:
        """Call `piece` on the running loop when its turn comes; it should take about a millisecond."""
        self._line.append(piece)
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            loop.call_soon(self._next, loop)

    async def turn(self) -> None:
        """Wait for a turn. The caller's work until its next wait is its piece."""
        granted = asyncio.get_running_loop().create_future()

        def grant() -> None:
            if not granted.done():
                granted.set_result(None)

        self.do(grant)
        await granted

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._line:
            self._loop = None
            return
        # Also after a piece that fails, which the loop reports.
        loop.call_later(_REST_S, self._next, loop)
        self._line.popleft()()
