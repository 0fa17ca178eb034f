"""The engine core: each step plans, runs and updates by calling the scheduler and the executor."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from beheld.core.config import ModelInfo
from beheld.core.errors import AsleepError, EngineDeadError, PausedError, StatesLostError, first_line
from beheld.core.outputs import TokenEvent
from beheld.core.plan import SeqSlice, StepPlan, StepResult
from beheld.core.request import Request
from beheld.core.sleep import MEMORY, EnginePart, lost_at
from beheld.engine.profile import Recorder
from beheld.engine.stats import EngineStats
from beheld.executor.executor import Executor
from beheld.kvstore.store import FileStore
from beheld.scheduler.scheduler import Scheduler
from beheld.structured.rows import GrammarRows
from beheld.utils.gil import quick_turns
from beheld.utils.log import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True, eq=False)
class Launched:
    """A launched step whose result is not read yet: its plan, and its handle or, after a retry, its result.

    `launched_s` is when it was launched, on the monotonic clock.
    """

    plan: StepPlan
    handle: Any
    result: StepResult | None = None
    launched_s: float = 0.0


@dataclass(frozen=True, eq=False)
class InFlight:
    """The launched steps whose results are not read yet, at least one, in their order."""

    steps: tuple[Launched, ...]


class EngineCore:
    """The scheduler, the executor and the step that connects them.

    Args:
        store: the folder in which keys and values of prompts are kept, if there is one.
    """

    def __init__(self, info: ModelInfo, executor: Executor, store: FileStore | None = None) -> None:
        # Set together with a tokenizer; without one, no request has a grammar.
        self.grammars: GrammarRows | None = None
        self.executor = executor
        self.scheduler = Scheduler(executor.config, info, executor.capacity, store)
        self._store = store
        self._stages = executor.config.pipeline_parallel_size
        # How many launched steps stay unread; with stages, so many that each stage has one to compute.
        self._depth = max(1, self._stages - 1) if executor.config.overlap else 0
        self._recurrent = info.recurrent
        self._steps = 0
        self._retried = 0
        self._death: EngineDeadError | None = None
        # What it lacks while it sleeps or is paused.
        self._lacks: frozenset[EnginePart] = frozenset()
        self.recorder = Recorder()
        # It will sleep once some requests have ended.
        self.falls_asleep = False
        # It refuses new requests until it wakes up, though it has its memory.
        self.refuses = False
        self._encode_s = 0.0
        # When the last result was read.
        self._read_s = 0.0

    def add(self, request: Request) -> None:
        """Queue a request.

        If its adapter is neither in memory nor read ahead, it is read here, and nothing else runs meanwhile.

        Raises:
            UserError, CapacityError: the request can never run.
            AsleepError: the engine sleeps.
            EngineDeadError: the engine has stopped.
        """
        self._check_alive()
        if self._lacks & MEMORY:
            raise _asleep()
        if request.lora is not None:
            request = dataclasses.replace(request, lora=self.executor.add_lora(request.lora))
        self.scheduler.add(request)

    def add_many(self, requests: Sequence[Request]) -> dict[str, Exception]:
        """Queue requests; returns the error of each that `add` refuses, by its id.

        Raises:
            EngineDeadError: the engine has stopped.
        """
        self._check_alive()
        refused: dict[str, Exception] = {}
        for request in requests:
            try:
                self.add(request)
            except Exception as error:
                refused[request.id] = error
        return refused

    def step(self, in_flight: InFlight | None) -> tuple[InFlight | None, list[TokenEvent]]:
        """Plan and launch the next step; then read the oldest step in flight, if too many are unread or none is new.

        With overlap the device computes the new step while the host processes the old one, and stages of a pipeline
        compute different ones. Without it, the new step is read at once and nothing stays in flight.

        Raises:
            EngineDeadError: the device is lost or the engine has an internal error; the engine accepts no more work.
            KeyboardInterrupt: the user's own. To continue, abort all requests, then step with the same `in_flight`
                again, whether it was read or not.
        """
        self._check_alive()
        try:
            with quick_turns():
                return self._step(in_flight)
        except EngineDeadError as error:
            self._death = error
            raise
        except Exception as error:
            # Host and device may now disagree about rows and blocks, so no later result is reliable.
            self._death = EngineDeadError(f"The engine has failed ({type(error).__name__}).", "Start it again.")
            raise self._death from error
        except BaseException:
            self._interrupted(in_flight)
            raise

    def _interrupted(self, in_flight: InFlight | None) -> None:
        """Discard all plans made since `in_flight`: how far they ran is unknown."""
        known = () if in_flight is None else tuple(step.plan for step in in_flight.steps)
        for plan in (*self.scheduler.abandon(known), *known):
            self.scheduler.lose(self._missing(plan))

    def _missing(self, plan: StepPlan) -> tuple[bytes, ...]:
        """The digests of the plan's `encode` that are not on the device."""
        return self.executor.missing(item.digest for item in plan.encode)

    def _step(self, in_flight: InFlight | None) -> tuple[InFlight | None, list[TokenEvent]]:
        plan = None if self._lacks else self.scheduler.schedule()
        if plan is not None and self.grammars is not None:
            plan = self.grammars.masked(plan)
        steps = () if in_flight is None else in_flight.steps
        if plan is not None:
            steps = (*steps, self._launch(plan))
        events: list[TokenEvent] = []
        if steps and (plan is None or len(steps) > self._depth):
            events, steps = self._update(steps[0]), steps[1:]
        return InFlight(steps) if steps else None, events

    @property
    def has_work(self) -> bool:
        """True if a step can compute something: not while it sleeps or is paused."""
        return not self._lacks and self.scheduler.has_work

    @property
    def lacks(self) -> frozenset[EnginePart]:
        """What it lacks: nothing, if it is awake; steps alone, if it is paused."""
        return self._lacks

    def check_awake(self) -> None:
        """Check that a new request may wait here.

        Raises:
            AsleepError: the engine sleeps, or will once the requests that it has have ended.
            PausedError: it is paused, and no request is to wait.
        """
        self._check_memory()
        if self.refuses:
            raise PausedError("Generation is paused.", "Send the request again once the engine goes on: POST /resume.")

    def _check_memory(self) -> None:
        if self.falls_asleep or self._lacks & MEMORY:
            raise _asleep()

    def settle(self, in_flight: InFlight | None) -> list[TokenEvent]:
        """Read the results of all launched steps, and launch no other.

        Raises:
            EngineDeadError: as `step`.
        """
        self._check_alive()
        return [event for step in (() if in_flight is None else in_flight.steps) for event in self._update(step)]

    def check_sleeps(self, level: int) -> None:
        """Check that the engine can sleep at this level.

        Raises:
            ConfigError: the executor cannot.
        """
        if lost_at(level) & MEMORY:
            self.executor.check_sleeps()

    def sleep(self, level: int) -> None:
        """Pause; with level 1 or 2, give memory back, see Executor.sleep. No step may be in flight.

        Sequences that are left go on after `wake_up`: those of level 0 as they are, others from their start. An engine
        that sleeps, or has some of its memory again, gives back what it still has.

        Raises:
            ConfigError: the executor cannot; nothing has changed.
            EngineDeadError: the engine has stopped.
        """
        self._check_alive()
        self.check_sleeps(level)
        lost = lost_at(level)
        awake = not self._lacks & MEMORY
        # Set first: after an interrupt, nothing relies on memory that may be gone.
        self._lacks |= lost
        if not lost & MEMORY:
            return
        if awake:
            self.scheduler.lose_device()
            if self.grammars is not None:
                self.grammars.forget()
        self.executor.sleep(level)
        logger.info("The engine sleeps at level %d.", level)

    def wake_up(self, parts: Collection[EnginePart]) -> None:
        """Bring these parts back; once all memory is back, the engine steps again.

        Raises:
            ModelError, CapacityError: it sleeps on.
            EngineDeadError: the engine has stopped.
        """
        self._check_alive()
        if not self._lacks:
            return
        if self._lacks & MEMORY:
            self.executor.wake_up(parts)
        if self._store is not None and EnginePart.WEIGHTS in self._lacks & frozenset(parts):
            self._store.renew()
        left = (self._lacks - frozenset(parts)) & MEMORY
        if not left and self._lacks & MEMORY:
            logger.info("The engine has woken up.")
        self._lacks = left | {EnginePart.SCHEDULING} if left else frozenset()

    def reload_weights(self) -> None:
        """Read the weights from their files, and lack afterwards what it lacked before, apart from them.

        No step may be in flight. Sequences are computed again from their start. A paused engine stays paused; one that
        lacked nothing but the weights has woken up.

        Raises:
            ConfigError: the executor cannot; nothing has changed.
            ModelError, CapacityError: it sleeps, without any of its memory.
            EngineDeadError: the engine has stopped.
        """
        lacked = self._lacks
        self.sleep(2)
        self.executor.wake_up(MEMORY - lacked | {EnginePart.WEIGHTS})
        if self._store is not None:
            self._store.renew()
        left = lacked - {EnginePart.WEIGHTS}
        self._lacks = frozenset() if lacked & MEMORY and not left & MEMORY else left
        logger.info("The weights were read again.")

    def checksums(self) -> dict[str, str]:
        """See Executor.checksums.

        Raises:
            AsleepError: its memory was given back.
            EngineDeadError: the engine has stopped.
        """
        self._check_alive()
        self._check_memory()
        return self.executor.checksums()

    def reset_weights(self) -> None:
        """Make all weights zero, and forget what was computed with them. No step may be in flight.

        Raises:
            ConfigError: the executor cannot read them again.
            AsleepError: its memory was given back.
            EngineDeadError: the engine has stopped.
        """
        self._check_alive()
        self._check_memory()
        self.executor.reset_weights()
        if self._store is not None:
            self._store.suspend()
        self.scheduler.clear_prefix_cache()
        self.scheduler.clear_embeddings()

    def flush(self) -> None:
        """Return when the keys and values that are to be kept are, or when that takes too long."""
        if self._store is not None:
            self._store.flush()

    def close(self) -> None:
        """Free the model's memory; no step may follow."""
        if self._store is not None:
            self._store.close()
        self.executor.close()

    @property
    def alive(self) -> bool:
        """False after a step failed for a reason other than a single sequence."""
        return self._death is None

    def _check_alive(self) -> None:
        if self._death is not None:
            raise self._death

    def stats(self) -> EngineStats:
        """Counters since the start."""
        return EngineStats(self.scheduler.stats(), self._steps, self._retried, self._encode_s)

    def _launch(self, plan: StepPlan) -> Launched:
        self._steps += 1
        launched_s = time.monotonic()
        try:
            return Launched(plan, self.executor.launch(plan), launched_s=launched_s)
        except EngineDeadError:
            raise
        except Exception as error:
            reason = first_line(error)
        # Outside of the `except` block: inside it, the exception still holds the failed step's memory.
        return Launched(plan, None, self._retry(plan, reason))

    def _update(self, step: Launched) -> list[TokenEvent]:
        if not self.scheduler.awaits(step.plan):
            # The interrupted step had already read this result.
            return []
        seconds = None
        if step.result is None:
            retried = self._retried
            result = self._collect(step)
            begun_s, self._read_s = max(step.launched_s, self._read_s), time.monotonic()
            # Towers and retries say nothing about what prompts cost.
            if not step.plan.encode and self._retried == retried:
                seconds = self._read_s - begun_s
        else:
            result = step.result
        self._encode_s += result.encode_s
        if self.grammars is not None:
            result = self.grammars.advanced(result)
        return self.scheduler.update(step.plan, result, seconds)

    def _collect(self, step: Launched) -> StepResult:
        """The result of a launched step. If it is lost: without overlap the step is retried.

        With overlap, the next step may have reused its rows and blocks already, so all its sequences fail. Between
        stages, which compute other sequences meanwhile, only those fail whose rows later steps use.
        """
        try:
            return self.executor.collect(step.handle)
        except EngineDeadError:
            raise
        except Exception as error:
            reason = first_line(error)
        plan = step.plan
        if not self._depth:
            return self._retry(plan, reason)
        alone = self.scheduler.alone(plan) if self._stages > 1 else frozenset[int]()
        failed = {piece.row: reason for piece in plan.slices if piece.row not in alone}
        if failed:
            logger.error("The result of a step is lost (%s); %d of its sequences fail.", reason, len(failed))
        if not alone:
            return StepResult(plan.id, {}, failed=failed, lost=self._missing(plan))
        result = self._retry(_of_rows(plan, alone), reason)
        return dataclasses.replace(result, failed={**result.failed, **failed})

    def _retry(self, plan: StepPlan, reason: str) -> StepResult:
        """Run a failed plan again so that only the faulty sequences fail, and the others get the tokens they would have
        got: one by one to find the faulty ones, then together in the shape of the plan, with stand-ins for these.
        """
        self._retried += 1
        logger.warning("A step failed (%s); retrying its %d sequences one by one.", reason, len(plan.slices))
        parts: list[StepResult] = []
        for index, piece in enumerate(plan.slices):
            try:
                own = self.executor.collect(self.executor.launch(_part(plan, piece, first=index == 0)))
            except EngineDeadError:
                raise
            except StatesLostError:
                own = StepResult(plan.id, {}, redone={piece.row: reason})
            except Exception as culprit:
                own = StepResult(plan.id, {}, failed={piece.row: first_line(culprit)}, culprits=frozenset({piece.row}))
            parts.append(own)
        # Ask the device for lost items: a part may have failed before it could report them.
        alone = _merged(plan.id, parts, self._missing(plan))
        if len(plan.slices) == 1 or len(alone.culprits) == len(plan.slices) or self._recurrent:
            return alone
        together = self._together(plan, alone.culprits)
        return alone if together is None else _without(together, alone)

    def _together(self, plan: StepPlan, culprits: frozenset[int]) -> StepResult | None:
        """The result of a plan with stand-ins for its culprits; None if it fails still, as one that is too large does.

        A product of another number of rows may round otherwise, in float32 too, and the best of two close tokens
        changes then. What the parts wrote is written again: keys and values, and the newest tokens.
        Only the dense copies of keys that a CPU keeps in float32 do not follow a retry: attention may sum in another
        order then.
        """
        stand_ins = self.scheduler.stand_ins(plan, culprits)
        kept = tuple(admission for admission in plan.admitted if admission.row not in culprits)
        masks = {row: allowed for row, allowed in plan.masks.items() if row not in culprits}
        again = dataclasses.replace(plan, admitted=(*kept, *stand_ins), encode=(), released=(), forget=(), masks=masks)
        try:
            return self.executor.collect(self.executor.launch(again))
        except EngineDeadError:
            raise
        except Exception as error:
            logger.warning("The retried sequences cannot be run together (%s).", first_line(error))
            return None


def _without(together: StepResult, alone: StepResult) -> StepResult:
    """The results of a plan's sequences that can run, and the failures of its culprits."""
    by_row = ("tokens", "logprobs", "prompt_logprobs", "pooled", "draft_ids", "failed", "kept")
    bad = alone.culprits
    kept: dict[str, Any] = {
        name: {row: own for row, own in getattr(together, name).items() if row not in bad} for name in by_row
    }
    kept["failed"] |= {row: alone.failed[row] for row in bad}
    return dataclasses.replace(alone, **kept, encode_s=alone.encode_s + together.encode_s)


def _merged(plan_id: int, parts: list[StepResult], lost: tuple[bytes, ...]) -> StepResult:
    """The result of a plan, merged from those of its sequences."""
    by_row = ("tokens", "logprobs", "prompt_logprobs", "pooled", "draft_ids", "failed", "redone", "kept")
    merged = {name: {row: own for part in parts for row, own in getattr(part, name).items()} for name in by_row}
    culprits = frozenset[int]().union(*(part.culprits for part in parts))
    return StepResult(plan_id, **merged, culprits=culprits, lost=lost, encode_s=sum(part.encode_s for part in parts))


def _of_rows(plan: StepPlan, rows: Collection[int]) -> StepPlan:
    """The part of a plan that computes these rows, without what belongs to no sequence and was done at once."""
    return dataclasses.replace(
        plan,
        slices=tuple(piece for piece in plan.slices if piece.row in rows),
        admitted=tuple(admission for admission in plan.admitted if admission.row in rows),
        masks={row: allowed for row, allowed in plan.masks.items() if row in rows},
        keep=tuple(keep for keep in plan.keep if keep.row in rows),
        released=(),
        forget=(),
    )


def _part(plan: StepPlan, piece: SeqSlice, *, first: bool) -> StepPlan:
    """The part of a plan that computes one sequence; the first part also has what belongs to no sequence.

    Every part carries all of `encode`: items that are on the device already cost nothing.
    """
    return dataclasses.replace(
        plan,
        slices=(piece,),
        admitted=tuple(a for a in plan.admitted if a.row == piece.row),
        keep=tuple(keep for keep in plan.keep if keep.row == piece.row),
        released=plan.released if first else (),
        forget=plan.forget if first else (),
    )


def _asleep() -> AsleepError:
    return AsleepError("The engine sleeps.", "Wake it up first: wake_up(), or POST /wake_up.")
