"""Engines of the same model in processes of their own, each on devices of its own, and how a dead one is replaced.

With data_parallel_backend="ray" each is on some host of a Ray cluster.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

from beheld.cluster.session import connected
from beheld.core.config import EngineArgs, EngineConfig, ModelInfo
from beheld.core.errors import BeheldError, EngineDeadError
from beheld.core.media import MediaItem
from beheld.engine.messages import Tokenizer
from beheld.engine.process import EngineProcess, OnDecided, Spawned, spawn, spawn_elsewhere
from beheld.platform.driver import Driver
from beheld.platform.probe import driver_of, has_accelerator
from beheld.platform.room import devices
from beheld.utils.log import get_logger

logger = get_logger(__name__)


def environments(
    num_engines: int, devices_each: int, driver: Driver | None, given: Mapping[str, str], num_devices: int | None
) -> list[dict[str, str]]:
    """The variables of each engine's process.

    On GPUs, engine i sees the i-th group of `devices_each`. On a CPU, the engines divide the cores, unless
    OMP_NUM_THREADS is set, and the memory for caches.

    Args:
        driver: of the devices that the engines run on; None for a CPU.
        given: this process's variables.
        num_devices: the GPUs of this machine; None if unknown.

    Raises:
        ConfigError: there are fewer GPUs.
    """
    if driver is None:
        cores = max(1, len(os.sched_getaffinity(0)) // num_engines)
        own = {"OMP_NUM_THREADS": str(cores), "BEHELD_HOST_SHARES": str(num_engines)}
        return [{**own, **given} for _ in range(num_engines)]
    names = devices(num_engines, devices_each, driver, given, num_devices)
    groups = [names[i * devices_each : (i + 1) * devices_each] for i in range(num_engines)]
    return [{**given, **driver.seeing(group)} for group in groups]


def spawn_all(num_engines: int, ranks_each: int, device: str | None) -> list[Spawned]:
    """Start the processes; see `process.spawn` for when to call it.

    Raises:
        ConfigError: as `environments`.
    """
    driver = driver_of(device)
    num_devices = None if driver is None else driver.num_devices()
    made = environments(num_engines, ranks_each, driver, os.environ, num_devices)
    return [spawn(each) for each in made]


def spawn_all_elsewhere(args: EngineArgs) -> list[Spawned]:
    """Start the processes on the hosts of a Ray cluster, at the same time.

    Raises:
        ConfigError: Ray is not installed, or the cluster has no room for all.
        EngineDeadError: one ended before it was connected.
    """
    connected(_asking(args), "data_parallel_backend")
    with ThreadPoolExecutor(args.data_parallel_size) as threads:
        futures = [threads.submit(_spawn_elsewhere, args) for _ in range(args.data_parallel_size)]
    errors = [error for each in futures if (error := each.exception()) is not None]
    if not errors:
        return [each.result() for each in futures]
    for each in futures:
        if each.exception() is None:
            each.result().process.kill()
    raise errors[0]


def _asking(args: EngineArgs) -> str:
    return f"data_parallel_backend='ray' with {args.data_parallel_size} engines"


def _spawn_elsewhere(args: EngineArgs) -> Spawned:
    gpus_each = args.num_ranks if has_accelerator(args.device) else 0
    return spawn_elsewhere(_asking(args), gpus_each)


class ProcessGroup:
    """The engines of a group of processes; see data_parallel.Restarter for `restart` and `cancel`.

    Args:
        args: the user's options.
        spawned: the processes, if they already run.
        on_decided: see EngineProcess; the first engine's decisions.

    Attributes:
        engines: not yet started.
        info: the model's facts.
        config: the engines' common decisions.

    Raises:
        ConfigError, ModelError, CapacityError, EngineDeadError: as EngineProcess; no process is left.
    """

    def __init__(
        self, args: EngineArgs, spawned: Sequence[Spawned] | None = None, on_decided: OnDecided | None = None
    ) -> None:
        self._asked = args
        begun = spawned or (
            spawn_all_elsewhere(args)
            if args.data_parallel_backend == "ray"
            else spawn_all(args.data_parallel_size, args.num_ranks, args.device)
        )
        # Engines whose seeds differ would still answer alike, because requests bring their own; their logs would not.
        seed = args.seed if args.seed is not None else int.from_bytes(os.urandom(7), "little")
        self._args = replace(args, data_parallel_size=1, data_parallel_backend="mp", seed=seed)
        self._environments = [each.environment for each in begun]
        self._tokenizer: Callable[[], Tokenizer] | None = None
        self._now = False
        self._items: tuple[MediaItem, ...] = ()
        self._lock = threading.Lock()
        self._cancelled = False
        self._starting: list[Spawned] = []
        self.engines: list[EngineProcess] = _all(self._args, begun, on_decided)
        self.info: ModelInfo = self.engines[0].info
        # With little memory, an engine may have shrunk the longest sequence that it takes.
        shortest = min(engine.config.max_model_len for engine in self.engines)
        self.config: EngineConfig = replace(self.engines[0].config, max_model_len=shortest)
        self._args = replace(self._args, max_model_len=shortest)

    def use(self, tokenizer: Callable[[], Tokenizer], *, now: bool = False) -> None:
        """As EngineProcess.use, for all."""
        self._tokenizer, self._now = tokenizer, now
        for engine in self.engines:
            engine.use(tokenizer, now=now)

    def try_items(self, items: Sequence[MediaItem]) -> None:
        """As EngineProcess.try_items, on all at once."""
        self._items = tuple(items)
        with ThreadPoolExecutor(len(self.engines)) as threads:
            list(threads.map(lambda engine: engine.try_items(items), self.engines))

    def close(self) -> None:
        """End all processes, if the engines were never started."""
        for engine in self.engines:
            engine.close()

    def restart(self, index: int) -> EngineProcess:
        """A new engine with the devices of the one that had this number, or wherever a cluster has room."""
        elsewhere = self._asked.data_parallel_backend == "ray"
        begun = _spawn_elsewhere(self._asked) if elsewhere else spawn(self._environments[index])
        with self._lock:
            if self._cancelled:
                begun.process.kill()
            self._starting.append(begun)
        try:
            engine = EngineProcess(self._args, begun)
            try:
                if self._tokenizer is not None:
                    engine.use(self._tokenizer, now=self._now)
                if self._items:
                    engine.try_items(self._items)
            except BaseException:
                engine.close()
                raise
        finally:
            with self._lock:
                self._starting.remove(begun)
        return engine

    def cancel(self) -> None:
        """Kill what starts."""
        with self._lock:
            self._cancelled = True
            for begun in self._starting:
                begun.process.kill()


def _all(args: EngineArgs, begun: Sequence[Spawned], on_decided: OnDecided | None) -> list[EngineProcess]:
    """Start engines at the same time; if one fails, the others end and its error is raised.

    Args:
        on_decided: of the first.
    """
    with ThreadPoolExecutor(len(begun)) as threads:
        futures = [
            threads.submit(EngineProcess, args, each, None if index else on_decided) for index, each in enumerate(begun)
        ]
    made, errors = [], []
    for future in futures:
        try:
            made.append(future.result())
        except (BeheldError, OSError) as error:
            errors.append(error)
    if not errors:
        return made
    for engine in made:
        with suppress(OSError):
            engine.close()
    # A plain end of one process says less than another one's reason.
    errors.sort(key=lambda error: isinstance(error, EngineDeadError))
    raise errors[0]
