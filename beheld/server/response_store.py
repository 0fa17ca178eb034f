"""Keeps responses in memory, up to a number of bytes, so that later requests can go on with them."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from beheld.server.errors import HttpError

# Counted for each value besides its characters.
_EACH = 64


class TokenEntries(list[Any]):
    """Tokens, or their log-probabilities, made here: thousands, which are about as large as the first."""


@dataclass
class Stored:
    """A response that is kept.

    Attributes:
        owner: the client that may use it.
        response: the object as it stands.
        history: the conversation up to its input, and its answer when it is complete; empty if none may continue it.
        history_bytes: its size.
        num_bytes: what it counts.
        over: set when the response does not change any more.
        task: answers it without its client.
    """

    owner: str
    response: dict[str, Any]
    history: tuple[dict[str, Any], ...]
    history_bytes: int
    num_bytes: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    def go_on(self, messages: tuple[dict[str, Any], ...]) -> None:
        """Add messages to the history."""
        self.history += messages
        self.history_bytes += size_of(messages)


class ResponseStore:
    """Responses by their ids; the least recently used make room.

    What several responses of a conversation share is counted for each, so the bound holds for any order of removal.

    Args:
        max_bytes: the most bytes of all responses together; 0 keeps none.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max = max_bytes
        self._kept: OrderedDict[str, Stored] = OrderedDict()
        self.num_bytes = 0
        # Requests are read in threads.
        self._lock = threading.RLock()

    def put(self, stored: Stored) -> bool:
        """Keep a response, or count it anew; False if it is too large, and then it is not kept."""
        name = stored.response["id"]
        size = size_of(stored.response) + stored.history_bytes
        with self._lock:
            self.discard(name)
            if size > self._max:
                return False
            while self.num_bytes + size > self._max:
                self.discard(next(iter(self._kept)))
            stored.num_bytes = size
            self._kept[name] = stored
            self.num_bytes += size
            return True

    def holds(self, name: str) -> bool:
        """True if a response of that id is kept."""
        return name in self._kept

    def get(self, name: str, owner: str, param: str | None = None) -> Stored:
        """The response of that id, which is now the most recently used.

        Raises:
            HttpError: 404 if there is none of this client.
        """
        with self._lock:
            found = self._kept.get(name)
            if found is not None and found.owner == owner:
                self._kept.move_to_end(name)
                return found
        raise HttpError(
            404,
            f"Response with id {name[:64]!r} is not found.",
            "Send the whole conversation as input. The operator may raise --response-store-mib.",
            param=param,
            code="response_not_found",
        )

    def history_of(self, name: str, owner: str) -> tuple[tuple[dict[str, Any], ...], int]:
        """The conversation up to the response of that id, which another request goes on with, and its bytes.

        Raises:
            HttpError: 404 if there is none of this client; 400 if it is not answered yet, or never was.
        """
        found = self.get(name, owner, "previous_response_id")
        words, remedy = None, ""
        if found.response["status"] in ("queued", "in_progress"):
            words, remedy = "is not answered yet", "Retrieve it until its status is completed."
        elif not found.history:
            words, remedy = "was never answered", "Send the whole conversation as input."
        if words is not None:
            raise HttpError(
                400,
                f"Response with id {name[:64]!r} {words}.",
                remedy,
                param="previous_response_id",
                code="response_not_complete",
            )
        return found.history, found.history_bytes

    def delete(self, name: str, owner: str) -> None:
        """Forget a response.

        Raises:
            HttpError: 404 if there is none of this client.
        """
        found = self.get(name, owner)
        self.discard(name)
        if found.task is not None:
            found.task.cancel()

    def forget_history(self, stored: Stored) -> None:
        """Let no later request continue a response, and count it again if it is kept."""
        with self._lock:
            stored.history, stored.history_bytes = (), 0
            if self.holds(stored.response["id"]):
                self.put(stored)

    def discard(self, name: str) -> None:
        """Forget a response if it is there."""
        with self._lock:
            found = self._kept.pop(name, None)
            if found is not None:
                self.num_bytes -= found.num_bytes


def size_of(value: Any) -> int:
    """About the bytes that a JSON value takes in memory."""
    total, left = 0, [value]
    while left:
        one = left.pop()
        total += _EACH
        if isinstance(one, str):
            # Of the widest character, as Python keeps texts.
            total += len(one) * (1 if one.isascii() else 4)
        elif isinstance(one, dict):
            left += one.keys()
            left += one.values()
        elif isinstance(one, TokenEntries):
            total += len(one) * size_of(one[0]) if one else 0
        elif isinstance(one, list | tuple):
            left += one
    return total
