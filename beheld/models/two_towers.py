"""The adapter of models with one tower for text and one for images, whose vectors share a space.

A prompt is a text or an image. An image takes one position, whose embedding is its vector already.

Shapes are those of ModelAdapter; D numbers of a vector, W the larger of D and H.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from beheld.core.config import ModelInfo
from beheld.core.plan import EncodeItem, SpanView
from beheld.families import registry
from beheld.models import tower_calls
from beheld.models.encoder import EncoderAdapter
from beheld.models.surgery.operation import Surgery
from beheld.platform.registry import platform_of


class TwoTowersAdapter(EncoderAdapter):
    """Wraps such a model of transformers.

    Its positions have two axes: the position, and what it holds (0 a token, 1 an image's vector).

    Args: see EncoderAdapter.

    Raises:
        ModelError: the model lacks an interface.
    """

    def __init__(self, surgery: Surgery, info: ModelInfo, how: str = "torch") -> None:
        super().__init__(surgery, info, how)
        assert info.pooler is not None
        family = registry.model(info.family)
        assert family.text_vectors is not None
        self._text_vectors = family.text_vectors
        self._embeds = family.embeds
        self._most_id = info.vocab_size - 1
        self._hidden_size = info.hidden_size
        self._width = info.pooler.width
        self._upload = platform_of(self.device).uploader(self.device)

    def embed(self, ids_T: Tensor) -> Tensor:
        """Return token embeddings (T, W), with room for vectors; the id of an image's place has none."""
        embeds_TH = super().embed(ids_T.clamp(max=self._most_id))
        spare = self._width - self._hidden_size
        return embeds_TH if spare <= 0 else torch.nn.functional.pad(embeds_TH, (0, spare))

    def encode(self, items: Sequence[EncodeItem]) -> list[Tensor]:
        """Return each image's vector (1, D); images of a size share a call."""
        out: list[Tensor | None] = [None] * len(items)
        items = [
            replace(
                item, features={k: tower_calls.moved(v, self._upload, self.dtype) for k, v in item.features.items()}
            )
            for item in items
        ]
        with self.surgery.passing():
            for modality, indices, options in tower_calls.combine(items):
                result = self.model.get_image_features(**options, return_dict=True)
                vectors_ID = self._embeds(self.model, modality, result).to(self.dtype)
                for i, vector_D in zip(indices, vectors_ID, strict=True):
                    out[i] = vector_D.unsqueeze(0).clone()
        return [vector for vector in out if vector is not None]

    def positions(
        self, token_ids: Sequence[int], spans: Sequence[SpanView], second: int | None = None
    ) -> tuple[np.ndarray, int]:
        """Return positions and what they hold (2, N)."""
        shared_2N, first = super().positions(token_ids, spans)
        places_2N = shared_2N.copy()
        for span in spans:
            places_2N[1, span.start : span.stop] = 1
        return places_2N, first

    def hidden(self, embeds_TH: Tensor, positions_XT: Tensor) -> Tensor:
        """Return the vectors (T, D) at all positions."""
        with self.surgery.passing():
            vectors_TD = self._text_vectors(self.model, embeds_TH[:, : self._hidden_size], positions_XT[0])
        return torch.where(positions_XT[1].bool().unsqueeze(1), embeds_TH[:, : self._width], vectors_TD)
