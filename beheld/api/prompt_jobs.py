"""A job of each prompt that a call of LLM has: its parameters, and how its requests are prepared."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from beheld.api import iterables
from beheld.api.collectors import Params
from beheld.api.feed import Job, JobGroup, Jobs, Reading
from beheld.api.offline_engine import OfflineEngine
from beheld.api.per_prompt import check_enough, check_lengths, lengths_of, value_at
from beheld.api.pools import has_grammar
from beheld.api.seeds import answers, seed_of
from beheld.core.errors import ParamsError
from beheld.core.outputs import PoolingRequestOutput
from beheld.core.params import SamplingParams
from beheld.core.pooling_params import PoolingParams
from beheld.core.request import LoRARequest, Request
from beheld.inputs.pipeline import Chat, InputPipeline, Pair, PromptType, RequestOrder
from beheld.inputs.prompt.reader import plain_form
from beheld.inputs.prompt.tokenizer import SHORT_TEXT
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# The most plain prompts that are prepared together, and the most letters or token ids of all of them: no step begins
# meanwhile.
_GROUP = 256
_GROUP_LETTERS = 1 << 18


class PromptJobs:
    """Makes the jobs of prompts and conversations.

    Args:
        inputs: prepares requests.
        seed: of the engine.
        pools_texts: the model gives vectors or scores of texts alone.
        engine: the engine; raises EngineDeadError once the LLM is closed.
    """

    def __init__(
        self, inputs: InputPipeline, seed: int, *, pools_texts: bool, engine: Callable[[], OfflineEngine]
    ) -> None:
        self._inputs, self._seed, self._engine = inputs, seed, engine
        self._pools_texts = pools_texts
        # Incremented by whichever thread reads the prompts.
        self._numbers = itertools.count()

    def next_id(self) -> str:
        """A name that no other job has."""
        return str(next(self._numbers))

    def jobs(
        self,
        items: Iterable[Any],
        params: Params | Sequence[Params] | None,
        lora: LoRARequest | Sequence[LoRARequest | None] | None,
        priority: int | Sequence[int] | None,
        chat: Mapping[str, Any] | None = None,
        *,
        common: Mapping[str, Any] | None = None,
        grounding: bool = False,
        kind: Any = PoolingRequestOutput,
    ) -> Jobs:
        """One job per item, with its own or the common parameters.

        Args:
            chat: the fields of Chat if the items are conversations; None if they are prompts.
            common: entries of every prompt.
            kind: of the outputs of groups.
        """
        if params is None:
            params = self._inputs.default_params()
        for one in params if isinstance(params, list | tuple) else (params,):
            if not isinstance(one, SamplingParams | PoolingParams):
                raise ParamsError(
                    f"sampling_params must be SamplingParams, not {type(one).__name__}.",
                    "Write SamplingParams(temperature=0, ...).",
                    param="sampling_params",
                )
        lengths = lengths_of(sampling_params=params, lora_request=lora, priority=priority)
        if isinstance(items, Sequence):
            check_lengths(lengths, len(items))

        # Prompts to be pooled are many and brief.
        if (
            isinstance(items, list)
            and len(items) > 1
            and self._pools_texts
            and lora is None
            and chat is None
            and common is None
        ):
            return Jobs(self._groups(items, params, priority, kind), Reading.TAKER, len(items))

        def each() -> Generator[Job, None, None]:
            number = 0
            with closing(iterables.each(items)) as source:
                for index, item in enumerate(source):
                    number = index + 1
                    # The length of an iterator is known only after reading it.
                    check_enough(lengths, number)
                    own = value_at(params, index)
                    # Without a budget, a grammar shapes the whole answer, its reasoning too.
                    fields = dict(chat or {}) if has_budget(own) else {**(chat or {}), "reasoning": None}
                    prompt = with_entries(item, common) if chat is None else Chat(item, **fields)
                    yield self.job(
                        prompt,
                        own,
                        value_at(lora, index),
                        value_at(priority, index) or 0,
                        grounding=grounding,
                    )
            check_lengths(lengths, number)

        return Jobs(each(), iterables.reading(items), iterables.length(items))

    def _groups(self, items: list[Any], params: Any, priority: Any, kind: Any) -> Generator[Job | JobGroup, None, None]:
        """Groups of plain prompts with equal parameters, and a job for each other item; arguments as of `jobs`."""
        # An earlier call that was interrupted may have left ids, and the tokenizer may have changed since.
        self._inputs.reader.read_ahead((), first=True)
        index = 0
        while index < len(items):
            own = value_at(params, index)
            stop, room = index, _GROUP_LETTERS
            while stop < min(len(items), index + _GROUP):
                size = _plain_size(items[stop])
                if size is None or size > room or value_at(params, stop) is not own:
                    break
                stop, room = stop + 1, room - size
            if stop == index or not isinstance(own, PoolingParams):
                yield self.job(items[index], own, None, value_at(priority, index) or 0)
                index += 1
                continue
            self._engine()
            names = list(map(str, itertools.islice(self._numbers, stop - index)))
            urgent = [value_at(priority, place) or 0 for place in range(index, stop)]
            prepare = partial(self._group_requests, items[index:stop], own, names, urgent)
            yield JobGroup(names, own, prepare, kind)
            index = stop

    def _group_requests(
        self, prompts: list[Any], params: PoolingParams, names: list[str], priorities: list[int]
    ) -> list[Request | Exception]:
        """Prepare a group in the calling thread: the request of each prompt, or its error."""
        arrival = time.monotonic()
        try:
            made: list[Any] = self._inputs.plain_group(prompts, params, names, priorities, arrival)
        except Exception:
            # Prepared alone, only the prompt at fault fails.
            logger.debug("Prompts of a group are prepared one by one.", exc_info=True)
            made = [None] * len(prompts)
        for place, request in enumerate(made):
            if request is None:
                try:
                    params.verify()
                    order = RequestOrder(
                        prompts[place], params, names[place], priority=priorities[place], arrival=arrival
                    )
                    made[place] = self._inputs.prepare(order)
                except Exception as error:
                    made[place] = error
                    if isinstance(text := plain_form(prompts[place]), str):
                        # It may have failed before its ids were asked for, which would be kept.
                        self._inputs.reader.read_before(text)
        return made

    def job(
        self,
        prompt: PromptType | Chat | Pair,
        params: Params,
        lora: LoRARequest | None,
        priority: int,
        *,
        grounding: bool = False,
    ) -> Job:
        """A job with numbered answers; without a given seed, all answers differ."""
        number = next(self._numbers)
        self._engine()
        light = _is_light(prompt) and lora is None and not has_grammar(params)
        prepare = partial(self._requests, number, prompt, params, lora, priority, grounding=grounding)
        return Job(str(number), params, prepare, self._inputs.tokenizer, light)

    def _requests(
        self,
        number: int,
        prompt: PromptType | Chat | Pair,
        params: Params,
        lora: LoRARequest | None,
        priority: int,
        *,
        grounding: bool,
    ) -> list[Request]:
        """Prepare one job in the calling thread: a request for each answer."""
        params.verify()
        base = seed_of(params, self._seed, number)
        order = RequestOrder(
            prompt, params, str(number), lora, priority, arrival=time.monotonic(), seed=base, grounding=grounding
        )
        first = self._inputs.prepare(order)
        if first.lora is not None:
            self._engine().read_lora(first.lora)
        return answers(first, params, base)


def tokenization_of(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Check the tokenizer's options of a call.

    Raises:
        ParamsError: there are others than `add_special_tokens`, or that is neither true nor false.
    """
    for name, value in (given or {}).items():
        if name != "add_special_tokens":
            raise ParamsError(
                f"tokenization_kwargs cannot say {name!r}.",
                "It takes add_special_tokens; truncate_prompt_tokens is one of SamplingParams.",
                param="tokenization_kwargs",
            )
        if not isinstance(value, bool):
            raise ParamsError('"add_special_tokens" must be true or false.', param="tokenization_kwargs")
    return dict(given or {})


def with_entries(prompt: Any, common: Mapping[str, Any] | None) -> Any:
    """A prompt with entries that all have; its own go first."""
    if not common:
        return prompt
    if isinstance(prompt, Chat):
        both = {**(common.get("mm_processor_kwargs") or {}), **(prompt.mm_processor_kwargs or {})}
        return replace(prompt, mm_processor_kwargs=both or None)
    if isinstance(prompt, Mapping):
        both = {**(common.get("mm_processor_kwargs") or {}), **(prompt.get("mm_processor_kwargs") or {})}
        return {**common, **prompt} | ({"mm_processor_kwargs": both} if both else {})
    return {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt, **common}


def has_budget(params: Params | None) -> bool:
    """Whether the parameters bound the reasoning."""
    budget = params.thinking_token_budget if isinstance(params, SamplingParams) else None
    return budget is not None and budget >= 0


def is_ids(prompt: Any) -> bool:
    """True for a list of token ids."""
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], int)


def _is_light(prompt: Any) -> bool:
    """True for a prompt of token ids without media."""
    if isinstance(prompt, Mapping):
        return "prompt_token_ids" in prompt and not prompt.get("multi_modal_data")
    return is_ids(prompt)


def _plain_size(prompt: Any) -> int | None:
    """The letters of a text or a pair, or the number of token ids; None of other prompts, and of long texts."""
    prompt = plain_form(prompt)
    if prompt is None:
        return None
    size = len(prompt.first) + len(prompt.second) if type(prompt) is Pair else len(prompt)
    return size if size <= SHORT_TEXT else None
