"""A runner whose memory was given back, and which is made again with the same capacity.

What depends on an address is made anew: the cache, the rows, the sampler, and graphs, which hold the addresses of all
that they read and are captured again. Weights stay where they are in the host's memory, at level 1. Otherwise they are
dropped and read from their files, which the host's page cache holds as long as it has room: a copy of our own would
hold them twice.
"""

from __future__ import annotations

import gc
from collections.abc import Collection
from typing import Any

from beheld.core.config import EngineConfig, ModelInfo
from beheld.core.errors import LoRAError
from beheld.core.request import LoRARequest
from beheld.core.sleep import MEMORY, EnginePart
from beheld.models.adapter import ModelAdapter
from beheld.platform.registry import platform_of
from beheld.runner.build import backends_of, load, make_runner
from beheld.runner.runner import ModelRunner
from beheld.utils.allocator import give_back_freed
from beheld.utils.frames import clear_frames
from beheld.utils.log import get_logger

logger = get_logger(__name__)


class SleepingRunner:
    """What is left of a runner.

    Args:
        hf_config, info: what it was built of.
        runner: the caller drops its own reference.
        level: 1 or 2, see Executor.sleep.
    """

    def __init__(self, hf_config: Any, info: ModelInfo, runner: ModelRunner, level: int) -> None:
        self._hf_config, self._info = hf_config, info
        self._config: EngineConfig = runner.config
        self._capacity = runner.capacity
        self._platform = platform_of(self._config.device)
        # Rows hold places of adapters.
        for row in range(self._config.max_num_seqs):
            runner.rows.release(row)
        adapter = runner.adapter
        slots = adapter.lora
        self._loras: tuple[LoRARequest, ...] = () if slots is None else slots.known()
        self._pinned: frozenset[int] = frozenset() if slots is None else slots.pinned
        self._adapter: ModelAdapter | None = adapter
        self._missing = set(MEMORY)
        self.sleep(level)

    def sleep(self, level: int) -> None:
        """Lack all again, and drop the weights unless the level leaves them where they are."""
        if level != 1 or not self._platform.shares_host_memory:
            self._adapter = None
        self._missing = set(MEMORY)

    def loras(self) -> tuple[LoRARequest, ...]:
        """The adapters that are in memory once it has woken up."""
        return self._loras

    def give_back(self) -> None:
        """Give to the system what was freed; no reference to the runner is left."""
        gc.collect()
        self._platform.empty_cache()
        give_back_freed()

    def wake_up(self, parts: Collection[EnginePart]) -> ModelRunner | None:
        """Take memory for these parts; returns the runner once both are there.

        The cache is allocated next to the weights, whichever is asked for first.

        Raises:
            ModelError, CapacityError: it sleeps on.
        """
        try:
            return self._taken(self._missing - set(parts))
        except BaseException as error:
            # Its frames hold what was taken.
            clear_frames(error)
            self.give_back()
            raise

    def _taken(self, missing: set[EnginePart]) -> ModelRunner | None:
        """Bring back all except what stays missing; after an error, what it lacks is as before."""
        adapter = self._adapter
        if EnginePart.WEIGHTS not in missing and adapter is None:
            adapter = self._loaded()
        if adapter is not None and not missing:
            return make_runner(adapter, backends_of(adapter, self._config), self._config, self._capacity)
        self._adapter, self._missing = adapter, missing
        return None

    def _loaded(self) -> ModelAdapter:
        """The model, read again, with its adapters."""
        adapter, _ = load(self._hf_config, self._info, self._config, again=True)
        for lora in self._loras:
            assert adapter.lora is not None, "adapters without slots"
            try:
                adapter.lora.add(lora)
            except LoRAError as error:
                logger.warning("The adapter %r is not in memory any more: %s", lora.lora_name, error)
        for number in self._pinned:
            assert adapter.lora is not None, "adapters without slots"
            adapter.lora.pin(number)
        return adapter
