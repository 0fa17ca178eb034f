"""How the text towers of CLIP and SigLIP run: their modules have the same names.

Shapes: T tokens of a step, H hidden size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def text_states(model: Any, embeds_TH: Tensor, positions_T: Tensor, **options: Any) -> Tensor:
    """Return the text tower's last states (T, H); `options` go to attention."""
    text = model.text_model
    x_1TH = text.embeddings(inputs_embeds=embeds_TH.unsqueeze(0), position_ids=positions_T.unsqueeze(0))
    found = text.encoder(inputs_embeds=x_1TH, attention_mask=None, **options).last_hidden_state
    states_TH: Tensor = text.final_layer_norm(found)[0]
    return states_TH
