"""How a user asks for tokens: SamplingParams; sampling.py has the engine's form of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from beheld.core.errors import ParamsError
from beheld.core.logits_processors import LogitsProcessor, num_arguments
from beheld.core.pooling_params import PoolingParams
from beheld.core.repetition import RepetitionDetectionParams
from beheld.core.structured_outputs import StructuredOutputs
from beheld.core.value_checks import known_keywords, number, sequence, strings, table_of_ids, whole

if TYPE_CHECKING:
    import numpy as np

# Scripts import all of these from here.
__all__ = ["PoolingParams", "RawParams", "RequestOutputKind", "SamplingParams", "StepParams", "StructuredOutputs"]

# Logits over a smaller one, and over a temperature, are not finite in float32.
MIN_REPETITION_PENALTY = 1e-6
# The most tokens of `logprob_token_ids`, as in vLLM.
MAX_LOGPROB_TOKEN_IDS = 128


class RequestOutputKind(Enum):
    """The content of each output of AsyncLLM: everything so far, the new part, or everything at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


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
class SamplingParams:
    """How to choose tokens. Names, meaning and defaults follow vLLM's class of the same name.

    numpy's numbers are accepted and become Python's. `logprobs` and `prompt_logprobs` of -1 report the whole
    vocabulary, which max_logprobs must allow. `logprob_token_ids` names the tokens that are reported in place of the
    likeliest, up to 128; they have no rank. `prompt_logprob_token_ids` (rows, N) names tokens at positions of the
    prompt: row i those whose log-probabilities are wanted in the place of prompt token `prompt_logprob_start` + i + 1,
    as lists or an array of integers; -1 fills a row up. They come as `RequestOutput.prompt_token_id_logprobs`.
    With `flat_logprobs`, log-probabilities are FlatLogprobs in place of lists. `max_tokens` may be 0 where
    log-probabilities of the prompt are asked. `guided_decoding` is the older name of `structured_outputs`, which has
    its value once it is made. `watermarking`, `routed_experts_prompt_start`, `skip_reading_prefix_cache`, `skip_clone`
    and `stream_interval` change no answer here and are accepted.

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
    prompt_logprob_token_ids: np.ndarray | list[list[int]] | None = None
    prompt_logprob_start: int | None = None
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
        fewest = 1 if self.prompt_logprobs is None and self.prompt_logprob_token_ids is None else 0
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
        self._verify_prompt_ids()
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

    def _verify_prompt_ids(self) -> None:
        """Check the tokens that are named at positions of the prompt, and make an array of them."""
        self.prompt_logprob_start = whole("prompt_logprob_start", self.prompt_logprob_start, 0, optional=True)
        if self.prompt_logprob_token_ids is not None:
            self.prompt_logprob_token_ids = table_of_ids("prompt_logprob_token_ids", self.prompt_logprob_token_ids)
        elif self.prompt_logprob_start is not None:
            raise ParamsError(
                "prompt_logprob_start requires prompt_logprob_token_ids.",
                "Name tokens, or leave it out.",
                param="prompt_logprob_start",
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


@dataclass
class RawParams(SamplingParams):
    """Parameters of a request whose log-probabilities are the model's own, whatever the engine's logprobs_mode is.

    Searches and scores compute with them.
    """


@dataclass
class StepParams(RawParams):
    """Parameters of one step of a search, whose prompt ends with the answer so far.

    Attributes:
        num_answered: how many of the prompt's last tokens are the answer's.
    """

    num_answered: int | None = None


def _one_for_true(value: Any) -> Any:
    """`value`, or 1 for True, as OpenAI's clients and vLLM count log-probabilities."""
    return 1 if value is True else value
