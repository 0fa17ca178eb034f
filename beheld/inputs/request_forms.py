"""What a request is between the pipeline's steps: RequestOrder, then ReadRequest, then RequestWithItems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from beheld.core.media import MediaItem, MediaReceipt, MediaSpan
from beheld.core.params import SamplingParams
from beheld.core.pooling_params import PoolingParams
from beheld.core.request import LoRARequest
from beheld.core.structured_outputs import ReasoningFormat
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
        chat_template: a template's text or file; None for the engine's or the checkpoint's.
        content_format: "auto", "openai" or "string"; None for the engine's.
        add_generation_prompt: whether the template starts the answer.
        continue_final_message: whether the answer continues the last message.
        tools: the tools that the model may call, as the template shows them.
        template_kwargs: further variables of the template.
        mm_processor_kwargs: processor options of this request.
        cache_salt: separates prefix caches.
        reasoning: the reasoning that may precede an answer with a grammar, or that has a budget.
        add_special_tokens: whether the tokenizer's special tokens are added to those that the template writes.
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
    add_special_tokens: bool = False


@dataclass(frozen=True, eq=False)
class Pair:
    """Two texts that a model compares in one prompt.

    Attributes:
        first, second: the texts.
        cache_salt: separates prefix caches.
    """

    first: str
    second: str
    cache_salt: str | None = None


@dataclass(frozen=True, eq=False)
class RequestOrder:
    """A user's order. Other fields are those of Request.

    Attributes:
        prompt: a prompt in one of its forms, a conversation, or two texts.
        params: the user's parameters.
        seed: used if the parameters have none.
        client: opaque; clients share turns and room fairly. All requests without one are one client's.
        cancel: ends the work on the request as far as possible.
        grounding: whether the answer's places in images are wanted, in their pixels.
    """

    prompt: PromptType | Chat | Pair
    params: SamplingParams | PoolingParams
    request_id: str
    lora: LoRARequest | None = None
    priority: int = 0
    arrival: float = 0.0
    client: str = field(default="", repr=False)
    seed: int = 0
    cancel: CancelToken = field(default_factory=CancelToken)
    grounding: bool = False


@dataclass(frozen=True, eq=False)
class PromptText:
    """A prompt's text, and how it becomes token ids.

    Attributes:
        text: with one placeholder per item.
        stand_ins: for special tokens that users spelled; None for trusted text.
        ends: whether to add the tokenizer's special tokens around it.
        most: the number of ids needed; None for all.
    """

    text: str
    stand_ins: StandIns | None
    ends: bool
    most: int | None


@dataclass(frozen=True, eq=False)
class ReadPrompt:
    """A parsed, checked, rendered and tokenized prompt.

    Attributes:
        ids: its token ids, with one placeholder per item.
        parsed: its text, media, options and salt.
        text: the text of the ids; None if ids were given, or the family wrote them.
        reasoning: what may precede an answer with a grammar.
        second: where the second of two texts starts, if the tokenizer says so.
    """

    ids: Sequence[int]
    parsed: ParsedPrompt
    text: PromptText | None = None
    reasoning: ReasoningFormat | None = None
    second: int | None = None


@dataclass(frozen=True, eq=False)
class ReadRequest:
    """A request whose media are not opened yet."""

    order: RequestOrder
    prompt: ReadPrompt


@dataclass(frozen=True, eq=False)
class RequestWithItems:
    """A request with its items by modality, and their receipts in the order of the prompt.

    `ids` are the prompt's, with the items' texts around their placeholders; `spans` are of a prompt of embeddings.
    """

    read: ReadRequest
    ids: Sequence[int]
    items: ItemsByModality
    receipts: tuple[MediaReceipt, ...]
    spans: tuple[MediaSpan, ...] = ()
