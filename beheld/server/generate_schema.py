"""The request schemas of /inference/v1/generate and /generative_scoring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from beheld.core.params import RawParams, SamplingParams
from beheld.core.value_checks import table_of_ids
from beheld.server import limits
from beheld.server.body_schema import Body, Ids, Name, Whole, wrong
from beheld.server.pooling_schema import Pooled
from beheld.server.schema import CompletionRequest, SamplingFields, StreamOptions

_PaddedId = Annotated[int, Field(ge=-1, lt=2**31)]
_PaddedIds = Annotated[list[_PaddedId], Field(fail_fast=True)]
# Cells that are checked in one step, which keeps the interpreter lock.
_CELLS_A_STEP = 16_384


def _as_table(given: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """The rows as an array, checked in steps between which other threads run."""
    if not isinstance(given, list) or not all(isinstance(row, list) for row in given):
        return check(given)
    width = max(map(len, given), default=0)
    if width == 0:
        raise wrong("The table must be non-empty", "Send a row of token ids for each position.")
    if len(given) * width > limits.MAX_TABLE_CELLS:
        raise wrong(
            f"The table of {len(given)} rows by {width} has more than {limits.MAX_TABLE_CELLS} cells",
            "Name fewer tokens, or send several requests with prompt_logprob_start.",
        )
    a_step = max(1, _CELLS_A_STEP // max(1, width))
    for start in range(0, len(given), a_step):
        try:
            for cells in range(0, width, _CELLS_A_STEP):
                check([row[cells : cells + _CELLS_A_STEP] for row in given[start : start + a_step]])
        except ValidationError:
            # Once more from the beginning, so that the error names the row's place in the whole list.
            return check(given)
    return table_of_ids("prompt_logprob_token_ids", given)


_Table = Annotated[list[_PaddedIds], Field(fail_fast=True), WrapValidator(_as_table)]


class GenerateParams(SamplingFields):
    """vLLM's SamplingParams as an object."""

    says_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "extra_args": ({},),
        "spaces_between_special_tokens": (True,),
        "watermarking": (False,),
    }
    without_effect: ClassVar[Mapping[str, str]] = {
        "flat_logprobs": "Answers are JSON; it is a form of Python's objects.",
        "detokenize": "`output_mode` says whether there is a text.",
        "output_kind": "`stream` says it.",
        "routed_experts_prompt_start": "Answers do not name experts.",
        "skip_clone": "It is of vLLM's objects.",
        "skip_reading_prefix_cache": "Answers are the same with cached prefixes.",
        "stream_interval": "Each piece of an answer is sent as soon as it is there.",
        "watermarking": "Texts are not marked.",
    }

    n: Whole | None = None
    max_tokens: Whole | None = None
    logprobs: Whole | None = None
    prompt_logprobs: Whole | None = None
    logprob_token_ids: Ids | None = None
    prompt_logprob_token_ids: _Table | None = None
    prompt_logprob_start: Whole | None = None
    detokenize: bool | None = None


class TokensCompletion(CompletionRequest):
    """What /inference/v1/generate asks for, as a completion: no body of a route."""

    prompt_logprob_token_ids: Any = None
    prompt_logprob_start: Whole | None = None


class ScoredCompletion(CompletionRequest):
    """What /generative_scoring asks for, as a completion: no body of a route."""

    params_class: ClassVar[type[SamplingParams]] = RawParams


class GenerateRequest(Body):
    """POST /inference/v1/generate."""

    remedies: ClassVar[Mapping[str, str]] = {
        "content_parts": "Send messages with media to /v1/chat/completions, with return_token_ids.",
        "features": "Send messages with media to /v1/chat/completions, with return_token_ids.",
        "output_mode": "Send messages to /v1/chat/completions for calls and reasoning.",
    }
    says_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "content_parts": ([],),
        "ec_transfer_params": (),
        "features": (),
        "kv_transfer_params": (),
        "parse_context": (),
        "reasoning_ended": (),
        "reasoning_parser_kwargs": (),
        "token_offsets": (),
    }
    without_effect = Pooled.without_effect

    token_ids: Annotated[Ids, Field(min_length=1)]
    sampling_params: GenerateParams
    output_mode: Literal["tokens", "text"] | None = None
    model: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=limits.MAX_NAME)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    return_token_ids: bool | None = None


class AbortRequest(Body):
    """POST /inference/v1/abort_requests."""

    request_ids: Annotated[list[Name], Field(max_length=limits.MAX_ABORTED, fail_fast=True)]
    # Whatever shares requests out by their model.
    model: Name | None = None


_Texts = Annotated[list[str], Field(min_length=1, max_length=limits.MAX_INPUTS, fail_fast=True)]
_Lists = Annotated[list[Ids], Field(min_length=1, max_length=limits.MAX_INPUTS, fail_fast=True)]


class GenerativeScoringRequest(Body):
    """POST /generative_scoring."""

    without_effect = Pooled.without_effect

    query: str | Ids
    items: _Texts | _Lists
    label_token_ids: Annotated[Ids, Field(min_length=1)]
    apply_softmax: bool | None = None
    item_first: bool | None = None
    add_special_tokens: bool | None = None
    model: Name | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=limits.MAX_NAME)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
