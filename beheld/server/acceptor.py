"""Accepts connections at a socket from which several processes accept: each leaves them to those that have fewer.

Woken for the same connection, one process may be the first for a hundred in a row, and clients keep their connections.
So a front that has more of them than another waits a moment, in which that one accepts unless it is too busy. Those of
the first front count for more. The numbers are in a table that all fronts see.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine

from beheld.server.admission import Places
from beheld.server.front_table import AWAY, Column, FrontTable
from beheld.server.listen import EXHAUSTED

# So many more than another a front may have; the most that it accepts in one turn of the loop.
_SLACK = 4
_IN_TURN = 64
# How long a front that has too many leaves connections to the others.
_WAIT_S = 0.001
# How long none is accepted where the process has no descriptors left.
_PAUSE_S = 1.0


class ConnectionCounts:
    """The numbers of connections of all fronts, by which new ones are shared out.

    Args:
        table: the table of the fronts.
    """

    def __init__(self, table: FrontTable) -> None:
        self._table = table
        self._taken = self._coming = 0
        self._accepts = False

    def begin(self) -> None:
        """Tell the others that this front accepts."""
        self._accepts = True
        self.tell()

    def set(self, taken: int) -> None:
        """Tell the others how many this front has."""
        self._taken = taken
        self.tell()

    def come(self, count: int) -> None:
        """Count connections that are accepted, and not yet among those that are `set`."""
        self._coming += count
        self.tell()

    @property
    def _own(self) -> int:
        return int((self._taken + self._coming) * self._table.place.weight)

    def tell(self) -> None:
        """Tell the others anew: they may have taken this front for one that hangs."""
        self._table.put(Column.SHARE, self._own if self._accepts else AWAY)

    def leave(self) -> None:
        """Tell the others that this front accepts no more."""
        self._accepts = False
        self.tell()

    def others_have_fewer(self) -> bool:
        """Whether another front has clearly fewer connections than this one."""
        return self._own > min(self._table.column(Column.SHARE)) + _SLACK


class CountedPlaces(Places):
    """Places of connections whose number the other fronts see."""

    def __init__(self, most: int, counts: ConnectionCounts, table: FrontTable) -> None:
        super().__init__(most, table, Column.CONNECTIONS)
        self._counts = counts

    def take(self, client: str, count: int = 1) -> None:
        """Count places as taken."""
        super().take(client, count)
        self._counts.set(self.taken)

    def give(self, client: str, count: int = 1) -> None:
        """Count places as free."""
        super().give(client, count)
        self._counts.set(self.taken)


class Acceptor:
    """Accepts connections in the event loop; the place of asyncio's server in uvicorn's list.

    Args:
        listener: the listening socket.
        connect: serves a connection; its task ends once the connection is counted.
        counts: the numbers of connections.
    """

    def __init__(
        self,
        listener: socket.socket,
        connect: Callable[[socket.socket], Coroutine[None, None, None]],
        counts: ConnectionCounts,
    ) -> None:
        self._listener = listener
        self._connect = connect
        self._counts = counts
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = set[asyncio.Task[None]]()
        listener.setblocking(False)
        counts.begin()
        self._loop.add_reader(listener, self._ready)

    def close(self) -> None:
        """Accept no more."""
        self._loop.remove_reader(self._listener)
        if self._timer is not None:
            self._timer.cancel()
        self._counts.leave()

    async def wait_closed(self) -> None:
        """Nothing is left to wait for."""

    def _ready(self) -> None:
        for _ in range(_IN_TURN):
            if self._counts.others_have_fewer():
                self._pause(_WAIT_S)
                return
            if not self._accept():
                return

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        self._timer = self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        """Accept what nobody else has accepted meanwhile."""
        self._timer = None
        self._loop.add_reader(self._listener, self._ready)
        self._accept()

    def _accept(self) -> bool:
        """Accept a connection; False if there was none."""
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False
        except OSError as error:
            if error.errno not in EXHAUSTED:
                raise
            context = {"message": "socket.accept() out of system resource", "exception": error}
            self._loop.call_exception_handler(context)
            self._pause(_PAUSE_S)
            return False
        accepted.setblocking(False)
        self._counts.come(1)
        task = self._loop.create_task(self._connect(accepted))
        self._tasks.add(task)
        task.add_done_callback(self._connected)
        return True

    def _connected(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._counts.come(-1)


async def connected(
    loop: asyncio.AbstractEventLoop, protocol: Callable[[], asyncio.Protocol], accepted: socket.socket, tls: object
) -> None:
    """Serve an accepted connection; a client that leaves or fails in TLS meanwhile is no error."""
    with contextlib.suppress(OSError):
        await loop.connect_accepted_socket(protocol, accepted, ssl=tls)  # type: ignore[arg-type]
