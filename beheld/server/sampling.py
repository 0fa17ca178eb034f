"""From a request's fields to SamplingParams."""

from __future__ import annotations

import json
from typing import Any

from beheld.core.errors import ParamsError
from beheld.core.params import SamplingParams, StructuredOutputs
from beheld.server.errors import HttpError
from beheld.server.options import ServerOptions
from beheld.server.schema import ResponseFormat, Sampled, Structured

# Fields that mean the same under the same name.
_SAME = (
    "n",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "allowed_token_ids",
    "bad_words",
    "skip_special_tokens",
    "prompt_logprobs",
    "truncate_prompt_tokens",
)


def sampling(body: Sampled, defaults: SamplingParams, options: ServerOptions, **own: Any) -> SamplingParams:
    """The parameters that a request asks for, over the model's own defaults.

    Args:
        body: the request.
        defaults: of the model.
        options: of the server.
        own: parameters that the route has worked out; None takes the default.

    Raises:
        HttpError, ParamsError: a field is out of range.
    """
    check_answers(body.n, options)
    said = {name: getattr(body, name) for name in _SAME} | {"logit_bias": _bias(body.logit_bias)} | own
    if body.prompt_logprobs is not None and body.stream:
        raise HttpError(
            400, "prompt_logprobs are not sent in a stream.", "Set stream to false.", param="prompt_logprobs"
        )
    if body.stream_options is not None and not body.stream:
        raise HttpError(400, "stream_options need stream.", "Set stream to true.", param="stream_options")
    made = {**vars(defaults), **{name: value for name, value in said.items() if value is not None}}
    if said.get("structured_outputs") is None:
        made["structured_outputs"] = structured(body.response_format, body.structured_outputs)
    return SamplingParams(**made)


def check_answers(n: int | None, options: ServerOptions) -> None:
    """Raise HttpError if too many answers are asked for."""
    if n is not None and not 1 <= n <= options.max_answers:
        raise HttpError(400, f"n must be from 1 to {options.max_answers}.", "Ask for fewer answers.", param="n")


def check_ids(allowed: list[int] | None, num_ids: int) -> None:
    """Raise HttpError if more tokens are allowed than there are: a list costs work everywhere it passes."""
    if allowed is not None and len(allowed) > num_ids:
        raise HttpError(
            400,
            f"allowed_token_ids has {len(allowed)} entries; there are {num_ids} tokens.",
            "Name each token once.",
            param="allowed_token_ids",
        )


def structured(form: ResponseFormat | None, asked: Structured | None) -> StructuredOutputs | None:
    """The grammar that a request asks for, if it does.

    Raises:
        HttpError: two grammars, or an incomplete one.
    """
    wanted = form is not None and form.type != "text"
    if asked is not None:
        given = StructuredOutputs(asked.json_, asked.regex, asked.choice, asked.grammar)
        if wanted or sum(value is not None for value in vars(given).values()) != 1:
            raise HttpError(
                400,
                "There is no grammar, or more than one.",
                "Give one of json, regex, choice and grammar.",
                param="structured_outputs",
            )
        return given
    if form is None or not wanted:
        return None
    if form.type == "json_object":
        return StructuredOutputs(json='{"type": "object"}')
    if form.json_schema is None:
        raise HttpError(
            400,
            "response_format has no json_schema.",
            "Give one, or the type json_object.",
            param="response_format.json_schema",
        )
    return StructuredOutputs(json=json.dumps(form.json_schema.schema_))


def _bias(given: dict[str, float] | None) -> dict[int, float] | None:
    if given is None:
        return None
    bias: dict[int, float] = {}
    for name, value in given.items():
        if not (name.isascii() and name.isdigit() and len(name) < 10):
            raise ParamsError(
                f"logit_bias names {name[:20]!r}, which is not a token id.",
                "Give {token id: bias}.",
                param="logit_bias",
            )
        if int(name) in bias:
            raise ParamsError(f"logit_bias names the token {int(name)} twice.", "Name it once.", param="logit_bias")
        bias[int(name)] = value
    return bias
