"""The number of ranks that share a model: one on a CPU unless asked for, and on machines with too few GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from beheld.cluster.session import need_ray
from beheld.core.config import EngineArgs, EngineConfig, ModelInfo
from beheld.core.errors import ConfigError
from beheld.executor.executor import Executor
from beheld.utils import env
from beheld.utils.log import get_logger

LAUNCHED = "external_launcher"
logger = get_logger(__name__)


def ranks_of(args: EngineArgs, info: ModelInfo, device: str) -> tuple[int, int]:
    """Return how many ranks share the model or each of its stages, and how many stages there are.

    The cores of a CPU share one memory, so ranks only make it slower there: they are started if
    distributed_executor_backend="mp" asks for them, as one does to try what will run on GPUs. With "ray", they are as
    many as asked for, wherever the cluster has room. With "external_launcher", torchrun has started as many processes
    of a script, each of which computes the whole model.

    Raises:
        ConfigError: Ray is not installed, or stages cannot do what the model needs, or torchrun's processes would
            meet on GPUs.
    """
    asked = args.num_ranks
    launched = args.distributed_executor_backend == LAUNCHED
    if asked == 1 and args.distributed_executor_backend == "ray":
        logger.info("distributed_executor_backend='ray' has no effect with one rank, which runs on this host.")
    if (asked == 1 and not (launched and args.data_parallel_size > 1)) or args.distributed_executor_backend == "uni":
        return 1, 1
    _check_stages(args, info)
    both = args.tensor_parallel_size, args.pipeline_parallel_size
    from beheld.platform.registry import platform_of

    if launched:
        if platform_of(device).splits:
            raise ConfigError(
                f"distributed_executor_backend={LAUNCHED!r} is built for CPUs alone.",
                "Leave the option out, and start the script without torchrun: beheld starts the ranks itself.",
                param="distributed_executor_backend",
            )
        return 1, 1

    if args.distributed_executor_backend == "ray":
        need_ray(f"distributed_executor_backend='ray' with {asked} ranks", "distributed_executor_backend")
        return both
    platform = platform_of(device)
    if platform.splits and env.ONE_GPU():
        _check_one_gpu(args)
    if not platform.splits:
        return both if args.distributed_executor_backend == "mp" else (1, 1)
    return both if platform.num_devices >= asked else (1, 1)


def _check_one_gpu(args: EngineArgs) -> None:
    """Refuse what ranks cannot do that share a GPU."""
    wrong = {
        "pipeline_parallel_size": args.pipeline_parallel_size > 1,
        "data_parallel_size": args.data_parallel_size > 1,
        "enforce_eager": not args.enforce_eager,
        "kv_cache_memory_bytes": args.kv_cache_memory_bytes is None,
    }
    for name, found in wrong.items():
        if found:
            raise ConfigError(
                f"BEHELD_ONE_GPU puts the ranks of one engine on a GPU, and not with {name}={getattr(args, name)!r}.",
                "Give tensor_parallel_size alone, enforce_eager=True and kv_cache_memory_bytes for each rank.",
                param=name,
            )


def _check_stages(args: EngineArgs, info: ModelInfo) -> None:
    """Refuse what stages of a pipeline cannot do.

    Raises:
        ConfigError: names it.
    """
    if args.pipeline_parallel_size == 1:
        return
    refused = {
        "layers that attend to states of media": info.cross is not None,
        "an encoder for the prompt": info.is_encoder_decoder,
        "an encoder that makes vectors": info.pooler is not None and info.pooler.encodes,
    }
    found = [what for what, there in refused.items() if there]
    if found:
        raise ConfigError(
            f"pipeline_parallel_size={args.pipeline_parallel_size} does not go together with {found[0]} yet.",
            "Give pipeline_parallel_size=1"
            + ("." if info.pooler is not None else "; tensor_parallel_size shares such a model."),
            param="pipeline_parallel_size",
        )


def with_fitting_ranks(args: EngineArgs, info: ModelInfo, config: EngineConfig) -> EngineConfig:
    """Return the configuration, with one rank if several gain nothing and were not asked for by "mp".

    Scripts that ask for several GPUs then run on one, as on a machine that has no more.
    """
    if config.num_ranks == 1 or args.distributed_executor_backend == "mp":
        return config
    from beheld.executor.multi import MultiExecutor

    reason = MultiExecutor.unshared(info)
    if reason is None:
        return config
    logger.warning("%s runs on one GPU: of several, %s.", info.architecture, reason)
    return replace(config, tensor_parallel_size=1, pipeline_parallel_size=1)


def check_ranks(
    args: EngineArgs, info: ModelInfo, config: EngineConfig, hf_config: Any, executor: type[Executor]
) -> None:
    """Warn that a model runs on one device although the options split it, or refuse it.

    Scripts that ask for more GPUs than there are run on one with enough memory. Loading checks whether the KV cache
    fits next to the weights.

    Raises:
        ConfigError: the weights alone exceed the free memory of one GPU.
    """
    asked = args.num_ranks
    if asked == 1 or config.num_ranks == asked:
        return
    from beheld.platform.registry import platform_of

    platform = platform_of(config.device)
    if args.distributed_executor_backend == LAUNCHED:
        logger.warning("Each of torchrun's %d processes computes the whole model, and gives the same answers.", asked)
        return
    names = [name for name in ("tensor_parallel_size", "pipeline_parallel_size") if getattr(args, name) > 1]
    named = " and ".join(f"{name}={getattr(args, name)}" for name in names)
    if not platform.splits:
        logger.warning(
            "%s %s no effect on a CPU: the model is not split. "
            "distributed_executor_backend='mp' splits it into %d processes, which is slower.",
            named,
            "has" if len(names) == 1 else "have",
            asked,
        )
        return
    needed = executor.size(hf_config, info, config).num_bytes
    available = executor.available_bytes(config)
    sizes = (
        f"its weights take about {needed / 2**30:.2f} GiB of the {available / 2**30:.2f} GiB that are available there"
    )
    if needed > available:
        raise ConfigError(
            f"{named} is not possible (GPUs here: {platform.num_devices}), and one GPU does not "
            f"hold the model: {sizes}.",
            "Make more GPUs visible, take one with more memory, or use a smaller or a quantized checkpoint.",
            param=names[0],
        )
    logger.warning(
        "%s: the model runs on one GPU, which holds it: %s.",
        named,
        sizes,
    )
