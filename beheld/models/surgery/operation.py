"""What an operation on a loaded model is, and the record of its changes, by which they are taken back.

An operation never keeps weights that it replaced: what is taken back is made from what stands in its place.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import nn

from beheld.core.config import EngineConfig
from beheld.lora.slots import LoRASlots
from beheld.utils.log import get_logger

logger = get_logger(__name__)

T = TypeVar("T")


class Stage(enum.IntEnum):
    """The fixed order of operations."""

    SETTLE = 1
    """Weights that passed the loader in a form of their own get the layers that multiply them."""
    ADAPT = 2
    """A family's modules compute a batch as the engine lays it out."""
    QUANTIZE = 3
    SHARD = 4
    FUSE = 5
    """Layers take the form that the device computes fastest."""
    LORA = 6
    COMPILE = 7
    PASS = 8
    """What the adapter's passes need: further columns of rows, layers that take a pass's tail."""


class Changes:
    """What one operation changed, so that it can be taken back, the last change first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def __len__(self) -> int:
        return len(self._undo)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Give `owner` a method or another plain attribute of its own, no submodule and no parameter."""
        own = vars(owner)
        if name in own:
            self._undo.append(functools.partial(setattr, owner, name, own[name]))
        else:
            self._undo.append(lambda: delattr(owner, name))
        setattr(owner, name, value)

    def replace(self, parent: Any, name: str, new: nn.Module, restore: Callable[[nn.Module], nn.Module]) -> None:
        """Put `new` in place of a submodule.

        Args:
            parent, name: where it stands.
            restore: what makes the old module from the one that stands there when this is taken back.
        """
        setattr(parent, name, new)
        self._undo.append(lambda: setattr(parent, name, restore(getattr(parent, name))))

    def exchange(self, parent: Any, name: str, new: nn.Module, parts: Iterable[str]) -> None:
        """Put `new` in place of a submodule whose parts, under the same names, it took over.

        The old module is kept without them; when this is taken back, it gets those that stand there then. A part that
        can tell what it stands for (`restored`) gives that.
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
        """Note a hook; `handle` is what registering it gave."""
        self._undo.append(handle.remove)

    def undo_with(self, act: Callable[[], object]) -> None:
        """Note a change of any other kind, which `act` takes back."""
        self._undo.append(act)

    def take_back(self) -> None:
        """Undo all changes."""
        while self._undo:
            self._undo.pop()()


@dataclass(eq=False)
class Target:
    """A loaded model under surgery.

    Attributes:
        model: of transformers.
        config: the engine's.
        slots: those of LoRA adapters, if an operation made any.
        around: what every pass through the model runs within.
    """

    model: Any
    config: EngineConfig
    slots: LoRASlots | None = None
    around: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)


def always(target: Target) -> bool:
    """True for every model."""
    return True


@dataclass(frozen=True)
class Operation:
    """One named change to a loaded model.

    Attributes:
        name: short words.
        stage: when it is applied.
        needs: in words, of which modules, on which device and with which options it does something.
        replaces: in words, which methods, modules or hooks it changes, and by what.
        apply: does it, and notes each change.
        suits: False where it would do nothing, which can be known before.
    """

    name: str
    stage: Stage
    needs: str
    replaces: str
    apply: Callable[[Target, Changes], object]
    suits: Callable[[Target], bool] = always


class Surgery:
    """The operations that were applied to one model, in order."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.done: list[tuple[Operation, Changes]] = []

    def perform(self, operations: Iterable[Operation]) -> None:
        """Apply the operations that suit the model, by stage, and within a stage in the order given."""
        for operation in sorted(operations, key=lambda each: each.stage):
            assert not self.done or operation.stage >= self.done[-1][0].stage, f"{operation.name} comes too late"
            if not operation.suits(self.target):
                continue
            changes = Changes()
            self.done.append((operation, changes))
            operation.apply(self.target, changes)
            logger.debug("Surgery: %s, %d changes.", operation.name, len(changes))

    def apply(self, name: str, replaces: str, act: Callable[[Any, Changes], T]) -> T:
        """Apply one more operation, of the last stage, to the model; gives what `act` gives."""
        given: list[T] = []
        operation = Operation(
            name, Stage.PASS, "an adapter that asks for it", replaces,
            lambda target, changes: given.append(act(target.model, changes)),
        )  # fmt: skip
        self.perform([operation])
        return given[0]

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Within the block, which is a pass through the model, what operations want around it is in force."""
        with ExitStack() as stack:
            for around in self.target.around:
                stack.enter_context(around())
            yield

    def take_back(self) -> None:
        """Undo all operations, the last one first."""
        while self.done:
            self.done.pop()[1].take_back()
