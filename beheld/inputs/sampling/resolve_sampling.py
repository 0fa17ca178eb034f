"""Resolves a user's SamplingParams to the engine's complete, checked Sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from beheld.checkpoint.files import read_json
from beheld.core.config import EngineArgs, EngineConfig, ModelInfo
from beheld.core.errors import ConfigError, ParamsError
from beheld.core.params import RawParams, SamplingParams, StepParams, snapshot
from beheld.core.repetition import NoRepeatWindow, RepetitionDetectionParams
from beheld.core.sampling import GREEDY_BELOW, LogprobsMode, PromptIds, Sampling, ThinkingBudget
from beheld.core.structured_outputs import Grammar, ReasoningFormat
from beheld.families import registry
from beheld.families.inputs import AnswerRules
from beheld.inputs.sampling.logits_processors import EngineProcessors
from beheld.sandbox.sandbox import Sandbox
from beheld.structured.compile import Compiler, grammar_of
from beheld.structured.sandboxed_compile import CompilerSettings, SandboxedCompile
from beheld.utils.cancellation import CancelToken
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# Settings of a generation_config.json that transformers' generate applies and that are not supported here.
_NOT_HONOURED = ("sequence_bias",)

# The argument of compat/ngram.py that bans repetition.
_OWN_BAN = "ngram_size"

# Whitespace in a vocabulary: as it is, as byte-level ones write it, a space as ▁, and as tokens for single bytes.
_BLANKS = " \t\n\v\f\r\x1c\x1d\x1e\x1f"
_BLANK_SIGNS = f"{_BLANKS}▁{''.join(chr(0x100 + ord(blank)) for blank in _BLANKS)}"
_BLANK_BYTES = frozenset(f"<0x{ord(blank):02X}>" for blank in _BLANKS)

RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
HABITUAL = (
    *("no_repeat_ngram_size", "forced_bos_token_id", "forced_eos_token_id", "num_beams"),
    *("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "min_new_tokens"),
)
"""Names in generation_config.json that affect every answer; see Habits."""


class SamplingResolver:
    """Resolves sampling parameters for one model.

    Args:
        info: the model.
        config: the engine's configuration.
        args: the user's engine options.
        tokenizer: transformers' tokenizer, or None.
        sandbox: compiles grammars first.
    """

    def __init__(
        self, info: ModelInfo, config: EngineConfig, args: EngineArgs, tokenizer: Any, sandbox: Sandbox
    ) -> None:
        self._info = info
        self._config = config
        self._max_logprobs = args.max_logprobs
        self._tokenizer = tokenizer
        own = getattr(tokenizer, "eos_token_id", None)
        self._eos = info.eos_ids | (
            frozenset((own,)) if isinstance(own, int) and 0 <= own < info.vocab_size else frozenset()
        )
        self.compiler = Compiler(self._tokenizer_json, info.vocab_size, self._eos)
        self._grammars = SandboxedCompile(sandbox, self._compiler_settings)
        self._processors = EngineProcessors(config.logits_processors, config)
        self._generation = read_json(Path(info.path) / "generation_config.json")
        self._habits = habits(self._generation, args, info)
        # Rules and repetition are recommendations of the checkpoint, as habits are, so "vllm" leaves them out.
        family = registry.inputs(info.family)
        self._rules = None if args.generation_config == "vllm" else family.rules
        self._repetition = None if args.generation_config == "vllm" else family.repetition
        self._no_repeat = None if args.generation_config == "vllm" else family.no_repeat
        # The parameters and habits of the last request, and the Sampling that they resolved to.
        self._last: tuple[object, Habits, Sampling] | None = None
        if self._repetition is not None:
            logger.info(
                "Answers that repeat themselves end with the finish reason 'repetition', as the model's card advises: "
                "%s. A request's repetition_detection goes before it; {} switches it off.",
                self._repetition,
            )
        if self._no_repeat is not None:
            logger.info(
                "Answers do not repeat %d tokens of their last %d, as the model's card advises. A request's %s in "
                "extra_args, or its repetition_detection, takes the place of that; {} switches it off.",
                self._no_repeat.size,
                self._no_repeat.window,
                _OWN_BAN,
            )

    @property
    def reads_extra_args(self) -> bool:
        """Whether a loaded class may read the `extra_args` of requests."""
        return self._processors.reads_extra_args

    def warm(self) -> None:
        """Let the process that compiles grammars start now, in the background."""
        if self._tokenizer is not None:
            self._grammars.warm()

    def _compiler_settings(self) -> CompilerSettings:
        return CompilerSettings(self._tokenizer_json(), self._info.vocab_size, self._eos)

    def resolve(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        seed: int,
        reasoning: ReasoningFormat | None = None,
        cancel: CancelToken | None = None,
        most: int | None = None,
    ) -> Sampling:
        """Return the complete, frozen parameters of one sequence.

        Args:
            params: the user's parameters.
            prompt_ids: the whole prompt.
            seed: used if the parameters set none.
            reasoning: the reasoning that may precede an answer with a grammar, or that has a budget.
            cancel: the request's.
            most: the answer's longest length, besides that of the context; None for no other limit.

        Raises:
            ParamsError: a parameter is out of range for this model, or not available.
            Cancelled: the request was cancelled.
        """
        given, last = snapshot(params), self._last
        if last is None or given != last[0]:
            params.verify()
            given = snapshot(params)
        num_prompt = len(prompt_ids)
        room = self._config.max_model_len - num_prompt
        assert room > 0, "the length of the prompt was not checked"
        room = room if most is None else min(room, most)
        # The one of an answer without tokens is computed, and left out where it is collected.
        longest = room if params.max_tokens is None else min(max(1, params.max_tokens), room)
        forced = self._habits.forced_ids(num_prompt, longest)
        fewest = min(max(params.min_tokens, self._habits.fewest), longest)
        seed = (seed if params.seed is None else params.seed) % 2**64
        # What depends on nothing else of the prompt is resolved once for requests in a row with equal parameters.
        if reasoning is not None or self._rules is not None or not self._processors.common:
            given = None
        if given is not None and last is not None and last[:2] == (given, self._habits):
            return last[2].of_prompt(seed, longest, fewest, forced)
        self._verify(params)
        own = frozenset(params.stop_token_ids or ())
        grammar = self._grammar(params, reasoning, cancel)
        penalised = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
        rules = AnswerRules() if self._rules is None else self._rules(prompt_ids, self._generation)
        if (self._habits.bind(forced) or rules.timestamps is not None) and grammar is not None:
            raise _no_grammar()
        # Where a grammar is complete only the end can follow, whatever was said of it.
        stop_ids = own if params.ignore_eos and grammar is None else own | self._eos
        bad_words_ids = tuple(
            dict.fromkeys((*self._bad_words(params.bad_words or ()), *self._habits.forbidden_from(rules.spared_from)))
        )
        reported = tuple(dict.fromkeys(params.logprob_token_ids or ()))
        if params.allowed_token_ids is not None:
            _check_allowed(params.allowed_token_ids, bad_words_ids, stop_ids if fewest else frozenset())
        made = Sampling(
            temperature=0.0 if params.temperature < GREEDY_BELOW else float(params.temperature),
            top_p=float(params.top_p),
            top_k=max(params.top_k, 0),
            min_p=float(params.min_p),
            seed=seed,
            max_tokens=longest,
            min_tokens=fewest,
            stop_ids=stop_ids,
            own_stop_ids=own,
            presence_penalty=float(penalised[0]),
            frequency_penalty=float(penalised[1]),
            repetition_penalty=float(penalised[2]),
            logit_bias=tuple((int(token), float(bias)) for token, bias in (params.logit_bias or {}).items()),
            # Each once, however often it is sent.
            allowed_token_ids=None if (some := params.allowed_token_ids) is None else tuple(dict.fromkeys(some)),
            bad_words_ids=bad_words_ids,
            logprobs=len(reported) if reported else self._num_candidates(params.logprobs),
            prompt_logprobs=self._num_candidates(params.prompt_logprobs),
            logprobs_mode=LogprobsMode.RAW_LOGPROBS if isinstance(params, RawParams) else self._config.logprobs_mode,
            prompt_ids=self._prompt_ids(params, num_prompt),
            logprob_ids=reported,
            grammar=grammar,
            num_answered=params.num_answered if isinstance(params, StepParams) else None,
            processors=self._processors.of(params),
            no_repeat_ngram=self._habits.no_repeat_ngram,
            no_repeat_window=self._bans_repetition(params),
            forced_ids=forced,
            first_forbidden=self._habits.first_forbidden,
            timestamps=rules.timestamps,
            thinking=self._thinking(params, reasoning, longest),
            repetition=self._ends_repetition(params),
        )
        if given is not None:
            self._last = given, self._habits, made
        return made

    def _ends_repetition(self, params: SamplingParams) -> RepetitionDetectionParams | None:
        """Return when an answer ends that repeats itself: as the request says, or else as the family's cards do."""
        rule = self._repetition if params.repetition_detection is None else params.repetition_detection
        return rule if rule is not None and rule.max_pattern_size else None

    def _bans_repetition(self, params: SamplingParams) -> NoRepeatWindow | None:
        """Return the ban that the family's cards advise, unless the request says otherwise."""
        read = (params.extra_args or {}) if self._processors.reads_extra_args else {}
        return None if params.repetition_detection is not None or _OWN_BAN in read else self._no_repeat

    def _thinking(
        self, params: SamplingParams, reasoning: ReasoningFormat | None, longest: int
    ) -> ThinkingBudget | None:
        """Return the budget of the reasoning; None if the answer cannot use it up.

        Without `reasoning`, the prompt has ended it.

        Raises:
            ParamsError: a mark is not one token.
        """
        budget = params.thinking_token_budget
        if budget is None or budget < 0 or reasoning is None:
            return None
        opening = None if reasoning.begun else self._mark(reasoning.open)
        close = self._mark(reasoning.close)
        if budget >= longest:
            return None
        return ThinkingBudget(budget, opening, close, frozenset() if reasoning.begun else self._blank_ids)

    @cached_property
    def _blank_ids(self) -> frozenset[int]:
        """The tokens of whitespace alone."""
        # Most pieces are ruled out without decoding them.
        likely = [
            token
            for piece, token in self._tokenizer.get_vocab().items()
            if isinstance(piece, str) and (not piece.strip(_BLANK_SIGNS) or piece in _BLANK_BYTES)
        ]
        return frozenset(token for token in likely if not self._tokenizer.decode([token]).strip())

    def _mark(self, text: str) -> int:
        """Return the only token of a mark of reasoning.

        A mark of several tokens can be written with other tokens too, and the sampler would not recognize it.

        Raises:
            ParamsError: it is several tokens.
        """
        ids = self._ids(text)
        if len(ids) != 1:
            raise ParamsError(
                f"thinking_token_budget is not available for this model: {text!r} is several tokens.",
                "Leave it out, and bound the answer with max_tokens.",
                param="thinking_token_budget",
            )
        return ids[0]

    def _grammar(
        self, params: SamplingParams, reasoning: ReasoningFormat | None, cancel: CancelToken | None
    ) -> Grammar | None:
        """Return the grammar, compiled once so that an invalid one is refused."""
        if params.structured_outputs is None:
            return None
        for name in ("min_tokens", "bad_words", "allowed_token_ids"):
            if getattr(params, name):
                raise ParamsError(f"{name} and a grammar cannot be combined.", "Set one of them.", param=name)
        grammar = grammar_of(params.structured_outputs, reasoning)
        self._grammars.check(grammar, cancel)
        return grammar

    def _tokenizer_json(self) -> str | None:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return None if backend is None else str(backend.to_str())

    def _verify(self, params: SamplingParams) -> None:
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            self._verify_ids(name, getattr(params, name) or ())
        self._verify_ids("logit_bias", [int(token) for token in params.logit_bias or {}])
        for name in ("logprobs", "prompt_logprobs"):
            if name == "logprobs" and params.logprob_token_ids:
                continue
            given, most = getattr(params, name), self._num_candidates(self._max_logprobs)
            value = self._num_candidates(given)
            if value is not None and most is not None and value > most:
                every = f", which is all {value} tokens of the vocabulary," if given == -1 else ""
                raise ParamsError(
                    f"{name}={given}{every} exceeds max_logprobs={most}.",
                    "Request fewer.",
                    param=name,
                    or_engine="raise max_logprobs; -1 allows all",
                )
        if params.stop and self._tokenizer is None:
            raise ParamsError("Stop strings require a tokenizer.", "Use stop_token_ids.", param="stop")

    def _prompt_ids(self, params: SamplingParams, num_prompt: int) -> PromptIds | None:
        """The tokens that are named at positions of the prompt.

        Raises:
            ParamsError: there are not as many rows as positions, too many tokens in one, or unknown ones.
        """
        name, table = "prompt_logprob_token_ids", params.prompt_logprob_token_ids
        if table is None:
            return None
        assert not isinstance(table, list), "the parameters were verified"
        rows, width = table.shape
        start = params.prompt_logprob_start or 0
        if rows != (wanted := max(0, num_prompt - 1 - start)):
            raise ParamsError(
                f"{name} has {rows} rows, but {num_prompt} tokens have {wanted} scored rows from "
                f"prompt_logprob_start={start} on: one for each token after that one.",
                "Give as many; an empty row asks for nothing.",
                param=name,
            )
        most = self._num_candidates(self._max_logprobs)
        if most is not None and width > most:
            raise ParamsError(
                f"A row of {name} has {width} tokens, which exceeds max_logprobs={most}.",
                "Name fewer.",
                param=name,
                or_engine=f"raise max_logprobs to at least {width}; -1 allows all",
            )
        if (highest := int(table.max())) >= self._info.vocab_size:
            raise ParamsError(
                f"{name} contains the out-of-vocab token id {highest}; the vocabulary has {self._info.vocab_size}.",
                param=name,
            )
        return PromptIds(start, table)

    def _num_candidates(self, given: int | None) -> int | None:
        """The number of candidates; -1 is vLLM's word for all."""
        return self._info.vocab_size if given == -1 else given

    def _verify_ids(self, name: str, ids: Sequence[int]) -> None:
        for token in ids:
            if not 0 <= token < self._info.vocab_size:
                raise ParamsError(
                    f"{name} contains the token id {token}; the vocabulary has {self._info.vocab_size}.", param=name
                )

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the ids of each word at the start of a text, and after a blank."""
        if words and self._tokenizer is None:
            raise ParamsError("bad_words require a tokenizer.", "Use logit_bias.", param="bad_words")
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            if not word.strip():
                raise ParamsError("bad_words must not contain an empty word.", param="bad_words")
            for form in (word.lstrip(), " " + word.lstrip()):
                found[self._ids(form)] = None
        return tuple(found)

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False, truncation=False)["input_ids"])


@dataclass(frozen=True)
class Habits:
    """The settings of a checkpoint's generation_config.json that affect every answer and have no sampling parameter.

    Attributes:
        no_repeat_ngram: sequences of this many tokens never repeat; 0 is off.
        forced_first: the token after a prompt of one token, which in encoder-decoder models is the answer's start.
        forced_last: the last token of an answer of max_tokens.
        forbidden: sequences of token ids that never occur.
        fewest: the smallest number of tokens in an answer.
        first_forbidden: token ids that never begin an answer.
        suppressed: those of `forbidden` that are single tokens.
    """

    no_repeat_ngram: int = 0
    forced_first: int | None = None
    forced_last: int | None = None
    forbidden: tuple[tuple[int, ...], ...] = ()
    fewest: int = 0
    first_forbidden: tuple[int, ...] = ()
    suppressed: frozenset[int] = frozenset()

    def bind(self, forced: Sequence[tuple[int, int]]) -> bool:
        """Return whether they force or forbid tokens."""
        return bool(forced or self.forbidden or self.fewest or self.first_forbidden)

    def forbidden_from(self, spared_from: int | None) -> tuple[tuple[int, ...], ...]:
        """Return the forbidden sequences without suppressed tokens from this id on; all if it is None."""
        if spared_from is None:
            return self.forbidden
        return tuple(
            word for word in self.forbidden if word[0] < spared_from or len(word) > 1 or word[0] not in self.suppressed
        )

    def forced_ids(self, num_prompt: int, max_tokens: int) -> tuple[tuple[int, int], ...]:
        """Return pairs (position, token id); the last one comes first, because it takes precedence in transformers."""
        if self.forced_first is None and self.forced_last is None:
            return ()
        last = (num_prompt + max_tokens - 1, self.forced_last)
        pairs = (last, (1, self.forced_first)) if num_prompt == 1 else (last,)
        return tuple((position, token) for position, token in pairs if token is not None)


def habits(generation: Mapping[str, Any], args: EngineArgs, info: ModelInfo) -> Habits:
    """Return the checkpoint's settings with the user's overrides; none with `generation_config="vllm"`.

    Raises:
        ConfigError: an override requests beams or another unsupported setting, or a token is not in the vocabulary.
    """
    overrides = args.override_generation_config or {}
    values = (dict(generation) if args.generation_config != "vllm" else {}) | overrides
    if (values.get("num_beams") or 1) > 1:
        if "num_beams" in overrides:
            raise ConfigError(
                "Beam search is not available in this version.", "Leave num_beams out.", param="num_beams"
            )
        logger.info("The checkpoint recommends %s beams; this engine decodes without beams.", values["num_beams"])
    forced = {name: values.get(f"forced_{name}_token_id") for name in ("bos", "eos")}
    for name, token in forced.items():
        if isinstance(token, list):
            # transformers makes all of several tokens equally likely, and greedy choice takes the lowest id.
            forced[name] = token = min(token, default=None)
        if token is not None and not 0 <= token < info.vocab_size:
            raise ConfigError(f"forced_{name}_token_id={token} is outside the vocabulary of {info.vocab_size}.")
    for name in _NOT_HONOURED:
        if overrides.get(name):
            raise ConfigError(f"{name} is not available in this version.", f"Leave {name} out.", param=name)
        if values.get(name):
            logger.warning("generation_config.json sets %s, which is not available in this version: left out.", name)
    return Habits(
        int(values.get("no_repeat_ngram_size") or 0),
        forced["bos"],
        forced["eos"],
        _forbidden(values, info),
        int(values.get("min_new_tokens") or 0),
        _checked_ids("begin_suppress_tokens", values, info),
        frozenset(_checked_ids("suppress_tokens", values, info)),
    )


def _checked_ids(name: str, values: Mapping[str, Any], info: ModelInfo) -> tuple[int, ...]:
    """Return a list of token ids.

    Raises:
        ConfigError: one is outside the vocabulary.
    """
    ids = tuple(values.get(name) or ())
    for token in ids:
        if not isinstance(token, int) or not 0 <= token < info.vocab_size:
            raise ConfigError(f"{name} holds {token!r}, which is outside the vocabulary of {info.vocab_size}.")
    return ids


def _forbidden(values: Mapping[str, Any], info: ModelInfo) -> tuple[tuple[int, ...], ...]:
    """Return the single tokens of suppress_tokens and the sequences of bad_words_ids.

    Raises:
        ConfigError: a token is outside the vocabulary.
    """
    words = [(token,) for token in values.get("suppress_tokens") or ()]
    # As in transformers, an end-of-text token does not count as a word.
    words += [tuple(word) for word in values.get("bad_words_ids") or () if frozenset(word) - info.eos_ids]
    for word in words:
        if not word or not all(isinstance(token, int) and 0 <= token < info.vocab_size for token in word):
            raise ConfigError(f"The checkpoint forbids {word}, which are outside its vocabulary of {info.vocab_size}.")
    return tuple(words)


def recommended(generation: Mapping[str, Any], args: EngineArgs) -> SamplingParams:
    """Return the checkpoint's recommended parameters with the user's overrides; ours with `generation_config="vllm"`.

    A checkpoint that explicitly disables sampling is decoded greedily.

    Raises:
        ParamsError: a value is out of range.
    """
    values = dict(generation) if args.generation_config != "vllm" else {}
    values |= args.override_generation_config or {}
    chosen = {name: values[name] for name in RECOMMENDED if values.get(name) is not None}
    if values.get("do_sample") is False:
        chosen["temperature"] = 0.0
        for name in ("top_p", "top_k", "min_p"):
            chosen.pop(name, None)
    if values.get("max_new_tokens") is not None:
        chosen["max_tokens"] = values["max_new_tokens"]
    return SamplingParams(**chosen)


def _check_allowed(allowed: Sequence[int], bad_words: Sequence[tuple[int, ...]], too_early: frozenset[int]) -> None:
    """Refuse allowed ids of which none may be left: where each ends a bad word, or the answer before its time.

    Raises:
        ParamsError: so it is.
    """
    left = frozenset(allowed) - too_early
    if allowed and not left:
        raise ParamsError(
            "allowed_token_ids allow only what ends the answer, and min_tokens forbid that.",
            "Allow other ids, or leave min_tokens out.",
            param="allowed_token_ids",
        )
    if allowed and left <= {word[-1] for word in bad_words if word}:
        raise ParamsError(
            "bad_words may leave none of allowed_token_ids.", "Allow other ids, or forbid less.", param="bad_words"
        )


def _no_grammar() -> ParamsError:
    return ParamsError(
        "This checkpoint forces or forbids tokens, which grammars do not support.",
        "Leave the grammar out.",
        param="structured_outputs",
        or_engine="start with generation_config='vllm'",
    )
