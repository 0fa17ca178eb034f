"""Sizes of a model and of some media, from the configuration alone, without weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from beheld.core.config import EngineArgs
from beheld.core.media import MediaRef
from beheld.engine.setup import describe
from beheld.inputs.pipeline import InputPipeline
from beheld.tools.scaling import expected, known

# About what steps and captured graphs take in addition to the weights; an engine measures it when it starts.
STEP_BYTES = 3 << 30


def plan(
    args: EngineArgs,
    media: Sequence[MediaRef],
    ranks: int | None = None,
    gpu_bytes: int | None = None,
    stages: int = 1,
    gpus: int = 1,
) -> dict[str, Any]:
    """Sizes of the model, and a receipt per item, as plain JSON types.

    Args:
        ranks: how many GPUs share the model; sizes are those of one of them.
        stages: how many stages of a pipeline they share; sizes are those of the largest.
        gpu_bytes: the memory of one GPU, of which an engine takes the default share.
        gpus: how many there are: as many engines stand side by side as they are enough for.

    Raises:
        ModelError, MediaError: the model or an item cannot be read.
    """
    info, config, sizes = describe(args, None if ranks == stages == 1 else ranks, stages, on_gpu=gpu_bytes is not None)
    if gpu_bytes is not None:
        left = int(gpu_bytes * args.gpu_memory_utilization) - sizes["weights_bytes"] - STEP_BYTES
        sizes["gpu_bytes"] = gpu_bytes
        per_token, per_sequence = sizes["kv_bytes_per_token"], sizes["state_bytes_per_sequence"]
        if per_token or left <= 0:
            sizes["kv_tokens"] = max(0, left // max(1, per_token))
        elif per_sequence:
            # It keeps nothing for each token.
            sizes["kv_sequences"] = left // per_sequence
        sizes |= _speeds(sizes, gpu_bytes, stages, gpus // max(1, (ranks or 1) * stages))
    receipts = InputPipeline(info, config, args).receipts(list(media)) if media else []
    tokens = sum(receipt.tokens for receipt in receipts)
    return {
        "model": sizes,
        "media": [receipt.to_json() for receipt in receipts],
        "media_tokens": tokens,
        "media_kv_bytes": tokens * sizes["kv_bytes_per_token"],
    }


def _speeds(sizes: dict[str, Any], gpu_bytes: int, stages: int, engines: int) -> dict[str, Any]:
    """Return what is expected of engines that fit, by the model of scaling; nothing where no figure calibrates it."""
    gpu = known(gpu_bytes)
    calibrated = "token_products" in sizes and stages == 1 and sizes["dtype"] in ("bfloat16", "float16")
    if gpu is None or not calibrated or not sizes.get("kv_tokens", 1):
        return {}
    cost = sizes["token_read_bytes"], sizes["token_products"]
    made = expected(gpu, *cost, sizes["sums"], sizes.get("prompt_link_bytes_per_token", 0))
    return {
        "expected_of": gpu.name,
        "expected_next_token_ms": made.next_token_s * 1e3,
        "expected_prefill_tokens_per_s": made.prefill_tokens * engines,
        "engines": engines,
    }
