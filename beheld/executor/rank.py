"""The process of a rank other than the first: it loads its part of the model and runs the steps that it is sent."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beheld.cluster.remote import LEAVE_S
from beheld.cluster.tunnel import TunnelEnd
from beheld.core.errors import BeheldError, EngineDeadError, ModelError, first_line
from beheld.executor.progress import StepClock
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
    RankFailed,
    RankItems,
    RemoveLoRA,
    Started,
    StartRank,
    Step,
    StepFailed,
    Sync,
    Synced,
    unpacked,
)
from beheld.utils.log import get_logger
from beheld.utils.roomy_stack import roomy
from beheld.wire.link import Link, end_with
from beheld.wire.stream_link import StreamLink

if TYPE_CHECKING:
    from beheld.parallel.meeting import Meeting

logger = get_logger(__name__)

BEAT_S = 1.0
_CONFIGS = ("transformers.", "beheld.")
_FLOAT = "__float__"


class Answers:
    """Sends messages to the first rank, from any thread."""

    def __init__(self, link: Link | StreamLink) -> None:
        self._link = link
        self._turn = threading.Lock()

    def send(self, message: Any) -> None:
        """Send one."""
        with self._turn:
            self._link.send(message)


def config_text(hf_config: Any) -> tuple[str, str]:
    """Return "module:name" of a configuration's class, and the JSON of which all ranks, the first one too, make it.

    Making a configuration may fill in values that it lacked, but only once.

    Raises:
        ModelError: it cannot be made again in another process.
    """
    kind = type(hf_config)
    place = f"{kind.__module__}:{kind.__qualname__}"
    text = _text_of(hf_config)
    made = _text_of(config_of(place, text)) if place.startswith(_CONFIGS) else ""
    if not made or _text_of(config_of(place, made)) != made:
        raise ModelError(
            f"The configuration of this model ({kind.__name__}) cannot be sent to other processes.",
            "Give tensor_parallel_size=1.",
        )
    return place, made


def _text_of(hf_config: Any) -> str:
    found: str = hf_config.to_json_string(use_diff=False)
    return found


def config_of(place: str, text: str) -> Any:
    """Return the configuration that `config_text` was given."""
    module, _, name = place.partition(":")
    if not module.startswith(_CONFIGS):
        raise ModelError(f"{module} is not a module of configurations.")
    return getattr(importlib.import_module(module), name).from_dict(json.loads(text, object_hook=_number_of))


def _number_of(entry: dict[str, Any]) -> Any:
    """Return the infinity or NaN that transformers writes as {"__float__": its name}, or the entry itself."""
    return float(entry[_FLOAT]) if entry.keys() == {_FLOAT} else entry


class Rank:
    """A running rank.

    Args:
        runner: with this rank's part.
        group: of all ranks.
        number: which one it is.
    """

    def __init__(self, runner: Any, group: Any, answers: Answers, number: int) -> None:
        self._runner, self._group, self._answers, self._number = runner, group, answers, number
        self._num_groups = len(runner.rows.tables_GRN)

    def take(self, message: Any) -> None:
        """Do what a message asks for."""
        if isinstance(message, Step):
            self._step(message)
        elif isinstance(message, Sync):
            self._answers.send(Synced(message.number, self._group.entered))
        elif isinstance(message, AskMissing):
            self._answers.send(Missing(message.number, self._runner.missing(message.digests)))
        elif isinstance(message, AskChecksums):
            self._answers.send(Checksums(self._runner.checksums()))
        elif isinstance(message, RankItems):
            # The first rank tells of an error: all ranks agree on whether there is one.
            try:
                self._runner.try_items(message.items)
            except BeheldError as error:
                if not self._group.lockstep:
                    # The first rank is of another stage, which has no towers.
                    raise
                logger.debug("%s", error)
        elif isinstance(message, AddRankLoRA):
            refusal: BeheldError | None = None
            try:
                self._runner.add_lora(message.lora)
            except BeheldError as error:
                refusal = error
            self._answers.send(Added(message.lora.lora_int_id, refusal))
        elif isinstance(message, RemoveLoRA):
            self._runner.remove_lora(message.lora_int_id)
        elif isinstance(message, PinLoRA):
            self._runner.pin_lora(message.lora_int_id)
        else:
            raise AssertionError(message)

    def _step(self, message: Step) -> None:
        import torch

        from beheld.runner.faults import let_go, loss_of

        device = torch.device(self._runner.config.device)
        # An error here ends the rank: the other stages would wait for what it sends in this step.
        plan = unpacked(message, self._num_groups)
        try:
            self._runner.launch(plan)
            # Nothing else reads how long towers ran here.
            self._runner.encoder.spent_s()
        except EngineDeadError:
            raise
        except Exception as error:
            let_go(error, device)
            lost = loss_of(error, device)
            if lost is not None:
                raise lost from error
            # A request that fails of it names this log.
            logger.error("A step has failed on rank %d: %s", self._number, first_line(error))
            self._answers.send(StepFailed(message.id, first_line(error)))


def _beat(answers: Answers, clock: StepClock, ended: threading.Event) -> None:
    while not ended.wait(BEAT_S):
        try:
            answers.send(clock.beat())
        except OSError:
            return


@roomy
def main(descriptor: int) -> None:
    """Load, then run steps until the first rank says that it is enough or is gone."""
    # Signals of a terminal or a supervisor reach all processes: the first rank drains, and needs this one for that.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end = socket.socket(fileno=descriptor)
    end_with(end)
    _run(Link(end, CODEC), None)


def main_elsewhere(end: socket.socket, token: bytes) -> None:
    """Be the rank of another host; see `main`.

    Args:
        end: the connection to the first rank.
        token: what both sides know.
    """
    address, first = str(end.getsockname()[0]), str(end.getpeername()[0])
    end_with(end, LEAVE_S)
    _run(StreamLink(end, CODEC), address, lambda port: TunnelEnd(first, int(port), token).port)


def _run(link: Link | StreamLink, address: str | None, led_to: Callable[[str], int] | None = None) -> None:
    """Run a rank.

    Args:
        address: that of its host, if ranks are on several.
        led_to: returns the port here that leads to one of the first rank's host.
    """
    from beheld.parallel.group import RankGroups
    from beheld.parallel.meeting import Folder, Port
    from beheld.platform.registry import platform_of
    from beheld.runner.build import build_runner

    answers = Answers(link)
    try:
        start: StartRank = link.receive()
        meeting: Meeting = Folder(Path(start.meeting))
        if address is not None:
            assert led_to is not None
            meeting = Port(led_to(start.meeting), address)
        group = RankGroups(
            start.rank,
            start.config.tensor_parallel_size,
            start.config.pipeline_parallel_size,
            meeting,
            platform_of(start.config.device).collectives,
            lambda: answers.send(Joining()),
        )
        ended, clock = threading.Event(), StepClock(group)
        threading.Thread(target=_beat, args=(answers, clock, ended), name="beheld-beat", daemon=True).start()
        try:
            if not Path(start.info.path).exists():
                raise ModelError(
                    f"This host ({address}) has no {start.info.path}.",
                    "The model's files must have the same path on every host.",
                )
            hf_config = config_of(start.hf_class, start.hf_config)
            runner = build_runner(hf_config, start.info, start.config, shrink=start.shrink, groups=group)
            if platform_of(start.config.device).synchronous:
                clock.count(runner.adapter.layers())
            answers.send(Started(runner.config.max_model_len, runner.capacity))
            rank = Rank(runner, group, answers, start.rank)
            while not isinstance(message := link.receive(), CloseRank):
                # An adapter that is read from a slow disk is no step. What items take that are tried, no plan says.
                tries = isinstance(message, RankItems)
                with nullcontext() if isinstance(message, AddRankLoRA) else clock.step(unbounded=tries):
                    rank.take(message)
        except BeheldError as error:
            answers.send(RankFailed(error))
        except (EOFError, ConnectionError):
            raise
        except Exception as error:
            logger.exception("This rank has failed.")
            answers.send(RankFailed(EngineDeadError(f"{type(error).__name__}: {first_line(error)}")))
    except (EOFError, OSError):
        # No one is left to answer to.
        return


if __name__ == "__main__":
    main(int(sys.argv[1]))
    # There is nothing to save, and unloading the libraries takes long.
    os._exit(0)
