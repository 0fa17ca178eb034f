"""Processes that Ray places on the hosts of a cluster, each connected to this one.

Ray starts and ends them and shares out devices. Messages go over a connection of our own, without pickle.
"""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from beheld.cluster.handshake import Door, connect, new_token
from beheld.cluster.session import connected
from beheld.core.errors import ConfigError, EngineDeadError, first_line
from beheld.platform.probe import variable_prefixes
from beheld.utils.held_variables import HELD

# A cluster that grows by itself may need some time for a host.
_PLACE_S = 60.0
# On a busy host Ray may need minutes until a process runs, and starts it anew if it does not report in time. The first
# thing that the process does is to connect.
_START_S, _CONNECT_S = 600.0, 60.0
# A process whose connection has ended has so long to end by itself, which Ray does not report as a failure.
LEAVE_S = 1.0
# Variables that change what a process computes or how hosts reach each other; Ray sets those of devices.
_SENT = ("BEHELD_", "HF_", "GLOO_", "TORCH_", "TRANSFORMERS_", "OMP_", *variable_prefixes())
# Those of them that hold a secret end so.
_SECRET = ("_TOKEN", "_KEY")


@dataclass(frozen=True)
class Secrets:
    """Variables that no one may read, such as HF_TOKEN.

    They go to a process as an argument: Ray writes the variables of a process to its logs and shows them to all who
    ask for its state.
    """

    values: Mapping[str, str] = field(repr=False)

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Self:
        """Return those that a process elsewhere gets too."""
        return cls({name: value for name, value in given.items() if name.startswith(_SENT) and name.endswith(_SECRET)})

    def set(self) -> None:
        """Set them in this process."""
        os.environ.update(self.values)


@dataclass(frozen=True)
class Placement:
    """What a group of processes needs.

    Attributes:
        main: "module:function", which gets the connection and the token, and runs until it ends.
        count: how many processes.
        gpus_each: GPUs of each; 0 for one core of a CPU.
        with_caller: this process needs as much too, on its own host.
        asking, param: the option that asks, for messages.
    """

    main: str
    count: int
    gpus_each: int
    with_caller: bool
    asking: str
    param: str


class RemoteProcess:
    """A process on some host, with the methods of Popen that executors and engines call.

    Attributes:
        number: from 1, or from 0 without the caller.
        host: its address.
    """

    def __init__(self, ray: Any, actor: Any, ready: Any, running: Any, number: int) -> None:
        self._ray, self._actor, self._ready, self._running = ray, actor, ready, running
        self.number, self.host = number, ""
        self._end: socket.socket | None = None
        self._killed = False

    def joined(self, end: socket.socket) -> None:
        """Keep its connection, which `kill` cuts."""
        self._end, self.host = end, str(end.getpeername()[0])

    @property
    def pid(self) -> int:
        """Its number on its own host says nothing here."""
        return 0

    def poll(self) -> int | None:
        """None while it runs, else 0, also for one that was killed; Ray does not tell an exit code."""
        if self._killed:
            return 0
        try:
            done, _ = self._ray.wait([self._running], timeout=0)
        except Exception:
            # This process has left the cluster, which ended all of its processes.
            return 0
        return 0 if done else None

    def started(self, timeout_s: float = 0.0) -> bool:
        """Return whether Ray has started it within the time; it may have ended since."""
        return bool(self._ray.wait([self._ready], timeout=timeout_s)[0])

    def ending(self) -> str:
        """Why it has ended, in words."""
        try:
            self._ray.get(self._running, timeout=1)
        except Exception as error:
            cause = getattr(error, "cause", None) or error
            return f"failed ({type(cause).__name__}: {first_line(cause)})"
        return "has ended"

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended."""
        until = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired("process", timeout or 0.0)
            time.sleep(0.02)
        return 0

    def kill(self) -> None:
        """End it; what waits for it fails at once, also if its host does not answer any more."""
        self._killed = True
        if self._end is not None:
            try:
                self._end.shutdown(socket.SHUT_RDWR)
            except OSError:
                # The connection has ended already.
                self._end = None
        try:
            self._ray.kill(self._actor, no_restart=True)
        except Exception:
            # As in `poll`.
            return


class Worker:
    """An actor: the process in which `main` runs."""

    def run(self, main: str, address: str, port: int, number: int, token: bytes, secrets: Secrets) -> None:
        """Connect, and run until it ends."""
        secrets.set()
        module, _, name = main.partition(":")
        end = connect(address, port, number, token)
        getattr(importlib.import_module(module), name)(end, token)
        importlib.import_module("ray.actor").exit_actor()


@dataclass
class Group:
    """Connected processes.

    Attributes:
        ends: their connections, in the order of `processes`.
        address: of this host, where they reach it.
        token: what they and this process know.
    """

    processes: list[RemoteProcess]
    ends: list[socket.socket]
    address: str
    token: bytes
    release: Any


def start(wanted: Placement) -> Group:
    """Place processes and wait until all are connected.

    Raises:
        ConfigError: Ray is not installed, or the cluster has too little for them.
        EngineDeadError: one of them ended before it was connected.
    """
    ray = connected(wanted.asking, wanted.param)
    util = importlib.import_module("ray.util")
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    address = str(util.get_node_ip_address())
    first = 1 if wanted.with_caller else 0
    processes: list[RemoteProcess] = []
    bundles: list[dict[str, float]] = []
    held: Any = None
    if wanted.count > 1 or wanted.with_caller:
        # All or none: two groups that each hold a part of what they need would wait for each other.
        bundles = bundles_of(wanted, address, inside=ray.get_runtime_context().get_actor_id() is not None)
        held = util.placement_group(bundles, strategy="PACK")

    def strategy(place: int) -> Any:
        if held is None:
            return "SPREAD"
        index = len(bundles) - wanted.count + place
        return strategies.PlacementGroupSchedulingStrategy(held, placement_group_bundle_index=index)

    def release() -> None:
        try:
            if held is not None:
                util.remove_placement_group(held)
        except Exception:
            # This process has left the cluster, which frees everything.
            return

    door = Door(address, token := new_token())
    try:
        if held is not None and not _reserved(held):
            raise _too_little(wanted, ray.cluster_resources())
        actor = ray.remote(Worker)
        for place in range(wanted.count):
            made = actor.options(
                num_cpus=0 if wanted.gpus_each else 1,
                num_gpus=wanted.gpus_each,
                scheduling_strategy=strategy(place),
                runtime_env={"env_vars": environment(os.environ, sys.path)},
            ).remote()
            # Asked before `run`, behind which it would wait.
            ready = made.__ray_ready__.remote()
            number = first + place
            running = made.run.remote(wanted.main, address, door.port, number, token, Secrets.of(os.environ))
            processes.append(RemoteProcess(ray, made, ready, running, number))
            if held is None and not processes[-1].started(_PLACE_S):
                raise _too_little(wanted, ray.cluster_resources())
        ends = _connections(door, processes)
    except BaseException:
        for each in processes:
            each.kill()
        release()
        raise
    finally:
        door.close()
    return Group(processes, ends, address, token, release)


def bundles_of(wanted: Placement, address: str, *, inside: bool) -> list[dict[str, float]]:
    """Return what is reserved: for this process on its own host, then for each of the others.

    Args:
        inside: Ray runs this process too, and has given it what it needs.
    """
    each: dict[str, float] = {"GPU": wanted.gpus_each} if wanted.gpus_each else {"CPU": 1}
    own = [{**each, f"node:{address}": 0.001}] if wanted.with_caller and not inside else []
    return [*own, *(dict(each) for _ in range(wanted.count))]


def environment(given: Mapping[str, str], path: Sequence[str]) -> dict[str, str]:
    """Return the variables of a process elsewhere: those that change an answer, and where it finds beheld.

    Those that hold a secret are left to `Secrets`.
    """
    sent = {
        name: value
        for name, value in given.items()
        # What an engine of this process has set is right on this host alone.
        if name.startswith(_SENT) and not name.endswith(_SECRET) and not HELD.has_set(name, value)
    }
    sent.setdefault("BEHELD_LOG_LEVEL", "WARNING")
    return {**sent, "PYTHONPATH": os.pathsep.join(each for each in path if each)}


def _reserved(held: Any) -> bool:
    """Wait until a placement group has what it asks for, which needs no process of Ray's; return whether it has."""
    until = time.monotonic() + _PLACE_S
    # Signals are handled between two looks.
    while not (found := bool(held.wait(1))) and time.monotonic() < until:
        pass
    return found


def _too_little(wanted: Placement, there: Mapping[str, float]) -> ConfigError:
    kind, each = ("GPU", wanted.gpus_each) if wanted.gpus_each else ("CPU", 1)
    total = (wanted.count + wanted.with_caller) * each
    return ConfigError(
        f"{wanted.asking} needs {total} free {kind}s in the Ray cluster, which has {there.get(kind, 0):g} in all, "
        f"and did not get them in {_PLACE_S:g} s.",
        "Start Ray on more hosts (ray start --address=HEAD:6379), end what uses them, or give smaller numbers.",
        param=wanted.param,
    )


def _connections(door: Door, processes: Sequence[RemoteProcess]) -> list[socket.socket]:
    """Wait for all processes.

    Raises:
        EngineDeadError: one has ended, or they did not come in time.
    """
    found: dict[int, socket.socket] = {}
    until = time.monotonic() + _START_S
    # The processes that run, and the time by which each must have connected.
    limits: dict[int, float] = {}
    while len(found) < len(processes):
        came = door.accept(0.5)
        if came is not None:
            found.setdefault(*came)
            continue
        for each in processes:
            if each.number in found:
                continue
            reason = ""
            if each.poll() is not None:
                reason = each.ending()
            elif each.started():
                if time.monotonic() > limits.setdefault(each.number, time.monotonic() + _CONNECT_S):
                    reason = f"runs, but did not connect within {_CONNECT_S:g} s"
            elif time.monotonic() > until:
                reason = f"was not started within {_START_S:g} s"
            if reason:
                raise EngineDeadError(
                    f"Process {each.number} in the Ray cluster {reason}.",
                    "Its log on that host says why (by default below /tmp/ray/session_latest/logs). Hosts need the "
                    "same versions of Python and beheld, and must reach this one.",
                )
    for each in processes:
        each.joined(found[each.number])
    return [found[each.number] for each in processes]
