"""LLM, the entry point for scripts, with the names and meaning of vLLM's class."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from beheld.api import iterables, scoring
from beheld.api.beam import beam_search
from beheld.api.feed import Job, Jobs
from beheld.api.long_texts import DividedPrompts
from beheld.api.offline_engine import OfflineEngine, OwnEngine, RemoteEngines
from beheld.api.per_prompt import check_lengths, lengths_of
from beheld.api.prompt_jobs import PromptJobs, has_budget, is_ids, tokenization_of
from beheld.api.run import OfflineRun
from beheld.api.start import start_both, start_processes
from beheld.core.beams import BeamSearchOutput, BeamSearchParams, checked
from beheld.core.config import EngineArgs
from beheld.core.errors import EngineDeadError, ParamsError
from beheld.core.media import MediaReceipt, MediaRef
from beheld.core.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from beheld.core.params import SamplingParams
from beheld.core.pooling_params import PAIR_BOUNDS, PoolingParams, pooling_task
from beheld.core.request import LoRARequest
from beheld.core.sleep import level_of, mode_of, parts_of
from beheld.core.structured_outputs import ReasoningFormat
from beheld.engine.ranks import LAUNCHED
from beheld.engine.stats import EngineStats
from beheld.inputs.pipeline import Chat, PromptType
from beheld.inputs.prompt.template import text_of
from beheld.inputs.sampling import option_checks
from beheld.platform.room import check_room
from beheld.text.reasoning import FORMATS, format_of, reasoning_of
from beheld.utils.gc_tuning import seldom_collected
from beheld.utils.log import get_logger

logger = get_logger(__name__)

Messages = list[dict[str, Any]]

OF_SCRIPTS = frozenset(
    (
        *("apply_model", "collective_rpc", "enqueue", "enqueue_chat", "get_metrics", "get_world_size"),
        *("model_config", "parallel_config", "preprocess_chat", "reset_mm_cache", "start_profile", "stop_profile"),
        "wait_for_completion",
    )
)
"""What of vLLM's LLM only scripts use; the class in compat/llm.py has it."""
_ELSEWHERE = "The LLM that scripts import from vllm has it: `import beheld.compat.vllm`, then `from vllm import LLM`."


class LLM:
    """A model for offline use. Without a model name it uses the small embedded one.

    Args:
        model: a folder, a hub name, or None.
        **options: every field of EngineArgs.

    Raises:
        ConfigError: an option is unknown or not available; the message names the nearest known one.
        ModelError, CapacityError: the model cannot run here.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self._args = EngineArgs.from_keywords({"model": model, **options})
        # Before loading the weights, so that a misspelt option does not cost minutes.
        check_room(self._args)
        option_checks.check(self._args)
        if self._args.served_model_name is not None:
            logger.info("served_model_name has no effect without a server.")
        engine: OfflineEngine
        # Of torchrun's processes, each has one of the engines, and the script shares out the prompts.
        if self._args.data_parallel_size > 1 and self._args.distributed_executor_backend != LAUNCHED:
            remote = start_processes(self._args)
            engine = RemoteEngines(remote.engine, self._args.data_parallel_size)
            self._inputs, self._info, self._config = remote.inputs, remote.info, remote.config
        else:
            setup, self._inputs = start_both(self._args)
            engine = OwnEngine(setup.core)
            self._info, self._config = setup.info, setup.config
        self._run: OfflineRun | None = OfflineRun(engine, self._config)
        pools_texts = self._info.pooler is not None and not self._info.modalities
        self._jobs = PromptJobs(
            self._inputs, self._config.seed, pools_texts=pools_texts, engine=lambda: self._live().engine
        )

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        """A model with these options."""
        return cls(**engine_args.keywords())

    # ------------------------------------------------------------------ asking

    def generate(
        self,
        prompts: PromptType | Iterable[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        on_error: str = "raise",
        grounding: bool = False,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one prompt or many.

        Args:
            prompts: a string, a dict with "prompt" or "prompt_token_ids" and "multi_modal_data", or a list of these.
                Any other iterable is read while its first prompts are answered, as by `generate_iter`.
            sampling_params: one for all, or one per prompt; None takes the model's defaults.
            use_tqdm: show progress bars on standard error.
            lora_request: one for all, or one per prompt.
            priority: one for all, or one number per prompt; smaller runs sooner (scheduling_policy="priority").
            on_error: "raise" stops at the first bad prompt; "return" gives it an output with `error` set and finishes
                the others.
            grounding: give what the answers locate in images, in the images' pixels: see CompletionOutput.grounding.
            mm_processor_kwargs: processor options of all prompts; a prompt's own go first.
            tokenization_kwargs: {"add_special_tokens": False} leaves the tokenizer's special tokens out of texts.

        Returns:
            One output per prompt, in order.
        """
        items: Iterable[Any] = [prompts] if _is_one(prompts) else iterables.many(prompts)
        common = tokenization_of(tokenization_kwargs)
        if mm_processor_kwargs is not None:
            common["mm_processor_kwargs"] = mm_processor_kwargs
        jobs = self._jobs.jobs(items, sampling_params, lora_request, priority, common=common, grounding=grounding)
        return self._all(jobs, use_tqdm, on_error)

    def generate_iter(
        self,
        prompts: Iterable[PromptType],
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        on_error: str = "return",
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Answer prompts from any iterable, which is read only as fast as needed.

        The thread that asks for the next output reads a list or another sequence. Other iterables may be slow, so a
        separate thread reads them, in the caller's context (contextvars): available prompts are answered while the next
        is produced. Objects that only their own thread may use, such as a cursor of sqlite3, must be created inside of
        the generator.

        Closing the returned iterator ends the reading; the thread that reads a generator closes it. If the generator
        takes longer than a second for its current prompt, it is closed after that prompt.

        Args:
            prompts: entries as in a list for `generate`. An error of the iterable is raised here, with an explaining
                note, after the outputs of all earlier prompts and for any `on_error`.
            lora_request: one for all.
            on_error: as for `generate`.

        Yields:
            (index of the prompt, its output) as each one finishes.
        """
        items = iterables.many(prompts)
        jobs = self._jobs.jobs(items, sampling_params, _common_lora(lora_request), None)
        return self._live().results(jobs, on_error)

    def chat(
        self,
        messages: Messages | Iterable[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        on_error: str = "raise",
        grounding: bool = False,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, given as OpenAI messages; content may hold media.

        An iterable that is not a sequence is read while its first conversations are answered, as by `generate_iter`.
        With `grounding`, each answer has what it locates in the image, in the image's pixels. `priority` as for
        `generate`. `tokenization_kwargs={"add_special_tokens": True}` adds the tokenizer's special tokens to those
        that the template writes.
        """
        many = iterables.conversations(iterables.many(messages))
        options: dict[str, Any] = {
            "chat_template": chat_template or self._args.chat_template,
            "content_format": chat_template_content_format,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "template_kwargs": chat_template_kwargs,
            "mm_processor_kwargs": mm_processor_kwargs,
            **tokenization_of(tokenization_kwargs),
        }
        given = sampling_params if isinstance(sampling_params, list | tuple) else (sampling_params,)
        if any(has_budget(one) for one in given):
            options["reasoning"] = self._reasoning(options["chat_template"], tools)
        jobs = self._jobs.jobs(many, sampling_params, lora_request, priority, options, grounding=grounding)
        return self._all(jobs, use_tqdm, on_error)

    def _reasoning(self, template: str | None, tools: Any) -> ReasoningFormat | None:
        """How the model delimits its reasoning, by the family and the template; None if nobody knows."""
        shown = self._inputs.reader.template(tools) if template is None else text_of(template)
        named = reasoning_of(shown, self._info.reasoning_formats)
        return None if named is None else format_of(FORMATS[named])

    def chat_stream(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        grounding: bool = False,
        **options: Any,
    ) -> Iterator[RequestOutput]:
        """Answer one conversation piece by piece: each output holds only the new part.

        Args:
            grounding: as for `chat`; the last output has it.
            options: keywords of `chat` for the template and the processor.
        """
        jobs = self._jobs.jobs(
            [messages], sampling_params, _common_lora(lora_request), None, options, grounding=grounding
        )
        (job,) = jobs.each
        assert isinstance(job, Job), "a conversation in a run"
        return self._live().stream(job)

    def beam_search(
        self,
        prompts: Sequence[Any],
        params: BeamSearchParams,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt, by beam search; see core/beams.py for what the scores are.

        Args:
            prompts: as in a list for `generate`.
            use_tqdm: accepted; there is no bar.
            concurrency_limit: the most prompts that are searched at the same time; None for all.

        Returns:
            One output per prompt, in order, with up to `beam_width` sequences.
        """
        return beam_search(
            self,
            prompts,
            checked(params),
            lora_request,
            concurrency_limit,
            sorted(self._inputs.compiler.eos_ids),
            self._config,
        )

    # ------------------------------------------------------------------ pooling

    def encode(
        self,
        prompts: PromptType | Iterable[PromptType],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        pooling_task: str | None = None,
        truncate_prompt_tokens: int | None = None,
        priority: int | Sequence[int] | None = None,
        on_error: str = "raise",
    ) -> list[PoolingRequestOutput]:
        """Pool one prompt or many; the model is started with runner="pooling".

        Args:
            prompts: as for `generate`.
            pooling_params: one for all, or one per prompt; None takes the model's defaults.
            pooling_task: "embed" (a vector), "token_embed" (a vector for each position), "classify" (scores) or
                "token_classify" (scores at each position); None takes the model's own.
            truncate_prompt_tokens: keep this many tokens of a longer text, from its start; -1 means as many as fit.
            on_error: as for `generate`.

        Returns:
            One output per prompt, in order; `outputs.data` is a tensor.
        """
        return self._pooled(
            PoolingRequestOutput,
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task=pooling_task,
            truncate_prompt_tokens=truncate_prompt_tokens,
            priority=priority,
            on_error=on_error,
        )

    def _pooled(
        self,
        kind: Any,
        prompts: PromptType | Iterable[PromptType],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None,
        *,
        use_tqdm: bool | Callable[..., Any],
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
        pooling_task: str | None,
        truncate_prompt_tokens: int | None = None,
        priority: int | Sequence[int] | None = None,
        on_error: str = "raise",
    ) -> list[Any]:
        """As `encode`; outputs are of this kind."""
        items: Iterable[Any] = [prompts] if _is_one(prompts) else iterables.many(prompts)
        params = _pooling(pooling_params, pooling_task, truncate_prompt_tokens)
        outputs = self._encoded(items, params, lora_request, priority, use_tqdm, on_error, kind)
        # Those of runs are of the kind already.
        return [output if type(output) is kind else kind.of(output) for output in outputs]

    def _encoded(
        self,
        items: Iterable[Any],
        params: PoolingParams | Sequence[PoolingParams],
        lora: LoRARequest | Sequence[LoRARequest | None] | None,
        priority: int | Sequence[int] | None,
        use_tqdm: bool | Callable[..., Any],
        on_error: str,
        kind: Any = PoolingRequestOutput,
    ) -> list[Any]:
        """Pool prompts, long texts in parts if the model does; outputs of runs are of this kind."""
        info = self._info.pooler
        if info is None or info.longest is None:
            return self._all(self._jobs.jobs(items, params, lora, priority, kind=kind), use_tqdm, on_error)
        prompts, most = list(items), self._config.max_model_len
        check_lengths(lengths_of(sampling_params=params, lora_request=lora, priority=priority), len(prompts))
        divided = DividedPrompts(
            prompts, params, info, most, self._inputs.ids_of_long, keep_errors=on_error != "raise"
        )  # fmt: skip
        jobs = self._jobs.jobs(divided.parts, divided.params, divided.spread(lora), divided.spread(priority))
        return divided.joined(self._all(jobs, use_tqdm, on_error), self._jobs.next_id)

    def embed(
        self,
        prompts: PromptType | Iterable[PromptType],
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **options: Any,
    ) -> list[EmbeddingRequestOutput]:
        """The vectors of prompts, as `outputs.embedding`; `options` are keywords of `encode`."""
        return self._pooled(
            EmbeddingRequestOutput,
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task="embed",
            **options,
        )

    def classify(
        self,
        prompts: PromptType | Iterable[PromptType],
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **options: Any,
    ) -> list[ClassificationRequestOutput]:
        """The scores of the classes, as `outputs.probs`; `options` are keywords of `encode`."""
        return self._pooled(
            ClassificationRequestOutput,
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task="classify",
            **options,
        )

    def reward(
        self,
        prompts: PromptType | Iterable[PromptType],
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **options: Any,
    ) -> list[PoolingRequestOutput]:
        """The scores at each position, as `outputs.data`; `options` are keywords of `encode`."""
        return self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task="token_classify",
            **options,
        )

    def score(
        self,
        data_1: Any,
        data_2: Any,
        /,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
        chat_template: str | None = None,
        truncate_prompt_tokens: int | None = None,
        on_error: str = "raise",
    ) -> list[ScoringRequestOutput]:
        """How well the texts of pairs go together: one with one, one with many, or many with as many.

        A model with one class reads both at once; of a model of vectors, the score is the cosine of both vectors, and
        of a model with a vector for each token their late interaction (MaxSim).

        Args:
            data_1: one side of the pairs: texts, or {"content": [parts of a chat message]} with images.
            data_2: the other side, in the same forms.
            chat_template: makes the prompt of a pair, for a model that reads both at once; its messages have the roles
                "query" and "document". None takes the engine's, and without one the texts are joined.

        Returns:
            One output per pair, in order; `outputs.score` is a number.
        """
        pooler = self._info.pooler
        if pooler is None:
            # The error is the same as for any other pooling.
            self.encode("", pooling_params, use_tqdm=False)
            raise AssertionError("a generating model pools")
        first, second = scoring.pairs(data_1, data_2)
        if pooling_params is not None and pooling_params.extra_kwargs:
            most = [pooling_params.extra_kwargs.get(name) for name in PAIR_BOUNDS]
            first, second = (
                scoring.cut(name, side, bound, self._inputs.reader.cut)
                for name, side, bound in zip(PAIR_BOUNDS, (first, second), most, strict=True)
            )
            pooling_params = replace(pooling_params, extra_kwargs=None)
        template = chat_template or self._args.chat_template or pooler.pair_template or None
        scores = scoring.PairScores(first, second, pooler, template)
        params = _pooling(pooling_params, scores.task, truncate_prompt_tokens)
        return scores.of(self._encoded(scores.prompts, params, lora_request, None, use_tqdm, on_error))

    # ------------------------------------------------------------------ asking about the engine

    def plan(self, media: Sequence[MediaRef]) -> list[MediaReceipt]:
        """What the model would see of these media, and how many tokens each would take."""
        return self._inputs.receipts(list(media))

    def get_tokenizer(self) -> Any:
        """The checkpoint's tokenizer. Prompts use a copy from now on, so changes to it have no effect on them."""
        return self._inputs.share_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters that the model's generation_config.json recommends."""
        return self._inputs.default_params()

    def stats(self) -> EngineStats:
        """Counters since the start."""
        return self._live().engine.stats()

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache."""
        self._live().engine.clear_prefix_cache()
        return True

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back until `wake_up`; answers after it are those that it would have given before.

        Cached prefixes and embeddings are lost, and computed again when they are needed.

        Args:
            level: 0 only pauses. 1 gives back the cache of keys and values, and what a step takes; weights stay in the
                host's memory. 2 gives back the weights as well, which are read again from their files. On a GPU, 1 does
                so too.
            mode: what becomes of requests that have not ended, of which `generate` and `chat` leave none.

        Raises:
            EngineError: an iterator of answers is not at its end.
            ConfigError: ranks share the model.
        """
        mode_of(mode)
        self._live().sleep(level_of(level))

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Take the memory again that `sleep` gave back.

        Args:
            tags: what to bring back, of "weights", "kv_cache" and "scheduling"; None for all. Answers need all of it.

        Raises:
            ModelError, CapacityError: there is not enough memory, or no checkpoint any more; it sleeps on.
        """
        self._live().engine.wake_up(parts_of(tags))

    def is_sleeping(self) -> bool:
        """True if it must wake up before it answers."""
        return bool(self._live().engine.lacks)

    @property
    def llm_engine(self) -> LLM:
        """The handle that scripts use to add adapters."""
        return self

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read an adapter now, so that its first request need not wait; True once it is in memory.

        Raises:
            LoRAError: the adapter cannot be used; the message says why and what to do.
        """
        self._live().engine.add_lora(lora_request)
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Remove an adapter by its number; sequences that use it finish. False if it is not in memory."""
        return self._live().engine.remove_lora(lora_id)

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in memory until it is removed; False if it is not in memory."""
        return self._live().engine.pin_lora(lora_id)

    def list_loras(self) -> set[int]:
        """The numbers of the adapters in memory."""
        return self._live().engine.loras()

    def close(self) -> None:
        """Free the model's memory; the object cannot be used afterwards."""
        if self._run is not None:
            self._run.engine.close()
            self._run = None
            self._inputs.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ how

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            where = f" {_ELSEWHERE}" if name in OF_SCRIPTS else ""
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}.{where}", name=name, obj=self
            )

    def _live(self) -> OfflineRun:
        if self._run is None:
            raise EngineDeadError("This LLM is closed.", "Make a new one.")
        return self._run

    def _all(self, jobs: Jobs, use_tqdm: bool | Callable[..., Any], on_error: str) -> list[Any]:
        outputs = dict(seldom_collected(self._live().results(jobs, on_error, progress=use_tqdm)))
        return [outputs[index] for index in range(len(outputs))]


def _pooling(
    given: PoolingParams | Sequence[PoolingParams] | None, task: str | None, keep: int | None
) -> PoolingParams | list[PoolingParams]:
    """Pooling parameters with the task and the truncation of a call.

    Raises:
        ParamsError: they name another task, or are something else.
    """
    if isinstance(given, list | tuple):
        return [_pooling_of(one, task, keep) for one in given]
    return _pooling_of(PoolingParams() if given is None else given, task, keep)


def _pooling_of(given: Any, task: str | None, keep: int | None) -> PoolingParams:
    if not isinstance(given, PoolingParams):
        raise ParamsError(
            f"pooling_params must be PoolingParams, not {type(given).__name__}.",
            "Write PoolingParams(dimensions=256, ...).",
            param="pooling_params",
        )
    made = given.clone()
    wanted = None if task is None else pooling_task(task)
    if wanted is not None and made.task not in (None, wanted):
        raise ParamsError(
            f"pooling_params are for the task {made.task!r}, and the call is for {wanted!r}.",
            "Leave out the task.",
            param="task",
        )
    made.task = wanted or made.task
    made.truncate_prompt_tokens = keep if keep is not None else made.truncate_prompt_tokens
    made.verify()
    return made


def _is_one(prompts: Any) -> bool:
    """True for a single prompt: a string, a dict, a conversation, or a list of token ids."""
    return isinstance(prompts, str | dict | Chat) or is_ids(prompts)


def _common_lora(lora: LoRARequest | None) -> LoRARequest | None:
    """The adapter of all prompts. If their number is unknown, a list is refused."""
    if isinstance(lora, list | tuple):
        raise ParamsError(
            f"lora_request must be one LoRARequest here, not a {type(lora).__name__}.",
            "`generate` and `chat` take a list of them, one for each prompt.",
            param="lora_request",
        )
    return lora
