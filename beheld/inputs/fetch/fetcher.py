"""Fetches what a request's media need from other machines, before anything waits for them in a thread.

Every fetch waits in the event loop. A request that is cancelled ends its fetches, and a host that does not answer
delays only the requests that ask it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from urllib.parse import urlsplit

from beheld.core.errors import FetchError, MediaError
from beheld.core.media import MediaRef, item_name
from beheld.inputs.fetch.fetch import MAX_URL, FetchRules, fetch_remote, is_remote, times_s
from beheld.utils.loop_share import LoopShare

_MAX_AT_ONCE = 256
# So that a host that hangs holds only its part of them.
_MAX_PER_HOST = 32


class Fetcher:
    """Fetches the media of one pipeline's requests. All of its coroutines run in one event loop at a time.

    Args:
        rules: what may be opened; their limits bound the bytes of all requests that are being prepared.
    """

    def __init__(self, rules: FetchRules) -> None:
        self._rules = rules
        self._room = Room(max(rules.limits.max_fetched_bytes, rules.limits.max_item_bytes))
        self._parsing = LoopShare()
        self._all = _Turns(_MAX_AT_ONCE)
        self._hosts = _Turns(_MAX_PER_HOST)

    @asynccontextmanager
    async def fetched(self, media: Sequence[MediaRef]) -> AsyncGenerator[tuple[MediaRef, ...], None]:
        """The same media, with bytes where there were URLs of other machines; inside the block they have room.

        Raises:
            FetchError, LimitError: the first in the order of the media, once all have ended; it names its item.
        """
        taken: list[int] = []

        async def reserve(num_bytes: int) -> None:
            taken.append(await self._room.take(num_bytes))

        async def one(ref: MediaRef) -> MediaRef:
            if not is_remote(ref.source):
                return ref
            _, timeout = times_s(ref.modality)
            async with self._turn(ref.source, timeout):
                return replace(
                    ref, source=await fetch_remote(ref.source, ref.modality, self._rules, reserve, self._parsing)
                )

        try:
            found = await asyncio.gather(*map(one, media), return_exceptions=True)
            yield tuple(_or_raise(media, index, one) for index, one in enumerate(found))
        finally:
            for num_bytes in taken:
                self._room.give(num_bytes)

    @asynccontextmanager
    async def _turn(self, url: str, timeout: float) -> AsyncGenerator[None, None]:
        """Wait in line for the host, then in line for all hosts."""
        deadline = asyncio.get_running_loop().time() + timeout
        try:
            async with (
                asyncio.timeout_at(deadline) as waiting,
                self._hosts.turn(_host(url)),
                self._all.turn(""),
            ):
                waiting.reschedule(None)
                yield
        except TimeoutError as error:
            raise FetchError("Too many fetches are waiting for that server.", "Try again.") from error


def _or_raise(media: Sequence[MediaRef], index: int, found: MediaRef | BaseException) -> MediaRef:
    if isinstance(found, MediaRef):
        return found
    if not isinstance(found, MediaError):
        raise found
    ref = media[index]
    number = sum(other.modality == ref.modality for other in media[: index + 1])
    raise found.for_item(item_name(ref.modality, number), ref.place) from found


def _host(url: str) -> str:
    try:
        return (urlsplit(url[:MAX_URL]).hostname or "").lower()
    except ValueError:
        # Refused with its reason where it is taken apart.
        return ""


class _Turns:
    """So many at a time under one name; others wait in the order in which they came."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lines: dict[str, tuple[asyncio.Semaphore, int]] = {}

    @asynccontextmanager
    async def turn(self, name: str) -> AsyncGenerator[None, None]:
        """Wait for it, and have it inside the block."""
        line, num_users = self._lines.get(name) or (asyncio.Semaphore(self._most), 0)
        self._lines[name] = (line, num_users + 1)
        try:
            async with line:
                yield
        finally:
            num_users = self._lines[name][1] - 1
            if num_users:
                self._lines[name] = (line, num_users)
            else:
                del self._lines[name]


class Room:
    """Bytes that may be held at a time; callers that want more wait, first come, first served.

    Args:
        max_bytes: a caller that wants more than all of it gets all of it.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max = max_bytes
        self._left = max_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, num_bytes: int) -> int:
        """Wait for room; what is to be given back."""
        wanted = min(num_bytes, self._max)
        granted = asyncio.get_running_loop().create_future()
        self._waiting.append((wanted, granted))
        self._wake()
        try:
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled():
                # It was granted, and is not wanted any more.
                self.give(wanted)
            self._wake()
            raise
        return wanted

    def give(self, num_bytes: int) -> None:
        """Give back what was taken."""
        self._left += num_bytes
        self._wake()

    def _wake(self) -> None:
        while self._waiting and (self._waiting[0][1].cancelled() or self._waiting[0][0] <= self._left):
            wanted, granted = self._waiting.popleft()
            if not granted.cancelled():
                self._left -= wanted
                granted.set_result(None)
