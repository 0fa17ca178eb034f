"""The messages between a front end and an engine in another thread or process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from beheld.core.config import EngineConfig, ModelInfo
from beheld.core.errors import BeheldError
from beheld.core.media import MediaItem
from beheld.core.outputs import TokenEvent
from beheld.core.request import LoRARequest, Request
from beheld.core.sleep import EnginePart, PauseMode
from beheld.engine.stats import EngineReport, EngineStats


@dataclass(frozen=True, eq=False)
class Submit:
    """Queue these requests. A request that can never run gets an event with its error."""

    requests: tuple[Request, ...]


@dataclass(frozen=True)
class Abort:
    """Abort these requests: nobody needs them any more."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True)
class Stop:
    """End this request: its text is complete."""

    request_id: str


@dataclass(frozen=True)
class Ping:
    """Ask for a Pong with the same number."""

    number: int


@dataclass(frozen=True)
class AddLoRA:
    """Read an adapter; the answer is a LoRAAdded with the same number."""

    number: int
    lora: LoRARequest


class LoRAAction(StrEnum):
    """What to do with an adapter in memory, or to tell of all of them."""

    REMOVE = "remove"
    PIN = "pin"
    LIST = "list"


@dataclass(frozen=True)
class ManageLoRA:
    """Act on an adapter in memory; the answer is a LoRAsManaged with the same number."""

    number: int
    action: LoRAAction
    lora_int_id: int = 0


@dataclass(frozen=True)
class Sleep:
    """Fall asleep, see EngineCore.sleep; the answer is an Asleep with the same number.

    `mode` says what becomes of the requests that have not ended. From now on, level 1 or 2 refuses new ones; at level 0
    `refuses` says whether they are refused or wait, and None leaves that as it is.
    """

    number: int
    level: int
    mode: PauseMode
    refuses: bool | None = None


@dataclass(frozen=True)
class WakeUp:
    """Bring these parts back, see EngineCore.wake_up; the answer is an Asleep with the same number.

    With `again`, read the weights from their files, see EngineCore.reload_weights; `parts` is WEIGHTS then.
    """

    number: int
    parts: frozenset[EnginePart]
    again: bool = False


@dataclass(frozen=True)
class Profile:
    """Begin to record what is computed; with a folder, end and write the record there. The answer is a Profiled."""

    number: int
    folder: str | None = None


@dataclass(frozen=True)
class CheckWeights:
    """Answer with WeightsChecked: what the weights are; with `reset`, make them all zero, while no step is computed."""

    number: int
    reset: bool = False


@dataclass(frozen=True, eq=False)
class TryItems:
    """Run the towers for these items, and answer with Tried; before any request."""

    items: tuple[MediaItem, ...]


@dataclass(frozen=True)
class ClearCache:
    """Clear the prefix cache."""


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer for compiling grammars, serialized by the tokenizers library; None if it has no such form."""

    text: str | None
    vocab_size: int
    eos_ids: frozenset[int]


@dataclass(frozen=True)
class Prepared:
    """A waiting request's grammar and adapter are ready, or failed. The engine's side sends this to itself."""

    request_id: str
    error: BeheldError | None = None


@dataclass(frozen=True)
class Read:
    """The adapter of AddLoRA was read, or could not be. The engine's side sends this to itself."""

    number: int
    lora: LoRARequest
    error: BeheldError | None = None


@dataclass(frozen=True)
class Lost:
    """The executor can run no more steps. The engine's side sends this to itself, so that an idle engine dies too."""


@dataclass(frozen=True)
class Unread:
    """A message could not be read. The fields name its requests and its number, as far as its label gives them.

    Whichever side fails to read a message, the engine aborts the requests and the front end is notified.
    """

    request_ids: tuple[str, ...]
    number: int | None = None


@dataclass(frozen=True)
class Close:
    """End the engine."""


@dataclass(frozen=True)
class Events:
    """The events of one step."""

    events: tuple[TokenEvent, ...]


@dataclass(frozen=True)
class Pong:
    """The answer to Ping."""

    number: int
    stats: EngineStats


@dataclass(frozen=True)
class LoRAAdded:
    """The answer to AddLoRA; `error` is None on success."""

    number: int
    error: BeheldError | None


@dataclass(frozen=True)
class LoRAsManaged:
    """The answer to ManageLoRA: whether the adapter was in memory, and the numbers of those that are; or an error."""

    number: int
    found: bool
    held: tuple[int, ...]
    error: BeheldError | None = None


@dataclass(frozen=True)
class Asleep:
    """The answer to Sleep and WakeUp: what the engine lacks now, or why nothing was done."""

    number: int
    lacks: frozenset[EnginePart]
    error: BeheldError | None = None


@dataclass(frozen=True)
class WakingUp:
    """Another front of the engine has sent WakeUp with this number; its Asleep follows."""

    number: int


@dataclass(frozen=True)
class Profiled:
    """The answer to Profile with the same number; `error` is None on success."""

    number: int
    error: BeheldError | None = None


@dataclass(frozen=True, eq=False)
class WeightsChecked:
    """The answer to CheckWeights with the same number.

    Attributes:
        digests: the SHA-256 of each tensor by its name, see Executor.checksums; empty if they were reset.
    """

    number: int
    digests: Mapping[str, str]
    error: BeheldError | None = None


@dataclass(frozen=True)
class Tried:
    """The answer to TryItems: what was wrong, if anything."""

    error: BeheldError | None


@dataclass(frozen=True)
class Died:
    """The engine has stopped and answers no more."""

    reason: str


@dataclass(frozen=True)
class Decisions:
    """The engine has read the configuration and loads the weights next; `max_model_len` may still shrink."""

    info: ModelInfo
    config: EngineConfig


@dataclass(frozen=True)
class Ready:
    """The engine is ready."""

    info: ModelInfo
    config: EngineConfig


@dataclass(frozen=True)
class Failed:
    """The engine could not start."""

    error: BeheldError


Message = (
    Submit
    | Abort
    | Stop
    | Ping
    | AddLoRA
    | ManageLoRA
    | Sleep
    | WakeUp
    | Profile
    | CheckWeights
    | TryItems
    | ClearCache
    | Tokenizer
    | Prepared
    | Read
    | Lost
    | Unread
    | Close
)
Reply = Events | Pong | LoRAAdded | LoRAsManaged | Asleep | WakingUp | Profiled | WeightsChecked | Tried | Unread | Died


class Engine(Protocol):
    """An engine in another thread or process, as its user sees it. All methods are thread-safe."""

    def start(self, receive: Callable[[Reply], None]) -> None:
        """Start; a thread of the engine's side calls `receive`, which must be quick."""

    def send(self, message: Message) -> None:
        """Send a message. A dead engine, which has sent Died, ignores it."""

    @property
    def alive(self) -> bool:
        """False after the engine died or was closed."""

    def reports(self) -> tuple[EngineReport, ...]:
        """What each of several engines does; of one engine nothing."""

    def close(self) -> None:
        """End the engine, wait for its end and free everything."""


class Inbox(Protocol):
    """The queue from which the engine's side takes its messages."""

    def wait(self) -> Message:
        """Wait for the next message."""

    def poll(self) -> Message | None:
        """The next message if there is one, else None."""

    def put(self, message: Message) -> None:
        """Add a message from the engine's side to itself; thread-safe."""
