"""The executor of several ranks: the first in the caller's process, each other in its own, on this machine.

The first rank sends every plan to the others, in one message a step, and runs it itself. They meet in the collectives
of the model; the first rank samples. A rank that fails alone, ends or hangs ends the engine (watchdog.py).
"""

from __future__ import annotations

import functools
import gc
import os
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch

from beheld.core.config import EngineConfig, ModelInfo
from beheld.core.errors import BeheldError, ConfigError, EngineDeadError, LoRAError, StepError, first_line
from beheld.core.media import MediaItem
from beheld.core.plan import StepPlan, StepResult
from beheld.core.request import LoRARequest
from beheld.core.sleep import EnginePart
from beheld.executor.executor import ModelSize, Watch
from beheld.executor.hangs import Patience, StepSize
from beheld.executor.rank import config_of, config_text
from beheld.executor.rank_folder import RankFolder
from beheld.executor.watchdog import RankProcess, Watchdog
from beheld.executor.wire import (
    CODEC,
    Added,
    AddRankLoRA,
    AskChecksums,
    AskMissing,
    Checksums,
    CloseRank,
    Joining,
    Missing,
    PinLoRA,
    RankItems,
    RemoveLoRA,
    Started,
    StartRank,
    Step,
    Sync,
    Synced,
    packed,
    with_features,
)
from beheld.parallel.group import RankGroups
from beheld.parallel.meeting import Folder, Meeting
from beheld.parallel.shared_items import owners_of, shares_items
from beheld.parallel.stages import cuts
from beheld.platform.registry import platform_of
from beheld.utils import env, working_directory
from beheld.utils.exit_hook import ExitHook
from beheld.utils.log import get_logger
from beheld.wire.codec import Encoded
from beheld.wire.link import Link, pair

if TYPE_CHECKING:
    from beheld.executor.local import LocalExecutor
    from beheld.runner.runner import Handle

logger = get_logger(__name__)

# All ranks leave a failed step at nearly the same time.
_SYNC_S = 8.0
_CLOSE_S = 2.0
# Loading weights takes this long at most; a rank that ends before is noticed at once.
_START_S = 3600.0
# Files of features that are reused, see Link.
_MAX_KEPT = 2


@dataclass(frozen=True)
class Placed:
    """The processes of all ranks but the first, which load their libraries, and where all ranks find each other.

    Attributes:
        meet: where; called once torch is loaded.
        ended: called when all have ended.
    """

    ranks: list[RankProcess]
    meet: Callable[[], Meeting]
    ended: Callable[[], None]


@dataclass(eq=False)
class Later:
    """A step that the other ranks have and the first one begins later.

    Attributes:
        handle, error: once it has begun, one of the two.
    """

    plan: StepPlan
    handle: Handle | None = None
    error: Exception | None = None


class MultiExecutor:
    """Runs plans on all ranks.

    The first rank is of the last stage. Where a step computes in the caller's thread, it would wait in `launch` for
    what earlier stages compute of it; so it begins the step in `collect`, when they are already at the next one.

    Args:
        local: the first rank's executor.
    """

    def __init__(
        self, info: ModelInfo, local: LocalExecutor, group: RankGroups, placed: Placed, watchdog: Watchdog
    ) -> None:
        self._local, self._group, self._ranks, self._watchdog = local, group, placed.ranks, watchdog
        self._ended = placed.ended
        # A script may end without closing its engine. The hook does not refer to this executor, which may go before.
        self._at_exit = ExitHook(functools.partial(_leave, watchdog, placed.ended))
        self.config, self.capacity = local.config, local.capacity
        self._syncs = 0
        # Ranks from this one on are of the first stage, which has the towers.
        self._first_encoder = (local.config.pipeline_parallel_size - 1) * local.config.tensor_parallel_size
        self._shares_items = shares_items(local.config, info)
        self._synchronous = platform_of(local.config.device).synchronous
        self._waits = not group.lockstep and self._synchronous
        # Steps that the first rank has not begun, by the ids of their plans.
        self._later: dict[int, Later] = {}
        watchdog.not_begun = self._later

    @classmethod
    def unshared(cls, info: ModelInfo) -> str | None:
        """Return why every rank would hold all of this model, in words; None if they share it."""
        from beheld.runner.rank_checks import unshared

        return unshared(info)

    @classmethod
    def size(cls, hf_config: Any, info: ModelInfo, config: EngineConfig) -> ModelSize:
        """See Executor; of one rank's part."""
        from beheld.runner.build import count_weights

        weights = count_weights(hf_config, info, config)
        plan, num_sums = weights.shards, 0
        if plan is not None:
            info = plan.local(info)
            num_sums = sum(shard.summed is not None and not shard.tower for shard in plan.shards)
            num_sums += plan.embedding is not None
        if weights.stage is not None:
            info = weights.stage.widest(info)
        return ModelSize(weights.num_parameters, weights.num_bytes, info.kv_groups, num_sums, weights.cost)

    @classmethod
    def available_bytes(cls, config: EngineConfig) -> int:
        """See Executor; of one rank."""
        from beheld.executor.local import LocalExecutor

        return LocalExecutor.available_bytes(config)

    @classmethod
    def place(cls, config: EngineConfig) -> Placed:
        """Start the processes of the other ranks.

        Raises:
            ConfigError, EngineDeadError: they cannot be started.
        """
        # Readable by this user alone. Ranks find each other in it, and agree in it on errors until they end.
        folder = RankFolder()
        ranks: list[RankProcess] = []
        try:
            ranks.extend(_spawn(rank, config) for rank in range(1, config.num_ranks))
        except BaseException:
            _abandon(ranks)
            folder.remove()
            raise
        return Placed(ranks, lambda: Folder(folder.path), folder.remove)

    @classmethod
    def start(cls, hf_config: Any, info: ModelInfo, config: EngineConfig, *, shrink: bool) -> Self:
        """See Executor.

        Raises:
            ModelError, CapacityError: as on one device; the model cannot be shared; or another rank raised it.
            ConfigError: the layers cannot be cut into so many stages.
        """
        # Before processes start, for their libraries take seconds.
        cuts(info.num_layers, info, config.pipeline_parallel_size)
        hf_class, hf_text = config_text(hf_config)
        hf_config = config_of(hf_class, hf_text)
        quiet = replace(config, show_progress=False, logits_processors=())
        platform = platform_of(config.device)
        try:
            # A script's environment was not looked at before.
            factor = env.HANG_FACTOR()
        except ValueError as error:
            raise ConfigError(f"{error}.", "Set another number, or leave it out.") from error
        placed = cls.place(config)
        ranks = placed.ranks
        try:
            meeting = placed.meet()
            group = RankGroups(
                0,
                config.tensor_parallel_size,
                config.pipeline_parallel_size,
                meeting,
                platform.collectives,
                lambda: joined(watchdog, ranks),
            )
        except BaseException:
            _abandon(ranks)
            placed.ended()
            raise
        equal = not config.expert_parallel and config.mm_encoder_tp_mode != "data"
        patience = Patience.of(synchronous=platform.synchronous, lockstep=group.lockstep, equal=equal, factor=factor)
        watchdog = Watchdog(ranks, group, patience)
        try:
            # Only now, while the other ranks import the same.
            from beheld.executor.local import LocalExecutor
            from beheld.runner.build import build_runner

            for each in ranks:
                _tell(each, StartRank(each.rank, str(meeting), hf_class, hf_text, info, quiet, shrink), watchdog)
            runner = build_runner(hf_config, info, config, shrink=shrink, groups=group)
            if platform.synchronous:
                watchdog.clock.count(runner.adapter.layers())
                watchdog.hangs.count(info.hidden_size)
            local = LocalExecutor(runner)
            for each in ranks:
                started = _answer(each, Started, watchdog, _START_S)
                assert (started.max_model_len, started.capacity) == (local.config.max_model_len, local.capacity)
                each.started, each.beat_at = True, time.monotonic()
        except BaseException as error:
            cause = watchdog.cause
            _stop(watchdog, ranks)
            group.close()
            placed.ended()
            if cause is not None and isinstance(error, Exception):
                raise cause from error
            raise
        return cls(info, local, group, placed, watchdog)

    def try_items(self, items: Sequence[MediaItem]) -> None:
        """See Executor."""
        self._tell_all(RankItems(tuple(items)))
        self._local.try_items(items)

    def launch(self, plan: StepPlan) -> Handle | Later:
        """See Executor."""
        step = packed(plan)
        # What is the same for all ranks is serialized once.
        same = None if step.encode else Encoded(CODEC.encode(step))
        for each in self._ranks:
            _tell(each, same or self._own_features(step, each.rank), self._watchdog)
        self._watchdog.hangs.launched(plan.id, _size(plan))
        if self._waits:
            self._later[plan.id] = later = Later(plan)
            return later
        try:
            with self._watchdog.clock.step():
                return self._local.launch(plan)
        except Exception as error:
            self._failed(plan.id, error)
            raise

    def _own_features(self, step: Step, rank: int) -> Step:
        """Return the message for a rank: it holds features only of the items that this rank encodes or copies."""
        if rank < self._first_encoder:
            return with_features(step, lambda item: False)
        if not self._shares_items:
            return step
        ranks = self.config.tensor_parallel_size
        owners, part = owners_of(step.encode, ranks), rank % ranks
        return with_features(step, lambda item: owners.get(item.digest, part) == part)

    def collect(self, handle: Handle | Later) -> StepResult:
        """See Executor."""
        number = handle.plan.id if isinstance(handle, Later) else handle.plan_id
        try:
            with self._watchdog.clock.step():
                begun = self._begun(handle) if isinstance(handle, Later) else handle
                result = self._local.collect(begun)
        except Exception as error:
            # Ranks that share this stage wait in the next steps for this one.
            self._begin_all()
            self._failed(number, error)
            raise
        if self._watchdog.cause is not None:
            raise self._watchdog.error()
        # Nobody waits for the device where a step gives nothing.
        if self._synchronous or begun.ready is not None:
            self._watchdog.hangs.finished(number, time.monotonic())
        return result

    def _begun(self, step: Later) -> Handle:
        """Begin all steps up to this one; return its handle, or raise its error."""
        while step.handle is None and step.error is None:
            self._begin_next()
        if step.error is not None:
            raise step.error
        assert step.handle is not None
        return step.handle

    def _begin_all(self) -> None:
        while self._later and not self._group.broken:
            self._begin_next()

    def _begin_next(self) -> None:
        number = next(iter(self._later))
        # From here on, the watchdog may ask why this rank does not fail when another one has.
        step = self._later.pop(number)
        try:
            step.handle = self._local.launch(step.plan)
        except Exception as error:
            self._watchdog.failed(number)
            step.error = error
        except BaseException:
            step.error = StepError("The step was interrupted.")
            raise

    def _failed(self, step: int, error: Exception) -> None:
        """Return once all ranks have left a step that failed on this one.

        Raises:
            EngineDeadError: they have not, or are gone.
        """
        if isinstance(error, EngineDeadError):
            self._watchdog.end(error)
            return
        self._watchdog.failed(step)
        if self._watchdog.cause is None:
            self._syncs += 1
            try:
                self._tell_all(Sync(self._syncs))
                for each in self._ranks:
                    synced = _answer(each, Synced, self._watchdog, _SYNC_S * self._watchdog.factor)
                    if self._group.lockstep and synced.entered != self._group.entered:
                        raise TimeoutError
            except TimeoutError:
                self._watchdog.end(
                    EngineDeadError(f"A step failed on rank 0 alone ({first_line(error)}).", "Restart the engine.")
                )
        if self._watchdog.cause is not None:
            raise self._watchdog.error() from error

    def missing(self, digests: Iterable[bytes]) -> tuple[bytes, ...]:
        """See Executor; all ranks of the first stage have the same embeddings, and others none."""
        if self._group.lockstep:
            return self._local.missing(digests)
        asked = tuple(digests)
        if not asked:
            return ()
        # The first stage may wait in later steps for tokens of these.
        self._begin_all()
        self._syncs += 1
        first = self._ranks[-1]
        _tell(first, AskMissing(self._syncs, asked), self._watchdog)
        while True:
            try:
                found = _answer(first, Missing, self._watchdog, _SYNC_S)
            except TimeoutError:
                # To encode them again is safe.
                return asked
            if found.number == self._syncs:
                lacking: tuple[bytes, ...] = found.digests
                return lacking

    def watch(self, take: Watch | None) -> None:
        """See Executor; of the first rank."""
        self._local.watch(take)

    def embeddings(self, digest: bytes) -> torch.Tensor | None:
        """See Executor."""
        return self._local.embeddings(digest)

    def read_lora(self, request: LoRARequest) -> None:
        """See Executor. The other ranks read an adapter when it is added."""
        self._local.read_lora(request)

    def add_lora(self, request: LoRARequest) -> LoRARequest:
        """See Executor."""
        added = self._local.add_lora(request)
        # Also if it is known: which adapter leaves memory next depends on the order of use.
        self._tell_all(AddRankLoRA(request))
        for each in self._ranks:
            error = _answer(each, Added, self._watchdog, _START_S).error
            if error is not None:
                self.remove_lora(request.lora_int_id)
                raise LoRAError(f"Rank {each.rank}: {error}")
        return added

    def remove_lora(self, lora_int_id: int) -> bool:
        """See Executor."""
        self._tell_all(RemoveLoRA(lora_int_id))
        return self._local.remove_lora(lora_int_id)

    def pin_lora(self, lora_int_id: int) -> bool:
        """See Executor."""
        self._tell_all(PinLoRA(lora_int_id))
        return self._local.pin_lora(lora_int_id)

    def loras(self) -> tuple[LoRARequest, ...]:
        """See Executor."""
        return self._local.loras()

    def check_sleeps(self) -> None:
        """See Executor; ranks would have to load their parts at the same time as this one, while steps may fail."""
        raise ConfigError(
            "An engine whose model is shared by several ranks does not sleep.",
            "Give the model one device for each engine (data_parallel_size), or end the engine and start it again.",
            param="tensor_parallel_size",
        )

    def sleep(self, level: int) -> None:
        """See Executor; it never sleeps."""

    def wake_up(self, parts: Collection[EnginePart]) -> None:
        """See Executor; it never sleeps."""

    def checksums(self) -> dict[str, str]:
        """See Executor."""
        self._tell_all(AskChecksums())
        found = self._named(0, self._local.runner.checksums())
        for each in self._ranks:
            found |= self._named(each.rank, _answer(each, Checksums, self._watchdog, _START_S).digests)
        return found

    def _named(self, rank: int, digests: Mapping[str, str]) -> dict[str, str]:
        shared, stages = self.config.tensor_parallel_size, self.config.pipeline_parallel_size
        # Rank 0 is of the last stage.
        place = f"pp{stages - 1 - rank // shared}:pcp0:tp{rank % shared}"
        return {f"{place}:{name}": digest for name, digest in digests.items()}

    def reset_weights(self) -> None:
        """See Executor; it never sleeps."""
        self.check_sleeps()

    def check(self) -> None:
        """See Executor."""
        if self._watchdog.cause is not None:
            raise self._watchdog.error()

    def on_loss(self, tell: Callable[[], None]) -> None:
        """See Executor."""
        self._watchdog.on_end(tell)

    def close(self) -> None:
        """See Executor."""
        self._at_exit.cancel()
        try:
            if self._watchdog.cause is None:
                # Ranks that share this stage wait in them for this one.
                self._begin_all()
            _stop(self._watchdog, self._ranks)
            self._local.close()
            # The runner's graphs hold collectives; see RankGroup.close.
            gc.collect()
            self._group.close()
        finally:
            self._ended()

    def _tell_all(self, message: Any) -> None:
        for each in self._ranks:
            _tell(each, message, self._watchdog)


def _size(plan: StepPlan) -> StepSize:
    return StepSize(
        sum(piece.stop - piece.start for piece in plan.slices),
        sum(item.num_embeds for item in plan.encode),
        sum((piece.stop - piece.start) * piece.stop for piece in plan.slices),
    )


def _spawn(rank: int, config: EngineConfig) -> RankProcess:
    """Start the process of a rank, which loads its libraries and waits."""
    ours, theirs = pair()
    with theirs:
        command = [sys.executable, "-m", "beheld.executor.rank", str(theirs.fileno())]
        process = subprocess.Popen(
            command,
            pass_fds=(theirs.fileno(),),
            cwd=working_directory.existing(),
            env=_environment(rank, config.device),
        )
    return RankProcess(rank, process, Link(ours, CODEC, _MAX_KEPT))


def _environment(rank: int, device: str) -> dict[str, str]:
    """Return the environment of a rank's process, in which its own device is the first one."""
    found = dict(os.environ)
    # The first rank logs for all of them.
    found.setdefault("BEHELD_LOG_LEVEL", "ERROR")
    found.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # A process finds beheld where this one did.
    found["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return found | platform_of(device).rank_environment(rank, found)


def joined(watchdog: Watchdog, ranks: Sequence[RankProcess]) -> None:
    """Return when all other ranks are about to connect.

    Raises:
        BeheldError: one of them is gone.
    """
    for each in ranks:
        _answer(each, Joining, watchdog, _START_S)


def _tell(rank: RankProcess, message: Any, watchdog: Watchdog) -> None:
    """Send a message.

    Raises:
        BeheldError: the ranks are gone.
    """
    if watchdog.cause is None:
        try:
            rank.link.send(message)
            return
        except OSError:
            watchdog.end(EngineDeadError(f"The process of rank {rank.rank} {rank.ending()}.", "Restart the engine."))
    raise watchdog.error()


def _answer(rank: RankProcess, kind: Any, watchdog: Watchdog, timeout_s: float) -> Any:
    """Return the rank's next answer.

    Raises:
        BeheldError: the ranks are gone.
        TimeoutError: there is none.
    """
    until = time.monotonic() + timeout_s
    while watchdog.cause is None:
        try:
            found = rank.answers.get(timeout=0.1)
        except queue.Empty:
            if time.monotonic() > until:
                raise TimeoutError from None
            continue
        # Late answers to an earlier Sync are of no use.
        if isinstance(found, kind):
            return found
    raise watchdog.cause


def _leave(watchdog: Watchdog, ended: Callable[[], None]) -> None:
    """Let the other ranks end with this process, without reporting that as a fault."""
    watchdog.leave()
    ended()


def _abandon(ranks: Sequence[RankProcess]) -> None:
    """End processes that no watchdog knows yet."""
    for each in ranks:
        each.process.kill()
        each.link.close()
        each.process.wait()


def _stop(watchdog: Watchdog, ranks: Sequence[RankProcess]) -> None:
    """End the other ranks, which have nothing to save."""
    if watchdog.cause is None:
        for each in ranks:
            try:
                each.link.send(CloseRank(), 0.5)
            except (OSError, BeheldError):
                each.process.kill()
    watchdog.close(_CLOSE_S if watchdog.cause is None else 0.5)
