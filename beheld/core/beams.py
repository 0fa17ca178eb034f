"""Beam search: the best continuations of a prompt, found by keeping several at each position.

The search asks for the likeliest next tokens of each kept sequence and never computes itself; its caller (LLM)
makes one request for each sequence and position, whose prefix the cache holds.

Names and scores follow vLLM's, and so transformers': the sum of log-probabilities over the number of the answer's
tokens, with the one that ends it. Unlike transformers' search, this one goes on to `max_tokens` while a sequence is
unfinished.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from beheld.core.errors import ParamsError
from beheld.core.outputs import Logprob
from beheld.core.params import MAX_LOGPROB_TOKEN_IDS
from beheld.core.request import LoRARequest
from beheld.core.structured_outputs import StructuredOutputs
from beheld.core.value_checks import number, sequence, whole


@dataclass
class BeamSearchParams:
    """Parameters of a beam search.

    Attributes:
        beam_width: how many sequences are kept, and at most how many come back.
        max_tokens: the most tokens of an answer.
        ignore_eos: go on after a token that ends answers.
        temperature: accepted; sequences are compared by the raw log-probabilities.
        length_penalty: the exponent of the length that divides the sum of log-probabilities; greater favours longer.
        include_stop_str_in_output: whether a sequence's tokens include the one that ended it.
        structured_outputs: a grammar that answers follow. It ends them, so that `ignore_eos` changes nothing.
        skip_special_tokens: whether texts leave out special tokens.
        allowed_token_ids: up to 128 tokens; if given, answers have no others.
        watermarking: accepted; texts are not marked.

    Raises:
        ParamsError: a value is wrong or out of range, or there are both a grammar and allowed tokens.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputs | None = None
    skip_special_tokens: bool = True
    allowed_token_ids: list[int] | None = None
    watermarking: bool | None = None

    def __post_init__(self) -> None:
        self.beam_width = int(whole("beam_width", self.beam_width, 1) or 1)
        self.max_tokens = int(whole("max_tokens", self.max_tokens, 1) or 1)
        self.length_penalty = number("length_penalty", self.length_penalty, -100.0, 100.0)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _allowed(self.allowed_token_ids)
        if self.allowed_token_ids is not None and self.structured_outputs is not None:
            raise ParamsError(
                "A search follows structured_outputs or allowed_token_ids.",
                "Leave one of them out.",
                param="allowed_token_ids",
            )


def _allowed(given: Any) -> list[int]:
    name = "allowed_token_ids"
    sequence(name, given)
    found = [int(whole(name, token, 0)) for token in given]
    if not found:
        raise ParamsError(f"{name} must not be empty.", "Leave it out to allow all.", param=name)
    if (count := len(set(found))) > MAX_LOGPROB_TOKEN_IDS:
        raise ParamsError(
            f"{name} of a search has {count} tokens; at most {MAX_LOGPROB_TOKEN_IDS} are allowed.",
            "Allow fewer, or follow a grammar with structured_outputs.",
            param=name,
        )
    return found


@dataclass
class BeamSearchSequence:
    """A sequence of the search.

    Attributes:
        tokens: the prompt's ids and the answer's.
        logprobs: for each token of the answer, with the one that ended it, the candidates at its position.
        cum_logprob: the sum of the answer's log-probabilities.
        text: all tokens as text, of a result.
        finish_reason: "stop" after a token that ends answers, else "length".
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    lora_request: LoRARequest | None = None
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    multi_modal_data: Mapping[str, Any] | None = None
    mm_processor_kwargs: Mapping[str, Any] | None = None


# A score, a sequence, the token that would follow, and the candidates at its position.
_Growth = tuple[float, BeamSearchSequence, int, dict[int, Logprob]]


@dataclass
class BeamSearchOutput:
    """The best sequences of a search, the best first."""

    sequences: list[BeamSearchSequence]


@dataclass(eq=False)
class BeamSearch:
    """One search: give each of `beams` its candidates with `take` until there are none.

    Attributes:
        prompt_ids: the prompt.
        eos_ids: tokens that end an answer.
        limit: the most tokens of prompt and answer.
    """

    prompt_ids: Sequence[int]
    params: BeamSearchParams
    eos_ids: Sequence[int]
    limit: int
    beams: list[BeamSearchSequence] = field(default_factory=list)
    _ended: list[BeamSearchSequence] = field(default_factory=list)
    _taken: int = 0

    def __post_init__(self) -> None:
        self.beams = [BeamSearchSequence(list(self.prompt_ids), [])]
        if self.params.ignore_eos and self.params.structured_outputs is None:
            # Then it is a token as others, also in an answer's length.
            self.eos_ids = ()

    @property
    def num_candidates(self) -> int:
        """How many of the likeliest tokens `take` needs: half of them may end their sequence."""
        return 2 * self.params.beam_width

    def take(self, candidates: Sequence[dict[int, Logprob]]) -> None:
        """Grow the beams by one token.

        Args:
            candidates: for each beam, in order, its likeliest next tokens.
        """
        ended: list[_Growth] = []
        grown: list[_Growth] = []
        for beam, likely in zip(self.beams, candidates, strict=True):
            ends = False
            for token, entry in sorted(likely.items(), key=lambda pair: -pair[1].logprob)[: self.num_candidates]:
                growth = self._score(beam.cum_logprob + entry.logprob, len(beam.logprobs) + 1), beam, token, likely
                if token not in self.eos_ids:
                    grown.append(growth)
                elif not (ends and self.params.structured_outputs is not None):
                    # A complete grammar allows every token that ends answers: one answer, ended in several ways.
                    ended.append(growth)
                    ends = True
        self._ended = self._best([*self._ended, *self._longer(ended)])
        self.beams = self._longer(grown)
        self._taken += 1
        if self._taken == self.params.max_tokens or len(self.prompt_ids) + self._taken >= self.limit:
            for beam in self.beams:
                beam.finish_reason = "length"
            self._ended += self.beams
            self.beams = []

    def best(self) -> list[BeamSearchSequence]:
        """The best ended sequences, the best first."""
        return self._best(self._ended)

    def _longer(self, found: list[_Growth]) -> list[BeamSearchSequence]:
        """The best of beams that each grow by a token. Only these are made: prompts may be long."""
        made = []
        for _, beam, token, likely in sorted(found, key=lambda one: one[0], reverse=True)[: self.params.beam_width]:
            longer = BeamSearchSequence(
                [*beam.tokens, token], [*beam.logprobs, likely], cum_logprob=beam.cum_logprob + likely[token].logprob
            )
            if token in self.eos_ids:
                longer.finish_reason, longer.stop_reason = "stop", token
            made.append(longer)
        return made

    def _best(self, sequences: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        def score(one: BeamSearchSequence) -> float:
            return self._score(one.cum_logprob, len(one.logprobs))

        return sorted(sequences, key=score, reverse=True)[: self.params.beam_width]

    def _score(self, cum_logprob: float, length: int) -> float:
        """The score of an answer of `length` tokens, with the one that ends it."""
        score: float = cum_logprob / length**self.params.length_penalty
        return score


def checked(params: Any) -> BeamSearchParams:
    """The parameters, if they are ones.

    Raises:
        ParamsError: they are something else.
    """
    if not isinstance(params, BeamSearchParams):
        raise ParamsError(
            f"params must be BeamSearchParams, not {type(params).__name__}.",
            "Write BeamSearchParams(beam_width=4, max_tokens=64).",
            param="params",
        )
    return params
