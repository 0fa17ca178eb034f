"""MiniCPM-o's model: MiniCPM-V's, and Whisper's encoder with a projector and pooling.

Shapes: C windows of all audio items, N items, M mel bins, F feature frames, P encoder positions, D the encoder's width,
E embeddings, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool1d
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_outputs import BaseModelOutputWithPooling

from beheld.families._shared.whisper import ShortWhisperEncoder, num_positions
from beheld.families.minicpmo.config import MiniCPMOConfig, num_embeds
from beheld.families.minicpmv.modeling import MiniCPMVForConditionalGeneration, MiniCPMVModel

_POSITIONS_PER_S = 50
_AUDIO = 3


class MiniCPMOProjector(nn.Module):
    """Two layers, under their published names."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.linear1 = nn.Linear(width, hidden)
        self.linear2 = nn.Linear(hidden, hidden)

    def forward(self, features: Tensor) -> Tensor:
        """Return (C, P, H) of features (C, P, D)."""
        out: Tensor = self.linear2(self.linear1(features).relu())
        return out


class MiniCPMOModel(MiniCPMVModel):
    """MiniCPM-V's parts, and the audio encoder with its projector."""

    def __init__(self, config: MiniCPMOConfig) -> None:
        super().__init__(config)
        self.apm = ShortWhisperEncoder(config.audio_config)
        self.audio_projection_layer = MiniCPMOProjector(config.audio_config.encoder_ffn_dim // 4, config.hidden_size)
        self.post_init()

    def get_audio_features(
        self, audio_features: Tensor, audio_feature_lens: Tensor, audio_num_windows: Tensor, **keywords: Any
    ) -> Any:
        """Return the embeddings (E, H) of all items, window after window, as `pooler_output`.

        Windows of an item are filled up with zeros to its longest; what a batch adds is left out.

        Args:
            audio_features: mel frames (C, M, F).
            audio_feature_lens: (C,), the frames of each window.
            audio_num_windows: (N,), the windows of each item.
        """
        lengths = audio_feature_lens.tolist()
        widths: list[int] = []
        for count in audio_num_windows.tolist():
            widths += [max(lengths[len(widths) : len(widths) + count])] * count
        step = self.config.audio_pool_step
        found: dict[int, Tensor] = {}
        for width in dict.fromkeys(widths):
            own = [index for index, other in enumerate(widths) if other == width]
            seen = self._seen([lengths[index] for index in own], num_positions(width), audio_features.device)
            x_CPH = self.audio_projection_layer(self.apm(audio_features[own, :, :width], seen))
            found |= dict(zip(own, avg_pool1d(x_CPH.transpose(1, 2), step, step).transpose(1, 2), strict=True))
        parts = [found[index][: num_embeds(length, step)] for index, length in enumerate(lengths)]
        return BaseModelOutputWithPooling(pooler_output=torch.cat(parts))

    def _seen(self, lengths: list[int], positions: int, device: Any) -> Tensor:
        """Return which positions attend to which, (C, P, P): to their own block and to earlier ones.

        The published code counts the ends of windows in frames, of which a position has two: positions up to a
        window's length that follow its end are seen by its last block.
        """
        places = torch.arange(positions, device=device)
        seen = (places < torch.tensor(lengths, device=device)[:, None])[:, None].expand(-1, positions, -1)
        block = int(self.config.audio_chunk_length * _POSITIONS_PER_S)
        return seen & (places // block <= (places // block)[:, None]) if block > 0 else seen

    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        tgt_sizes: Tensor | None = None,
        num_slices: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        audio_features: Tensor | None = None,
        audio_feature_lens: Tensor | None = None,
        audio_num_windows: Tensor | None = None,
        mm_token_type_ids: Tensor | None = None,
        **keywords: Any,
    ) -> Any:
        """As MiniCPMVModel's, with audio where `mm_token_type_ids` says so."""
        if audio_features is not None:
            assert input_ids is not None
            assert audio_feature_lens is not None
            assert audio_num_windows is not None
            assert mm_token_type_ids is not None
            heard = self.get_audio_features(audio_features, audio_feature_lens, audio_num_windows).pooler_output
            places = mm_token_type_ids == _AUDIO
            embeds = self.get_input_embeddings()(input_ids)
            inputs_embeds = embeds.masked_scatter(places[..., None], heard.to(embeds))
            # Images are then placed among the others.
            input_ids = input_ids.masked_fill(places, -1)
        return super().forward(input_ids, pixel_values, tgt_sizes, num_slices, inputs_embeds, **keywords)


class MiniCPMOForConditionalGeneration(MiniCPMVForConditionalGeneration):
    """The model with its head."""

    config_class = MiniCPMOConfig
    core_class = MiniCPMOModel

    def get_audio_features(
        self, audio_features: Tensor, audio_feature_lens: Tensor, audio_num_windows: Tensor, **keywords: Any
    ) -> Any:
        """As MiniCPMOModel's."""
        return self.model.get_audio_features(audio_features, audio_feature_lens, audio_num_windows)

    def prepare_inputs_for_generation(
        self,
        input_ids: Any,
        *arguments: Any,
        pixel_values: Tensor | None = None,
        tgt_sizes: Tensor | None = None,
        num_slices: Tensor | None = None,
        audio_features: Tensor | None = None,
        audio_feature_lens: Tensor | None = None,
        audio_num_windows: Tensor | None = None,
        mm_token_type_ids: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Media go in with the prompt alone."""
        kwargs["is_first_iteration"] = is_first_iteration
        kwargs |= {"pixel_values": pixel_values, "tgt_sizes": tgt_sizes, "num_slices": num_slices}
        made = super().prepare_inputs_for_generation(input_ids, *arguments, **kwargs)
        media = {
            "audio_features": audio_features,
            "audio_feature_lens": audio_feature_lens,
            "audio_num_windows": audio_num_windows,
            "mm_token_type_ids": mm_token_type_ids,
        }
        return made | (media if is_first_iteration else {})


register_checkpoint_conversion_mapping(
    MiniCPMOForConditionalGeneration.__name__,
    [
        WeightRenaming(r"^llm\.lm_head\.", "lm_head."),
        WeightRenaming(r"^llm\.model\.", "model.language_model."),
        WeightRenaming(r"^(vpm|resampler|apm|audio_projection_layer)\.", r"model.\1."),
    ],
    overwrite=True,
)
