"""The stages of a request in the pipeline: ordered, read, with items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from beheld.core.media import MediaItem, MediaReceipt
from beheld.core.params import ReasoningFormat, SamplingParams
from beheld.core.request import LoRARequest
from beheld.inputs.prompt.parse import ParsedPrompt, PromptType
from beheld.inputs.prompt.special_tokens import StandIns
from beheld.utils.cancellation import CancelToken

Messages = Sequence[Mapping[str, Any]]
ItemsByModality = Mapping[str, Sequence[MediaItem]]


@dataclass(frozen=True, eq=False)
class Chat:
    """A conversation of OpenAI messages, and how it becomes a prompt.

    Attributes:
        messages: the conversation; content may hold media.
        chat_template: a template or its file; None for the engine's, or the checkpoint's.
        content_format: "auto", "openai" or "string"; None for the engine's.
        add_generation_prompt: the template begins the answer.
        continue_final_message: the answer continues the last message.
        tools: the tools that the model may call, as the template gets them.
        template_kwargs: further variables of the template.
        mm_processor_kwargs: processor options of this request.
        cache_salt: separates prefix caches.
        reasoning: the reasoning that may precede an answer with a grammar.
    """

    messages: Messages
    chat_template: str | None = None
    content_format: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] | None = None
    mm_processor_kwargs: Mapping[str, Any] | None = None
    cache_salt: str | None = None
    reasoning: ReasoningFormat | None = None


@dataclass(frozen=True, eq=False)
class RequestOrder:
    """A user's order. Other fields are those of Request.

    Attributes:
        prompt: a prompt in one of its forms, or a conversation.
        params: the user's parameters.
        seed: used if the parameters have none.
        cancel: ends the work on the request as far as possible.
    """

    prompt: PromptType | Chat
    params: SamplingParams
    request_id: str
    lora: LoRARequest | None = None
    priority: int = 0
    arrival: float = 0.0
    seed: int = 0
    cancel: CancelToken = field(default_factory=CancelToken)


@dataclass(frozen=True, eq=False)
class PromptText:
    """A prompt's text, and how it becomes token ids.

    Attributes:
        text: the text, with one placeholder per item.
        stand_ins: stand-ins for special tokens that untrusted text spells; None if the text is trusted.
        ends: add the tokenizer's special tokens around it.
        most: the most ids that are needed; None for all.
    """

    text: str
    stand_ins: StandIns | None
    ends: bool
    most: int | None


@dataclass(frozen=True, eq=False)
class ReadPrompt:
    """A prompt that was read, checked, rendered and tokenized.

    Attributes:
        ids: its token ids, with one placeholder per item.
        parsed: its text, media, options and salt.
        text: the text of the ids; None if ids were given or the family made them.
        reasoning: the reasoning that may precede an answer with a grammar.
    """

    ids: Sequence[int]
    parsed: ParsedPrompt
    text: PromptText | None = None
    reasoning: ReasoningFormat | None = None


@dataclass(frozen=True, eq=False)
class ReadRequest:
    """A request whose media are not opened yet."""

    order: RequestOrder
    prompt: ReadPrompt


@dataclass(frozen=True, eq=False)
class RequestWithItems:
    """A request with its items by modality, and their receipts in the order of the prompt.

    `ids` are the prompt's, with the items' texts around their placeholders.
    """

    read: ReadRequest
    ids: Sequence[int]
    items: ItemsByModality
    receipts: tuple[MediaReceipt, ...]
