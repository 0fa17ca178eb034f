"""Bodies of the routes that give vectors and scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
)

from beheld.server import limits
from beheld.server.body_schema import Body, Ids, Name, Whole, wrong
from beheld.server.parts_schema import PlainParts
from beheld.server.schema import WITHOUT_EFFECT, Messages, Reading, Variables, prompt_form

_ManyTexts = Annotated[list[str], Field(max_length=limits.MAX_INPUTS, fail_fast=True)]


_ManyLists = Annotated[list[Ids], Field(max_length=limits.MAX_INPUTS, fail_fast=True)]


Inputs = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[_ManyTexts, Tag("texts")]
    | Annotated[Ids, Tag("ids")]
    | Annotated[_ManyLists, Tag("lists")],
    Discriminator(prompt_form),
]


class Pooled(Body):
    """The common fields of requests that pool. Absent fields take the model's defaults."""

    says_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "mm_processor_kwargs": ({},),
        "truncation_side": ("right",),
        "user": (),
    }
    without_effect: ClassVar[Mapping[str, str]] = {"request_id": WITHOUT_EFFECT["request_id"]}
    remedies: ClassVar[Mapping[str, str]] = {
        "mm_processor_kwargs": "Leave it out: pairs are read with the server's own.",
        "truncation_side": "Leave it out: of a text to pool, the beginning is kept.",
    }

    model: Name | None = None
    priority: Whole | None = None
    truncate_prompt_tokens: Whole | None = None
    cache_salt: Name | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    softmax: bool | None = None
    activation: bool | None = None
    user: Name | None = None
    padding: Literal["max_length", "do_not_pad", False] | None = None


class ClassifyRequest(Pooled):
    """POST /classify: texts, or a conversation."""

    input: Inputs | None = None
    add_special_tokens: bool | None = None
    messages: Messages | None = None
    chat_template: str | None = None
    chat_template_kwargs: Variables | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: Reading | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class LateChunking(Body):
    """How many tokens of a text have a vector together."""

    chunk_size: Annotated[int, Field(ge=1, lt=2**63)]


class EmbeddingRequest(ClassifyRequest):
    """POST /v1/embeddings: texts, or a conversation."""

    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = None
    embed_dtype: Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"] | None = None
    endianness: Literal["native", "big", "little"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=2**20)] | None = None
    late_chunking_params: LateChunking | None = None


class PoolingRequest(EmbeddingRequest):
    """POST /pooling: texts, or a conversation."""

    task: Name | None = None


class ScoredContent(Body):
    """A side of a pair: the parts of a message."""

    content: Annotated[PlainParts, Field(min_length=1)]


class ScoredText(Body):
    """A side of a pair: a text."""

    text: str


def _side(given: Any) -> str:
    """The form that a side of a pair is checked against."""
    if not isinstance(given, dict | ScoredContent | ScoredText):
        return "text"
    return "object" if isinstance(given, ScoredText) or "text" in given else "content"


def _sides(given: Any) -> str:
    return "many" if isinstance(given, list) else "one"


Side = Annotated[
    Annotated[str, Tag("text")] | Annotated[ScoredContent, Tag("content")] | Annotated[ScoredText, Tag("object")],
    Discriminator(_side),
]


_ManySides = Annotated[list[Side], Field(min_length=1, max_length=limits.MAX_INPUTS, fail_fast=True)]


Sides = Annotated[Annotated[Side, Tag("one")] | Annotated[_ManySides, Tag("many")], Discriminator(_sides)]


# A bound, which 0 leaves out.


def _no_less(given: Any, info: ValidationInfo) -> Any:
    if type(given) is int and given < 0:
        words = f"{info.field_name} must be a non-negative integer"
        raise wrong(words, "Send 0 for all tokens, or how many there may be.")
    return given


_Most = Annotated[int, Field(ge=0, lt=2**31), BeforeValidator(_no_less)]


class ScoreRequest(Pooled):
    """POST /score: pairs, under any of the names of their sides."""

    text_1: Sides | None = None
    text_2: Sides | None = None
    data_1: Sides | None = None
    data_2: Sides | None = None
    queries: Sides | None = None
    documents: Sides | None = None
    items: Sides | None = None
    max_tokens_per_query: _Most | None = None
    max_tokens_per_doc: _Most | None = None
    instruction: str | None = None
    chat_template_kwargs: Variables | None = None


class RerankRequest(Pooled):
    """POST /rerank: documents, and the query by which they are ordered."""

    says_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **Pooled.says_nothing,
        "rank_fields": (),
        "max_chunks_per_doc": (),
    }

    query: Side
    documents: _ManySides
    top_n: _Most | None = None
    max_tokens_per_query: _Most | None = None
    max_tokens_per_doc: _Most | None = None
    instruction: str | None = None
    return_documents: bool | None = None
    chat_template_kwargs: Variables | None = None
