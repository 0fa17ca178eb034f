"""AsyncLLM with the names and arguments that only vLLM's scripts use."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from types import SimpleNamespace
from typing import Any, Self

from beheld.api.async_llm import AsyncLLM
from beheld.api.prompt_jobs import tokenization_of, with_entries
from beheld.compat.installed import with_installed
from beheld.core.config import EngineArgs
from beheld.core.errors import EngineDeadError, ParamsError
from beheld.core.outputs import RequestOutput
from beheld.core.params import SamplingParams


class ScriptAsyncLLM(AsyncLLM):
    """AsyncLLM, and AsyncLLMEngine, as scripts make and end it."""

    def __init__(self, model: str | None = None, **options: Any) -> None:
        super().__init__(model, **options | {"logits_processors": with_installed(options.get("logits_processors"))})

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, *_: Any, **__: Any) -> Self:
        """Build from EngineArgs; vLLM's further arguments (usage_context, stat_loggers) mean nothing here."""
        return cls(**engine_args.keywords())

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
            ParamsError: there is no engine of that number.
            UserError, EngineError: the request failed; raised by the first read or a later one.
        """
        most = max(1, len(self.engine_reports()))
        if data_parallel_rank is not None and not 0 <= data_parallel_rank < most:
            raise ParamsError(
                f"data_parallel_rank is {data_parallel_rank}, and there are {most} engines.",
                f"Say a number below {most}, or leave it out.",
                param="data_parallel_rank",
            )
        made = with_entries(prompt, tokenization_of(tokenization_kwargs))
        return super().generate(made, sampling_params, request_id, **options)

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """End a request or several; each generator yields a last output with the finish reason "abort"."""
        for name in [request_id] if isinstance(request_id, str) else list(request_id):
            await super().abort(name)

    async def check_health(self) -> None:
        """Ask the engine for a sign of life.

        Raises:
            EngineDeadError: it has ended.
        """
        if self.errored:
            raise EngineDeadError(self.reason, "Start it again.")
        await self.ping()

    @property
    def is_running(self) -> bool:
        """Whether the engine answers."""
        return self.alive

    @property
    def errored(self) -> bool:
        """Whether the engine has ended."""
        return not self.alive

    @property
    def output_processor(self) -> Any:
        """What scripts ask how many requests have not ended."""
        return SimpleNamespace(
            has_unfinished_requests=lambda: self.num_open > 0,
            get_num_unfinished_requests=lambda: self.num_open,
        )

    async def do_log_stats(self) -> None:
        """Nothing to do: /metrics has the figures."""

    async def is_tracing_enabled(self) -> bool:
        """No: requests are not traced."""
        return False

    async def reset_mm_cache(self) -> None:
        """As LLM.reset_mm_cache: nothing to do."""

    async def reset_prefix_cache(  # type: ignore[override]
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Clear the prefix cache. Running requests keep their blocks, which changes no answer."""
        super().reset_prefix_cache()
        return True

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine and free its memory."""
        self.close()
