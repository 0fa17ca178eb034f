"""The request of POST /v2/embed, as Cohere's clients send it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from beheld.server import limits
from beheld.server.body_schema import Name, Whole
from beheld.server.pooling_schema import Pooled, ScoredContent

_Texts = Annotated[list[str], Field(min_length=1, max_length=limits.MAX_INPUTS, fail_fast=True)]
_Inputs = Annotated[list[ScoredContent], Field(min_length=1, max_length=limits.MAX_INPUTS, fail_fast=True)]
_Kind = Literal["float", "base64", "binary", "ubinary"]
_Kinds = Annotated[list[_Kind], Field(min_length=1, max_length=8, fail_fast=True)]


class EmbedRequest(Pooled):
    """POST /v2/embed: texts, URLs of images, or contents of both."""

    without_effect: ClassVar[Mapping[str, str]] = {
        **Pooled.without_effect,
        "input_type": "Queries and documents are read as they are sent.",
    }

    input_type: Name | None = None
    texts: _Texts | None = None
    images: _Texts | None = None
    inputs: _Inputs | None = None
    embedding_types: _Kinds | None = None
    output_dimension: Annotated[int, Field(ge=1, le=2**20)] | None = None
    max_tokens: Annotated[Whole, Field(ge=1)] | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
