"""Kimi-Linear: mixers of Kimi's delta attention on the cache.

Shapes: T tokens of a step, H hidden size, M heads, K size of a head.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, cat, nn

from beheld.attention.channel_delta import ChannelDelta
from beheld.attention.recurrent import recur
from beheld.families.model import FamilyModel
from beheld.models.recurrent import RecurrentMixer
from beheld.models.surgery.operation import Changes
from beheld.models.surgery.parts import text_model

_PARTS = ("q_proj", "k_proj", "v_proj", "conv1d", "forget_gate", "b_proj", "o_norm", "o_proj")


class ChannelDeltaMixer(RecurrentMixer):
    """The model's mixer, for packed tokens of several sequences.

    Args:
        mixer: the module whose weights it takes over, under the same names.
    """

    q_proj: Any
    k_proj: Any
    v_proj: Any
    conv1d: Any
    forget_gate: Any
    b_proj: Any
    o_norm: Any
    o_proj: Any
    gates: tuple[str, ...] = ("g_a_proj", "g_b_proj")
    """Layers that make the gate of the output, one after another."""

    def __init__(self, mixer: Any) -> None:
        super().__init__()
        self.layer_idx = mixer.layer_idx
        for name in (*_PARTS, *self.gates):
            setattr(self, name, getattr(mixer, name))
        assert mixer.activation == "silu", "the convolution's activation is SiLU in all known checkpoints"
        self.head_dim = mixer.head_dim
        self.recurrence = ChannelDelta(mixer.num_heads, mixer.head_dim, mixer.head_dim)

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        """Compute (1, T, H) -> (1, T, H); other arguments concern padding and caches, which do not exist here."""
        x_TH = hidden_states[0]
        x_TC = cat([self.q_proj(x_TH), self.k_proj(x_TH), self.v_proj(x_TH)], dim=-1)
        g_TMK, beta_TM = self.forget_gate(hidden_states)[0], self.b_proj(x_TH).sigmoid()
        silu = nn.functional.silu
        out_TMK = recur(
            self.layer_idx,
            x_TC,
            self.conv1d.weight.squeeze(1),
            self.conv1d.bias,
            lambda y_TC: (silu(y_TC), g_TMK, beta_TM),
            self.recurrence,
        )
        gate_TC = x_TH
        for name in self.gates:
            gate_TC = getattr(self, name)(gate_TC)
        gate_TMK = gate_TC.unflatten(-1, (-1, self.head_dim))
        mixed: Tensor = self.o_proj(self.o_norm(out_TMK, gate_TMK).flatten(1)).unsqueeze(0)
        return mixed


def replace_mixers(model: Any, changes: Changes, kind: type[ChannelDeltaMixer] = ChannelDeltaMixer) -> None:
    """Replace the mixers of all layers that have one."""
    for layer in text_model(model).layers:
        if hasattr(layer.self_attn, "forget_gate"):
            changes.exchange(layer, "self_attn", kind(layer.self_attn), (*_PARTS, *kind.gates))


def adapt(model: Any, changes: Changes) -> None:
    """Replace the mixers; see FamilyModel.adapt."""
    replace_mixers(model, changes)


MODEL = FamilyModel(adapt=adapt, plain_head=True)
