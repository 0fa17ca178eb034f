"""A request as the engine takes it: sealed, complete, and frozen."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from beheld.core.media import MediaReceipt, MediaSpan
from beheld.core.params import Sampling


class FinishReason(StrEnum):
    """Why a sequence ended, in the words of the OpenAI API where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True)
class LoRARequest:
    """An adapter: its name, its number (at least 1), and the folder that holds it."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""


@dataclass(frozen=True, eq=False)
class Request:
    """One sequence to be generated.

    Attributes:
        id: unique while the request lives.
        token_ids: the prompt with every placeholder already replaced.
        spans: where the media stand in it, in order.
        params: the sealed sampling parameters.
        lora: the adapter, if any.
        salt: separates the prefix cache of one user from another's.
        priority: smaller runs sooner under the priority policy.
        arrival: seconds of a monotonic clock.
        receipts: one per media item.
        prompt: the prompt as text, if it came as text.
    """

    id: str
    token_ids: tuple[int, ...]
    params: Sampling
    spans: tuple[MediaSpan, ...] = ()
    lora: LoRARequest | None = None
    salt: bytes = b""
    priority: int = 0
    arrival: float = 0.0
    receipts: tuple[MediaReceipt, ...] = ()
    prompt: str | None = None
