"""Fetches a request's media from other machines before any thread waits for them.

Every fetch waits in the event loop. Cancelling a request ends its fetches, and a host that does not answer delays only
the requests that use it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import replace
from urllib.parse import urlsplit

from beheld.core.errors import FetchError, MediaError
from beheld.core.media import MediaRef, item_name
from beheld.inputs.fetch.fetch import MAX_URL, FetchRules, fetch_remote, is_remote, times_s
from beheld.inputs.fetch.shares import Room, Shares
from beheld.utils.fair_turns import FairTurns
from beheld.utils.loop_share import LoopShare

# Waits until there is room for so many bytes more.
Reserve = Callable[[int], Awaitable[None]]
# Of one client; all together have twice as many.
_MAX_AT_ONCE = 256
# Limits per host, so that a hanging host occupies only its part of the slots.
_MAX_PER_HOST = 32
# Names that are being resolved: some resolvers take half a minute to say that there is no such name.
_MAX_NAMES = 32


class Fetcher:
    """Fetches media for one pipeline's requests. Its coroutines run in one event loop at a time.

    Args:
        rules: what may be opened; their limits bound the bytes of all requests in preparation.
    """

    def __init__(self, rules: FetchRules) -> None:
        self._rules = rules
        most, item = rules.limits.max_fetched_bytes, rules.limits.max_item_bytes
        self._room = Room(max(most, item), item)
        self._parsing = LoopShare()
        # To begin one takes up to a millisecond, and a request may name dozens.
        self._beginning = LoopShare(rest_s=0.0)
        self._all = FairTurns(2 * _MAX_AT_ONCE, _MAX_AT_ONCE)
        self._names = FairTurns(2 * _MAX_NAMES, _MAX_NAMES)
        self._hosts: dict[str, FairTurns] = {}

    @contextmanager
    def request(self) -> Generator[Reserve, None, None]:
        """The room of one request, for all that `fetched` fetches with it; it is given back when the block ends."""
        with self._room.request() as reserve:
            yield reserve

    @asynccontextmanager
    async def fetched(
        self, media: Sequence[MediaRef], client: str = "", reserve: Reserve | None = None
    ) -> AsyncGenerator[tuple[MediaRef, ...], None]:
        """The same media, with bytes where there were URLs of other machines; inside the block they have room.

        Args:
            media: of a request.
            client: who asks: one client's fetches leave room for the others'.
            reserve: of `request`, if the request fetches more than once; None for a room that ends with the block.

        Raises:
            FetchError, LimitError: the first failure in the order of the media, after all fetches ended; it names its
                item.
        """
        if not any(is_remote(ref.source) for ref in media):
            yield tuple(media)
            return
        with nullcontext(reserve) if reserve is not None else self.request() as reserve:
            shares = Shares(reserve, self._parsing, lambda: self._names.take(client))

            async def one(ref: MediaRef) -> MediaRef | MediaError:
                if not is_remote(ref.source):
                    return ref
                _, timeout = times_s(ref.modality)
                try:
                    async with self._turn(ref.source, client, timeout):
                        await self._beginning.turn(client)
                        return replace(ref, source=await fetch_remote(ref.source, ref.modality, self._rules, shares))
                except MediaError as error:
                    # Of an error that a task raises, it keeps the frames.
                    _forget_frames(error)
                    return error

            found = await asyncio.gather(*map(one, media), return_exceptions=True)
            yield tuple(_or_raise(media, index, one) for index, one in enumerate(found))

    @asynccontextmanager
    async def _turn(self, url: str, client: str, timeout: float) -> AsyncGenerator[None, None]:
        """Wait in line for the host, then in line for all hosts."""
        deadline = asyncio.get_running_loop().time() + timeout
        name = _host(url)
        host = self._hosts.setdefault(name, FairTurns(2 * _MAX_PER_HOST, _MAX_PER_HOST))
        try:
            async with asyncio.timeout_at(deadline) as waiting, host.turn(client), self._all.turn(client):
                waiting.reschedule(None)
                yield
        except TimeoutError as error:
            raise FetchError("Too many fetches are waiting for that server.", "Try again.") from error
        finally:
            if host.idle:
                self._hosts.pop(name, None)


def _forget_frames(error: BaseException) -> None:
    """Let go of where an error arose: its frames hold connections and the task that holds the error.

    A collection of thousands of such circles would hold up the loop.
    """
    waiting, seen = [error], set[int]()
    while waiting:
        each = waiting.pop()
        seen.add(id(each))
        each.__traceback__ = None
        waiting += [
            other for other in (each.__cause__, each.__context__) if other is not None and id(other) not in seen
        ]


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
        # Refused with a reason when it is parsed.
        return ""
