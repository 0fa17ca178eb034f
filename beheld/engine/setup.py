"""From the user's options to a running engine: makes and logs every decision."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from beheld.checkpoint.adapters import built_in
from beheld.checkpoint.identity import identity
from beheld.checkpoint.info import read_config, read_info
from beheld.checkpoint.resolve import fetch_weights, layouts, resolve
from beheld.checkpoint.validate import validate
from beheld.core.config import (
    AT_LOAD_AS,
    KEPT_BITS,
    QUANTIZED_AT_LOAD,
    QUANTIZED_CHECKPOINTS,
    EngineArgs,
    EngineConfig,
    MediaWork,
    ModelInfo,
)
from beheld.core.engine_numbers import check_numbers
from beheld.core.errors import ConfigError
from beheld.core.kv_transfer import OPTION as KV_TRANSFER
from beheld.core.kv_transfer import KVTransferConfig
from beheld.core.logits_processors import FromPackage, of_pooling
from beheld.core.media import CHUNKS, MODALITIES
from beheld.core.pooling import PoolerConfig, runner_and_convert
from beheld.core.profiling import ProfilerConfig
from beheld.core.sampling import LogprobsMode
from beheld.core.value_checks import nearest
from beheld.engine.core import EngineCore
from beheld.engine.ranks import LAUNCHED, check_ranks, ranks_of, with_fitting_ranks
from beheld.executor.executor import Executor
from beheld.kvstore.folder import BlockFolder
from beheld.kvstore.store import FileStore
from beheld.quant.availability import AT_LOAD_METHODS, check_at_load
from beheld.utils import env
from beheld.utils.gc_tuning import paused_collector
from beheld.utils.log import get_logger, headline
from beheld.utils.version import VERSION

if TYPE_CHECKING:
    from beheld.platform.platform import Platform

logger = get_logger(__name__)

_DTYPES = ("float32", "bfloat16", "float16")
_DTYPE_WORDS = {"float": "float32", "half": "float16", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Words for keys and values in FP8; other engines mean the same type by both.
_FLOAT8 = ("fp8", "fp8_e4m3")
_MANY = 999
# With fewer weights than this, a model computes an ordinary step of pooled prompts sooner than the host launches it.
_SMALL_TO_POOL = 1 << 29
_PREPARE_THREADS = 6

# Option -> the values that this version supports.
_NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "quantization": (None, *sorted({*QUANTIZED_CHECKPOINTS, *QUANTIZED_AT_LOAD})),
    "cpu_offload_gb": (None, 0),
    "kv_cache_dtype": ("auto", *_DTYPES, "int8", *_FLOAT8),
    "config_format": ("auto", "hf", *layouts()),
    "distributed_executor_backend": (None, "mp", "uni", "ray", LAUNCHED),
    "data_parallel_backend": ("mp", "ray"),
    "mm_encoder_tp_mode": ("weights", "data"),
    "scheduling_policy": ("fcfs", "priority"),
    "logprobs_mode": tuple(mode.value for mode in LogprobsMode),
    "load_format": ("auto", "hf", "safetensors", "sharded_state", "dummy", *layouts()),
    "tokenizer_mode": ("auto", "slow", "hf", *layouts()),
}
_LORA_OPTIONS = ("max_loras", "max_lora_rank", "max_cpu_loras")
_NO_MEANING = {
    "swap_space": None,
    "disable_custom_all_reduce": False,
    "disable_log_stats": False,
}


@dataclass
class Setup:
    """Everything that a front end needs: the options, the model's facts, the decisions and the engine."""

    args: EngineArgs
    info: ModelInfo
    config: EngineConfig
    core: EngineCore


@dataclass(frozen=True)
class Decided:
    """The decisions before the weights are loaded; `config.max_model_len` may still shrink to fit."""

    info: ModelInfo
    config: EngineConfig
    hf_config: Any


def start(args: EngineArgs, decided: Decided | None = None) -> Setup:
    """Decide (unless `decided` is given), load the model and make the engine.

    Raises:
        ConfigError, ModelError, CapacityError: the message says what to do.
    """
    with paused_collector():
        return _start(args, decided or resolve_and_decide(args))


def resolve_and_decide(args: EngineArgs) -> Decided:
    """Find the model, read its configuration and decide.

    Raises:
        ConfigError, ModelError: the message says what to do.
    """
    check(args)
    hf_config, info = _read(args)
    config = decide(args, info)
    tasks = ("generate",) if info.pooler is None else info.pooler.tasks
    logger.info("This model supports the tasks: {%s}. Defaulting to %r.", ", ".join(map(repr, tasks)), tasks[0])
    logger.info("Initializing an engine with config: model=%r, %s", info.name, _summary(config))
    headline(f"beheld {VERSION}: {info.name} on {config.device}, {config.dtype}, {config.max_model_len} tokens")
    return Decided(info, config, hf_config)


def _read(args: EngineArgs) -> tuple[Any, ModelInfo]:
    """The configuration of the model, whose files are validated first."""
    path = resolve(args)
    validate(path, args)
    hf_config = read_config(path, args)
    return hf_config, read_info(path, args, hf_config)


def _start(args: EngineArgs, decided: Decided) -> Setup:
    info = decided.info
    # Only after all options were checked: the weights may be many gigabytes.
    fetch_weights(args, Path(info.path))
    begin = time.perf_counter()
    config = with_fitting_ranks(args, info, decided.config)
    kind = executor_of(config)
    check_ranks(args, info, config, decided.hf_config, kind)
    _check_store(info, config)
    executor = kind.start(decided.hf_config, info, config, shrink=args.max_model_len is None)
    core = EngineCore(info, executor, _store(decided.hf_config, info, executor))
    logger.info("init engine (load weights, create kv cache, self-test) took %.2f seconds", time.perf_counter() - begin)
    return Setup(args, info, executor.config, core)


def _check_store(info: ModelInfo, config: EngineConfig) -> None:
    """Check that the prompts of a model can be kept in a folder.

    Raises:
        ConfigError: they cannot.
    """
    if config.kv_transfer is None:
        return
    partly = not all(group.keeps_all for group in info.kv_groups)
    reasons = {
        f"{info.architecture} has layers that do not keep something of each position": partly,
        "a model that pools has no answers": info.pooler is not None,
        f"{config.num_ranks} ranks share the model": config.num_ranks > 1,
        "prefix caching is off": not config.prefix_caching,
        "load_format='dummy' makes weights of no checkpoint": config.load_format == "dummy",
        "this model keeps no keys and values": not info.kv_groups,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError(
                f"{KV_TRANSFER} is not available here: {reason}.",
                f"Leave {KV_TRANSFER} out; the engine's own prefix cache needs no option.",
                param=KV_TRANSFER,
            )


def _store(hf_config: Any, info: ModelInfo, executor: Executor) -> FileStore | None:
    """The folder for keys and values of prompts, if one is named."""
    config = executor.config
    if config.kv_transfer is None:
        return None
    from beheld.executor.local import LocalExecutor

    assert isinstance(executor, LocalExecutor), "ranks keep nothing in folders"
    block_bytes, layout = executor.runner.block_bytes.block_bytes, executor.runner.block_bytes.layout

    def kind() -> str:
        decisions = (VERSION, version("transformers"), config.dtype, config.kv_dtype, config.quantization)
        said = (*decisions, config.device, config.exact_weights, config.block_size, layout, identity(info, hf_config))
        return blake3(repr(said).encode()).hexdigest()[:32]

    given = config.kv_transfer
    folder = BlockFolder(given.folder, kind(), block_bytes, given.max_bytes)
    words = [word for word, holds in (("kept", given.is_kv_producer), ("taken", given.is_kv_consumer)) if holds]
    logger.info("Keys and values of prompts are %s in %s.", " and ".join(words), folder.root)
    if idle := given.without_effect():
        logger.info("Entries of %s that change nothing here: %s.", KV_TRANSFER, ", ".join(idle))
    if given.kv_connector_module_path is None:
        return FileStore(folder, given, kind)
    from beheld.kvstore.connector import AskingStore

    return AskingStore(folder, given, kind, block_size=config.block_size)


def executor_of(config: EngineConfig) -> type[Executor]:
    """The executor class for this configuration: of this process alone, or of several ranks."""
    if config.num_ranks > 1:
        if config.over_hosts:
            from beheld.executor.ray import RayExecutor

            return RayExecutor
        from beheld.executor.multi import MultiExecutor

        return MultiExecutor
    from beheld.executor.local import LocalExecutor

    return LocalExecutor


def preload() -> None:
    """Import an engine's libraries before the model is known."""
    import_module("beheld.executor.local")


def check(args: EngineArgs) -> None:
    """Refuse options that are not available and log accepted ones that have no effect.

    Raises:
        ConfigError: this version does not support an option's value.
    """
    for name, allowed in _NOT_BUILT.items():
        value = getattr(args, name)
        if value not in allowed:
            known = ", ".join(repr(v) for v in allowed)
            raise ConfigError(f"{name}={value!r} is not available in this version.", f"Available: {known}.", param=name)
    if args.allowed_local_media_path and not Path(args.allowed_local_media_path).is_dir():
        raise ConfigError(
            f"allowed_local_media_path={args.allowed_local_media_path!r} is not a folder.",
            "Give the folder whose files chat messages may use.",
            param="allowed_local_media_path",
        )
    for name, default in _NO_MEANING.items():
        if getattr(args, name) != default:
            logger.info("%s has no effect here.", name)
    check_numbers(args)
    runner_and_convert(args.task, args.runner, args.convert)
    _one_pooler_config(args)
    _check_profiles(args)
    KVTransferConfig.of(args.kv_transfer_config)
    for name in ("limit_mm_per_prompt", "mm_processor_kwargs", "media_io_kwargs", "override_generation_config"):
        value = getattr(args, name)
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{name} must be a mapping, got {value!r}.", param=name)
    if args.hf_overrides is not None and not (isinstance(args.hf_overrides, Mapping) or callable(args.hf_overrides)):
        raise ConfigError("hf_overrides must be a mapping or a function of the configuration.", param="hf_overrides")
    if args.model is not None and not isinstance(args.model, str | os.PathLike):
        raise ConfigError(f"model must be a folder or a hub name, got {args.model!r}.", param="model")
    if args.generation_config not in ("auto", "vllm"):
        raise ConfigError(
            f"generation_config={args.generation_config!r} is not available in this version.",
            "Available: 'auto' (the checkpoint's), 'vllm' (none); see also override_generation_config.",
            param="generation_config",
        )


def _one_pooler_config(args: EngineArgs) -> None:
    """Refuse an unknown or wrong entry, and the option under both of its names.

    Raises:
        ConfigError: it is refused.
    """
    if args.pooler_config is not None:
        if args.override_pooler_config is not None:
            raise ConfigError(
                "pooler_config and override_pooler_config are the same option.", "Give one.", param="pooler_config"
            )
        args.override_pooler_config = args.pooler_config
        args.pooler_config = None
    PoolerConfig.of(args.override_pooler_config)


def _check_profiles(args: EngineArgs) -> None:
    """Refuse a wrong entry of profiler_config, and name those without an effect.

    Raises:
        ConfigError: it is refused.
    """
    idle = ProfilerConfig.of(args.profiler_config).without_effect()
    if idle:
        logger.info("Entries of profiler_config that change nothing here: %s.", ", ".join(idle))


def decide(args: EngineArgs, info: ModelInfo) -> EngineConfig:
    """Make the EngineConfig from the user's options, the checkpoint and the machine."""
    platform = _platform(args.device)
    shared, stages = ranks_of(args, info, platform.name)
    dtype = _dtype(args.dtype, info, platform)
    for name in platform.ignored_options:
        if getattr(args, name) != getattr(EngineArgs, name):
            logger.info("%s has no effect on a %s.", name, platform.label)
    max_model_len = _max_model_len(args, info)
    seqs, tokens = platform.defaults.max_num_seqs, platform.defaults.max_num_batched_tokens
    # About as many weights as the layers' products have.
    if info.pooler is not None and 12 * info.num_layers * info.hidden_size**2 < _SMALL_TO_POOL:
        seqs, tokens = platform.defaults.pooled_seqs, platform.defaults.pooled_tokens
    max_num_seqs = args.max_num_seqs or seqs
    budget = args.max_num_batched_tokens or tokens
    # Attention over the whole prompt is bidirectional: one step computes it, and prompts share no parts.
    whole_prompts = info.both_ways == "prompt"
    chunked = args.enable_chunked_prefill is not False and not whole_prompts
    if not chunked:
        budget = max(budget, max_model_len)
    limits = _limits(args, info)
    cache_gb = args.mm_processor_cache_gb
    if cache_gb is None:
        cache_gb = platform.defaults.processor_cache_gib
    logger.info("Using max model len %d", max_model_len)
    if chunked:
        logger.info("Chunked prefill is enabled with max_num_batched_tokens=%d.", budget)
    encoder_tokens = args.mm_encoder_budget or max(budget, min(max_model_len, 16384))
    if info.cross is not None:
        # At most two items per row. Whether they fit next to the text's keys and values is measured later.
        encoder_tokens = args.mm_encoder_budget or 2 * max_num_seqs * info.cross.num_states
    elif info.modalities:
        logger.info("Encoder cache will be initialized with a budget of %d tokens.", encoder_tokens)
    loras = _loras(args, info, [modality for modality, limit in limits.items() if limit])
    if stages > 1 and loras.get("max_loras"):
        raise ConfigError(
            f"pipeline_parallel_size={stages} does not go together with LoRA adapters yet, and this model has some for "
            "its media or they are turned on.",
            "Give pipeline_parallel_size=1; tensor_parallel_size shares such a model.",
            param="pipeline_parallel_size",
        )
    return EngineConfig(
        device=platform.name,
        dtype=dtype,
        kv_dtype=_kv_dtype(args, info, platform, dtype),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        block_size=args.block_size or 16,
        max_encoder_tokens=encoder_tokens,
        processor_cache_bytes=0 if args.disable_mm_preprocessor_cache else int(cache_gb * 2**30),
        limit_per_prompt=limits,
        prefix_caching=args.enable_prefix_caching is not False and not whole_prompts,
        chunked_prefill=chunked,
        policy=args.scheduling_policy,
        # Stages compute different steps at a time.
        overlap=platform.defaults.overlap or stages > 1
        if args.async_scheduling is None
        else bool(args.async_scheduling),
        seed=_seed(args),
        load_format=args.load_format,
        enforce_eager=args.enforce_eager,
        attention_backend=args.attention_backend,
        memory_fraction=args.gpu_memory_utilization,
        kv_cache_bytes=args.kv_cache_memory_bytes,
        num_blocks_override=args.num_gpu_blocks_override,
        trust_remote_code=args.trust_remote_code,
        logits_processors=_processors(args, info),
        show_progress=args.use_tqdm_on_load,
        max_logprobs=args.max_logprobs,
        logprobs_mode=LogprobsMode(args.logprobs_mode),
        quantization=_quantization(args, info, platform, dtype),
        exact_weights=_dtype_word(args.dtype) == "float32",
        tensor_parallel_size=shared,
        pipeline_parallel_size=stages,
        expert_parallel=args.enable_expert_parallel and shared > 1,
        over_hosts=args.distributed_executor_backend == "ray",
        prompt_embeds=_prompt_embeds(args, info),
        max_step_s=platform.defaults.max_step_s,
        mm_encoder_tp_mode=args.mm_encoder_tp_mode,
        kv_transfer=KVTransferConfig.of(args.kv_transfer_config),
        **_workers(args, platform),
        **loras,
    )


def _seed(args: EngineArgs) -> int:
    """The seed given, or a random one, which torchrun's processes have in common."""
    seed = args.seed if args.seed is not None else int.from_bytes(os.urandom(7), "little")
    if args.distributed_executor_backend != LAUNCHED:
        return seed
    from beheld.executor.launched import agreed_seed

    return agreed_seed(args.data_parallel_size * args.num_ranks, seed)


def _workers(args: EngineArgs, platform: Platform) -> dict[str, Any]:
    """Settings of the media workers and prepare threads.

    A model on the host's cores needs all of them, so one process decodes; otherwise most cores are idle.
    """
    if args.media_work not in ("auto", *MediaWork):
        raise ConfigError(
            f"There is no media_work={args.media_work!r}.", "Known: 'auto', 'decode', 'process'.", param="media_work"
        )
    cpu = platform.synchronous
    work = (MediaWork.DECODE if cpu else MediaWork.PROCESS) if args.media_work == "auto" else MediaWork(args.media_work)
    count = args.media_workers
    if count is None:
        count = 1 if cpu else max(1, min(12, len(os.sched_getaffinity(0)) - 2))
    # These threads mostly wait for workers. With too many of them, the thread that drives the device waits for the
    # interpreter: with fourteen, the first step of 256 images was launched half a second late.
    threads = 0 if cpu and args.media_workers is None else min(count, _PREPARE_THREADS)
    return {"media_workers": count, "media_work": work, "prepare_threads": threads}


def _loras(args: EngineArgs, info: ModelInfo, modalities: Sequence[str]) -> dict[str, Any]:
    """The LoRA part of EngineConfig; `modalities` are those that are not switched off.

    Raises:
        ConfigError: the options contradict each other, or the model does not support adapters.
    """
    given = {field.name: field.default for field in fields(EngineArgs) if field.name in _LORA_OPTIONS}
    own = built_in(info, modalities)
    if not args.enable_lora and own:
        logger.info("The checkpoint has adapters for %s; requests with such media use them.", ", ".join(own))
        ranks = max(lora.rank for lora in own.values())
        return {
            "max_loras": len(own),
            "max_lora_rank": ranks,
            "max_cpu_loras": len(own),
            "media_loras": tuple((modality, lora.request) for modality, lora in own.items()),
        }
    if not args.enable_lora:
        for name, default in given.items():
            if getattr(args, name) != default:
                logger.info("%s has no effect without enable_lora=True.", name)
        return {}
    if info.cross is not None:
        raise ConfigError(
            f"Adapters for {info.architecture} are not available in this version: its keys and values of media are "
            "computed once for all requests.",
            "Leave enable_lora out.",
            param="enable_lora",
        )
    if args.max_cpu_loras is not None and args.max_cpu_loras < args.max_loras:
        raise ConfigError(
            f"max_cpu_loras={args.max_cpu_loras} is less than max_loras={args.max_loras}.", param="max_cpu_loras"
        )
    return {
        "max_loras": args.max_loras,
        "max_lora_rank": args.max_lora_rank,
        "max_cpu_loras": args.max_cpu_loras or max(args.max_loras, len(own)),
        "media_loras": tuple((modality, lora.request) for modality, lora in own.items()),
    }


def _platform(wanted: str) -> Platform:
    from beheld.platform.registry import choose

    platform = choose(wanted)
    if wanted == "auto":
        logger.info("Automatically detected platform %s.", platform.name)
    return platform


def _dtype_word(wanted: str) -> str:
    word = str(wanted).removeprefix("torch.")
    return _DTYPE_WORDS.get(word, word)


def _dtype(wanted: str, info: ModelInfo, platform: Platform) -> str:
    wanted = _dtype_word(wanted)
    if wanted == "auto":
        stored = info.checkpoint_dtype if info.checkpoint_dtype in _DTYPES else "float32"
        chosen, reason = platform.default_dtype(stored)
        keeps = info.quantized_by in KEPT_BITS and platform.no_grouped_products is None and env.KEEP_BITS()
        if stored == "float16" and chosen == "float32" and keeps and platform.bfloat16_products:
            chosen, reason = "bfloat16", "in which the bits of its weights are kept"
        if reason is not None:
            logger.info("The checkpoint is %s; using %s, %s (set dtype to change).", stored, chosen, reason)
        return chosen
    if wanted not in _DTYPES:
        known = ("auto", *_DTYPES)
        raise ConfigError(
            f"There is no dtype {wanted!r}.", nearest(wanted, known) or f"Known: {', '.join(known)}.", param="dtype"
        )
    if wanted == "float16" and not platform.float16_products:
        logger.warning(
            "dtype='float16' is computed in float32: this %s does not multiply float16 in hardware, and would take "
            "minutes for a product. bfloat16 takes half the memory of float32.",
            platform.label,
        )
        return "float32"
    if wanted == "bfloat16" and not platform.bfloat16_products:
        logger.warning(
            "dtype='bfloat16' is slow: this %s does not multiply bfloat16 in hardware. Leave dtype out, or set it to "
            "float32, for prompts that are computed several times as fast.",
            platform.label,
        )
    return wanted


def without_unused(args: EngineArgs) -> EngineArgs:
    """The options without logits processors of installed packages, if the model pools: they have no effect there.

    Only if there are some, the checkpoint's configuration is read, which imports transformers.

    Raises:
        ConfigError: the model pools, and there are other processors.
        ModelError: there is no such model, or the engine cannot run it.
    """
    given = args.logits_processors or []
    if not any(isinstance(each, FromPackage) for each in given) or read_info(resolve(args), args).pooler is None:
        return args
    of_pooling(given)
    return replace(args, logits_processors=None)


def _processors(args: EngineArgs, info: ModelInfo) -> tuple[Any, ...]:
    """Return the engine's logits processors.

    Raises:
        ConfigError: there are some for a model that pools.
    """
    if info.pooler is None:
        return tuple(args.logits_processors or ())
    of_pooling(args.logits_processors)
    return ()


def _kv_dtype(args: EngineArgs, info: ModelInfo, platform: Platform, dtype: str) -> str:
    """Return the type of keys and values.

    Raises:
        ConfigError: attention does not read what was asked for, on this device or in this model.
    """
    wanted, gpu = args.kv_cache_dtype, not platform.shares_host_memory
    if wanted in ("auto", dtype):
        return dtype

    def refusal(reason: str, remedy: str) -> ConfigError:
        return ConfigError(f"kv_cache_dtype={wanted!r} {reason}.", remedy, param="kv_cache_dtype")

    if wanted in _DTYPES:
        raise refusal(
            f"is not the type of activations, {dtype}: keys and values are kept in that, or in 8 bits",
            f"Leave the option out, or set dtype={wanted!r}.",
        )
    if wanted == "int8" and gpu:
        raise refusal(
            f"is not available {platform.place}: kernels of attention there read keys and values without scales",
            "Set kv_cache_dtype='fp8', which takes as little, leave the option out, or add device='cpu'.",
        )
    if wanted in _FLOAT8 and gpu and not platform.fp8_products:
        raise refusal(
            f"needs {platform.needs.fp8_products}, which converts such numbers in hardware",
            "Leave the option out.",
        )
    if not all(group.has_keys_and_values for group in info.kv_groups):
        raise refusal(
            f"rounds keys and values, and some layers of {info.name!r} keep latents, inputs or states instead",
            "Leave the option out for this model.",
        )
    return "float8_e4m3fn" if wanted in _FLOAT8 else wanted


def _quantization(args: EngineArgs, info: ModelInfo, platform: Platform, dtype: str) -> str | None:
    """Return the method by which weights are quantized as they are loaded; None for none.

    Raises:
        ConfigError: the device does not multiply such weights.
    """
    wanted = args.quantization
    if wanted is None or wanted == info.quantized_by:
        return None
    if wanted in AT_LOAD_AS:
        logger.info("quantization=%r quantizes weights as they are loaded, as %r does.", wanted, AT_LOAD_AS[wanted])
        wanted = AT_LOAD_AS[wanted]
    if wanted not in QUANTIZED_AT_LOAD:
        return None
    check_at_load(wanted, str(args.quantization), platform, dtype)
    return wanted


def _max_model_len(args: EngineArgs, info: ModelInfo) -> int:
    longest = info.max_model_len
    if args.max_model_len is None:
        if info.sparse_reach is not None:
            logger.warning(
                "Of the %d positions of %s the first %d can be used: of so many its indexer picks all, and attention "
                "to a choice of more cannot be run yet.",
                *(info.sparse_reach, info.name, longest),
            )
        return longest
    if args.max_model_len > longest:
        why = ""
        if info.sparse_reach is not None:
            why = " of which its indexer picks all: attention to a choice of more positions cannot be run yet"
        raise ConfigError(
            f"max_model_len={args.max_model_len} exceeds the {longest} positions of {info.name!r}{why}.",
            f"Give at most {longest}.",
            param="max_model_len",
        )
    return args.max_model_len


def _prompt_embeds(args: EngineArgs, info: ModelInfo) -> bool:
    """Whether prompts may be embeddings.

    Raises:
        ConfigError: this model cannot take any.
    """
    if args.enable_prompt_embeds and (info.modalities or info.is_encoder_decoder or info.both_ways != "nowhere"):
        raise ConfigError(
            f"enable_prompt_embeds needs a decoder of text alone; {info.architecture} is none.",
            "Leave it out, and send text or token ids.",
            param="enable_prompt_embeds",
        )
    return args.enable_prompt_embeds


def _limits(args: EngineArgs, info: ModelInfo) -> dict[str, int]:
    limits = dict.fromkeys(info.modalities, _MANY)
    chunks = 0
    for modality, limit in (args.limit_mm_per_prompt or {}).items():
        if modality not in (*MODALITIES, CHUNKS):
            raise ConfigError(
                f"limit_mm_per_prompt names the unknown modality {modality!r}.",
                "Known: image, video, audio.",
                param="limit_mm_per_prompt",
            )
        count = limit.get("count", _MANY) if isinstance(limit, dict) else limit
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ConfigError(
                f"limit_mm_per_prompt[{modality!r}] must be a whole number from 0, got {limit!r}.",
                param="limit_mm_per_prompt",
            )
        if modality in limits:
            limits[modality] = count
        elif modality == CHUNKS:
            chunks = count
    if args.language_model_only:
        limits, chunks = dict.fromkeys(limits, 0), 0
    # A limit of no chunks does not limit images that are given as images.
    if chunks and "image" in limits:
        own = "image" in (args.limit_mm_per_prompt or {})
        limits["image"] = max(limits["image"], chunks) if own else chunks
    off = [modality for modality, count in limits.items() if count == 0]
    if off:
        logger.info(
            "%s switches off %s: requests with them are refused, and towers that only they use are not loaded.",
            "language_model_only" if args.language_model_only else "limit_mm_per_prompt",
            ", ".join(off),
        )
    return limits


def _summary(config: EngineConfig) -> str:
    shown = (
        "device",
        "dtype",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "block_size",
        "overlap",
        "seed",
    )
    return ", ".join(f"{name}={getattr(config, name)!r}" for name in shown)


def rounds_at_load(quantization: str, platform: Platform, dtype: str) -> bool:
    """Return whether a device multiplies weights that this value of the option rounds as they are loaded."""
    return AT_LOAD_METHODS[quantization].missing(platform, dtype) is None


def describe(
    args: EngineArgs, ranks: int | None = None, stages: int = 1, *, on_gpu: bool = False
) -> tuple[ModelInfo, EngineConfig, dict[str, Any]]:
    """The decisions for a model and its sizes, without reading its weights.

    Args:
        stages: as if the model ran in so many stages; only with `ranks`.
        ranks: as if so many ranks shared the model, whatever this machine has; sizes are those of one of them.
        on_gpu: weights that are rounded at load have the form of a GPU, whatever this machine has.

    Raises:
        ConfigError, ModelError: as `start`.
    """
    check(args)
    hf_config, info = _read(args)
    config = decide(args, info)
    config = (
        with_fitting_ranks(args, info, config)
        if ranks is None
        else replace(config, tensor_parallel_size=ranks, pipeline_parallel_size=stages)
    )
    kind = executor_of(config)
    if ranks is None:
        check_ranks(args, info, config, hf_config, kind)
    rounds = config.quantization is not None and getattr(hf_config, "quantization_config", None) is None
    sized = config
    if on_gpu and rounds:
        from beheld.platform.registry import ACCELERATOR

        sized = replace(config, device=ACCELERATOR)
    size = kind.size(hf_config, info, sized)
    element_bytes = {"float32": 4, "bfloat16": 2, "float16": 2}[config.dtype]
    sizes = {
        "name": info.name,
        "architecture": info.architecture,
        "parameters": size.num_parameters,
        "dtype": config.dtype,
        "weights_bytes": size.num_bytes,
        "kv_bytes_per_token": sum(
            group.bytes_per_token(*config.kv_bytes) for group in size.kv_groups or info.paged_groups
        ),
        "state_bytes_per_sequence": sum(group.bytes_per_sequence(element_bytes) for group in info.paged_groups),
        "max_model_len": config.max_model_len,
    }
    if size.cost is not None:
        sizes |= {"token_read_bytes": size.cost.read_bytes, "token_products": size.cost.products}
        sizes |= {"sums": size.num_sums, "experts": size.cost.experts}
    if config.pipeline_parallel_size > 1:
        sizes["stages"] = config.pipeline_parallel_size
        # Hidden states from stage to stage.
        sizes["stage_bytes_per_token"] = info.hidden_size * element_bytes
    if config.tensor_parallel_size > 1:
        sizes["ranks"] = config.tensor_parallel_size
        sums, logits = _link_bytes(info, config.tensor_parallel_size, size.num_sums, element_bytes)
        # Of a prompt's tokens only the last one has logits.
        sizes |= {"prompt_link_bytes_per_token": sums, "link_bytes_per_token": sums + logits}
    return info, config, sizes


def _link_bytes(info: ModelInfo, ranks: int, num_sums: int, element_bytes: int) -> tuple[int, int]:
    """What each rank sends for a token: in rings that add hidden states up, and its part of the logits.

    A ring sends a vector's n-th part 2 (n - 1) times.
    """
    sums = 2 * (ranks - 1) * num_sums * info.hidden_size // ranks
    return sums * element_bytes, (ranks - 1) * info.vocab_size // ranks * element_bytes
