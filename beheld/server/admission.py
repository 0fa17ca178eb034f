"""Admission control: counts running requests and the bytes of their bodies, and refuses more than the limits."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from beheld.server import limits
from beheld.server.errors import HttpError
from beheld.server.front_table import Column, FrontTable
from beheld.server.options import ServerOptions


class Places:
    """Counts what clients take of a limited number of places.

    One client may take them all. Where they are taken, a client that has few may have some more, so that no client has
    the others refused.

    Of several fronts all together have the places: two that take the last one in the same moment both get it. What a
    client has, each front counts by itself.

    Args:
        most: the limit. A client has few up to a sixteenth of it, and there is a fourth of it more for such clients.
        table: of the fronts; None if there is one.
        column: where in the table the fronts say how many places they have taken.

    Attributes:
        most: the limit.
        taken: places that are taken here.
    """

    def __init__(self, most: int, table: FrontTable | None = None, column: Column = Column.ANSWERS) -> None:
        self.most = most
        self.taken = 0
        num_fronts = 1 if table is None else table.place.count
        self._few, self._more = -(-(most // 16) // num_fronts), most // 4
        self._taken_by: Counter[str] = Counter()
        self._table, self._column = table, column

    @property
    def all_taken(self) -> int:
        """Places that are taken, here or at another front."""
        return self.taken if self._table is None else self.taken + self._table.others(self._column)

    def _tell(self) -> None:
        if self._table is not None:
            self._table.put(self._column, self.taken)

    def free(self, client: str, count: int) -> bool:
        """Return whether a client may take so many more; an empty `client` is nobody in particular."""
        taken = self.all_taken
        if taken + count <= self.most or not taken:
            return True
        return self.has_few(client, count) and taken + count <= self.most + self._more

    def bears(self, client: str, count: int) -> bool:
        """Return whether a client may take so many more in one piece: as `free`, or if it has few before, unless twice
        the places are taken."""
        return self.free(client, count) or (self.has_few(client) and self.all_taken <= 2 * self.most)

    def flooded(self, client: str) -> bool:
        """Return whether twice the places are taken, and a client has more than few of them."""
        return self.all_taken > 2 * self.most and not self.has_few(client)

    def has_few(self, client: str, count: int = 0) -> bool:
        """Return whether a client has few places, together with `count` more."""
        return client != "" and self._taken_by[client] + count <= self._few

    def take(self, client: str, count: int = 1) -> None:
        """Count places as taken."""
        self.taken += count
        self._taken_by[client] += count
        self._tell()

    def give(self, client: str, count: int = 1) -> None:
        """Count places as free."""
        self.taken -= count
        self._taken_by[client] -= count
        if self._taken_by[client] <= 0:
            del self._taken_by[client]
        self._tell()


class AdmissionControl:
    """Limits the running requests and drains them before the end.

    A client's name is empty where all are to be one client.

    Args:
        options: the limits.
        table: of the server's fronts, which have them together; None if there is one.

    Attributes:
        connections: the places of connections; the protocol takes them.
        buffers: bytes that connections keep, because they are not parsed yet or the client does not read them.
        draining: the server is about to end.
        cut: the server ends now and cancels running requests.
        num_refused: requests that were refused because too many ran.
    """

    def __init__(self, options: ServerOptions, table: FrontTable | None = None) -> None:
        self._table = table
        self._answers = Places(options.max_requests, table)
        self._idle = asyncio.Event()
        self._idle.set()
        self._max_held = options.max_reading_bytes
        # One client leaves the others a fourth, and may send one body in any case. Each front counts by itself.
        num_fronts = 1 if table is None else table.place.count
        self._max_held_by_client = max(options.max_body_bytes, options.max_reading_bytes * 3 // 4 // num_fronts)
        self._held = 0
        self._held_by: Counter[str] = Counter()
        self.connections = Places(options.max_connections)
        self.buffers = Places(max(1, options.max_reading_bytes // 2 // num_fronts))
        self.draining = False
        self.cut = False
        self.num_refused = 0
        self._tasks: set[asyncio.Task[object]] = set()
        self._num_passing = 0

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Register the current task, which passes on what another front answers, until it ends."""
        self._num_passing += 1
        self._idle.clear()
        try:
            with self.known():
                yield
        finally:
            self._num_passing -= 1
            self._rest()

    def _rest(self) -> None:
        if not self.busy and not self._num_passing:
            self._idle.set()

    @contextmanager
    def known(self) -> Iterator[asyncio.Task[object]]:
        """Register the current task, which answers a request, so that `cut_off` cancels it."""
        task = asyncio.current_task()
        assert task is not None, "requests are answered in tasks"
        self._tasks.add(task)
        try:
            yield task
        finally:
            self._tasks.discard(task)

    def cut_off(self) -> None:
        """Cancel all running requests; `CutOff` answers their clients."""
        self.cut = True
        for task in self._tasks:
            task.cancel()

    @property
    def busy(self) -> int:
        """Number of running answers."""
        return self._answers.taken

    @contextmanager
    def admitted(self, answers: int = 1, client: str = "") -> Iterator[None]:
        """Reserve `answers` running answers of a client.

        Raises:
            HttpError: 503 with Retry-After, at once, if there are too many or the server is about to end.
        """
        self.check(answers, client)
        self._answers.take(client, answers)
        self._idle.clear()
        try:
            yield
        finally:
            self._answers.give(client, answers)
            self._rest()

    def check(self, answers: int = 1, client: str = "") -> None:
        """Raise what `admitted` would, so that a full server need not read a body that it will refuse."""
        if self.draining:
            raise HttpError(
                503,
                "The server is shutting down.",
                "Try again after the restart.",
                code="draining",
                headers={"Retry-After": "30"},
            )
        if not self._answers.free(client, answers):
            self.num_refused += 1
            raise _busy("The server has too many running requests.")

    def crowded(self, peer: str) -> bool:
        """True if there are too many connections, and more than a few of them are this peer's."""
        return not self.connections.free(peer, 0)

    @property
    def held_bytes(self) -> int:
        """Bytes of the bodies that are being read or prepared."""
        return self._held

    def most_held(self, client: str) -> int:
        """How many bytes one client may ever have held; without a name, what all may."""
        return self._max_held_by_client if client else self._max_held

    def hold(self, client: str = "") -> Hold:
        """Reserve the bytes of one body of a client until it is released."""
        return Hold(self, client)

    def hold_columns(self, num_bytes: int, param: str = "prompt_logprobs", client: str = "") -> Hold:
        """Reserve the bytes of log-probabilities of prompts, and of many of an answer, until they are released.

        Args:
            num_bytes: the most that there may be.
            param: the field that asks for them.
            client: who asks.

        Raises:
            HttpError: 400 if they alone are too many; 503 if they are together with all bodies.
        """
        most = self.most_held(client)
        if num_bytes > most:
            raise HttpError(
                400,
                f"The log-probabilities that {param} asks for take up to {num_bytes >> 20} MiB; "
                f"the server holds at most {most >> 20} MiB of one client.",
                "Ask for fewer candidates, fewer or shorter answers (max_tokens), or send fewer prompts at once.",
                param=param,
            )
        held = self.hold(client)
        held.grow(num_bytes)
        return held

    def take(self, num_bytes: int, client: str) -> None:
        """Count bytes of a client's body.

        Raises:
            HttpError: 503 with Retry-After if all bodies together are too large, or those of the client.
        """
        others = 0 if self._table is None else self._table.others(Column.HELD_BYTES)
        if others + self._held + num_bytes > self._max_held:
            raise _busy("The server has too many large requests.")
        if client and self._held_by[client] + num_bytes > self._max_held_by_client:
            raise _busy("The server has too many large requests of yours.")
        self._hold_bytes(num_bytes, client)

    def give(self, num_bytes: int, client: str) -> None:
        """Stop counting bytes that were taken."""
        self._hold_bytes(-num_bytes, client)
        if self._held_by[client] <= 0:
            del self._held_by[client]

    def _hold_bytes(self, more: int, client: str) -> None:
        self._held += more
        self._held_by[client] += more
        if self._table is not None:
            self._table.put(Column.HELD_BYTES, self._held)

    async def idle(self) -> None:
        """Wait until no request is running."""
        await self._idle.wait()


class Hold:
    """The bytes of one body, as a context or until `release`.

    The first bytes are not counted, so that large bodies never keep small ones out.

    Attributes:
        client: whose body it is.
        size: its bytes, and what it takes parsed beyond these.
        parsed: the latter.
        counted: the bytes that count.
        slow: whether it is checked in threads, because it is large or holds many objects.
    """

    def __init__(self, admission: AdmissionControl, client: str = "") -> None:
        self._admission = admission
        self.client = client
        self.size = 0
        self.parsed = 0
        self.counted = 0
        self.slow = False

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Stop counting the body; a second call does nothing."""
        self._admission.give(self.counted, self.client)
        self.counted = 0

    def read(self, num_bytes: int, param: str) -> None:
        """Count `num_bytes` more, which are checked with the body.

        Args:
            param: the field that names them.

        Raises:
            HttpError: 400 if they are too many for one client at any time; 503 if all bodies together are too large.
        """
        most = self._admission.most_held(self.client)
        if self.size + num_bytes > most:
            raise HttpError(
                400,
                f"What {param} names takes {num_bytes >> 20} MiB, and the server reads at most {most >> 20} MiB of one "
                "client at a time.",
                "Send the last messages in `input` instead; or the operator raises --max-reading-mib.",
                param=param,
            )
        self.grow(num_bytes)
        self.slow = self.slow or num_bytes > limits.INLINE_BYTES

    def grow_within(self, num_bytes: int) -> None:
        """Count up to `num_bytes` more, but in all no more than one client may have: a body that may be sent is read.

        Raises:
            HttpError: 503 if all bodies together are too large, or those of the client.
        """
        further = max(0, min(num_bytes, self._admission.most_held(self.client) - self.size))
        self.grow(further)
        self.parsed += further

    def resize(self, num_bytes: int) -> None:
        """Count `num_bytes` in all, until `release`.

        Raises:
            HttpError: 503 if they are more than before, and all bodies together are too large.
        """
        if num_bytes > self.size:
            self.grow(num_bytes - self.size)
        else:
            self.shrink(num_bytes)

    def shrink(self, num_bytes: int) -> None:
        """Count `num_bytes` in all, which is less than before; after `release` nothing changes."""
        self.size = num_bytes
        less = self.counted - max(0, num_bytes - limits.FREE_BYTES)
        if less > 0:
            self._admission.give(less, self.client)
            self.counted -= less

    def grow(self, num_bytes: int) -> None:
        """Count `num_bytes` more.

        Raises:
            HttpError: 503 if all bodies together are too large.
        """
        self.size += num_bytes
        more = max(0, self.size - limits.FREE_BYTES) - self.counted
        if more > 0:
            self._admission.take(more, self.client)
            self.counted += more


def _busy(reason: str) -> HttpError:
    return HttpError(503, reason, "Try again.", code="busy", headers={"Retry-After": "1"})
