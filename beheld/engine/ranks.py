"""The number of ranks that share a model: one on a CPU unless asked for, and on machines with too few GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from beheld.core.config import EngineArgs, EngineConfig, ModelInfo
from beheld.core.errors import ConfigError
from beheld.executor.executor import Executor
from beheld.utils.log import get_logger

logger = get_logger(__name__)


def ranks_of(args: EngineArgs, device: str) -> int:
    """Return how many ranks share the model.

    The cores of a CPU share one memory, so ranks only make it slower there: they are started if
    distributed_executor_backend="mp" asks for them, as one does to try what will run on GPUs.
    """
    asked = args.tensor_parallel_size
    if asked == 1 or args.distributed_executor_backend == "uni":
        return 1
    from beheld.platform.registry import platform_of

    platform = platform_of(device)
    if not platform.splits:
        return asked if args.distributed_executor_backend == "mp" else 1
    return asked if platform.num_devices >= asked else 1


def with_fitting_ranks(args: EngineArgs, info: ModelInfo, config: EngineConfig) -> EngineConfig:
    """Return the configuration, with one rank if several gain nothing and were not asked for by "mp".

    Scripts that ask for several GPUs then run on one, as on a machine that has no more.
    """
    if config.tensor_parallel_size == 1 or args.distributed_executor_backend == "mp":
        return config
    from beheld.executor.multi import MultiExecutor

    reason = MultiExecutor.unshared(info)
    if reason is None:
        return config
    logger.warning("%s runs on one GPU: of several, %s.", info.architecture, reason)
    return replace(config, tensor_parallel_size=1)


def check_ranks(
    args: EngineArgs, info: ModelInfo, config: EngineConfig, hf_config: Any, executor: type[Executor]
) -> None:
    """Warn that a model runs on one device although the options split it, or refuse it.

    Scripts that ask for more GPUs than there are run on one with enough memory. Loading checks whether the KV cache
    fits next to the weights.

    Raises:
        ConfigError: the weights alone exceed the free memory of one GPU.
    """
    asked = args.tensor_parallel_size
    if asked == 1 or config.tensor_parallel_size == asked:
        return
    from beheld.platform.registry import platform_of

    platform = platform_of(config.device)
    if not platform.splits:
        logger.warning(
            "tensor_parallel_size=%d has no effect on a CPU: the model is not split. "
            "distributed_executor_backend='mp' splits it into %d processes, which is slower.",
            asked,
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
            f"tensor_parallel_size={asked} is not possible (GPUs here: {platform.num_devices}), and one GPU does not "
            f"hold the model: {sizes}.",
            "Make more GPUs visible, take one with more memory, or use a smaller or a quantized checkpoint.",
            param="tensor_parallel_size",
        )
    logger.warning(
        "tensor_parallel_size=%d: the model runs on one GPU, which holds it: %s.",
        asked,
        sizes,
    )
