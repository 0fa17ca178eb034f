"""Logits processors as scripts write them for vLLM's engine, as processors of one request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Self

from beheld.core.params import SamplingParams

RequestLogitsProcessor = Callable[..., Any]


class MoveDirectionality(Enum):
    """How rows of a batch change places; a batch of one row has none of it."""

    UNIDIRECTIONAL = auto()
    SWAP = auto()


@dataclass(frozen=True)
class BatchUpdate:
    """What changed in a batch: `added` holds (row, parameters, prompt ids, output ids)."""

    batch_size: int
    removed: Sequence[int] = field(default_factory=list)
    added: Sequence[tuple[int, SamplingParams, list[int] | None, list[int]]] = field(default_factory=list)
    moved: Sequence[Any] = field(default_factory=list)


class LogitsProcessor(ABC):
    """A processor of a batch. Each request gets an instance of its own, with a batch of one row."""

    _settings: tuple[Any, Any, bool]

    def __new__(cls, vllm_config: Any, device: Any, is_pin_memory: bool) -> Self:
        """Note the arguments, with which each request's instance is made."""
        made = super().__new__(cls)
        made._settings = (vllm_config, device, is_pin_memory)
        return made

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:  # noqa: B027
        """Keep nothing."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Check a request's parameters."""
        return

    @abstractmethod
    def apply(self, logits: Any) -> Any:
        """Change logits (rows, vocabulary)."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether greedy choices stay as they are."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Take notice of rows that came or went, before each `apply`."""

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """The function (prompt_ids, output_ids, logits_V) -> logits_V of one request."""
        self.validate_params(params)
        one = type(self)(*self._settings)
        generated: list[int] = []
        begun = False

        def change(prompt_ids: Sequence[int], output_ids: Sequence[int], logits_V: Any) -> Any:
            nonlocal begun
            # The list is one and the same at each call, as it is for a row of a batch.
            generated[:] = output_ids
            added = [] if begun else [(0, params, list(prompt_ids), generated)]
            begun = True
            one.update_state(BatchUpdate(1, added=added) if added else None)
            return one.apply(logits_V[None])[0]

        return change


class AdapterLogitsProcessor(ABC):
    """A processor that makes a function for each request."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:  # noqa: B027
        """Keep nothing: state belongs to the functions."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Check a request's parameters."""
        return

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """The function of a request, or None."""


def process_dict_updates(
    req_entries: dict[int, Any],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], Any | None],
) -> bool:
    """Keep a table row -> state up to date; returns whether it changed."""
    if batch_update is None:
        return False
    changed = False
    for row, params, prompt_ids, output_ids in batch_update.added:
        state = new_state(params, prompt_ids, output_ids)
        if state is not None:
            req_entries[row] = state
            changed = True
        elif req_entries.pop(row, None) is not None:
            changed = True
    for row in batch_update.removed:
        changed |= req_entries.pop(row, None) is not None
    return changed
