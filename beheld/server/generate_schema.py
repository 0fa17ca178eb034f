"""The request schema of /inference/v1/generate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from beheld.server import limits
from beheld.server.schema import Body, Ids, Name, SamplingFields, StreamOptions, Whole


class GenerateParams(SamplingFields):
    """vLLM's SamplingParams as an object."""

    says_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "extra_args": ({},),
        "spaces_between_special_tokens": (True,),
    }
    without_effect: ClassVar[Mapping[str, str]] = {
        "flat_logprobs": "Answers are JSON; it is a form of Python's objects.",
        "detokenize": "The answer is token ids; /v1/completions gives its text.",
        "output_kind": "`stream` says it.",
    }

    n: Whole | None = None
    max_tokens: Whole | None = None
    logprobs: Whole | None = None
    prompt_logprobs: Whole | None = None
    logprob_token_ids: Ids | None = None


class GenerateRequest(Body):
    """POST /inference/v1/generate."""

    remedies: ClassVar[Mapping[str, str]] = {
        "content_parts": "Send messages with media to /v1/chat/completions, with return_token_ids.",
        "features": "Send messages with media to /v1/chat/completions, with return_token_ids.",
        "output_mode": "Use /v1/completions for texts.",
    }
    says_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "content_parts": ([],),
        "ec_transfer_params": (),
        "features": (),
        "kv_transfer_params": (),
        "output_mode": ("tokens",),
        "parse_context": (),
        "reasoning_ended": (),
        "reasoning_parser_kwargs": (),
        "token_offsets": (),
    }
    without_effect: ClassVar[Mapping[str, str]] = {
        "request_id": "Answers have ids of this server, which X-Request-Id and its log show."
    }

    token_ids: Annotated[Ids, Field(min_length=1)]
    sampling_params: GenerateParams
    model: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=limits.MAX_NAME)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    return_token_ids: bool | None = None
