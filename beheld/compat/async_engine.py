"""AsyncLLM with the two names that only vLLM's scripts use."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Self

from beheld.api.async_llm import AsyncLLM
from beheld.core.config import EngineArgs


class ScriptAsyncLLM(AsyncLLM):
    """AsyncLLM, and AsyncLLMEngine, as scripts make and end it."""

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, *_: Any, **__: Any) -> Self:
        """Build from EngineArgs; vLLM's further arguments (usage_context, stat_loggers) mean nothing here."""
        return cls(**{each.name: getattr(engine_args, each.name) for each in fields(EngineArgs)})

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine and free its memory."""
        self.close()
