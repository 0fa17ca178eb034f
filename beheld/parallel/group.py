"""The group of ranks that share a model, and its collectives: gloo between CPUs, a platform's library between GPUs.

Small sums between GPUs that reach one another's memory are a kernel of our own (peers.py).

The groups are made without torch.distributed's default group, so a caller's own use of that is not disturbed. How ranks
find each other and at which address they connect is said in meeting.py.
"""

from __future__ import annotations

import ctypes
import datetime
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from beheld.parallel import host_sums
from beheld.parallel.connections import Connections
from beheld.parallel.host_sums import HostSums
from beheld.parallel.meeting import Folder, Meeting, interface_of
from beheld.parallel.peers import PeerSums
from beheld.platform import operators
from beheld.platform.platform import Collectives
from beheld.utils import env
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# The watchdog of the executor notices ranks that are gone or stuck; this limit is only the last resort, because loading
# weights may take one rank minutes longer than another.
_HOST = torch.device("cpu")
_LIMIT = datetime.timedelta(minutes=60)
_LEAVE_S = 5.0
# How often a rank looks whether the others ask the same.
_ASK_S = 0.01
# Sends that are under way at once.
_SENT = 32
# What the store calls the path of the memory that ranks of one host share.
_MEMORY = "memory"

_groups: dict[int, RankGroup] = {}


class RankGroup:
    """One rank's view of the group. All ranks call the same methods in the same order, one thread each.

    Args:
        rank, size: which rank this process is, and how many there are.
        folder: a folder for this group alone, readable by this user only; or another place where ranks meet.
        collectives: what sums and gathers tensors of the model's device; None for gloo. See Platform.
        ready: called before this rank connects to the others, at its first collective. Connecting cannot be
            interrupted, so it returns when all ranks are about to connect, or raises.

    Attributes:
        number: names the group in compiled code.
        entered: collectives that this rank has begun, since the start.
        waits_since: when it began the one that it waits in, by time.monotonic; None if it waits in none.
        broken: a collective has failed, so none can be entered any more.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        folder: Path | Meeting,
        collectives: Collectives | None,
        ready: Callable[[], None],
    ) -> None:
        self.rank, self.size = rank, size
        self.entered = 0
        self.broken = False
        self.waits_since: float | None = None
        self._meeting = Folder(folder) if isinstance(folder, Path) else folder
        self._collectives, self._ready = collectives, ready
        self._store: Any = None
        self._host: Any = None
        self._device: Any = None
        # Between GPUs, what carries tensors to lower ranks; see open_lines.
        self._back: Any = None
        self._holds = False
        self._connections: Connections | None = None
        self._near: HostSums | None = None
        self._peers: PeerSums | None = None
        self._peers_known = size == 1 or collectives is None or not env.PEER_SUMS() or not self._meeting.one_host
        # What is being sent must stay.
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self.number = max(_groups, default=0) + 1
        _groups[self.number] = self

    def _connect(self) -> None:
        from torch import distributed
        from torch._C._distributed_c10d import AllgatherOptions

        # Its stubs lack what is used here.
        dist: Any = distributed

        self._ready()
        store, address = self._meeting.store(self.size), self._meeting.address
        self._store = store
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = _LIMIT
        opening = Connections(address)
        self._host = dist.ProcessGroupGloo(dist.PrefixStore("host", store), self.rank, self.size, options)
        opening.opened()
        self._connections = opening
        self._device = self._host
        if self._collectives is not None:
            self._collectives.hold(interface_of(address))
            self._holds = True
            self._device = self._own_group(self._collectives, "device")
        self._sum, self._least, self._gather, self._cast = (
            dist.AllreduceOptions(),
            dist.AllreduceOptions(),
            AllgatherOptions(),
            dist.BroadcastOptions(),
        )
        self._least.reduceOp = dist.ReduceOp.MIN
        if self._collectives is None and self._meeting.one_host and self.size > 1:
            self._near = self._find_near()
        # On the caller's stream, so that a CUDA graph captured on it holds the collective.
        for each in (self._sum, self._gather, self._cast):
            each.asyncOp = False

    def _own_group(self, collectives: Collectives, name: str) -> Any:
        from torch import distributed

        # Its stubs lack what is used here.
        dist: Any = distributed
        return collectives.group(dist.PrefixStore(name, self._store), self.rank, self.size, _LIMIT)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        if self.broken:
            # After that, Gloo would end a process that continues.
            raise RuntimeError("The connection to another rank has failed.")
        if self._host is None:
            self._connect()
        self.entered += 1
        self.waits_since = time.monotonic()
        try:
            yield
        except Exception:
            self.broken = True
            raise
        finally:
            self.waits_since = None

    def sum_(self, x: Tensor) -> None:
        """Replace `x`, in place, by its sum over all ranks, which has the same bits on each."""
        if not x.numel():
            return
        if self._by_host(x):
            host = x.cpu()
            self.sum_(host)
            x.copy_(host)
            return
        dense = x.contiguous()
        if not self._peers_known:
            self._peers_known = True
            self._peers = self._find_peers(x.device)
        with self._waiting():
            if self._near is not None:
                self._near.sum_(dense)
            elif self._peers is not None and self._peers.takes(dense):
                self._peers.sum_(dense)
            else:
                _finish(self._device.allreduce([dense], self._sum))
        if dense.data_ptr() != x.data_ptr():
            x.copy_(dense)

    def _by_host(self, x: Tensor) -> bool:
        """Whether `x` is on a device that ranks share (see BEHELD_ONE_GPU), and goes through the host's memory."""
        return self._collectives is None and x.device != _HOST

    def _find_near(self) -> HostSums | None:
        """Return memory that all ranks share, if each has it; called while they connect."""
        found: HostSums | None = None
        with ExitStack() as stack:
            path = ""
            try:
                if self.rank == 0:
                    path = stack.enter_context(host_sums.made())
            except (OSError, RuntimeError) as error:
                logger.debug("Sums are gloo's: %s.", error)
            if self.rank == 0:
                self._store.set(_MEMORY, path)
            else:
                path = self._store.get(_MEMORY).decode()
            try:
                found = HostSums(path, self.rank, self.size) if path else None
            except (OSError, RuntimeError) as error:
                logger.debug("Sums are gloo's: %s.", error)
            # Once all have answered, all have opened it.
            have = torch.tensor([found is not None], dtype=torch.int64)
            _finish(self._host.allreduce([have], self._least))
        return found if have.item() else None

    def _find_peers(self, device: torch.device) -> PeerSums | None:
        """Return sums by the GPUs' own memory if all ranks can have them and agree on a trial."""
        found: PeerSums | None = None
        reason = "another GPU cannot"
        try:
            found = PeerSums(self.rank, self.size, device, self.exchanged)
        except RuntimeError as error:
            reason = str(error)
        # Each rank asks in any case, for all must take the same way.
        if self.least([found is not None])[0]:
            assert found is not None
            # Now, so that `abort` ends the trial too.
            self._peers = found
            right, reason = False, "a trial gave another sum"
            try:
                right = found.tried()
            except Exception as error:
                # Also that the kernel cannot be compiled: the others learn it below, and do without the kernel.
                reason = str(error)
            if self.least([right])[0]:
                return found
            self._peers = None
        if found is not None:
            found.close()
        if self.rank == 0:
            library = "gloo" if self._collectives is None else self._collectives.name
            logger.info("All sums over GPUs are %s's: %s.", library, reason)
        return None

    def exchanged(self, own: bytes) -> list[bytes]:
        """Return all ranks' bytes, as many of each."""
        dense = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        out = dense.new_empty(self.size * len(own))
        with self._waiting():
            _finish(self._host._allgather_base(out, dense, self._gather))
        return [bytes(each.tolist()) for each in out.view(self.size, -1)]

    def joined(self, x: Tensor) -> Tensor:
        """Return all ranks' `x` (..., N), one after another along the last dimension: (..., N * size)."""
        sizes = (*x.shape[:-1], self.size * x.shape[-1])
        if not x.numel():
            return x.new_empty(sizes)
        if self._by_host(x):
            return self.joined(x.cpu()).to(x.device)
        dense = x.contiguous()
        with self._waiting():
            if self._near is not None:
                out = self._near.joined(dense)
            else:
                out = dense.new_empty(self.size * dense.numel())
                _finish(self._device._allgather_base(out, dense.view(-1), self._gather))
        return out.view(self.size, *dense.shape).movedim(0, -2).reshape(sizes)

    def copy_from(self, x: Tensor, source: int) -> None:
        """Overwrite a contiguous `x` by that of the rank `source`."""
        if not x.numel():
            return
        if self._by_host(x):
            host = x.cpu()
            self.copy_from(host, source)
            x.copy_(host)
            return
        with self._waiting():
            self._cast.rootRank = source
            _finish(self._device.broadcast([x], self._cast))

    def open_lines(self, device: torch.device) -> None:
        """Connect each rank with the next one and the last one with all others, the ways that stages send.

        Between GPUs the first send of a pair waits on the host until the other receives. Each direction has a
        communicator of its own: sends and receives of one run in order, so a send back could wait for one ahead that
        waits for it.
        """
        number, last = torch.zeros(1, device=device), self.size - 1
        for source, to in [*((rank, rank + 1) for rank in range(last)), *((last, rank) for rank in range(last))]:
            if self.rank == source:
                self.send(number, to)
            elif self.rank == to:
                self.receive(number, source)
        # Until the numbers are there.
        number.item()

    def send(self, x: Tensor, to: int) -> None:
        """Start sending a tensor to the rank `to`, which receives one of the same shape."""
        self._start(self._forth_end if to > self.rank else self._back_end, x.contiguous(), to)

    def send_host(self, x: Tensor, to: int) -> None:
        """Start sending a tensor of the host."""
        self._start(self._host_end, x, to)

    def _start(self, end: Callable[[], Any], x: Tensor, to: int) -> None:
        with self._waiting():
            self._sent.append((end().send([x], to, 0), x))
        while len(self._sent) > _SENT:
            _finish(self._sent.popleft()[0])

    def receive(self, x: Tensor, source: int) -> None:
        """Overwrite a contiguous tensor by one that the rank `source` sent."""
        with self._waiting():
            end = self._forth_end if source < self.rank else self._back_end
            _finish(end().recv([x], source, 0))

    def receive_host(self, count: int, source: int) -> list[int]:
        """Return so many whole numbers that the rank `source` sent from its host."""
        tensor = torch.empty(count, dtype=torch.int64)
        with self._waiting():
            _finish(self._host.recv([tensor], source, 0))
        found: list[int] = tensor.tolist()
        return found

    def _forth_end(self) -> Any:
        return self._device

    def _back_end(self) -> Any:
        if self._collectives is not None and self._back is None:
            self._back = self._own_group(self._collectives, "back")
        return self._device if self._back is None else self._back

    def _host_end(self) -> Any:
        return self._host

    def least(self, values: Sequence[int]) -> list[int]:
        """Return, for each place, the smallest value of all ranks; the host waits for them."""
        tensor = torch.tensor(list(values), dtype=torch.int64)
        with self._waiting():
            _finish(self._host.allreduce([tensor], self._least))
        found: list[int] = tensor.tolist()
        return found

    def alike(self, what: str, within_s: float) -> bool:
        """Return whether all ranks ask this with the same words within a time.

        No collective: a rank may ask while another one waits in a collective, which then says no.

        Args:
            what: words that are asked once.
        """
        if self._host is None:
            self._connect()
        until = time.monotonic() + within_s
        asked = [f"alike/{what}/{rank}" for rank in range(self.size)]
        try:
            self._store.set(asked[self.rank], "")
            # The store's own wait may take a second more.
            while not self._store.check(asked):
                if time.monotonic() > until:
                    return False
                time.sleep(_ASK_S)
        except Exception as error:
            logger.debug("%s: %s", what, error)
            return False
        return True

    def abort(self) -> None:
        """End what waits for ranks that are gone, on the device and on the host; any thread may call it."""
        device, peers, near = self._device, self._peers, self._near
        if self._connections is not None:
            self._connections.cut()
        if near is not None:
            near.abort()
        if peers is not None:
            peers.abort()
        _abort([each for each in (device, self._back) if each is not None and each is not self._host])

    def close(self) -> None:
        """Leave the group, once no CUDA graph holds a collective of it any more.

        A communicator waits for such graphs without end. If one is left after all, it stays, and nothing waits.
        """
        _groups.pop(self.number, None)
        self._sent.clear()
        if self._collectives is not None and self._holds:
            self._holds = False
            self._collectives.leave()
        device, back, host, peers = self._device, self._back, self._host, self._peers
        self._device = self._back = self._host = self._peers = self._near = None
        if peers is not None:
            peers.close()
        for each in _abort([each for each in (device, back) if each is not None and each is not host], _LEAVE_S):
            # Its destructor would wait as well, at the latest when the interpreter ends.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


class RankGroups:
    """The groups of one rank: those that share its stage, and those with its part in other stages.

    Args:
        number: the rank, of all; rank 0 is of the last stage.
        ranks, stages: how many share a stage, and how many stages there are.
        meeting: where all ranks find each other.
        collectives, ready: see RankGroup.

    Attributes:
        shared: None if a rank holds a stage alone.
        piped: its ranks are the stages in order; None if there is only one.
    """

    def __init__(
        self,
        number: int,
        ranks: int,
        stages: int,
        meeting: Meeting,
        collectives: Collectives | None,
        ready: Callable[[], None],
    ) -> None:
        self._logged = False
        self._ready = ready
        stage, part = stages - 1 - number // ranks, number % ranks
        self.shared = self._made("stage", stage, part, ranks, meeting, collectives)
        self.piped = self._made("part", part, stage, stages, meeting, collectives)

    def _made(
        self, kind: str, which: int, rank: int, size: int, meeting: Meeting, collectives: Collectives | None
    ) -> RankGroup | None:
        if size == 1:
            return None
        return RankGroup(rank, size, meeting.part(f"{kind}-{which}"), collectives, self._once)

    def _once(self) -> None:
        if not self._logged:
            self._logged = True
            self._ready()

    @property
    def all(self) -> list[RankGroup]:
        """Those that there are."""
        return [group for group in (self.shared, self.piped) if group is not None]

    @property
    def entered(self) -> int:
        """See RankGroup; of all."""
        return sum(group.entered for group in self.all)

    @property
    def waits_since(self) -> float | None:
        """See RankGroup; of the one in which it waits."""
        return next((group.waits_since for group in self.all if group.waits_since is not None), None)

    @property
    def broken(self) -> bool:
        """See RankGroup; of any."""
        return any(group.broken for group in self.all)

    @property
    def lockstep(self) -> bool:
        """Whether all ranks enter the same collectives in the same order."""
        return self.piped is None

    def least(self, values: Sequence[int]) -> list[int]:
        """See RankGroup; of all ranks."""
        found = list(values)
        for group in self.all:
            found = group.least(found)
        return found

    def abort(self) -> None:
        """See RankGroup."""
        _abort(self.all)

    def close(self) -> None:
        """See RankGroup."""
        for group in self.all:
            group.close()


def _abort(ending: Sequence[Any], within_s: float | None = None) -> list[Any]:
    """Abort communicators, all at once; returns those that have not ended within the time.

    A GPU's communicator frees memory at the end of an abort, and that waits for all kernels of the GPU: also for those
    of another communicator, which end only when that one is aborted.
    """
    threads = [threading.Thread(target=each.abort, name="beheld-leave", daemon=True) for each in ending]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(within_s)
    return [each for each, thread in zip(ending, threads, strict=True) if thread.is_alive()]


def _finish(work: Any) -> None:
    """Wait for a collective: the host, or on a GPU its stream. Without asyncOp there may be nothing to wait for."""
    if work is not None:
        work.wait()


def sum_over_ranks_(x: Tensor, group: RankGroup) -> Tensor:
    """Sum `x` over the ranks, in place, in compiled code as well; returns it."""
    if torch.compiler.is_compiling():
        torch.ops.beheld.rank_sum_(x, group.number)
    else:
        group.sum_(x)
    return x


def joined_over_ranks(x: Tensor, group: RankGroup) -> Tensor:
    """Return the ranks' `x` along the last dimension, in compiled code as well."""
    if torch.compiler.is_compiling():
        made: Tensor = torch.ops.beheld.rank_join(x, group.number, group.size)
        return made
    return group.joined(x)


def _sum(x: Tensor, group: int) -> None:
    _groups[group].sum_(x)


def _sum_shape(x: Tensor, group: int) -> None:
    """Describe the result for torch.compile: none."""


def _join(x: Tensor, group: int, size: int) -> Tensor:
    return _groups[group].joined(x)


def _join_shape(x: Tensor, group: int, size: int) -> Tensor:
    """Describe the result for torch.compile."""
    return x.new_empty((*x.shape[:-1], x.shape[-1] * size))


operators.register("rank_sum_(Tensor(a!) x, int group) -> ()", _sum, _sum_shape)
operators.register("rank_join(Tensor x, int group, int size) -> Tensor", _join, _join_shape)
