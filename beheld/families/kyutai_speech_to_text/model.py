"""Kyutai's speech to text: an audio's codes are embedded by the table that has the text's tokens too.

Shapes: T tokens of a step, H hidden size, I audios, E = 1 + F states, F frames, K codebooks.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    def rows(self, items: Sequence[EncodeItem]) -> Sequence[Tensor]:
        """Return the summed embeddings of codes (1 + F, H): of the codes before the first frame, and of each frame."""
        model = self._model
        config, codec, table = model.config, model.codec_model, model.model.embed_tokens
        weight = next(codec.parameters())
        bits = torch.cat([item.features["sample_bits"] for item in items])
        samples = bits.view(torch.float32).to(weight.device, weight.dtype)
        whole = samples.shape[-1] // config.frame_size * config.frame_size
        codes_IFK = codec.encode(samples[..., :whole]).audio_codes.transpose(1, 2)
        first_I1K = torch.full_like(codes_IFK[:, :1], config.audio_bos_token_id)
        codes_IEK = torch.cat((first_I1K, codes_IFK), dim=1)
        places_IEK = codes_IEK + table.audio_tokens_offsets[1:].to(codes_IEK.device)
        silent = codes_IEK == config.audio_pad_token_id
        rows_IEH: Tensor = table.embed_tokens(torch.where(silent, codes_IEK, places_IEK)).sum(2)
        return rows_IEH.unbind()

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
