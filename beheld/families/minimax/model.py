"""MiniMax-Text-01: mixers of lightning attention on the cache.

    S = exp(-s) S + v k^T;   o = S q        s > 0 is fixed for each head of a layer

That is the state space of Mamba-2 (attention/ssd.py) with a group for each head and steps of size one: x is v, B is k,
C is q.

Shapes: T tokens of a step, H hidden size, M heads, K size of a head.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, cat

from beheld.attention.recurrent import recur
from beheld.attention.ssd import StateSpace
from beheld.families.model import FamilyModel
from beheld.models.recurrent import RecurrentMixer
from beheld.models.surgery.operation import Changes
from beheld.models.surgery.parts import text_model

_PARTS = ("qkv_proj", "norm", "output_gate", "out_proj", "slope_rate")


class LightningMixer(RecurrentMixer):
    """The model's mixer, for packed tokens of several sequences.

    Args:
        mixer: the module whose weights it takes over, under the same names.
    """

    qkv_proj: Any
    norm: Any
    output_gate: Any
    out_proj: Any
    slope_rate: Tensor

    def __init__(self, mixer: Any) -> None:
        super().__init__()
        self.layer_idx = mixer.layer_idx
        for name in _PARTS:
            setattr(self, name, getattr(mixer, name))
        self.activate = mixer.act_fn
        self.heads, self.head_dim = mixer.num_attention_heads, mixer.head_dim

    def forward(self, hidden_states: Tensor, **options: Any) -> tuple[Tensor, None]:
        """Compute (1, T, H) -> (1, T, H); other arguments concern padding and caches, which do not exist here."""
        x_TH = hidden_states[0]
        parts_TM3K = self.activate(self.qkv_proj(x_TH)).unflatten(-1, (self.heads, 3, self.head_dim))
        q_TC, k_TC, v_TC = (parts_TM3K[:, :, each].flatten(1) for each in range(3))
        x_TC = cat([v_TC, k_TC, q_TC], dim=-1)
        slopes_M = self.slope_rate.view(-1).float()
        space = StateSpace(self.heads, self.head_dim, self.head_dim, -slopes_M, slopes_M.new_zeros(self.heads))
        ones_TM = slopes_M.new_ones(len(x_TH), self.heads)
        # A convolution of one position changes nothing.
        weight_C1 = x_TC.new_ones(x_TC.shape[1], 1)
        out_TC = recur(self.layer_idx, x_TC, weight_C1, None, lambda y_TC: (y_TC, ones_TM), space)
        mixed_TC = self.norm(out_TC.to(x_TC.dtype)) * self.output_gate(x_TH).sigmoid()
        return self.out_proj(mixed_TC).unsqueeze(0), None


def adapt(model: Any, changes: Changes) -> None:
    """Replace the mixers; see FamilyModel.adapt."""
    for layer in text_model(model).layers:
        if hasattr(layer.self_attn, "slope_rate"):
            changes.exchange(layer, "self_attn", LightningMixer(layer.self_attn), _PARTS)


MODEL = FamilyModel(adapt=adapt, plain_head=True)
