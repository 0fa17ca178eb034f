"""Thread pools that prepare requests, separated by what they wait for."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, TypeVar, TypeVarTuple, Unpack

from beheld.api.front_place import ALONE, FrontPlace
from beheld.core.params import SamplingParams
from beheld.core.pooling_params import PoolingParams
from beheld.core.request import ForeignTemplate
from beheld.inputs.fetch.fetch import is_remote
from beheld.inputs.pipeline import Chat, Pair, PromptType
from beheld.inputs.prompt.tokenizer import SHORT_TEXT
from beheld.utils.fair_turns import FairTurns
from beheld.utils.host_turns import HostTurns

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_TEXT_THREADS = 2
_LONG_THREADS = 2
_SLOW_THREADS = 2
# Conversations with more values are slow: rendering this number takes some 5 ms, all of it in the interpreter.
_SLOW_VALUES = 1024
# The event loop counts no more values, whatever a conversation holds.
_MOST_COUNTED = 16 * _SLOW_VALUES
# Requests whose media are opened and processed at a time, and of these, those of one client. They wait for workers
# (sandbox/client_turns.py); further threads only read prompts.
_MEDIA_TURNS, _MEDIA_TURNS_PER_CLIENT, _MEDIA_READERS = 24, 16, 4
_GRAMMAR_THREADS = 8
# As many as there are processes that render.
_TEMPLATE_THREADS = 2


class Pools:
    """The thread pools, and whose turn it is at each.

    Prompts with media wait for decoders, those with a grammar for compilers, and templates of requests for renderers.
    None of them may delay plain text, and long texts and conversations of hundreds of messages may not delay short
    ones. Fetching waits in the event loop and delays no thread. Clients that wait for one pool have its threads by
    turns, so that a client waits for what runs, and not for all that another one has sent.

    Args:
        host: turns of what keeps the interpreter busy.
        place: of several fronts of an engine, each has a share of the turns of media.
    """

    def __init__(self, host: HostTurns, place: FrontPlace = ALONE) -> None:
        self._host = host
        self.text = ThreadPoolExecutor(_TEXT_THREADS, thread_name_prefix="beheld-text")
        self.long = ThreadPoolExecutor(_LONG_THREADS, thread_name_prefix="beheld-long")
        self.slow = ThreadPoolExecutor(_SLOW_THREADS, thread_name_prefix="beheld-slow")
        self.media = ThreadPoolExecutor(_MEDIA_TURNS + _MEDIA_READERS, thread_name_prefix="beheld-prepare")
        self.media_turns = FairTurns(place.share(_MEDIA_TURNS), place.share(_MEDIA_TURNS_PER_CLIENT))
        self.template = ThreadPoolExecutor(_TEMPLATE_THREADS, thread_name_prefix="beheld-template")
        self.grammar = ThreadPoolExecutor(_GRAMMAR_THREADS, thread_name_prefix="beheld-grammar")
        # Some of the threads that wait for compilers are left to others: a grammar may take seconds.
        self._turns = {
            self.text: FairTurns(_TEXT_THREADS, _TEXT_THREADS),
            self.long: FairTurns(_LONG_THREADS, _LONG_THREADS),
            self.slow: FairTurns(_SLOW_THREADS, _SLOW_THREADS),
            self.template: FairTurns(_TEMPLATE_THREADS, _TEMPLATE_THREADS),
            self.grammar: FairTurns(_GRAMMAR_THREADS, _GRAMMAR_THREADS - 2),
        }

    def of(self, prompt: PromptType | Chat | Pair, params: SamplingParams | PoolingParams | None) -> ThreadPoolExecutor:
        """The pool that prepares a prompt or a conversation."""
        num_values = 0
        if isinstance(prompt, Chat):
            if any(map(_holds_media, prompt.messages)):
                return self.media
            num_letters, num_values = _size(prompt, SHORT_TEXT, _MOST_COUNTED)
        elif isinstance(prompt, Pair):
            num_letters = len(prompt.first) + len(prompt.second)
        else:
            if isinstance(prompt, Mapping) and prompt.get("multi_modal_data"):
                return self.media
            text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
            num_letters = len(text) if isinstance(text, str) else 0
        if num_letters > SHORT_TEXT:
            return self.long
        if has_grammar(params):
            return self.grammar
        return self.slow if num_values > _SLOW_VALUES else self.text

    def of_reading(
        self,
        prompt: PromptType | Chat | Pair,
        params: SamplingParams | PoolingParams | None,
        pool: ThreadPoolExecutor | None = None,
    ) -> ThreadPoolExecutor:
        """The pool that reads it; `pool` is that of `of`, if the caller has asked.

        A client's own template may loop, so these have a pool in which only they wait.
        """
        if isinstance(prompt, Chat) and isinstance(prompt.chat_template, ForeignTemplate):
            return self.template
        pool = self.of(prompt, params) if pool is None else pool
        if pool in (self.media, self.grammar) and isinstance(prompt, Chat) and _has_many_values(prompt):
            return self.slow
        return pool

    async def run(self, pool: ThreadPoolExecutor, client: str, function: Callable[[Unpack[Ts]], T], *args: *Ts) -> T:
        """Call a function in a pool's thread when it is the client's turn; media have turns of their own."""
        turns = self._turns.get(pool)
        async with nullcontext() if turns is None else turns.turn(client):
            if pool is self.slow:
                return await self._host.run(pool, client, function, *args)
            return await asyncio.get_running_loop().run_in_executor(pool, function, *args)

    def close(self) -> None:
        """Accept no more work; does not wait for running work."""
        for pool in (self.text, self.long, self.slow, self.media, self.template, self.grammar):
            pool.shutdown(wait=False, cancel_futures=True)


def has_grammar(params: SamplingParams | PoolingParams | None) -> bool:
    """True if an answer must follow a grammar, which takes time to compile."""
    return isinstance(params, SamplingParams) and params.structured_outputs is not None


def names_remote(prompt: PromptType | Chat | Pair) -> bool:
    """Whether a prompt seems to name media of other machines; it is not read yet, so this is a guess."""
    if isinstance(prompt, Chat):
        contents = [message.get("content") for message in prompt.messages if isinstance(message, Mapping)]
        parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
        values = [value for part in parts if isinstance(part, Mapping) for value in part.values()]
        values += [value.get("url") for value in values if isinstance(value, Mapping)]
        return any(map(is_remote, values))
    media = prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None
    if not isinstance(media, Mapping):
        return False
    return any(is_remote(one) for own in media.values() for one in (own if isinstance(own, list | tuple) else (own,)))


def _has_many_values(chat: Chat) -> bool:
    return _size(chat, math.inf, _SLOW_VALUES)[1] > _SLOW_VALUES


def _size(chat: Chat, most_letters: float, most_values: int) -> tuple[int, int]:
    """Number of characters of all texts of a conversation and its tools, and number of all values, counted until one of
    them is more than the most."""
    num_letters = num_values = 0
    left: list[Any] = [chat.messages, chat.tools, chat.template_kwargs, chat.chat_template]
    while left and num_letters <= most_letters and num_values <= most_values:
        value = left.pop()
        num_values += 1
        if isinstance(value, str):
            num_letters += len(value)
        elif isinstance(value, dict | Mapping):
            left += value
            left += value.values()
        elif isinstance(value, list | tuple):
            left += value
    return num_letters, num_values


def _holds_media(message: Any) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return False
    return any(isinstance(part, Mapping) and part.get("type") != "text" for part in content)
