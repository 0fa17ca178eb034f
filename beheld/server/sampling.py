"""Makes SamplingParams from a request's fields."""

from __future__ import annotations

from typing import Any, TypeVar

from beheld.core.beams import BeamSearchParams
from beheld.core.errors import ParamsError
from beheld.core.params import MAX_LOGPROB_TOKEN_IDS, SamplingParams
from beheld.core.repetition import RepetitionDetectionParams
from beheld.core.structured_outputs import StructuredOutputs
from beheld.server import limits
from beheld.server.errors import HttpError
from beheld.server.options import ServerOptions
from beheld.server.schema import ChatRequest, CompletionRequest, ResponseFormat, Sampled, SamplingFields, Structured

_TURNED = ("logit_bias", "repetition_detection", "structured_outputs")
# Fields with the same name and meaning.
_SAME = (
    "n",
    "prompt_logprobs",
    "logprob_token_ids",
    *(name for name in SamplingFields.model_fields if name not in _TURNED),
)

_Body = TypeVar("_Body", bound=Sampled)


def sampling(body: Sampled, defaults: SamplingParams, options: ServerOptions, **own: Any) -> SamplingParams:
    """The request's sampling parameters, on top of the model's defaults.

    Args:
        body: the request.
        defaults: the model's defaults.
        options: the server's options.
        own: parameters that the route has computed; None takes the default.

    Raises:
        HttpError, ParamsError: a field is out of range.
    """
    check_answers(body.n, options)
    given = {name: getattr(body, name) for name in _SAME} | {"logit_bias": _bias(body.logit_bias)} | own
    if body.prompt_logprobs is not None and body.stream:
        raise HttpError(
            400, "prompt_logprobs are not sent in a stream.", "Set stream to false.", param="prompt_logprobs"
        )
    check_stream_options(body)
    made = {**vars(defaults), **{name: value for name, value in given.items() if value is not None}}
    if body.repetition_detection is not None:
        made["repetition_detection"] = RepetitionDetectionParams(**body.repetition_detection.model_dump())
    if body.vllm_xargs:
        made["extra_args"] = body.vllm_xargs
    if given.get("structured_outputs") is None:
        made["structured_outputs"] = structured(body.response_format, body.structured_outputs)
    return body.params_class(**made)


def with_all(body: _Body, vocab_size: int) -> _Body:
    """The request with the number of all candidates where it has -1, vLLM's word for them."""
    names = ("logprobs", "top_logprobs", "prompt_logprobs")
    every = {name: vocab_size for name in names if type(value := getattr(body, name, None)) is int and value == -1}
    return body.model_copy(update=every) if every else body


def answer_bytes(
    body: Sampled,
    num_top: int | None,
    most_tokens: int,
    prompts: int = 1,
    *,
    kept: bool = False,
    come: int | None = None,
) -> int:
    """The most bytes that the log-probabilities of the answers take until they are sent.

    Within the engine's usual max_logprobs, the first bytes count as nothing.

    Args:
        num_top: the likeliest candidates of each token besides itself; None for no report.
        most_tokens: the most tokens of an answer.
        prompts: how many prompts are answered.
        kept: whether they are kept as parts of a whole answer also where it is streamed.
        come: tokens of all answers that have come, where the request does not say how long they may be: few are as long
            as the model allows. Until they come, the usual candidates are columns.
    """
    # More names are refused later; the named tokens stand in place of the likeliest.
    named = min(len(body.logprob_token_ids or ()), MAX_LOGPROB_TOKEN_IDS)
    candidates = 0 if num_top is None else named or num_top
    each = limits.STREAMED_CANDIDATE_BYTES if body.stream and not kept else limits.CANDIDATE_BYTES
    most = most_tokens * max(1, body.n or 1) * prompts
    usual = min(candidates, limits.FREE_CANDIDATES)
    of_each = most * each if come is None else max(most * limits.STREAMED_CANDIDATE_BYTES, come * each)
    return (candidates - usual) * most * each + max(0, usual * of_each - limits.FREE_COLUMN_BYTES)


def check_named(body: Sampled, *, reports: bool, remedy: str) -> None:
    """Raise HttpError if the request names tokens to report, and asks for no report."""
    if body.logprob_token_ids and not reports:
        raise HttpError(400, "logprob_token_ids needs logprobs.", remedy, param="logprob_token_ids")


def check_one_length(body: ChatRequest | CompletionRequest) -> None:
    """Raise HttpError if the request says twice how long an answer may be."""
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise HttpError(
            400,
            "max_tokens and max_completion_tokens mean the same.",
            "Send one of them.",
            param="max_completion_tokens",
        )


# Fields that beam search refuses, because they shape one answer token by token. The temperature has no effect there.
_NOT_IN_BEAMS = (
    "min_tokens",
    "stop",
    "stop_token_ids",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "bad_words",
    "prompt_logprobs",
    "logprob_token_ids",
    "truncate_prompt_tokens",
    "repetition_detection",
    "thinking_token_budget",
)


def beams_of(
    body: Sampled, options: ServerOptions, max_tokens: int | None, grammar: StructuredOutputs | None = None
) -> BeamSearchParams | None:
    """The beam search that a request asks for, with `n` beams; None if it asks for none.

    Args:
        max_tokens: the most tokens of an answer.
        grammar: the grammar that answers follow, where another field says it; None leaves it to the request's own.

    Raises:
        HttpError, ParamsError: a field is out of range, or does not go with a search.
    """
    if not body.use_beam_search:
        if body.length_penalty is not None:
            raise HttpError(
                400,
                "length_penalty belongs to beam search.",
                "Set use_beam_search to true, or leave it out.",
                param="length_penalty",
            )
        return None
    check_answers(body.n, options)
    names = [name for name in _NOT_IN_BEAMS if getattr(body, name) not in (None, [], {})]
    if getattr(body, "grounding", None) is True:
        names.append("grounding")
    if names:
        raise HttpError(
            400,
            f"{names[0]} and use_beam_search cannot be combined.",
            "Leave one of them out.",
            param="use_beam_search",
        )
    check_stream_options(body)
    return BeamSearchParams(
        beam_width=body.n or 1,
        max_tokens=16 if max_tokens is None else max_tokens,  # as SamplingParams
        ignore_eos=body.ignore_eos or False,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        structured_outputs=structured(body.response_format, body.structured_outputs) if grammar is None else grammar,
        allowed_token_ids=body.allowed_token_ids,
    )


def check_stream_options(body: Sampled) -> None:
    """Raise HttpError if the request says something of a stream that it does not ask for."""
    if body.stream_options is not None and not body.stream:
        raise HttpError(400, "stream_options needs stream.", "Set stream to true.", param="stream_options")


def tells_usage(body: Sampled) -> bool:
    """Whether every chunk of the stream has the usage so far."""
    options = body.stream_options
    return options is not None and options.include_usage and options.continuous_usage_stats


def check_answers(n: int | None, options: ServerOptions) -> None:
    """Raise HttpError if the request asks for too many answers."""
    if n is not None and not 1 <= n <= options.max_answers:
        raise HttpError(400, f"n must be from 1 to {options.max_answers}.", "Ask for fewer answers.", param="n")


def check_ids(allowed: list[int] | None, num_ids: int) -> None:
    """Raise HttpError if the list has more tokens than the vocabulary: every stage would spend time on it."""
    if allowed is not None and len(allowed) > num_ids:
        raise HttpError(
            400,
            f"allowed_token_ids has {len(allowed)} entries; there are {num_ids} tokens.",
            "List each token once.",
            param="allowed_token_ids",
        )


def structured(form: ResponseFormat | None, asked: Structured | None) -> StructuredOutputs | None:
    """The grammar that a request asks for, or None.

    Raises:
        HttpError: there are two grammars, or one is incomplete or has fields of another type.
    """
    if form is not None:
        _check_fields(form)
    wanted = form is not None and form.type != "text"
    if asked is not None:
        given = StructuredOutputs(
            asked.json_,
            asked.regex,
            asked.choice,
            asked.grammar,
            json_object=asked.json_object or None,
            structural_tag=asked.structural_tag,
        )
        if wanted or sum(value is not None for value in vars(given).values()) != 1:
            raise HttpError(
                400,
                "structured_outputs must have exactly one grammar.",
                "Send one of json, json_object, regex, choice, grammar and structural_tag.",
                param="structured_outputs",
            )
        return given
    if form is None or not wanted:
        return None
    if form.type == "json_object":
        return StructuredOutputs(json_object=True)
    if form.type == "structural_tag":
        return StructuredOutputs(structural_tag=form.model_dump(exclude_none=True, exclude={"type"}))
    if form.json_schema is None:
        raise HttpError(
            400,
            "response_format has no json_schema.",
            "Send one, or use the type json_object.",
            param="response_format.json_schema",
        )
    return StructuredOutputs(json=form.json_schema.schema_)


_FIELDS_OF_FORMATS = {"json_schema": ("json_schema",), "structural_tag": ("structures", "triggers", "format")}


def _check_fields(form: ResponseFormat) -> None:
    """Raise HttpError if a format has a field of another type, which would have no effect."""
    own = _FIELDS_OF_FORMATS.get(form.type, ())
    for kind, names in _FIELDS_OF_FORMATS.items():
        for name in names:
            if name not in own and getattr(form, name) is not None:
                raise HttpError(
                    400,
                    f"A response_format of type {form.type} has no {name}.",
                    f"Leave it out, or use the type {kind}.",
                    param=f"response_format.{name}",
                )


def _bias(given: dict[str, float] | None) -> dict[int, float] | None:
    if given is None:
        return None
    wrong = [name for name in given if not (name.isascii() and name.isdigit() and len(name) < 10)]
    if wrong:
        shown = ", ".join(repr(name[:20]) for name in wrong[:8])
        kind = "is not a token id" if len(wrong) == 1 else "are not token ids"
        raise ParamsError(f"logit_bias names {shown}, which {kind}.", "Give {token id: bias}.", param="logit_bias")
    bias: dict[int, float] = {}
    for name, value in given.items():
        if int(name) in bias:
            raise ParamsError(f"logit_bias names the token {int(name)} twice.", "List it once.", param="logit_bias")
        bias[int(name)] = value
    return bias
