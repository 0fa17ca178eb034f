"""Brings in memory for a model's weights on a CPU in a thread, while the model's class is imported."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from beheld.checkpoint.checks.safetensors import count_numbers
from beheld.checkpoint.weights import has_weights
from beheld.core.config import EngineConfig, ModelInfo
from beheld.models.load import quantization_of
from beheld.platform import jit, pages
from beheld.platform.registry import platform_of

_BYTES = 2


def ahead(hf_config: Any, info: ModelInfo, config: EngineConfig) -> AbstractContextManager[None]:
    """Bring in memory for the weights that surgery packs; see `pages.ahead`.

    Raises:
        ModelError: a file of weights is damaged.
    """
    return pages.ahead(_packed_bytes(hf_config, info, config))


def _packed_bytes(hf_config: Any, info: ModelInfo, config: EngineConfig) -> int:
    """Return about how many bytes are packed, by what the files hold; 0 where another form than bfloat16 is kept, or
    where the memory does not hold the unpacked weights at the same time, as loading needs for a while."""
    platform = platform_of(config.device)
    if not platform.shares_host_memory or config.dtype != "bfloat16" or not platform.bfloat16_products:
        return 0
    if config.quantization is not None or config.load_format == "dummy" or config.num_ranks > 1 or not jit.available():
        return 0
    folders = [Path(info.path), *(Path(part.path) for part in info.secondary)]
    if quantization_of(hf_config, folders[0]) is not None or not all(has_weights(folder) for folder in folders):
        return 0
    whole = num_bytes = _BYTES * sum(count_numbers(folder) for folder in folders)
    text = hf_config.get_text_config()
    if not getattr(text, "tie_word_embeddings", True):
        # Embeddings stay as they are; a head that shares them is packed.
        num_bytes -= _BYTES * text.vocab_size * text.hidden_size
    free, _ = platform.memory()
    return num_bytes if num_bytes + whole <= free else 0
