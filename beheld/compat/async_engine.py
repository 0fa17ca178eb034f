"""AsyncLLM with the names and arguments that only vLLM's scripts use."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import fields
from typing import Any, Self

from beheld.api.async_llm import AsyncLLM
from beheld.api.llm import tokenization_of, with_entries
from beheld.core.config import EngineArgs
from beheld.core.outputs import RequestOutput
from beheld.core.params import SamplingParams


class ScriptAsyncLLM(AsyncLLM):
    """AsyncLLM, and AsyncLLMEngine, as scripts make and end it."""

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, *_: Any, **__: Any) -> Self:
        """Build from EngineArgs; vLLM's further arguments (usage_context, stat_loggers) mean nothing here."""
        return cls(**{each.name: getattr(engine_args, each.name) for each in fields(EngineArgs)})

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        prompt_text: str | None = None,
        tokenization_kwargs: Any = None,
        trace_headers: Any = None,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        kv_hints: Any = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a prompt, as AsyncLLM.generate; `tokenization_kwargs` as for LLM.generate.

        The other arguments, which say whose session it is of and which engine may answer, change no answer.

        Raises:
            UserError, EngineError: the request failed; raised by the first read or a later one.
        """
        made = with_entries(prompt, tokenization_of(tokenization_kwargs))
        return super().generate(made, sampling_params, request_id, **options)

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine and free its memory."""
        self.close()
