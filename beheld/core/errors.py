"""The exception tree: one root, one half for what the user can mend, one for what we must mend.

BeheldError
|-- UserError (ValueError)         the input or an option is at fault; the message says what to do
|   |-- ConfigError                an engine option: unknown, out of range, or not available here
|   |-- ModelError                 no such model, not a model, no weights, or an unsupported architecture
|   |-- ParamsError                a sampling parameter
|   |-- PromptError                a prompt
|   |   |-- MarkerError            its markers are not as many as its media
|   |   `-- PromptTooLongError     longer than the model or the engine's limits allow
|   |-- TemplateError              the chat template is missing or fails
|   |-- LoRAError                  an adapter: unknown, broken, or not one for this model
|   `-- MediaError                 one picture, video or sound
|       |-- FetchError             could not be fetched, or may not be
|       |-- DecodeError            is not what it claims to be, or is broken
|       |-- LimitError             too many, too large, too long
|       |-- ProcessError           the model's processor refused it
|       `-- MediaLossError         strict_media was set and something would be lost
`-- EngineError (RuntimeError)     our fault, or the machine's
    |-- StepError                  this request failed while others went on
    |   `-- CulpritError           its step failed because of it: it fails alone as well
    |-- WorkerError                the process that prepared this request ended, or could not begin
    |-- CapacityError              the model or a request does not fit into memory
    `-- EngineDeadError            the engine has stopped and takes no more work
"""

from __future__ import annotations

from typing import Self, TypeVar

E = TypeVar("E", bound="BeheldError")


class BeheldError(Exception):
    """The root of all errors raised on purpose.

    Args:
        reason: what is wrong, one sentence.
        remedy: what to do about it, one sentence; may be empty.
        stage: where it was found ("fetch", "decode", "process", "prompt", "params", "step", ...).
        param: the option or field concerned, if one can be named.
        item: the media item concerned, as "image 2" (counted from 1), if any.
        detail: what a library said of it. It stands in the message, but clients of a server are not told: nobody has
            read what it may hold.
        or_engine: what else helps, but only the operator who starts the engine can do; words that follow "or": "raise
            max_model_len". Clients of a server are told it as the operator's.
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
        return f"{where}{reason} {self._advice()}".rstrip()

    def _advice(self) -> str:
        """All that helps, for somebody who has the engine."""
        if not (self.remedy and self.or_engine):
            return self.remedy or (f"{self.or_engine[0].upper()}{self.or_engine[1:]}." if self.or_engine else "")
        return f"{self.remedy.rstrip('.')}, or {self.or_engine}."

    def told(self) -> tuple[str, str, str, str | None, str | None, str, str]:
        """Everything it says, as `rebuild` takes it."""
        return (self.reason, self.remedy, self.stage, self.param, self.item, self.detail, self.or_engine)

    def of(self, item: str, place: str | None = None) -> Self:
        """The same error, which says that it is about this item, and where that was given, as far as it says nothing of
        them yet."""
        reason, remedy, stage, param, own, detail, or_engine = self.told()
        return rebuild(type(self), reason, remedy, stage, param or place, own or item, detail, or_engine)

    def __reduce__(self) -> tuple[object, ...]:
        return rebuild, (type(self), *self.told())


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
    """An error of what `told` gave, on the other side of a process border."""
    return kind(reason, remedy, stage=stage, param=param, item=item, detail=detail, or_engine=or_engine)


def first_line(error: BaseException) -> str:
    """What an exception says, in one line without a full stop."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


class UserError(BeheldError, ValueError):
    """The input or an option is at fault."""

    stage = "input"


class ConfigError(UserError):
    """An engine option is unknown, out of range, or not available here."""

    stage = "config"


class ModelError(UserError):
    """There is no such model, or it cannot be run."""

    stage = "model"


class ParamsError(UserError):
    """A sampling parameter is wrong; `param` names it."""

    stage = "params"


class PromptError(UserError):
    """A prompt is malformed."""

    stage = "prompt"


class MarkerError(PromptError):
    """A prompt has more markers than media, or fewer."""


class PromptTooLongError(PromptError):
    """A prompt is longer than the limits allow."""


class TemplateError(UserError):
    """The chat template is missing or fails on these messages."""

    stage = "template"


class LoRAError(UserError):
    """A LoRA adapter is unknown, broken, or not one that this model can carry."""

    stage = "lora"


class MediaError(UserError):
    """One media item is at fault; `item` says which."""

    stage = "media"


class FetchError(MediaError):
    """The item could not be fetched, or may not be."""

    stage = "fetch"


class DecodeError(MediaError):
    """The item's bytes or arrays are not what they claim to be."""

    stage = "decode"


class LimitError(MediaError):
    """There are too many items, or one is too large or too long."""

    stage = "limit"


class ProcessError(MediaError):
    """The model's processor refused the item."""

    stage = "process"


class MediaLossError(MediaError):
    """`strict_media` was set and part of the item would be lost."""

    stage = "strict"


class EngineError(BeheldError, RuntimeError):
    """Our fault, or the machine's."""


class StepError(EngineError):
    """This request failed while it was being computed; others went on."""

    stage = "step"


class CulpritError(StepError):
    """A step failed because of this request: computed alone, it failed again."""


class WorkerError(EngineError):
    """The process that prepared this request ended, or could not begin; others go on."""

    stage = "worker"


class CapacityError(EngineError):
    """The model, or one request, does not fit into the memory there is."""

    stage = "capacity"


class EngineDeadError(EngineError):
    """The engine has stopped and takes no more work."""

    stage = "engine"
