"""Limits how many connections' data the event loop parses in one of its turns, and lets clients take turns."""

from __future__ import annotations

import asyncio
from collections import deque

from beheld.utils.loop_share import Piece

# Each takes up to a third of a millisecond, with the request that it begins.
_IN_TURN = 12
# Connections that are looked at for those whose clients are still there.
_LOOKED_AT = 64


class ParseTurns:
    """Some connections' data are parsed in each turn of the event loop.

    A thousand connections that send a request in the same moment are ready in the same turn. Each costs little, and all
    of them together would keep the loop for a third of a second. The others' data wait; those of a client that has few
    connections wait for one turn of the loop.

    Args:
        in_turn: connections a turn.
    """

    def __init__(self, in_turn: int = _IN_TURN) -> None:
        self._in_turn = self._left = in_turn
        self._scheduled = False
        # The client that was served last is the last.
        self._waiting: dict[str, deque[Piece]] = {}

    def take(self, client: str, parse: Piece) -> bool:
        """Return whether the caller may parse now; otherwise `parse` is called in one of the next turns of the loop."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._next)
        if self._left and client not in self._waiting:
            self._left -= 1
            return True
        self._waiting.setdefault(client, deque()).append(parse)
        return False

    def _next(self) -> None:
        self._left, looked_at = self._in_turn, 0
        while self._left and self._waiting and looked_at < _LOOKED_AT:
            looked_at += 1
            client = next(iter(self._waiting))
            line = self._waiting.pop(client)
            parse = line.popleft()
            if line:
                self._waiting[client] = line
            try:
                if parse() is False:
                    continue
            except Exception as error:
                # One connection's failure must not keep the others waiting for ever.
                context = {"message": "data of a connection could not be parsed", "exception": error}
                asyncio.get_running_loop().call_exception_handler(context)
            self._left -= 1
        self._scheduled = bool(self._waiting)
        if self._scheduled:
            asyncio.get_running_loop().call_soon(self._next)
