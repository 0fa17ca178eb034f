"""Nemotron 3.5 Transcribe: mixers of Mamba-2 on the cache; an audio's token may have no row in the table."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from beheld.families._shared.mamba.mixer import adapt_heads
from beheld.families.model import FamilyModel
from beheld.models.surgery.operation import Changes


def adapt(model: Any, changes: Changes) -> None:
    """Replace the mixers, and embed ids beyond the table as token 0, as transformers does; see FamilyModel.adapt."""
    adapt_heads(model, changes)
    table = model.get_input_embeddings()

    def look_up(ids: Tensor) -> Tensor:
        """Return embeddings (.., H)."""
        return F.embedding(ids.masked_fill(ids >= table.num_embeddings, 0), table.weight)

    if model.config.audio_token_id >= table.num_embeddings:
        changes.set(table, "forward", look_up)


MODEL = FamilyModel(adapt=adapt)
