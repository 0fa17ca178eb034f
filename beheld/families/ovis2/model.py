"""Ovis 2: the marks of an image are visual words too.

Shapes: T tokens, H hidden size, M marks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from beheld.families.model import FamilyModel
from beheld.models.surgery.operation import Changes


def adapt(model: Any, changes: Changes) -> None:
    """Let the embedding of a mark be its visual word, which transformers puts in later; see FamilyModel.adapt."""
    embedding, table = model.get_input_embeddings(), model.model.visual_embeddings_table.weight
    marks = list(model.model.visual_indicator_token_ids)
    # The last words of the table, in this order; they never change.
    words_MH = table.detach()[-len(marks) :].clone()
    marks_M = torch.tensor(marks, device=words_MH.device)
    embed = embedding.forward

    def embedded(ids_T: Tensor) -> Tensor:
        is_mark_TM = ids_T.unsqueeze(-1) == marks_M
        words_TH = is_mark_TM.to(words_MH.dtype) @ words_MH
        made: Tensor = torch.where(is_mark_TM.any(-1, keepdim=True), words_TH, embed(ids_T))
        return made

    changes.set(embedding, "forward", embedded)


MODEL = FamilyModel(adapt=adapt)
