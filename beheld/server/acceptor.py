"""Accepts connections, also at a socket from which several processes accept: each leaves them to those that have fewer.

Woken for the same connection, one process may be the first for a hundred in a row, and clients keep their connections.
So a front that has more of them than another waits a moment, in which that one accepts unless it is too busy. Those of
the first front count for more. The numbers are in a table that all fronts see.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections import deque
from collections.abc import Callable, Coroutine

from beheld.server.admission import Places
from beheld.server.front_table import AWAY, Column, FrontTable
from beheld.server.tls import Secure

# So many more than another a front may have.
_SLACK = 4
# Connections that are accepted in one turn of the loop, those that begin in one, and those that may wait for that.
_ACCEPTED_IN_TURN = 64
_BEGUN_IN_TURN = 6
_MOST_WAITING = 4096
# Connections of a client whose next requests or pieces wait for their turn; with more of them, no further one begins.
_MOST_QUEUED = 256
# Bytes of a connection that the system takes and cannot send yet. Without a limit these are megabytes for each client
# that does not read; what it does not take is counted (AdmissionControl.buffers).
_MOST_UNSENT = 128 << 10
# How long a front that has too many leaves connections to the others, and those of a client with too many queued wait.
_WAIT_S = 0.001
# How long none is accepted where the process has no descriptors left.
_PAUSE_S = 1.0
_EXHAUSTED = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


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


class Uncounted:
    """The same of a server with one process, which shares connections with none."""

    def begin(self) -> None:
        """Accept."""

    def come(self, count: int) -> None:
        """Count connections that are accepted."""

    def leave(self) -> None:
        """Accept no more."""

    def others_have_fewer(self) -> bool:
        """There are no others."""
        return False


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

    To serve one from its beginning takes a millisecond. A few begin in each turn of the loop, and clients take turns:
    one waits for no more than a few connections of another, however many that one opens and closes. What a client sends
    in a row on each of hundreds of connections waits for turns, and its further connections wait for that: as sockets
    they take little, where those that have begun take 40 KB and 45 objects each.

    Args:
        listener: the listening socket.
        connect: serves a connection; its task ends once the connection is counted.
        counts: the numbers of connections; uncounted if there is one process.
        peer_of: returns who has opened a connection, by its address; empty if all are to be one.
        num_queued: returns how many connections of a client wait for a turn.
    """

    def __init__(
        self,
        listener: socket.socket,
        connect: Callable[[socket.socket], Coroutine[None, None, None]],
        counts: ConnectionCounts | Uncounted,
        peer_of: Callable[[str], str] = lambda address: "",
        num_queued: Callable[[str], int] = lambda peer: 0,
    ) -> None:
        self._listener = listener
        self._connect = connect
        self._counts = counts
        self._peer_of = peer_of
        self._num_queued = num_queued
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = set[asyncio.Task[None]]()
        # The client that was served last is the last.
        self._waiting: dict[str, deque[socket.socket]] = {}
        self._num_waiting = 0
        listener.setblocking(False)
        counts.begin()
        self._loop.add_reader(listener, self._ready)

    def close(self) -> None:
        """Accept no more."""
        self._loop.remove_reader(self._listener)
        if self._timer is not None:
            self._timer.cancel()
        for line in self._waiting.values():
            for accepted in line:
                self._drop(accepted)
        self._waiting.clear()
        self._num_waiting = 0
        self._counts.leave()

    async def wait_closed(self) -> None:
        """Nothing is left to wait for."""

    def _ready(self) -> None:
        for _ in range(_ACCEPTED_IN_TURN):
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
            accepted, address = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise
            context = {"message": "socket.accept() out of system resource", "exception": error}
            self._loop.call_exception_handler(context)
            self._pause(_PAUSE_S)
            return False
        accepted.setblocking(False)
        if isinstance(address, tuple):
            # Not every system has it, and a client may have reset the connection.
            with contextlib.suppress(OSError):
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MOST_UNSENT)
        self._counts.come(1)
        peer = self._peer_of(address[0] if isinstance(address, tuple) else "")
        if self._num_waiting >= _MOST_WAITING and peer in self._waiting:
            self._drop(accepted)
            return True
        if not self._num_waiting:
            self._loop.call_soon(self._begin)
        self._num_waiting += 1
        self._waiting.setdefault(peer, deque()).append(accepted)
        return True

    def _begin(self) -> None:
        """Serve some of the connections that wait, and let the loop do something else before the next ones."""
        left, looked_at, passed = _BEGUN_IN_TURN, 0, 0
        while passed < len(self._waiting) and left and looked_at < _ACCEPTED_IN_TURN:
            looked_at += 1
            peer = next(iter(self._waiting))
            line = self._waiting.pop(peer)
            if peer and self._num_queued(peer) >= _MOST_QUEUED:
                self._waiting[peer] = line
                passed += 1
                continue
            passed = 0
            accepted = line.popleft()
            if line:
                self._waiting[peer] = line
            self._num_waiting -= 1
            if _has_left(accepted):
                self._drop(accepted)
                continue
            left -= 1
            task = self._loop.create_task(self._connect(accepted))
            self._tasks.add(task)
            task.add_done_callback(self._connected)
        if passed and passed == len(self._waiting):
            self._loop.call_later(_WAIT_S, self._begin)
        elif self._waiting:
            self._loop.call_soon(self._begin)

    def _drop(self, accepted: socket.socket) -> None:
        accepted.close()
        self._counts.come(-1)

    def _connected(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._counts.come(-1)


def _has_left(accepted: socket.socket) -> bool:
    """Whether the client has reset the connection, or closed it without having sent anything."""
    try:
        if accepted.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            return True
        return not accepted.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


async def connected(protocol: Callable[[], asyncio.Protocol], accepted: socket.socket, secure: Secure | None) -> None:
    """Serve an accepted connection; a client that leaves or fails in TLS meanwhile is no error."""
    with contextlib.suppress(OSError):
        if secure is None:
            await asyncio.get_running_loop().connect_accepted_socket(protocol, accepted)
        else:
            await secure.connect(protocol, accepted)
