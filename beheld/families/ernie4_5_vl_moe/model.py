"""ERNIE 4.5 VL: separate experts for text and media tokens, so every layer receives the kind of each token.

After its tower, video frames are joined in pairs, which takes their sizes. Sizes stay on the host, and the method that
joins frames is replaced by an equivalent that copies nothing to the device.

Shapes: T tokens of a step, H hidden size, E embeddings of a tower call, K experts of a token, P patches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe import Ernie4_5_VLMoeMoeBlock

from beheld.families.model import FamilyModel, PackedTower
from beheld.models.surgery.operation import Changes
from beheld.platform.registry import platform_of

# A base class's annotation differs from what it returns.
_Block: Any = Ernie4_5_VLMoeMoeBlock


class TypedExperts(_Block):
    """The model's expert block without data-dependent sizes, so that it never synchronizes.

    Each set of experts receives all tokens; tokens of the other kind choose an expert that does not exist, which makes
    transformers' experts skip them.
    """

    def __init__(self, block: Any) -> None:
        nn.Module.__init__(self)
        self.num_experts = block.num_experts
        # Whether any token is a media token may then be checked at each call.
        self.synchronous = platform_of(next(block.parameters()).device).synchronous
        self.text_moe, self.vision_moe = block.text_moe, block.vision_moe
        self.shared_experts = block.shared_experts

    def forward(self, hidden_states: Tensor, moe_mm_token_type_ids: Tensor | None = None) -> tuple[Tensor, None]:
        """Apply hidden_states (1, T, H), kinds (1, T), true for media -> (1, T, H), and no router logits."""
        x_TH = hidden_states.flatten(0, 1)
        assert moe_mm_token_type_ids is not None, "tokens of unknown kind"
        seen_T = moe_mm_token_type_ids.flatten().bool()
        if not self.synchronous or seen_T.any():
            out_TH = self._routed(self.text_moe, x_TH, seen_T) + self._routed(self.vision_moe, x_TH, ~seen_T)
        else:
            out_TH = self._routed(self.text_moe, x_TH, seen_T)
        if self.shared_experts is not None:
            out_TH = out_TH + self.shared_experts(x_TH)
        return out_TH.view(hidden_states.shape), None

    def _routed(self, part: Any, x_TH: Tensor, others_T: Tensor) -> Tensor:
        """Return one set of experts' output for its tokens; zero for the others."""
        _, weights_TK, experts_TK = part.gate(x_TH)
        experts_TK = experts_TK.masked_fill(others_T.unsqueeze(1), self.num_experts)
        out_TH: Tensor = part.experts(x_TH, experts_TK, weights_TK.masked_fill(others_T.unsqueeze(1), 0.0))
        return out_TH


@dataclass(frozen=True)
class _Pairs:
    """Joins every second frame with the next one, and an image with itself; replaces the model's method.

    Attributes:
        merge: patches merged per side of a frame.
    """

    merge: int

    def __call__(self, hidden_PH: Tensor, grid_I3: Tensor) -> Tensor:
        """Join (P, H) -> (fewer, 2 H); `grid_I3` on the host."""
        grids = grid_I3.tolist()
        counts = [frames * height * width // self.merge**2 for frames, height, width in grids]
        firsts, seconds = [], []
        for part_PH, (frames, _, _) in zip(hidden_PH.split(counts), grids, strict=True):
            clip = part_PH.unflatten(0, (frames, -1))
            # The last of an odd number of frames has no partner and is left out.
            firsts.append(clip[: frames - 1 : 2].flatten(0, 1) if frames > 1 else part_PH)
            seconds.append(clip[1::2].flatten(0, 1) if frames > 1 else part_PH)
        return torch.cat((torch.cat(firsts), torch.cat(seconds)), dim=-1)


class Kinds:
    """Carries a token's kind as one extra column of its row: one for tokens of an image or video.

    Tokens around an image, whose embeddings are the text's, also count as media.
    """

    width = 1

    def __init__(self, model: Any, changes: Changes) -> None:
        self._core = model.model
        config = model.config
        around = (
            config.image_start_token_id,
            config.image_end_token_id,
            config.video_start_token_id,
            config.video_end_token_id,
        )
        self._around_N = torch.tensor(around, device=model.get_input_embeddings().weight.device)

    def of_tokens(self, ids_T: Tensor, embeds_TH: Tensor) -> Tensor | None:
        """Return one for the tokens around images and videos: (T, 1)."""
        return torch.isin(ids_T, self._around_N).unsqueeze(1).to(embeds_TH.dtype)

    def of_media(self, result: Any) -> Tensor | None:
        """Return ones (E, 1)."""
        return self.of_given(torch.cat(tuple(result.pooler_output)))

    def of_given(self, embeds_EH: Tensor) -> Tensor | None:
        """Return ones (E, 1)."""
        return embeds_EH.new_ones((len(embeds_EH), 1))

    def hidden(self, embeds_TH: Tensor, extra_TW: Tensor, positions: Tensor) -> Tensor:
        """Run the layers with the kinds as a keyword."""
        output = self._core(
            inputs_embeds=embeds_TH.unsqueeze(0),
            moe_mm_token_type_ids=(extra_TW[:, 0] > 0).unsqueeze(0),
            position_ids=positions,
            use_cache=False,
        )
        hidden_TH: Tensor = output.last_hidden_state[0]
        return hidden_TH


def adapt(model: Any, changes: Changes) -> None:
    """Replace the expert blocks and the method that joins frames; see FamilyModel.adapt."""
    resampler = model.model.resampler_model
    if hasattr(resampler, "spatial_merge_size"):
        changes.set(resampler, "_temporal_slicing", _Pairs(resampler.spatial_merge_size))
    for layer in model.model.language_model.layers:
        if isinstance(getattr(layer, "mlp", None), Ernie4_5_VLMoeMoeBlock):
            for part in (layer.mlp.text_moe, layer.mlp.vision_moe):
                changes.set(part.experts, "_is_expert_parallel", True)
            changes.exchange(layer, "mlp", TypedExperts(layer.mlp), ("text_moe", "vision_moe", "shared_experts"))


MODEL = FamilyModel(adapt=adapt, extra_columns=Kinds, packed=PackedTower(), packs_attention=True)
