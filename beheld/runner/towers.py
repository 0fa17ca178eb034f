"""Encodes media with a model of which only the towers are loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch

from beheld.core.config import EngineConfig, ModelInfo
from beheld.core.errors import BeheldError, CapacityError
from beheld.core.plan import EncodeItem
from beheld.models import registry
from beheld.models.adapter import ModelAdapter
from beheld.runner.encoder_cache import EncoderCache
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# Of the text model these many layers are loaded; the family's own parts may need the first ones.
_LAYERS = (1, 4)


class Towers:
    """Encodes media.

    Args:
        adapter: of a model whose text layers may be missing.
    """

    def __init__(self, adapter: ModelAdapter) -> None:
        self._store = EncoderCache(adapter)

    @classmethod
    def load(cls, read: Callable[[], Any], info_of: Callable[[Any], ModelInfo], config: EngineConfig) -> Self:
        """Load the model with as few text layers as it allows: one, a few, or all.

        Args:
            read: makes transformers' configuration anew.
            info_of: the model's facts, by its configuration.

        Raises:
            ModelError, CapacityError: as for the whole model.
        """
        for count in _LAYERS:
            hf_config = read()
            if not _shortened(hf_config, count):
                break
            try:
                return cls(registry.build(hf_config, info_of(hf_config), config))
            except CapacityError:
                # More layers take more.
                raise
            except (BeheldError, IndexError, KeyError, ValueError, AttributeError, RuntimeError) as error:
                logger.debug("%d layers are too few: %s", count, error)
        hf_config = read()
        logger.info("All text layers are loaded, too.")
        return cls(registry.build(hf_config, info_of(hf_config), config))

    @torch.inference_mode()
    def encode(self, items: Sequence[EncodeItem]) -> dict[bytes, torch.Tensor]:
        """Return embeddings (E, H) in host memory by digest; an item whose tower failed is missing."""
        self._store.encode(items)
        found = {}
        for item in items:
            embeds = self._store.known(item.digest)
            if embeds is not None:
                found[item.digest] = embeds.detach().cpu().contiguous()
        digests = [item.digest for item in items]
        self._store.forget(digests)
        self._store.spent_s()
        return found


def _shortened(hf_config: Any, count: int) -> bool:
    """Leave the first layers of the text model alone; False if it has no more anyway."""
    text = hf_config.get_text_config(decoder=True)
    layers = getattr(text, "num_hidden_layers", None)
    if not isinstance(layers, int) or layers <= count:
        return False
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == layers:
            setattr(text, name, value[:count])
    text.num_hidden_layers = count
    # Loading expects the checkpoint to have more.
    hf_config.shortened = True
    return True
