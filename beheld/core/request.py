"""A request as the engine takes it: resolved, complete, and frozen."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from beheld.core.errors import LoRAError
from beheld.core.grounding import AnswerGrounding
from beheld.core.media import MediaReceipt, MediaSpan
from beheld.core.pooling_params import Pooling
from beheld.core.sampling import Sampling
from beheld.core.structured_outputs import Grammar


class FinishReason(StrEnum):
    """Why a sequence ended. The values are the OpenAI API's where it has one."""

    STOP = "stop"
    LENGTH = "length"
    REPETITION = "repetition"
    ABORT = "abort"
    ERROR = "error"


class ForeignTemplate(str):
    """A chat template from an untrusted client: never a file name, and rendered in a process that can be killed."""


@dataclass(frozen=True)
class LoRARequest:
    """A LoRA adapter.

    Attributes:
        lora_name: the adapter's name.
        lora_int_id: its number, at least 1; a number stands for one adapter as long as the engine keeps it.
        lora_path: the folder with the adapter in PEFT's format.
        digest: hash of its files, set by the engine; users leave it out.

    Raises:
        LoRAError: a field has a wrong type or value.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    digest: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise LoRAError(f"lora_name must be a name, got {self.lora_name!r}.", param="lora_name")
        number = self.lora_int_id
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number < 1 << 63:
            raise LoRAError(f"lora_int_id must be a whole number from 1, got {number!r}.", param="lora_int_id")
        if not isinstance(self.lora_path, str):
            raise LoRAError(f"lora_path must be a folder's path, got {self.lora_path!r}.", param="lora_path")


@dataclass(frozen=True, eq=False)
class Request:
    """One sequence to generate, or one prompt to pool.

    Attributes:
        id: unique among the requests that have not finished.
        token_ids: the prompt, with every placeholder replaced.
        params: the resolved sampling or pooling parameters.
        spans: positions of the media in the prompt, in order.
        lora: the adapter, if any.
        salt: separates the prefix caches of different users.
        priority: smaller runs sooner under the priority policy.
        arrival: seconds of a monotonic clock.
        client: opaque; clients share prefill fairly. All requests without one are one client's.
        receipts: one per media item.
        prompt: the prompt's text, if the user gave text.
        grounding: how to read the places that the answer names; None if nobody asks for them.
        restartable: nobody reads the answer before its end, so another engine may begin it anew.
        at_end: likewise, and no token is looked at before the end, so they may come several at a time.
    """

    id: str
    token_ids: tuple[int, ...]
    params: Sampling | Pooling
    spans: tuple[MediaSpan, ...] = ()
    lora: LoRARequest | None = None
    salt: bytes = b""
    priority: int = 0
    arrival: float = 0.0
    client: str = field(default="", repr=False)
    receipts: tuple[MediaReceipt, ...] = ()
    prompt: str | None = None
    grounding: AnswerGrounding | None = None
    restartable: bool = False
    at_end: bool = False

    def of_text(self, id: str, token_ids: tuple[int, ...], prompt: str | None) -> Request:
        """The same request of another prompt: what `replace` makes, in a sixth of the time."""
        made = object.__new__(Request)
        made.__dict__.update(self.__dict__, id=id, token_ids=token_ids, prompt=prompt)
        return made

    @property
    def grammar(self) -> Grammar | None:
        """The answer's grammar, if there is one."""
        return self.params.grammar if isinstance(self.params, Sampling) else None
