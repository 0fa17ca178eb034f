"""Mixers that run the gated delta rule on the cache, with the weights of transformers' modules.

Shapes: T tokens of a step, H hidden size, M value heads, V size of a value.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from beheld.attention.delta_rule import delta_rule
from beheld.attention.gated_delta import GatedDelta, decay_of
from beheld.models.recurrent import RecurrentMixer
from beheld.models.surgery.operation import Changes

_PARTS = ("conv1d", "dt_bias", "A_log", "norm", "out_proj")


class DeltaMixer(RecurrentMixer):
    """The model's mixer, for packed tokens of several sequences.

    Args:
        mixer: the module whose weights it takes over, under the same names.
    """

    conv1d: Any
    dt_bias: Tensor
    A_log: Tensor
    norm: Any
    out_proj: Any
    in_proj_qkv: Any
    in_proj_z: Any
    in_proj_b: Any
    in_proj_a: Any
    compiles = True
    parts: tuple[str, ...] = _PARTS
    projections: tuple[str, ...] = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")

    def __init__(self, mixer: Any) -> None:
        super().__init__()
        self.layer_idx = mixer.layer_idx
        for name in (*self.projections, *self.parts):
            setattr(self, name, getattr(mixer, name))
        self.value_dim = mixer.head_v_dim
        assert mixer.activation == "silu", "the convolution's activation is SiLU in all known checkpoints"
        self.recurrence = GatedDelta(mixer.num_k_heads, mixer.head_k_dim, mixer.num_v_heads, mixer.head_v_dim)

    def project(self, x_TH: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k and v side by side (T, C), z (T, M, V), b and a (T, M)."""
        # In the order in which they are joined (models/surgery/joined.py).
        x_TC = self.in_proj_qkv(x_TH)
        z_TMV = self.in_proj_z(x_TH).unflatten(-1, (-1, self.value_dim))
        return x_TC, z_TMV, self.in_proj_b(x_TH), self.in_proj_a(x_TH)

    def strength(self, b_TM: Tensor) -> Tensor:
        """Return how much of a token's difference is written (T, M)."""
        return b_TM.sigmoid()

    def project_out(self, out_TMV: Tensor, z_TMV: Tensor) -> Tensor:
        """Norm, gate and project what was read: (T, M, V) twice -> (1, T, H)."""
        normed_TMV = self.norm(out_TMV.reshape(-1, self.value_dim), z_TMV.reshape(-1, self.value_dim))
        mixed: Tensor = self.out_proj(normed_TMV.view(1, len(out_TMV), -1))
        return mixed

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        """Compute (1, T, H) -> (1, T, H); other arguments concern padding and caches, which do not exist here."""
        x_TC, z_TMV, b_TM, a_TM = self.project(hidden_states[0])
        g_TM = decay_of(a_TM, self.A_log, self.dt_bias)
        weight_CL, bias_C = self.conv1d.weight.squeeze(1), self.conv1d.bias
        out_TMV = delta_rule(self, x_TC, g_TM, self.strength(b_TM), weight_CL, bias_C, self.recurrence)
        return self.project_out(out_TMV, z_TMV)


def replace_mixers(model: Any, changes: Changes, kind: type[DeltaMixer] = DeltaMixer) -> None:
    """Replace the mixers of all layers that have one."""
    decoder = model.get_decoder()
    for layer in getattr(decoder, "model", decoder).layers:
        if hasattr(layer, "linear_attn"):
            changes.exchange(layer, "linear_attn", kind(layer.linear_attn), (*kind.projections, *kind.parts))
