"""LLM and LLMEngine as vLLM's scripts use them: what only those scripts ask for, over LLM."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from beheld.api.feed import Job
from beheld.api.llm import LLM
from beheld.api.prompt_jobs import tokenization_of, with_entries
from beheld.api.stepwise import StepwiseRun
from beheld.compat import metrics, parts
from beheld.compat.installed import with_installed
from beheld.core.config import EngineArgs
from beheld.core.errors import ConfigError, ParamsError
from beheld.core.outputs import RequestOutput
from beheld.core.params import SamplingParams
from beheld.core.pooling_params import PoolingParams
from beheld.core.profiling import ProfilerConfig
from beheld.core.request import LoRARequest
from beheld.core.sleep import EnginePart, PauseMode, level_of, mode_of
from beheld.inputs.pipeline import Chat
from beheld.utils import env


class ScriptLLM(LLM):
    """LLM with the methods of vLLM's class that only scripts use."""

    def __init__(self, model: str | None = None, **options: Any) -> None:
        super().__init__(model, **options | {"logits_processors": with_installed(options.get("logits_processors"))})
        self._queued: list[Callable[[], list[Any]]] = []
        self._engine: ScriptEngine | None = None
        self._reloading: str | None = None

    @property
    def llm_engine(self) -> ScriptEngine:  # type: ignore[override]
        """This model as an LLMEngine."""
        if self._engine is None:
            self._engine = ScriptEngine(self)
        return self._engine

    @property
    def model_config(self) -> Any:
        """What scripts read of the model: its name, its greatest length, its config.json, and how long a vector is."""
        from transformers import AutoConfig

        read = AutoConfig.from_pretrained(self._info.path, trust_remote_code=self._args.trust_remote_code)
        pooler = self._info.pooler
        return SimpleNamespace(
            model=self._args.model,
            hf_config=read,
            hf_text_config=read.get_text_config(),
            max_model_len=self._config.max_model_len,
            embedding_size=None if pooler is None or pooler.scores else pooler.width,
            get_vocab_size=lambda: self._info.vocab_size,
        )

    def generate(
        self,
        prompts: Any = None,
        sampling_params: Any = None,
        *older: Any,
        prompt_token_ids: Any = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """As LLM.generate, and in the forms of older scripts.

        Args:
            older: `prompt_token_ids`, `use_tqdm` and `lora_request` by position; the first may be left out.
            prompt_token_ids: the ids of one prompt or of several, in place of `prompts`.

        Raises:
            ParamsError: there are prompts and ids.
        """
        names = (
            ("use_tqdm",) if older and isinstance(older[0], bool) else ("prompt_token_ids", "use_tqdm", "lora_request")
        )
        if len(older) > len(names):
            raise TypeError(f"generate() takes at most {2 + len(names)} arguments by position.")
        given = dict(zip(names, older, strict=False))
        for name in given.keys() & options.keys():
            raise TypeError(f"generate() got {name!r} twice.")
        options |= given
        ids = options.pop("prompt_token_ids", None) if prompt_token_ids is None else prompt_token_ids
        if ids is not None:
            if prompts is not None:
                raise ParamsError(
                    "A call has prompts or prompt_token_ids.", "Leave one of them out.", param="prompt_token_ids"
                )
            prompts = ids
        if prompts is None:
            raise ParamsError("There are no prompts.", "Send texts or token ids.", param="prompts")
        return super().generate(prompts, sampling_params, **options)

    def get_metrics(self) -> list[metrics.Metric]:
        """The engine's counters under vLLM's names."""
        return metrics.of(self.stats(), str(self._args.model or "mote"))

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Begin to record with torch's profiler, in the engine's thread or processes.

        Raises:
            ParamsError: it has begun.
        """
        self._live().engine.profile(None)

    def stop_profile(self) -> None:
        """End the record and write it as a trace for Chrome and Perfetto.

        It goes into the folder that profiler_config or VLLM_TORCH_PROFILER_DIR names.

        Raises:
            ParamsError: nothing is recorded.
        """
        self._live().engine.profile(ProfilerConfig.of(self._args.profiler_config).torch_profiler_dir or env.PROFILES())

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """As LLM.sleep; requests that a script steps end, as `mode` says.

        Raises:
            ParamsError: such requests are left that another mode than "abort" would keep; there is no such level.
            ConfigError: ranks share the model. No request ends for that.
        """
        if self._engine is not None:
            self._engine.end_requests(level_of(level), mode)
        super().sleep(level, mode)

    def enqueue(self, prompts: Any, sampling_params: Any = None, use_tqdm: Any = True, **options: Any) -> None:
        """Keep prompts for `wait_for_completion`; arguments as for `generate`."""
        self._queued.append(partial(self.generate, prompts, sampling_params, use_tqdm=False, **options))

    def enqueue_chat(self, messages: Any, sampling_params: Any = None, use_tqdm: Any = True, **options: Any) -> None:
        """Keep conversations for `wait_for_completion`; arguments as for `chat`."""
        self._queued.append(partial(self.chat, messages, sampling_params, use_tqdm=False, **options))

    def wait_for_completion(self, output_type: Any = None, *, use_tqdm: Any = True) -> list[Any]:
        """Answer what was enqueued; returns the outputs in order."""
        queued, self._queued = self._queued, []
        return [output for answer in queued for output in answer()]

    def preprocess_chat(
        self,
        messages: Any,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: Any = None,
    ) -> list[Chat]:
        """Prompts of one conversation or of several, for `generate`, which answers them as `chat` does.

        Raises:
            ParamsError: `tokenization_kwargs` has other options than `add_special_tokens`.
        """
        further = tokenization_of(tokenization_kwargs)
        several = bool(messages) and not isinstance(messages[0], Mapping)
        return [
            Chat(
                each,
                chat_template=chat_template or self._args.chat_template,
                content_format=chat_template_content_format,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                template_kwargs=chat_template_kwargs,
                mm_processor_kwargs=mm_processor_kwargs,
                **further,
            )
            for each in (messages if several else [messages])
        ]

    def reset_mm_cache(self) -> None:
        """Nothing to do: media are known by their content, so no entry of the cache is ever out of date."""

    def get_world_size(self, include_dp: bool = True) -> int:
        """How many devices the model's engines use."""
        size = self._config.tensor_parallel_size * self._args.pipeline_parallel_size
        return size * (self._args.data_parallel_size if include_dp else 1)

    @property
    def parallel_config(self) -> Any:
        """Which of how many engines this is: where torchrun's processes have one each, a script shares out prompts."""
        import torch.distributed as dist

        asked = self._args.num_ranks
        number = dist.get_rank() // asked if dist.is_initialized() else 0
        return SimpleNamespace(
            data_parallel_rank=number % self._args.data_parallel_size,
            data_parallel_size=self._args.data_parallel_size,
            tensor_parallel_size=self._args.tensor_parallel_size,
            pipeline_parallel_size=self._args.pipeline_parallel_size,
        )

    def collective_rpc(
        self, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None
    ) -> list[Any]:
        """Read other weights, as vLLM's scripts ask for it; other calls are refused.

        `update_config` with {"load_config": {"load_format": ...}} says how, and `reload_weights` makes the engine anew:
        its caches are empty, and its adapters are read again.

        Raises:
            ConfigError: another method, or another option.
        """
        if method == "update_config":
            self._reloading = _load_format(*args, **(kwargs or {}))
            return [None]
        if method == "reload_weights" and not args and not kwargs:
            lacks = self._live().engine.lacks
            if self._reloading is None and EnginePart.KV_CACHE in lacks and EnginePart.WEIGHTS not in lacks:
                # `wake_up` has just read them.
                return [None]
            options = self._args.keywords()
            self.close()
            self._engine = None
            LLM.__init__(self, **(options | {"load_format": self._reloading or self._args.load_format}))
            return [None]
        raise ConfigError(
            f"collective_rpc({method!r}) is not available here: scripts do not reach into the engine's processes.",
            "Make a new LLM to read other weights.",
        )

    def apply_model(self, func: Any) -> Any:
        """Refused as `collective_rpc`."""
        return self.collective_rpc(f"apply_model: {getattr(func, '__name__', func)}")


_SAME_WEIGHTS = "Weights do not change while an engine runs; make a new LLM, or read others with collective_rpc."
REFUSED = {
    **dict.fromkeys(
        (
            *("finish_weight_update", "get_weight_version", "init_weight_transfer_engine", "start_weight_update"),
            *("shutdown_weight_transfer_engine", "start_draft_weight_update", "update_weight_version"),
            "update_weights",
        ),
        _SAME_WEIGHTS,
    ),
    "release_kv_cache_memory": "sleep(1) gives back the cache of keys and values, and wake_up takes it again.",
}
"""Methods of vLLM's LLM that are not built: what there is instead."""


def _refusing(name: str, remedy: str) -> Callable[..., Any]:
    def refuse(self: ScriptLLM, *_: Any, **__: Any) -> Any:
        raise ConfigError(f"LLM.{name} is not available here.", remedy, param=name)

    refuse.__name__ = name
    refuse.__doc__ = f"Refused: {remedy}"
    return refuse


for _name, _remedy in REFUSED.items():
    setattr(ScriptLLM, _name, _refusing(_name, _remedy))


class ScriptEngine:
    """vLLM's LLMEngine: requests are added one by one, and the script steps the engine.

    Args:
        llm: the model; meanwhile nothing else asks it.
    """

    def __init__(self, llm: ScriptLLM) -> None:
        self._llm = llm
        live = llm._live()
        self._run = StepwiseRun(live.engine, live.config)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, *_: Any, **__: Any) -> ScriptEngine:
        """An engine with these options; vLLM's further arguments (usage_context, stat_loggers) mean nothing here."""
        return ScriptLLM(**engine_args.keywords()).llm_engine

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Any = None,
        trace_headers: Any = None,
        priority: int = 0,
        session_id: str | None = None,
        prompt_text: str | None = None,
        kv_hints: Any = None,
    ) -> str:
        """Queue a request; forms of the prompt and `tokenization_kwargs` as for `generate`.

        The arguments that say when it came, whose session it is of and what others could keep of it change no answer.

        Raises:
            UserError, EngineError: it cannot run.
        """
        prompt = with_entries(prompt, tokenization_of(tokenization_kwargs))
        job = self._llm._jobs.job(prompt, params, lora_request, priority)
        self._run.submit(Job(str(request_id), params, partial(_named, job, str(request_id)), job.tokenizer, job.light))
        return str(request_id)

    def step(self) -> list[RequestOutput]:
        """Compute a step; returns the outputs that it changed."""
        return self._run.advance()

    def has_unfinished_requests(self) -> bool:
        """Whether a request has not ended."""
        return self._run.unfinished > 0

    def get_num_unfinished_requests(self) -> int:
        """How many requests have not ended."""
        return self._run.unfinished

    def end_requests(self, level: int, mode: str) -> None:
        """End all requests before the engine sleeps; no outputs follow.

        Raises:
            ParamsError: there are some, and the mode is another than "abort".
            ConfigError: the engine cannot sleep at this level.
        """
        self._run.core.check_sleeps(level)
        if self._run.unfinished and mode_of(mode) is not PauseMode.ABORT:
            raise ParamsError(
                f"mode={mode!r} needs an engine that runs by itself.",
                "Call step until has_unfinished_requests is False.",
                param="mode",
            )
        self._run.cancel_all()

    def abort_request(self, request_ids: str | Iterable[str], internal: bool = False) -> None:
        """End requests; no outputs follow."""
        for name in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            self._run.cancel(name)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Clear the prefix cache. Running requests keep their blocks, which changes no answer."""
        return self._llm.reset_prefix_cache()

    @property
    def vllm_config(self) -> Any:
        """The configuration as far as scripts read it: `model_config` with `model` and `hf_config`, which of
        torchrun's engines this is, and whether prefixes are cached."""
        config = self._llm._config
        caches = SimpleNamespace(enable_prefix_caching=config.prefix_caching, block_size=config.block_size)
        return SimpleNamespace(
            model_config=self.model_config, parallel_config=self._llm.parallel_config, cache_config=caches
        )

    @property
    def model_config(self) -> Any:
        """As ScriptLLM.model_config."""
        return self._llm.model_config

    @property
    def engine_core(self) -> ScriptCore:
        """What scripts ask of the engine's core."""
        return ScriptCore(self._llm)

    def __getattr__(self, name: str) -> Any:
        """What LLM has as well: adapters, tokenizer, metrics."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._llm, name)


class ScriptCore:
    """vLLM's engine core as scripts use it."""

    def __init__(self, llm: ScriptLLM) -> None:
        self._llm = llm

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """Write the checkpoint's weights into `path` in parts, which load_format="sharded_state" reads; see parts.save.

        Raises:
            ModelError, ConfigError: there are no safetensors, or the pattern names no part.
        """
        parts.save(Path(self._llm._info.path), Path(path), pattern, max_size)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise ConfigError(
            f"llm_engine.engine_core.{name} is not available here: scripts do not reach into the engine's processes.",
            "Make a new LLM to read other weights.",
        )


def _load_format(overrides: Any = None) -> str:
    """The one option that may change while a script runs.

    Raises:
        ConfigError: others are asked for.
    """
    match overrides:
        case {"load_config": {"load_format": str() as found, **rest}, **others} if not rest and not others:
            return found
    raise ConfigError(
        f"update_config({overrides!r}) is not available here.",
        'Only {"load_config": {"load_format": ...}} may change; make a new LLM for the rest.',
    )


def _named(job: Job, request_id: str) -> list[Any]:
    """The requests of a job under the script's own id."""
    return [replace(one, id=one.id.replace(job.id, request_id, 1)) for one in job.requests()]
