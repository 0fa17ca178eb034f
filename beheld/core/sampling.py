"""Resolved sampling parameters: the engine's form of SamplingParams, frozen and complete."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from beheld.core.logits_processors import LogitsProcessor
from beheld.core.repetition import NoRepeatWindow, RepetitionDetectionParams
from beheld.core.structured_outputs import Grammar

if TYPE_CHECKING:
    import numpy as np

GREEDY_BELOW = 1e-5


class LogprobsMode(StrEnum):
    """What is reported as a token's log-probability.

    Raw is the model's own: before bans, grammars, bias, logits processors and penalties. Processed is what the token
    was sampled from: after these, temperature, min-p, top-k and top-p, with minus infinity for what they leave out.
    Greedy sampling has neither temperature nor filters. Tokens of a prompt are not sampled, so both are the same there.
    """

    RAW_LOGPROBS = "raw_logprobs"
    PROCESSED_LOGPROBS = "processed_logprobs"
    RAW_LOGITS = "raw_logits"
    PROCESSED_LOGITS = "processed_logits"

    @property
    def processed(self) -> bool:
        """True if the numbers are those of the logits that were sampled from."""
        return self in (LogprobsMode.PROCESSED_LOGPROBS, LogprobsMode.PROCESSED_LOGITS)

    @property
    def logits(self) -> bool:
        """True if the numbers are logits, not log-probabilities."""
        return self in (LogprobsMode.RAW_LOGITS, LogprobsMode.PROCESSED_LOGITS)


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


@dataclass(frozen=True, eq=False)
class PromptIds:
    """Tokens whose log-probabilities are reported at positions of a prompt.

    Attributes:
        start: the first position, from 0, whose next token is predicted; the following ones are all after it, up to the
            last but one.
        ids_TN: (T, N), int32: the tokens of each of these positions; -1 stands for none.
    """

    start: int
    ids_TN: np.ndarray


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
        logprobs_mode: what the numbers of all reports are.
        prompt_ids: further tokens that are reported at positions of the prompt; None for none.
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
    logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS
    prompt_ids: PromptIds | None = None
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
    def reports_from(self) -> int | None:
        """The first position of the prompt, from 0, whose next token is reported on; None if none is."""
        if self.prompt_logprobs is not None:
            return 0
        return None if self.prompt_ids is None else self.prompt_ids.start

    @property
    def of_prompt_alone(self) -> Sampling:
        """What decides which logits of the prompt are computed, and nothing else."""
        named = self.prompt_ids
        bare = None if named is None else PromptIds(named.start, named.ids_TN[:, :0])
        return Sampling(prompt_logprobs=self.prompt_logprobs, prompt_ids=bare)

    @property
    def greedy(self) -> bool:
        """True if sampling always takes the most likely token."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """True if token counts change the logits."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0
