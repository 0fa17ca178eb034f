"""Kyutai's speech to text: an audio's codes are embedded by the table that has the text's tokens too.

Shapes: T tokens of a step, H hidden size, F frames, K codebooks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from beheld.core.plan import EncodeItem
from beheld.families._shared.timeline.model import HearingDecoder
from beheld.families.model import FamilyModel
from beheld.models.surgery.operation import Changes


def adapt(model: Any, changes: Changes) -> None:
    """Embed text alone, which the model embeds together with codes; see FamilyModel.adapt."""
    changes.set(model, "get_input_embeddings", lambda: model.model.embed_tokens.embed_tokens)


class Kyutai(HearingDecoder):
    """See HearingDecoder."""

    def rows(self, item: EncodeItem) -> Tensor:
        """Return the summed embeddings of codes (1 + F, H): of the codes before the first frame, and of each frame."""
        model = self._model
        config, codec, table = model.config, model.codec_model, model.model.embed_tokens
        weight = next(codec.parameters())
        samples = item.features["sample_bits"].view(torch.float32).to(weight.device, weight.dtype)
        whole = samples.shape[-1] // config.frame_size * config.frame_size
        codes_FK = codec.encode(samples[..., :whole]).audio_codes[0].T
        first_1K = torch.full_like(codes_FK[:1], config.audio_bos_token_id)
        codes_EK = torch.cat((first_1K, codes_FK))
        places_EK = codes_EK + table.audio_tokens_offsets[1:].to(codes_EK.device)
        silent = codes_EK == config.audio_pad_token_id
        rows_EH: Tensor = table.embed_tokens(torch.where(silent, codes_EK, places_EK)).sum(1)
        return rows_EH

    def layers(self, embeds_1TH: Tensor, positions: Tensor) -> Tensor:
        """See HearingDecoder; transformers applies the window by its cache alone."""
        core = self._model.model
        for layer in core.layers:
            given = layer(
                embeds_1TH, position_ids=positions, sliding_window=self._model.config.sliding_window, use_cache=False
            )
            # transformers before 5.21 gives a tuple.
            embeds_1TH = given[0] if isinstance(given, tuple) else given
        hidden_1TH: Tensor = core.norm(embeds_1TH)
        return hidden_1TH


MODEL = FamilyModel(adapt=adapt, cross_inputs=Kyutai, plain_head=True)
