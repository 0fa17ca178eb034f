"""Thread pools that prepare requests, separated by what they wait for."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from beheld.core.params import SamplingParams
from beheld.inputs.pipeline import Chat, PromptType
from beheld.inputs.prompt.tokenizer import SHORT_TEXT

_TEXT_THREADS = 2
_LONG_THREADS = 2
_MEDIA_THREADS = 16
_GRAMMAR_THREADS = 8


class Pools:
    """The thread pools.

    Prompts with media wait for decoders, and those with a grammar for compilers. Neither may delay plain text, and long
    texts may not delay short ones. Fetching waits in the event loop and delays no thread.
    """

    def __init__(self) -> None:
        self.text = ThreadPoolExecutor(_TEXT_THREADS, thread_name_prefix="beheld-text")
        self.long = ThreadPoolExecutor(_LONG_THREADS, thread_name_prefix="beheld-long")
        self.media = ThreadPoolExecutor(_MEDIA_THREADS, thread_name_prefix="beheld-prepare")
        self.grammar = ThreadPoolExecutor(_GRAMMAR_THREADS, thread_name_prefix="beheld-grammar")

    def of(self, prompt: PromptType | Chat, params: SamplingParams | None) -> ThreadPoolExecutor:
        """The pool that prepares a prompt or a conversation."""
        if isinstance(prompt, Chat):
            if any(map(_holds_media, prompt.messages)):
                return self.media
            num_letters = _letters([prompt.messages, prompt.tools, prompt.template_kwargs, prompt.chat_template])
        else:
            if isinstance(prompt, Mapping) and prompt.get("multi_modal_data"):
                return self.media
            text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
            num_letters = len(text) if isinstance(text, str) else 0
        if num_letters > SHORT_TEXT:
            return self.long
        return self.grammar if params is not None and params.structured_outputs is not None else self.text

    def close(self) -> None:
        """Accept no more work; does not wait for running work."""
        for pool in (self.text, self.long, self.media, self.grammar):
            pool.shutdown(wait=False, cancel_futures=True)


def _letters(value: Any) -> int:
    """Number of characters of all texts in plain JSON."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_letters, value)) + sum(map(_letters, value.values()))
    return sum(map(_letters, value)) if isinstance(value, list | tuple) else 0


def _holds_media(message: Any) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return False
    return any(isinstance(part, Mapping) and part.get("type") != "text" for part in content)
