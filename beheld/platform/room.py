"""Whether this machine has room for the processes that an engine's options ask for, asked before any of them starts."""

from __future__ import annotations

import os
from collections.abc import Mapping

from beheld.core.config import EngineArgs
from beheld.core.engine_numbers import check_numbers
from beheld.core.errors import ConfigError
from beheld.platform.driver import Driver
from beheld.platform.probe import driver_of

# A CPU with fewer cores takes so many processes all the same: what will run on eight GPUs is tried on it.
_TRIED = 8


def check_room(args: EngineArgs) -> None:
    """Check how many ranks, stages and engines are asked for, as far as that shows before torch is loaded.

    Raises:
        ConfigError: a count is no whole number from 1; there are fewer GPUs than several engines need; or a CPU has far
            fewer cores than there would be processes.
    """
    check_numbers(args)
    ranks = args.num_ranks
    engines = 1 if args.data_parallel_backend == "ray" else args.data_parallel_size
    if args.distributed_executor_backend == "external_launcher":
        return
    driver = driver_of(args.device)
    if driver is not None:
        # A single engine runs on one GPU if there are fewer than it asks for.
        if engines > 1:
            devices(engines, ranks, driver, os.environ, driver.num_devices())
        return
    shared = args.distributed_executor_backend == "mp" and ranks > 1
    wanted = engines * (ranks if shared else 1)
    cores = len(os.sched_getaffinity(0))
    most = max(cores, _TRIED)
    if wanted > most:
        raise ConfigError(
            f"The options ask for {wanted} processes, and this machine has {cores} cores.",
            f"Ask for {most} at most: data_parallel_size times tensor_parallel_size times pipeline_parallel_size.",
            param="data_parallel_size" if engines > 1 else "tensor_parallel_size",
        )


def devices(
    num_engines: int, devices_each: int, driver: Driver, given: Mapping[str, str], num_devices: int | None
) -> list[str]:
    """Return the names of the GPUs of this machine that a process with these variables sees.

    Args:
        driver: of these GPUs.
        num_devices: all GPUs of this machine; None if unknown.

    Raises:
        ConfigError: there are fewer than the engines need.
    """
    wanted = num_engines * devices_each
    names = driver.seen(given)
    if names is None:
        names = [str(i) for i in range(wanted if num_devices is None else num_devices)]
    if len(names) < wanted:
        raise ConfigError(
            f"data_parallel_size={num_engines} needs {wanted} GPUs, {devices_each} for each engine, and there are "
            f"{len(names)}.",
            "Give fewer engines.",
            param="data_parallel_size",
        )
    return names
