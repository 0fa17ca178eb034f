"""The exception tree: UserError for what the user can fix, EngineError for the rest.

BeheldError
|-- UserError (ValueError)         the input or an option is at fault; the message says what to do
|   |-- ConfigError                an engine option is unknown, out of range or unavailable
|   |-- ModelError                 the model is missing, has no weights or an unsupported architecture
|   |-- ParamsError                a sampling parameter is wrong
|   |-- PromptError                a prompt is malformed
|   |   |-- PlaceholderError       the numbers of placeholders and media differ
|   |   `-- PromptTooLongError     the prompt exceeds the limits of the model or the engine
|   |-- TemplateError              the chat template is missing or fails
|   |-- LoRAError                  an adapter is unknown, broken or made for another model
|   `-- MediaError                 an image, video or audio clip is at fault
|       |-- FetchError             it cannot be fetched, or fetching it is not allowed
|       |-- DecodeError            it is broken, or not of the type that it claims
|       |-- LimitError             there are too many, or one is too large or too long
|       |-- ProcessError           the model's processor refused it
|       `-- MediaLossError         strict_media is set and information would be lost
`-- EngineError (RuntimeError)     the engine or the machine is at fault
    |-- StepError                  this request failed; others continue
    |   `-- CulpritError           its step failed because of it: it fails alone as well
    |-- WorkerError                the process that prepared this request ended or could not start
    |-- CapacityError              the model or a request does not fit into memory
    |-- AsleepError                the engine sleeps and accepts no request until it is woken up
    |   `-- PausedError            it is only paused, in a mode in which no request waits
    `-- EngineDeadError            the engine has stopped and accepts no more work
"""

from __future__ import annotations

from typing import Self, TypeVar

E = TypeVar("E", bound="BeheldError")


class BeheldError(Exception):
    """The root of all errors that beheld raises on purpose.

    Args:
        reason: what is wrong, in one sentence.
        remedy: what the user can do, in one sentence; may be empty.
        stage: where the error was found ("fetch", "decode", "process", "prompt", "params", "step", ...).
        param: the option or field at fault, if there is one.
        item: the media item at fault, such as "image 2" (counted from 1), if there is one.
        detail: a library's own message. The server leaves it out of its responses, because it may contain private data.
        or_engine: an alternative that only the operator of the engine has, as words that follow "or": "raise
            max_model_len". The server's responses attribute it to the operator.
    """

    stage = "engine"

    def __init__(
        self,
        reason: str,
        remedy: str = "",
        *,
        stage: str | None = None,
        param: str | None = None,
        item: str | None = None,
        detail: str = "",
        or_engine: str = "",
    ) -> None:
        self.reason = reason
        self.remedy = remedy
        self.or_engine = or_engine
        self.param = param
        self.item = item
        self.detail = detail
        if stage is not None:
            self.stage = stage
        super().__init__(str(self))

    def __str__(self) -> str:
        where = f"{self.item}: " if self.item else ""
        reason = f"{self.reason.rstrip('.')}: {self.detail.rstrip('.')}." if self.detail else self.reason
        return f"{where}{reason} {self.advice()}".rstrip()

    def advice(self) -> str:
        """The remedy followed by the operator's alternative."""
        if not (self.remedy and self.or_engine):
            return self.remedy or (f"{self.or_engine[0].upper()}{self.or_engine[1:]}." if self.or_engine else "")
        return f"{self.remedy.rstrip('.')}, or {self.or_engine}."

    def arguments(self) -> tuple[str, str, str, str | None, str | None, str, str]:
        """The error's contents, in the order of the parameters of `rebuild`."""
        return (self.reason, self.remedy, self.stage, self.param, self.item, self.detail, self.or_engine)

    def for_item(self, item: str, place: str | None = None) -> Self:
        """A copy of this error with `item` and `place` filled in where the error does not name its own."""
        reason, remedy, stage, param, named, detail, or_engine = self.arguments()
        return rebuild(type(self), reason, remedy, stage, param or place, named or item, detail, or_engine)

    def __reduce__(self) -> tuple[object, ...]:
        return rebuild, (type(self), *self.arguments())


def rebuild(
    kind: type[E],
    reason: str,
    remedy: str,
    stage: str,
    param: str | None,
    item: str | None,
    detail: str,
    or_engine: str,
) -> E:
    """Build an error from its `arguments`, on the other side of a process boundary."""
    return kind(reason, remedy, stage=stage, param=param, item=item, detail=detail, or_engine=or_engine)


def first_line(error: BaseException) -> str:
    """An exception's message in one line, without a full stop."""
    lines = [text for line in str(error).splitlines() if (text := line.strip())]
    if not lines:
        return type(error).__name__
    # Some first lines only announce what follows.
    return (" ".join(lines[:2]) if lines[0].endswith(":") else lines[0]).rstrip(".")


class UserError(BeheldError, ValueError):
    """The input or an option is at fault."""

    stage = "input"


class ConfigError(UserError):
    """An engine option is unknown, out of range, or not available here."""

    stage = "config"


class ModelError(UserError):
    """The model does not exist or cannot run."""

    stage = "model"


class ParamsError(UserError):
    """A sampling parameter is wrong; `param` names it."""

    stage = "params"


class PromptError(UserError):
    """A prompt is malformed."""

    stage = "prompt"


class PlaceholderError(PromptError):
    """The numbers of placeholders and media in a prompt differ."""


class PromptTooLongError(PromptError):
    """A prompt is longer than the limits allow."""


class TemplateError(UserError):
    """The chat template is missing or fails on these messages."""

    stage = "template"


class LoRAError(UserError):
    """A LoRA adapter is unknown, broken, or made for another model."""

    stage = "lora"


class LoRAMissingError(LoRAError):
    """The folder of a LoRA adapter does not exist."""


class MediaError(UserError):
    """One media item is at fault; `item` names it."""

    stage = "media"


class FetchError(MediaError):
    """The item cannot be fetched, or fetching it is not allowed."""

    stage = "fetch"


class DecodeError(MediaError):
    """The item's bytes or arrays are broken, or not of the type that they claim."""

    stage = "decode"


class LimitError(MediaError):
    """There are too many items, or one is too large or too long."""

    stage = "limit"


class ProcessError(MediaError):
    """The model's processor refused the item."""

    stage = "process"


class MediaLossError(MediaError):
    """`strict_media` is set and part of the item would be lost."""

    stage = "strict"


class EngineError(BeheldError, RuntimeError):
    """The engine or the machine is at fault."""


class StepError(EngineError):
    """The computation of this request failed; other requests continue."""

    stage = "step"


class CulpritError(StepError):
    """A step failed because of this request: computed alone, it failed again."""


class StatesLostError(EngineError):
    """A failed step has changed the recurrent states of a sequence, which must be computed again from its start."""


class WorkerError(EngineError):
    """The process that prepared this request ended or could not start; other requests continue."""

    stage = "worker"


class CapacityError(EngineError):
    """The model or one request does not fit into memory."""

    stage = "capacity"


class AsleepError(EngineError):
    """The engine sleeps: it has given its memory back, and accepts no request until it is woken up."""

    stage = "asleep"


class PausedError(AsleepError):
    """The engine is paused and accepts no request until it goes on."""

    stage = "paused"


class EngineDeadError(EngineError):
    """The engine has stopped and accepts no more work."""

    stage = "engine"
