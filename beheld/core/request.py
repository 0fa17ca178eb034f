"""A request as the engine takes it: sealed, complete, and frozen."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from beheld.core.errors import LoRAError
from beheld.core.media import MediaReceipt, MediaSpan
from beheld.core.params import Grammar, Pooling, Sampling


class FinishReason(StrEnum):
    """Why a sequence ended, in the words of the OpenAI API where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class ForeignTemplate(str):
    """A chat template that a stranger sent: never a file's name, and rendered where that can be killed."""


@dataclass(frozen=True)
class LoRARequest:
    """A LoRA adapter.

    Attributes:
        lora_name: what it is called.
        lora_int_id: its number, at least 1; one number stands for one adapter as long as the engine keeps it.
        lora_path: the folder that holds it, in PEFT's form.
        digest: of its files, once the engine has read them; users leave it out.

    Raises:
        LoRAError: a field is not what it should be.
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
    """One sequence to be generated, or one prompt to be pooled.

    Attributes:
        id: unique while the request lives.
        token_ids: the prompt with every placeholder already replaced.
        spans: where the media stand in it, in order.
        params: the sealed sampling or pooling parameters.
        lora: the adapter, if any.
        salt: separates the prefix cache of one user from another's.
        priority: smaller runs sooner under the priority policy.
        arrival: seconds of a monotonic clock.
        client: opaque; clients share prefill fairly. All requests without one are one client's.
        receipts: one per media item.
        prompt: the prompt as text, if it came as text.
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

    @property
    def grammar(self) -> Grammar | None:
        """What the answer must follow."""
        return self.params.grammar if isinstance(self.params, Sampling) else None
