"""What a front end and an engine that runs elsewhere (a thread, a process) say to each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from beheld.core.config import EngineConfig, ModelInfo
from beheld.core.errors import BeheldError
from beheld.core.media import MediaItem
from beheld.core.outputs import TokenEvent
from beheld.core.request import LoRARequest, Request
from beheld.engine.stats import EngineStats


@dataclass(frozen=True, eq=False)
class Submit:
    """Queue these requests; one that can never run is answered by an event with its error."""

    requests: tuple[Request, ...]


@dataclass(frozen=True)
class Abort:
    """Nobody wants these requests any more."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True)
class Stop:
    """The text of this request is complete."""

    request_id: str


@dataclass(frozen=True)
class Ping:
    """Answer with Pong of this number."""

    number: int


@dataclass(frozen=True)
class AddLoRA:
    """Read an adapter, and answer with LoRAAdded of this number."""

    number: int
    lora: LoRARequest


@dataclass(frozen=True, eq=False)
class TryItems:
    """Run the towers for these items, and answer with Tried; before any request."""

    items: tuple[MediaItem, ...]


@dataclass(frozen=True)
class ClearCache:
    """Forget all cached prefixes."""


@dataclass(frozen=True)
class Tokenizer:
    """What compiles grammars: the tokenizer as text of the tokenizers library, None if it has no such form."""

    text: str | None
    vocab_size: int
    eos_ids: frozenset[int]


@dataclass(frozen=True)
class Prepared:
    """What a request waited for is there, or cannot be had; the engine's side tells itself."""

    request_id: str
    error: BeheldError | None = None


@dataclass(frozen=True)
class Read:
    """The adapter of AddLoRA was read, or cannot be; the engine's side tells itself."""

    number: int
    lora: LoRARequest
    error: BeheldError | None = None


@dataclass(frozen=True)
class Unread:
    """A message between the processes could not be read; these are the requests, and the number of the question, that
    it was about, as far as its label said.

    It is told to whichever side it concerns: the engine drops what it knows of the requests and passes it on.
    """

    request_ids: tuple[str, ...]
    number: int | None = None


@dataclass(frozen=True)
class Close:
    """End."""


@dataclass(frozen=True)
class Events:
    """What one step brought."""

    events: tuple[TokenEvent, ...]


@dataclass(frozen=True)
class Pong:
    """The answer to Ping."""

    number: int
    stats: EngineStats


@dataclass(frozen=True)
class LoRAAdded:
    """The answer to AddLoRA: what was wrong with the adapter, if anything."""

    number: int
    error: BeheldError | None


@dataclass(frozen=True)
class Tried:
    """The answer to TryItems: what was wrong, if anything."""

    error: BeheldError | None


@dataclass(frozen=True)
class Died:
    """The engine has stopped and answers nothing any more."""

    reason: str


@dataclass(frozen=True)
class Ready:
    """The engine was made."""

    info: ModelInfo
    config: EngineConfig


@dataclass(frozen=True)
class Failed:
    """The engine could not be made."""

    error: BeheldError


Message = Submit | Abort | Stop | Ping | AddLoRA | TryItems | ClearCache | Tokenizer | Prepared | Read | Unread | Close
Reply = Events | Pong | LoRAAdded | Tried | Unread | Died


class Engine(Protocol):
    """An engine that runs beside its user, seen from the user's side. All methods may be called from any thread."""

    def start(self, receive: Callable[[Reply], None]) -> None:
        """Begin; `receive` is called from a thread of the engine's side and must be quick."""

    def send(self, message: Message) -> None:
        """Hand over a message; a dead engine ignores it, having said so with Died."""

    @property
    def alive(self) -> bool:
        """False once it has died or was closed."""

    def close(self) -> None:
        """End it, wait for that, and give everything back."""


class Inbox(Protocol):
    """Where the engine's side finds its messages."""

    def wait(self) -> Message:
        """The next message, as soon as there is one."""

    def poll(self) -> Message | None:
        """The next message, if there is one now."""

    def put(self, message: Message) -> None:
        """A message of the engine's side to itself; may be called from any thread."""
