"""Beam search over LLM: one request of one token for each kept sequence and position. AsyncLLM shares its parts."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from beheld.core.beams import BeamSearch, BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from beheld.core.config import EngineConfig
from beheld.core.errors import ParamsError
from beheld.core.outputs import CompletionOutput, Logprob
from beheld.core.params import SamplingParams, StepParams
from beheld.core.request import LoRARequest


class Generates(Protocol):
    """LLM, as far as a search asks it."""

    def generate(
        self,
        prompts: Sequence[Any],
        sampling_params: Sequence[SamplingParams],
        *,
        use_tqdm: bool,
        lora_request: Sequence[LoRARequest | None],
    ) -> list[Any]:
        """One output per prompt, in order."""

    def get_tokenizer(self) -> Any:
        """The checkpoint's tokenizer."""


def step_of(params: BeamSearchParams, logprobs: int | None = None, num_answered: int = 0) -> SamplingParams:
    """The parameters of the requests of a search: the likeliest next tokens of a sequence.

    Args:
        logprobs: how many are given in the answers, with their texts; None for none.
        num_answered: how many tokens the sequence has besides the prompt's.

    Raises:
        ParamsError: `logprobs` is out of range.
    """
    wanted = StepParams(temperature=0, max_tokens=1, logprobs=logprobs, detokenize=logprobs is not None)
    wanted.logprobs = max(2 * params.beam_width, wanted.logprobs or 0)
    if params.allowed_token_ids is not None:
        # Candidates are these and no others, with the log-probabilities that they have among all.
        wanted.logprobs = None
        wanted.allowed_token_ids = wanted.logprob_token_ids = list(dict.fromkeys(params.allowed_token_ids))
    if params.structured_outputs is not None:
        wanted.structured_outputs, wanted.num_answered = params.structured_outputs, num_answered
    return wanted


@contextmanager
def blaming_beams(params: BeamSearchParams, logprobs: int | None = None) -> Generator[None]:
    """Errors of the candidates that a search needs name the beams: the user asked for nothing else."""
    try:
        yield
    except ParamsError as error:
        if error.param != "logprobs" or (logprobs or 0) >= 2 * params.beam_width:
            raise
        raise ParamsError(
            f"A search with {params.beam_width} beams compares {2 * params.beam_width} candidates: {error.reason}",
            "Ask for fewer beams.",
            param="beam_width",
            or_engine=error.or_engine,
        ) from error


def answer_of(
    sequence: BeamSearchSequence, start: int, index: int, logprobs: int | None, tokenizer: Any, skip_special: bool
) -> CompletionOutput:
    """A sequence of a search as an answer.

    Args:
        start: the length of the prompt.
        index: the answer's number.
        logprobs: how many candidates are given for each token besides itself; None for no log-probabilities.
        tokenizer: None leaves the text empty.
        skip_special: whether the text leaves out special tokens.
    """
    tokens = sequence.tokens[start:]
    # The token that ends an answer is not part of its text.
    shown = tokens[:-1] if sequence.finish_reason == "stop" else tokens
    kept: list[dict[int, Logprob]] | None = None
    if logprobs is not None:
        kept = []
        for token, likely in zip(tokens, sequence.logprobs, strict=True):
            best = sorted(likely, key=lambda one: -likely[one].logprob)[:logprobs]
            kept.append({one: likely[one] for one in dict.fromkeys((token, *best))})
    return CompletionOutput(
        index,
        "" if tokenizer is None else tokenizer.decode(shown, skip_special_tokens=skip_special),
        tokens,
        sequence.cum_logprob,
        kept,
        sequence.finish_reason,
    )


def beam_search(
    llm: Generates,
    prompts: Sequence[Any],
    params: BeamSearchParams,
    lora: LoRARequest | Sequence[LoRARequest | None] | None,
    concurrency: int | None,
    eos_ids: Sequence[int],
    config: EngineConfig,
) -> list[BeamSearchOutput]:
    """See LLM.beam_search.

    Args:
        eos_ids: tokens that end an answer.
    """
    loras: list[LoRARequest | None] = [lora] * len(prompts) if isinstance(lora, LoRARequest | None) else list(lora)
    made = list(zip(prompts, loras, strict=True))
    outputs: list[BeamSearchOutput] = []
    size = concurrency or len(made) or 1
    for start in range(0, len(made), size):
        outputs += _searched(llm, made[start : start + size], params, eos_ids, config)
    return outputs


def _searched(
    llm: Generates,
    prompts: Sequence[tuple[Any, LoRARequest | None]],
    params: BeamSearchParams,
    eos_ids: Sequence[int],
    config: EngineConfig,
) -> list[BeamSearchOutput]:
    """Search some prompts in common steps."""
    searches = [BeamSearch(_ids(llm, prompt), params, eos_ids, config.max_model_len) for prompt, _ in prompts]
    while any(search.beams for search in searches):
        asked = [
            (_with_ids(prompt, beam.tokens), lora, step_of(params, num_answered=len(beam.logprobs)))
            for (prompt, lora), search in zip(prompts, searches, strict=True)
            for beam in search.beams
        ]
        with blaming_beams(params):
            answers = llm.generate(
                [prompt for prompt, _, _ in asked],
                [step for _, _, step in asked],
                use_tqdm=False,
                lora_request=[lora for _, lora, _ in asked],
            )
        found = iter([_candidates(output) for output in answers])
        for search in searches:
            if search.beams:
                search.take([next(found) for _ in search.beams])
    tokenizer = llm.get_tokenizer()
    outputs = []
    for (_, lora), search in zip(prompts, searches, strict=True):
        best = search.best()
        for sequence in best:
            sequence.lora_request = lora
            if sequence.finish_reason == "stop" and not params.include_stop_str_in_output:
                sequence.tokens.pop()
            sequence.text = tokenizer.decode(sequence.tokens, skip_special_tokens=params.skip_special_tokens)
        outputs.append(BeamSearchOutput(best))
    return outputs


def _candidates(output: Any) -> dict[int, Logprob]:
    (likely,) = output.outputs[0].logprobs
    found: dict[int, Logprob] = likely
    return found


def _ids(llm: Generates, prompt: Any) -> list[int]:
    """The ids of a prompt before its placeholders are replaced."""
    if isinstance(prompt, Mapping) and prompt.get("prompt_embeds") is not None:
        raise ParamsError("A prompt of embeddings cannot go on with beams.", "Ask for greedy answers.", param="prompt")
    if isinstance(prompt, Mapping) and prompt.get("prompt_token_ids") is not None:
        return list(prompt["prompt_token_ids"])
    if isinstance(prompt, str | Mapping):
        text = prompt if isinstance(prompt, str) else prompt["prompt"]
        ends = not isinstance(prompt, Mapping) or prompt.get("add_special_tokens", True) is not False
        return list(llm.get_tokenizer().encode(text, add_special_tokens=ends))
    return list(prompt)


def _with_ids(prompt: Any, token_ids: list[int]) -> dict[str, Any]:
    """The prompt with these ids in place of its text."""
    rest = (
        {}
        if not isinstance(prompt, Mapping)
        else {k: v for k, v in prompt.items() if k not in ("prompt", "add_special_tokens")}
    )
    return {**rest, "prompt_token_ids": token_ids}
