"""Parameters of a request: SamplingParams and PoolingParams are the user's forms, Sampling and Pooling the engine's."""

from __future__ import annotations

import difflib
import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from beheld.core.errors import BeheldError, ParamsError
from beheld.core.repetition import NoRepeatWindow, RepetitionDetectionParams

GREEDY_BELOW = 1e-5
# Logits over a smaller one, and over a temperature, are not finite in float32.
MIN_REPETITION_PENALTY = 1e-6
# The most tokens of `logprob_token_ids`, as in vLLM.
MAX_LOGPROB_TOKEN_IDS = 128
LogitsProcessor = Callable[..., Any]


class RequestOutputKind(Enum):
    """The content of each output of AsyncLLM: everything so far, the new part, or everything at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


# The form, in StructuredOutputs.calls, of an answer that is nothing but calls in JSON, whatever the model's own.
FORCED_CALLS = "forced"


@dataclass(frozen=True)
class ReasoningFormat:
    """How a model delimits its reasoning: the texts `open` and `close`.

    `begun` is True if the prompt already contains `open`.
    """

    open: str
    close: str
    begun: bool


@dataclass(frozen=True)
class Grammar:
    """A grammar as text.

    `kind` is "json" (a schema), "regex", "grammar" (llguidance's dialect of Lark), "structural_tag" or "calls" (see the
    files of these names in structured/).
    With `reasoning`, the grammar starts after the reasoning.
    """

    kind: str
    text: str
    reasoning: ReasoningFormat | None = None


@dataclass(frozen=True)
class TimestampRule:
    """How an answer is divided by timestamps, as Whisper's decoding does; see sample/timestamps.py.

    Attributes:
        first: the token id of 0.00 seconds; all greater ids are later timestamps.
        end: the token id that ends the answer; smaller ones are text.
        latest: the greatest timestamp with which an answer may begin, counted from `first`; None for any.
    """

    first: int
    end: int
    latest: int | None = None


@dataclass(frozen=True)
class ThinkingBudget:
    """When reasoning ends at the latest; see sample/thinking.py.

    Attributes:
        num_tokens: how many tokens it may have, without its marks.
        open_id: the answer reasons if it begins with this token; None if the prompt has begun the reasoning.
        close_id: what ends it.
        blank_ids: tokens of whitespace, of which up to 16 may precede `open_id`.
    """

    num_tokens: int
    open_id: int | None
    close_id: int
    blank_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Sampling:
    """Resolved sampling parameters of one sequence: complete, checked, without further look-ups.

    Attributes:
        temperature: 0.0 means greedy.
        top_p, top_k, min_p: filters; off at 1.0, 0 and 0.0.
        seed: 64 bits; the noise at position i depends only on (seed, i), never on the batch.
        max_tokens, min_tokens: length of the answer in tokens.
        stop_ids: token ids that end the answer: end-of-sequence ids and the request's own.
        own_stop_ids: the stop ids that the request named.
        presence_penalty, frequency_penalty, repetition_penalty: off at 0, 0 and 1.
        logit_bias: pairs (token id, bias).
        allowed_token_ids: if given, no other ids are sampled.
        bad_words_ids: token sequences that the answer must not contain.
        logprobs, prompt_logprobs: number of candidates to report besides the token itself; None means no report.
        logprob_ids: the candidates of `logprobs`, in this order; empty for the likeliest.
        grammar: the answer's grammar; the sequence then has at most one token in flight.
        num_answered: how many of the prompt's last tokens are the answer's own, and follow the grammar already. If it
            is set, the reported candidates are the likeliest that the grammar allows.
        processors: callables (output_ids, logits_V) or (prompt_ids, output_ids, logits_V) -> logits_V.
        no_repeat_ngram: no sequence of this many tokens occurs twice in prompt and answer; 0 is off.
        no_repeat_window: no sequence of so many tokens occurs twice at the end of the answer; None is off.
        forced_ids: pairs (position, token id): the token is forced at this position, counted from the start of the
            prompt.
        first_forbidden: token ids that do not begin the answer.
        thinking: when the reasoning ends at the latest; None for no limit.
        repetition: when the answer ends because it repeats itself; None for never.
        timestamps: the rule of timestamps, if the answer has them.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    own_stop_ids: frozenset[int] = frozenset()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None
    num_answered: int | None = None
    processors: tuple[LogitsProcessor, ...] = ()
    no_repeat_ngram: int = 0
    no_repeat_window: NoRepeatWindow | None = None
    forced_ids: tuple[tuple[int, int], ...] = ()
    first_forbidden: tuple[int, ...] = ()
    timestamps: TimestampRule | None = None
    thinking: ThinkingBudget | None = None
    repetition: RepetitionDetectionParams | None = None

    def of_prompt(
        self, seed: int, max_tokens: int, min_tokens: int, forced_ids: tuple[tuple[int, int], ...]
    ) -> Sampling:
        """The same for another prompt: what `replace` makes, in a sixth of the time."""
        made = object.__new__(Sampling)
        made.__dict__.update(
            self.__dict__, seed=seed, max_tokens=max_tokens, min_tokens=min_tokens, forced_ids=forced_ids
        )
        return made

    @property
    def greedy(self) -> bool:
        """True if sampling always takes the most likely token."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """True if token counts change the logits."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


@dataclass(frozen=True)
class Alignment:
    """Which weights of cross-attention say when a prompt's tokens are spoken; see pool/alignment.py.

    Attributes:
        heads: pairs (decoder layer, query head).
        start: the first position whose weights are read.
        num_states: how many of the item's first states were heard; what follows is silence that fills it up.
        width: states of the median filter, an odd number.
    """

    heads: tuple[tuple[int, int], ...]
    start: int
    num_states: int
    width: int = 7


@dataclass(frozen=True)
class Pooling:
    """Resolved pooling parameters of one sequence: nothing is sampled; the prompt gives a vector or scores.

    Attributes:
        task: one of POOLING_TASKS.
        method: which hidden states are pooled: those of the "last" position, of the first ("cls"), the "mean" of all,
            "all" of them, or those of the positions of the token `step_id` ("step").
        activate: scale vectors to length 1; make probabilities of scores.
        dimensions: truncate vectors to this many numbers; None keeps all.
        step_id: see `method`.
        returned_ids: the classes whose scores are given, in this order; empty gives all.
        second: the position where the second text of a pair starts; None for one text.
        alignment: if given, no hidden state is pooled: a model that generates gives the weights (N, E) of the prompt's
            positions from `alignment.start` on.
    """

    task: str = "embed"
    method: str = "last"
    activate: bool = True
    dimensions: int | None = None
    step_id: int | None = None
    returned_ids: tuple[int, ...] = ()
    second: int | None = None
    alignment: Alignment | None = None

    @property
    def reads_all(self) -> bool:
        """True if pooling needs what is computed before the last position; only positions computed now have it."""
        return self.method != "last" or self.alignment is not None


# Types whose values never change.
_CONSTANT = frozenset((type(None), bool, int, float, str, RequestOutputKind))


def snapshot(params: SamplingParams | PoolingParams) -> tuple[object, ...] | None:
    """Parameters as they are now, to be compared with later ones; None if an entry of theirs may change, as a list's.

    Types belong to it: True equals 1, and only one of them is right. So does the class, which may check more.
    """
    values = tuple(vars(params).values())
    types = tuple(map(type, values))
    return (type(params), values, types) if _CONSTANT.issuperset(types) else None


class _Verified:
    """The parameters that were last found right, of whichever request."""

    last: tuple[object, ...] | None = None


_verified = _Verified()


@dataclass
class StructuredOutputs:
    """A grammar that the answer must follow: exactly one field is set.

    `json_object` set to True allows any JSON object. `structural_tag`, JSON text or a dict, is a text with parts that
    follow schemas, see structured/structural_tag.py. Only the server sets `calls`, see structured/calls.py.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    calls: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None


@dataclass
class SamplingParams:
    """How to choose tokens. Names, meaning and defaults follow vLLM's class of the same name.

    numpy's numbers are accepted and become Python's. `logprobs` and `prompt_logprobs` of -1 report the whole
    vocabulary, which max_logprobs must allow. `logprob_token_ids` names the tokens that are reported in place of the
    likeliest, up to 128; they have no rank. With `flat_logprobs`, log-probabilities are FlatLogprobs in place of lists.
    `max_tokens` may be 0 where `prompt_logprobs` is asked. `guided_decoding` is the older name of
    `structured_outputs`, which has its value once it is made. `watermarking`, `routed_experts_prompt_start`,
    `skip_reading_prefix_cache`, `skip_clone` and `stream_interval` change no answer here and are accepted.

    Raises:
        ParamsError: a keyword is unknown or a value is wrong; the error names the parameter. The constructor raises it,
            and so does `verify()`, which the constructor calls.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logits_processors: list[LogitsProcessor] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    structured_outputs: StructuredOutputs | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    thinking_token_budget: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    guided_decoding: StructuredOutputs | None = None
    watermarking: bool | None = None
    routed_experts_prompt_start: int = 0
    skip_reading_prefix_cache: bool | None = None
    skip_clone: bool = False
    stream_interval: int | None = None

    def __new__(cls, *_: Any, **options: Any) -> SamplingParams:
        """Refuse an unknown keyword with an error that names it; a dataclass alone would raise a TypeError."""
        known_keywords(cls, options, ParamsError, "sampling parameter")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        if self.guided_decoding is not None:
            if self.structured_outputs is not None:
                raise ParamsError(
                    "guided_decoding is the older name of structured_outputs.", "Give one.", param="guided_decoding"
                )
            self.structured_outputs, self.guided_decoding = self.guided_decoding, None
        for name in ("stop_token_ids", "bad_words"):
            given = getattr(self, name)
            # A long list is refused elsewhere, and a wrong one by `verify`.
            if isinstance(given, list) and len(given) > 1 and {*map(type, given)} in ({int}, {str}):
                setattr(self, name, list(dict.fromkeys(given)))
        self.verify()

    def verify(self) -> None:
        """Check every field. Called again when the request is resolved, because fields may have changed."""
        given = snapshot(self)
        if given is not None and given == _verified.last:
            # Requests in a row mostly have the same.
            return
        self._verify_counts()
        self._verify_floats()
        self._verify_lists()
        _verified.last = snapshot(self)

    def _verify_counts(self) -> None:
        self.n = whole("n", self.n, 1)
        if self.best_of is not None and self.best_of != self.n:
            raise ParamsError("best_of is not supported.", "Ask for n answers and choose.", param="best_of")
        # An answer without tokens leaves the prompt's log-probabilities.
        fewest = 1 if self.prompt_logprobs is None else 0
        self.max_tokens = whole("max_tokens", self.max_tokens, fewest, optional=True)
        self.min_tokens = whole("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParamsError(
                f"min_tokens ({self.min_tokens}) is greater than max_tokens ({self.max_tokens}).", param="min_tokens"
            )
        # -1 is vLLM's word for no limit.
        self.thinking_token_budget = whole("thinking_token_budget", self.thinking_token_budget, -1, optional=True)
        self.seed = whole("seed", self.seed, -(2**63), 2**64 - 1, optional=True)
        self.top_k = whole("top_k", self.top_k, -1)
        # The engine's max_logprobs limits them when the request is resolved.
        self.logprobs = whole("logprobs", _one_for_true(self.logprobs), -1, optional=True)
        self.prompt_logprobs = whole("prompt_logprobs", _one_for_true(self.prompt_logprobs), -1, optional=True)
        self.truncate_prompt_tokens = whole("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, optional=True)
        if self.truncate_prompt_tokens == 0:
            raise ParamsError("truncate_prompt_tokens must be -1 or at least 1.", param="truncate_prompt_tokens")
        if self.truncation_side not in (None, "left", "right"):
            raise ParamsError("truncation_side must be 'left' or 'right'.", param="truncation_side")

    def _verify_floats(self) -> None:
        self.temperature = number("temperature", self.temperature, 0.0, 100.0)
        self.top_p = number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise ParamsError("top_p must be greater than 0.", "Use temperature=0 for greedy decoding.", param="top_p")
        self.min_p = number("min_p", self.min_p, 0.0, 1.0)
        self.presence_penalty = number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self.frequency_penalty = number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self.repetition_penalty = number("repetition_penalty", self.repetition_penalty, 0.0, 100.0)
        if self.repetition_penalty < MIN_REPETITION_PENALTY:
            raise ParamsError(
                f"repetition_penalty must be greater than 0, and at least {MIN_REPETITION_PENALTY:g}.",
                "1 changes nothing.",
                param="repetition_penalty",
            )

    def _verify_lists(self) -> None:
        for text in strings("stop", self.stop):
            if not text:
                raise ParamsError("stop must not hold an empty string.", "Leave it out to end nowhere.", param="stop")
        if self.stop and not self.detokenize:
            raise ParamsError("stop strings need detokenize=True.", "Use stop_token_ids instead.", param="stop")
        strings("bad_words", self.bad_words)
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logits_processors"):
            sequence(name, getattr(self, name))
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            given = getattr(self, name) or ()
            # Lists as long as a vocabulary are common, so a list of Python's own ints is not copied.
            if set(map(type, given)) <= {int} and (not given or min(given) >= 0):
                continue
            plain = [whole(name, token, 0) for token in given]
            setattr(self, name, plain)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ParamsError(
                "allowed_token_ids must not be empty.", "Leave it out to allow all.", param="allowed_token_ids"
            )
        self._verify_reported()
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise ParamsError("logit_bias must map token ids to numbers.", "Give {token_id: bias}.", param="logit_bias")
        for token, bias in (self.logit_bias or {}).items():
            whole("logit_bias", int(token) if isinstance(token, str) and token.isdigit() else token, 0)
            number("logit_bias", bias, -100.0, 100.0)
        for processor in self.logits_processors or ():
            if not callable(processor):
                raise ParamsError("logits_processors must hold callables.", param="logits_processors")
            num_arguments(processor)
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredOutputs):
            raise ParamsError(
                "structured_outputs must be a StructuredOutputs.",
                "Give StructuredOutputs(json=...), or regex, choice or grammar.",
                param="structured_outputs",
            )
        if isinstance(self.repetition_detection, Mapping):
            known_keywords(
                RepetitionDetectionParams, self.repetition_detection, ParamsError, "entry of repetition_detection"
            )
            self.repetition_detection = RepetitionDetectionParams(**self.repetition_detection)
        if not isinstance(self.repetition_detection, RepetitionDetectionParams | None):
            raise ParamsError(
                "repetition_detection must be a RepetitionDetectionParams.",
                "Give RepetitionDetectionParams(max_pattern_size=20, min_count=10).",
                param="repetition_detection",
            )
        if not isinstance(self.output_kind, RequestOutputKind):
            raise ParamsError(
                "output_kind must be a RequestOutputKind.", "Write RequestOutputKind.DELTA.", param="output_kind"
            )
        if not (self.spaces_between_special_tokens or self.skip_special_tokens):
            raise ParamsError(
                "spaces_between_special_tokens=False is not available.",
                "Leave it out.",
                param="spaces_between_special_tokens",
            )

    def _verify_reported(self) -> None:
        """Check the tokens whose log-probabilities are reported."""
        if not self.logprob_token_ids:
            return
        count = len(self.logprob_token_ids)
        if count > MAX_LOGPROB_TOKEN_IDS:
            raise ParamsError(
                f"logprob_token_ids has {count} tokens; at most {MAX_LOGPROB_TOKEN_IDS} are allowed.",
                "Name fewer, or ask for logprobs=-1, which are those of all tokens.",
                param="logprob_token_ids",
            )
        if self.logprobs is not None and self.logprobs != count:
            raise ParamsError(
                f"logprobs is {self.logprobs}, and logprob_token_ids has {count} tokens.",
                "Leave logprobs out: the named tokens are reported in place of the likeliest.",
                param="logprob_token_ids",
            )

    @property
    def all_stop_token_ids(self) -> set[int]:
        """The tokens that end an answer, besides the model's own."""
        return set(self.stop_token_ids or ())

    def clone(self) -> SamplingParams:
        """An independent copy; lists are copied one level deep."""
        # Not checked again: every request is when it is resolved.
        made = object.__new__(type(self))
        made.__dict__.update({k: list(v) if isinstance(v, list) else v for k, v in vars(self).items()})
        return made

    @classmethod
    def from_optional(cls, **options: Any) -> SamplingParams:
        """Build from keywords where None means the default; refuse an unknown one and name the nearest."""
        return cls(**{k: v for k, v in options.items() if v is not None})


POOLING_TASKS = ("embed", "token_embed", "classify", "token_classify")
"""What a pooling model may give: a vector, a vector for each position, scores of classes, scores at each position."""
# Names of older versions of vLLM.
_TASK_ALIASES = {"encode": "token_embed", "embedding": "embed", "score": "classify", "reward": "token_classify"}


# Names in PoolingParams.extra_kwargs.
PAIR_BOUNDS = ("max_tokens_per_query", "max_tokens_per_doc")


@dataclass
class StepParams(SamplingParams):
    """Parameters of one step of a search, whose prompt ends with the answer so far.

    Attributes:
        num_answered: how many of the prompt's last tokens are the answer's.
    """

    num_answered: int | None = None


@dataclass
class PoolingParams:
    """What to make of a prompt's hidden states. Names, meaning and defaults follow vLLM's class of the same name.

    None takes the model's default.

    Attributes:
        use_activation: scale vectors to length 1; make probabilities of scores.
        dimensions: truncate vectors to this many numbers, if the model was trained for that.
        task: one of POOLING_TASKS.
        step_tag_id, returned_token_ids: for reward models: the token at whose positions there are scores, and the
            classes that are returned.
        truncate_prompt_tokens: keep this many tokens of a longer text, from its start; -1 means as many as fit.
        normalize: the same as `use_activation`, in older scripts.
        softmax, activation: the same for scores.
        extra_kwargs: PAIR_BOUNDS, for LLM.score: as many tokens of each text of the first or the second side are read.

    Raises:
        ParamsError: a keyword is unknown or a value is wrong; the error names the parameter.
    """

    use_activation: bool | None = None
    dimensions: int | None = None
    task: str | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    truncate_prompt_tokens: int | None = None
    normalize: bool | None = None
    softmax: bool | None = None
    activation: bool | None = None
    extra_kwargs: dict[str, Any] | None = None

    def __new__(cls, *_: Any, **options: Any) -> PoolingParams:
        """Refuse an unknown keyword with an error that names it; a dataclass alone would raise a TypeError."""
        known_keywords(cls, options, ParamsError, "pooling parameter")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self.verify()

    def verify(self) -> None:
        """Check every field. Called again when the request is resolved, because fields may have changed."""
        for name in ("use_activation", "normalize", "softmax", "activation"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise ParamsError(f"{name} must be True or False, got {value!r}.", param=name)
        self.dimensions = whole("dimensions", self.dimensions, 1, optional=True)
        self.step_tag_id = whole("step_tag_id", self.step_tag_id, 0, optional=True)
        self.truncate_prompt_tokens = whole("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, optional=True)
        if self.truncate_prompt_tokens == 0:
            raise ParamsError("truncate_prompt_tokens must be -1 or at least 1.", param="truncate_prompt_tokens")
        sequence("returned_token_ids", self.returned_token_ids)
        if self.returned_token_ids is not None:
            self.returned_token_ids = [whole("returned_token_ids", each, 0) for each in self.returned_token_ids]
        for name, value in (self.extra_kwargs or {}).items():
            if name not in PAIR_BOUNDS:
                raise ParamsError(f"extra_kwargs: {name!r} has no effect here.", "Leave it out.", param="extra_kwargs")
            whole(name, value, 1)
        if self.task is not None:
            self.task = pooling_task(self.task)

    @property
    def activate(self) -> bool | None:
        """The activation that was asked for, under any of its names; None for the model's default."""
        given = (self.use_activation, self.normalize, self.softmax, self.activation)
        return next((value for value in given if value is not None), None)

    def clone(self) -> PoolingParams:
        """An independent copy."""
        return PoolingParams(**{f.name: getattr(self, f.name) for f in fields(self)})


def pooling_task(name: Any) -> str:
    """The task of that name, which may be one of older versions of vLLM.

    Raises:
        ParamsError: there is none.
    """
    found = _TASK_ALIASES.get(name, name) if isinstance(name, str) else name
    if found == "plugin":
        raise ParamsError(
            "No IOProcessor plugin installed.", "Write the processor as code before the engine.", param="task"
        )
    if found not in POOLING_TASKS:
        raise ParamsError(
            f"There is no pooling task {name!r}.",
            (nearest(name, POOLING_TASKS) if isinstance(name, str) else "") or f"Known: {', '.join(POOLING_TASKS)}.",
            param="task",
        )
    return str(found)


# Longer names are not compared with the known ones.
_MAX_MISSPELT = 128


def nearest(name: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """A remedy that names the nearest known name; empty if none is as near as `likeness`, of 1, says."""
    if len(name) > _MAX_MISSPELT:
        # No known name is as long, and time and memory of a comparison grow with the length.
        return ""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=likeness)
    return f"Did you mean {close[0]!r}?" if close else ""


def known_keywords(kind: Any, options: Iterable[str], error: type[BeheldError], what: str) -> None:
    """Raise `error` for an option that is not a field of the dataclass `kind`; it names the nearest field."""
    known = {f.name for f in fields(kind)}
    for name in options:
        if name not in known:
            raise error(f"Unknown {what} {name!r}.", nearest(name, known), param=name)


def whole(name: str, value: Any, low: int, high: int | None = None, *, optional: bool = False) -> Any:
    """`value` as Python's int, or None where it is optional.

    Raises:
        ParamsError: it is not an integer (Python's or numpy's, no bool) within `low` to `high`, both included.
    """
    if value is None and optional:
        return None
    # isinstance with an abstract class is the slowest step here, and each request runs this twenty times.
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, numbers.Integral)):
        raise ParamsError(f"{name} must be a whole number, got {value!r}.", "Leave it out for the default.", param=name)
    value = int(value)
    if value < low or (high is not None and value > high):
        span = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ParamsError(f"{name} must be {span}, got {value}.", "Leave it out for the default.", param=name)
    return value


def _one_for_true(value: Any) -> Any:
    """`value`, or 1 for True, as OpenAI's clients and vLLM count log-probabilities."""
    return 1 if value is True else value


def number(name: str, value: Any, low: float, high: float) -> Any:
    """`value` as Python's int or float.

    Raises:
        ParamsError: it is not a finite number (Python's or numpy's, no bool) within `low` to `high`, both included.
    """
    # A whole number is always finite, but too large a number does not fit into a float.
    whole_one = type(value) is int or (type(value) is not float and isinstance(value, numbers.Integral))
    known = type(value) is float or (isinstance(value, numbers.Real) and not isinstance(value, bool))
    if not known or not (whole_one or math.isfinite(value)):
        raise ParamsError(
            f"{name} must be a finite number, got {value!r}.", "Leave it out for the default.", param=name
        )
    value = int(value) if whole_one else float(value)
    if not low <= value <= high:
        raise ParamsError(
            f"{name} must be from {low:g} to {high:g}, got {value}.", "Leave it out for the default.", param=name
        )
    return value


def num_arguments(processor: LogitsProcessor) -> int:
    """Return how many arguments a logits processor is called with: (output_ids, logits), or prompt_ids before these.

    Raises:
        ParamsError: it requires more than three arguments or accepts fewer than two.
    """
    try:
        signature = inspect.signature(processor)
    except ValueError:  # a built-in without a signature
        return 2
    for count in (2, 3):
        try:
            signature.bind(*[None] * count)
        except TypeError:
            continue
        return count
    raise ParamsError(
        "A logits processor takes (output_ids, logits) or (prompt_ids, output_ids, logits).", param="logits_processors"
    )


def sequence(name: str, value: Any) -> None:
    """Raise ParamsError unless `value` is None, a list, a tuple or a set."""
    if value is not None and not isinstance(value, list | tuple | set | frozenset):
        raise ParamsError(f"{name} must be a list, got {value!r}.", param=name)


def strings(name: str, value: Any) -> list[str]:
    """Raise ParamsError unless `value` is None or a list of strings; return the list."""
    if value is None:
        return []
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
        raise ParamsError(f"{name} must be a list of strings, got {value!r}.", param=name)
    return list(value)
