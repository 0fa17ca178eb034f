"""Operations on a loaded model, and the record of their changes, by which they are undone.

An operation never keeps weights that it replaced: undoing makes the old module from the one in its place.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from beheld.core.config import EngineConfig
from beheld.lora.slots import LoRASlots
from beheld.parallel.group import RankGroup
from beheld.parallel.shard_plan import ShardPlan
from beheld.parallel.stages import StagePlan
from beheld.utils.log import get_logger

logger = get_logger(__name__)

T = TypeVar("T")


class Phase(enum.IntEnum):
    """The fixed order of operations."""

    SETTLE = 1
    """Insert the layers that multiply weights which were loaded in a quantized form."""
    ADAPT = 2
    """Make a family's modules compute batches in the engine's layout."""
    SHARD = 3
    FUSE = 4
    """Convert layers to the form that the device computes fastest."""
    LORA = 5
    SUM = 6
    """Sum over ranks what each of them computes in part."""
    COMPILE = 7
    PASS = 8
    """Add what the adapter's passes need: extra columns of rows, layers that process a pass's tail."""


class Changes:
    """The changes of one operation, undone in reverse order."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def __len__(self) -> int:
        return len(self._undo)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set a method or another plain attribute of `owner`, neither a submodule nor a parameter."""
        own = vars(owner)
        if name in own:
            self._undo.append(functools.partial(setattr, owner, name, own[name]))
        else:
            self._undo.append(lambda: delattr(owner, name))
        setattr(owner, name, value)

    def replace(self, parent: Any, name: str, new: nn.Module, restore: Callable[[nn.Module], nn.Module]) -> None:
        """Replace a submodule by `new`.

        Args:
            parent, name: the submodule's place.
            restore: makes the old module from the one in its place when the change is undone.
        """
        setattr(parent, name, new)
        self._undo.append(lambda: setattr(parent, name, restore(getattr(parent, name))))

    def exchange(self, parent: Any, name: str, new: nn.Module, parts: Iterable[str]) -> None:
        """Replace a submodule by `new`, which takes over its parts under the same names.

        The old module is kept without them; undoing returns the parts that are there then. A part that knows what it
        replaced (`restored`) returns that.
        """
        old, parts = getattr(parent, name), tuple(parts)
        for part in parts:
            setattr(old, part, None)

        def restore(module: Any) -> nn.Module:
            for part in parts:
                found = getattr(module, part)
                setattr(old, part, found.restored() if hasattr(found, "restored") else found)
            made: nn.Module = old
            return made

        self.replace(parent, name, new, restore)

    def hook(self, handle: Any) -> None:
        """Record a hook; `handle` is the result of registering it."""
        self._undo.append(handle.remove)

    def undo_with(self, act: Callable[[], object]) -> None:
        """Record any other change, which `act` undoes."""
        self._undo.append(act)

    def take_back(self) -> None:
        """Undo all changes."""
        while self._undo:
            self._undo.pop()()


@dataclass(eq=False)
class Target:
    """A loaded model under surgery.

    Attributes:
        model: the transformers model.
        config: the engine's.
        slots: the LoRA adapter slots, if an operation made any.
        around: context managers that every pass through the model enters.
        stage: which layers this rank holds; None if it holds all.
        ranks, shards: the ranks that share the model, and what this one holds of it; None if there is only this one.
    """

    model: Any
    config: EngineConfig
    slots: LoRASlots | None = None
    around: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)
    ranks: RankGroup | None = None
    shards: ShardPlan | None = None
    stage: StagePlan | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The type that the model computes in."""
        found: torch.dtype = getattr(torch, self.config.dtype)
        return found


def always(target: Target) -> bool:
    """Return True for every model."""
    return True


@dataclass(frozen=True)
class Operation:
    """One named change to a loaded model.

    Attributes:
        name: a short name.
        phase: when it is applied.
        needs: which modules, devices and options it applies to, in words.
        replaces: which methods, modules or hooks it changes, and by what, in words.
        apply: makes and records each change.
        suits: False if it would do nothing, as far as that is known in advance.
    """

    name: str
    phase: Phase
    needs: str
    replaces: str
    apply: Callable[[Target, Changes], object]
    suits: Callable[[Target], bool] = always


class Surgery:
    """The operations applied to one model, in order."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.done: list[tuple[Operation, Changes]] = []

    def perform(self, operations: Iterable[Operation]) -> None:
        """Apply the operations that suit the model, by phase, and within a phase in the given order."""
        for operation in sorted(operations, key=lambda each: each.phase):
            assert not self.done or operation.phase >= self.done[-1][0].phase, f"{operation.name} comes too late"
            if not operation.suits(self.target):
                continue
            changes = Changes()
            self.done.append((operation, changes))
            operation.apply(self.target, changes)
            logger.debug("Surgery: %s, %d changes.", operation.name, len(changes))

    def apply(self, name: str, replaces: str, act: Callable[[Any, Changes], T]) -> T:
        """Apply one more operation, of the last phase; returns what `act` returns."""
        given: list[T] = []
        operation = Operation(
            name, Phase.PASS, "an adapter that asks for it", replaces,
            lambda target, changes: given.append(act(target.model, changes)),
        )  # fmt: skip
        self.perform([operation])
        return given[0]

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Enter what operations need around a pass through the model."""
        with ExitStack() as stack:
            for around in self.target.around:
                stack.enter_context(around())
            yield

    def take_back(self) -> None:
        """Undo all operations, the last one first."""
        while self.done:
            self.done.pop()[1].take_back()
