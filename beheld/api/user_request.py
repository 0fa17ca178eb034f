"""What a user asks of AsyncLLM, before it is prepared and submitted."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from beheld.api.collectors import Params
from beheld.api.live_request import Pieces
from beheld.core.request import LoRARequest
from beheld.inputs.pipeline import Chat, Pair, PromptType


def _nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True, eq=False)
class UserRequest:
    """A prompt, and how it is to be answered.

    Attributes:
        prompt: a prompt in one of its forms, a conversation, or two texts.
        params: the user's parameters; None takes the model's defaults.
        request_id: the user's name for it; None takes a number.
        lora, priority: as in Request.
        pieces: what each output holds.
        client: who asks, in any words.
        marks: special tokens whose first occurrence is in the text even if special tokens are skipped.
        prepared: called when the prompt is processed and no reference to it is kept.
        grounding: whether the answer's places in images are wanted, in their pixels.
        lazy_prompt: whether outputs have `prompt_entries` in place of `prompt_logprobs`.
    """

    prompt: PromptType | Chat | Pair
    params: Params | None
    request_id: str | None
    lora: LoRARequest | None
    priority: int
    pieces: Pieces
    client: str = ""
    marks: Collection[str] = ()
    prepared: Callable[[], None] = _nothing
    grounding: bool = False
    lazy_prompt: bool = False
