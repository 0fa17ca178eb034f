"""Ultravox's model: Whisper's encoder, a projector of stacked frames, and transformers' Llama.

Shapes: C chunks of all audio items, N items, M mel bins, F feature frames, P encoder positions, D the encoder's width,
T embeddings of a chunk, E of all chunks, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu
from transformers import AutoModel, PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from beheld.families._shared.modeling import HeadedModel, with_media
from beheld.families._shared.whisper import ShortWhisperEncoder, up_to
from beheld.families.ultravox.config import UltravoxConfig


class UltravoxProjector(nn.Module):
    """Makes one embedding of `stack_factor` positions of the encoder."""

    def __init__(self, config: UltravoxConfig) -> None:
        super().__init__()
        self.stack = config.stack_factor
        width, hidden = config.audio_config.d_model * self.stack, config.text_config.hidden_size
        middle = config.hidden_size // 2
        self.ln_pre = LlamaRMSNorm(width)
        self.linear_1 = nn.Linear(width, config.hidden_size, bias=False)
        self.linear_2 = nn.Linear(middle, hidden, bias=False)
        self.ln_mid = LlamaRMSNorm(middle) if config.projector_ln_mid else nn.Identity()
        self.ln_post = nn.Identity() if config.projector_ln_mid else LlamaRMSNorm(hidden)

    def forward(self, features: Tensor) -> Tensor:
        """Return the embeddings (C, T, H) of features (C, P, D); zeros fill up the last of each chunk."""
        padded = pad(features, (0, 0, 0, -features.shape[1] % self.stack))
        # The second half gates the first.
        x, gate = self.linear_1(self.ln_pre(padded.unflatten(1, (-1, self.stack)).flatten(2))).chunk(2, dim=-1)
        embeds: Tensor = self.ln_post(self.linear_2(self.ln_mid(silu(gate) * x)))
        return embeds


class UltravoxPreTrainedModel(PreTrainedModel):
    """What transformers' loader and its attention interface require of a model."""

    config_class = UltravoxConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_attention_backend = True


class UltravoxCore(UltravoxPreTrainedModel):
    """Encoder, projector and text model."""

    def __init__(self, config: UltravoxConfig) -> None:
        super().__init__(config)
        self.audio_tower = ShortWhisperEncoder(config.audio_config)
        self.multi_modal_projector = UltravoxProjector(config)
        self.language_model = AutoModel.from_config(config.text_config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the text's embeddings."""
        return self.language_model.get_input_embeddings()

    def get_audio_features(
        self, audio_values: Tensor, audio_lens: Tensor, audio_num_chunks: Tensor, **keywords: Any
    ) -> Any:
        """Return the embeddings (E, H) of all items, chunk after chunk, as `pooler_output`.

        The last of several chunks is filled up with zeros, whose features enter its last embedding; a lone chunk is
        not, and what a batch adds to it is left out.

        Args:
            audio_values: mel frames (C, M, F).
            audio_lens: (C,), the frames of each chunk.
            audio_num_chunks: (N,), the chunks of each item.
        """
        lengths = audio_lens.tolist()
        window = 2 * self.config.audio_config.max_source_positions
        alone = [count == 1 for count in audio_num_chunks.tolist() for _ in range(count)]
        frames = [length if lone else window for length, lone in zip(lengths, alone, strict=True)]
        found: dict[int, Tensor] = {}
        for width in dict.fromkeys(frames):
            own = [index for index, other in enumerate(frames) if other == width]
            seen = up_to([lengths[index] for index in own], width, audio_values.device)
            features = self.audio_tower(audio_values[own, :, :width], seen)
            found |= dict(zip(own, self.multi_modal_projector(features), strict=True))
        step = 2 * self.config.stack_factor
        parts = [found[index][: -(-length // step)] for index, length in enumerate(lengths)]
        return BaseModelOutputWithPooling(pooler_output=torch.cat(parts))

    def forward(
        self,
        input_ids: Tensor | None = None,
        audio_values: Tensor | None = None,
        audio_lens: Tensor | None = None,
        audio_num_chunks: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **keywords: Any,
    ) -> Any:
        """As the text model's, with audio in the places of the placeholders, in the prompt's order."""
        token = self.config.audio_token_id
        if inputs_embeds is None:
            assert input_ids is not None
            # The placeholder's id may lie beyond the table of embeddings.
            inputs_embeds = self.get_input_embeddings()(input_ids.masked_fill(input_ids == token, 0))
        if audio_values is not None:
            assert audio_lens is not None
            assert audio_num_chunks is not None
            heard = self.get_audio_features(audio_values, audio_lens, audio_num_chunks).pooler_output
            inputs_embeds = with_media(inputs_embeds, input_ids, token, [heard])
        return self.language_model(inputs_embeds=inputs_embeds, **keywords)


class UltravoxForConditionalGeneration(UltravoxPreTrainedModel, HeadedModel):
    """The model with its head."""

    _tied_weights_keys = {"lm_head.weight": "model.language_model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: UltravoxConfig) -> None:
        super().__init__(config)
        self.model = UltravoxCore(config)
        text = config.text_config
        self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
        self.post_init()

    def get_audio_features(
        self, audio_values: Tensor, audio_lens: Tensor, audio_num_chunks: Tensor, **keywords: Any
    ) -> Any:
        """As UltravoxCore's."""
        return self.model.get_audio_features(audio_values, audio_lens, audio_num_chunks)

    def prepare_inputs_for_generation(
        self,
        input_ids: Any,
        *arguments: Any,
        audio_values: Tensor | None = None,
        audio_lens: Tensor | None = None,
        audio_num_chunks: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Audio goes in with the prompt alone."""
        kwargs["is_first_iteration"] = is_first_iteration
        parent: Any = super()
        made: dict[str, Any] = parent.prepare_inputs_for_generation(input_ids, *arguments, **kwargs)
        media = {"audio_values": audio_values, "audio_lens": audio_lens, "audio_num_chunks": audio_num_chunks}
        return made | (media if is_first_iteration else {})


register_checkpoint_conversion_mapping(
    UltravoxForConditionalGeneration.__name__,
    [
        WeightRenaming(r"^language_model\.lm_head\.", "lm_head."),
        WeightRenaming(r"^language_model\.model\.", "model.language_model."),
        WeightRenaming(r"^audio_tower\.", "model.audio_tower."),
        WeightRenaming(r"^multi_modal_projector\.", "model.multi_modal_projector."),
    ],
    overwrite=True,
)
