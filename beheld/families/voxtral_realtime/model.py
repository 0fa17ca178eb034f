"""Voxtral Realtime: what is heard is added to embeddings, and layers are scaled by the delay of the words.

Shapes: T tokens of a step, H hidden size, I audios, E states of an audio.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from beheld.core.plan import EncodeItem
from beheld.families._shared.timeline.model import HearingDecoder
from beheld.families.model import FamilyModel


class VoxtralRealtime(HearingDecoder):
    """See HearingDecoder."""

    def rows(self, items: Sequence[EncodeItem]) -> Sequence[Tensor]:
        """Return what is heard during each token (E, H)."""
        weight = self._model.get_input_embeddings().weight
        features = torch.cat([item.features["input_features"] for item in items]).to(weight.device, weight.dtype)
        rows_IEH: Tensor = self._model.get_audio_features(input_features=features, return_dict=True).pooler_output
        return rows_IEH.unbind()

    def layers(self, embeds_1TH: Tensor, positions: Tensor) -> Tensor:
        """See HearingDecoder."""
        core = self._model.model
        delay = torch.full_like(embeds_1TH[0, 0, :1], self._model.config.default_num_delay_tokens)
        output = core.language_model(
            inputs_embeds=embeds_1TH, position_ids=positions, use_cache=False, t_cond=core.time_embedding(delay)[None]
        )
        hidden_1TH: Tensor = output.last_hidden_state
        return hidden_1TH


MODEL = FamilyModel(cross_inputs=VoxtralRealtime, plain_head=True)
