"""The number of devices that share a model: always one, for any options."""

from __future__ import annotations

from typing import Any

from beheld.core.config import EngineArgs, EngineConfig, ModelInfo
from beheld.core.errors import ConfigError
from beheld.executor.executor import Executor
from beheld.utils.log import get_logger

logger = get_logger(__name__)


def check_ranks(
    args: EngineArgs, info: ModelInfo, config: EngineConfig, hf_config: Any, executor: type[Executor]
) -> None:
    """Warn that a model runs on one device although the options split it, or refuse it.

    A CPU's cores share one memory, so there is nothing to split. Models are not split over GPUs yet, but scripts that
    ask for several small GPUs run on one with enough memory. Loading checks whether the KV cache fits next to the
    weights.

    Raises:
        ConfigError: the weights alone exceed the free memory of one GPU.
    """
    asked = args.tensor_parallel_size
    if asked == 1:
        return
    from beheld.platform.registry import platform_of

    if not platform_of(config.device).splits:
        logger.warning("tensor_parallel_size=%d has no effect on a CPU: the model is not split.", asked)
        return
    needed = executor.size(hf_config, info, config).num_bytes
    available = executor.available_bytes(config)
    sizes = (
        f"its weights take about {needed / 2**30:.2f} GiB of the {available / 2**30:.2f} GiB that are available there"
    )
    if needed > available:
        raise ConfigError(
            f"tensor_parallel_size={asked} is not available in this version, and one GPU does not hold the model: "
            f"{sizes}.",
            "Available: 1, on a GPU with more memory; or use a smaller or a quantized checkpoint.",
            param="tensor_parallel_size",
        )
    logger.warning(
        "tensor_parallel_size=%d is not available in this version. The model runs on one GPU, which holds it: %s.",
        asked,
        sizes,
    )
