"""Mixers that run state spaces on the cache, with the weights of transformers' modules.

Shapes: T tokens of a step, H hidden size, I inner size, C channels of the convolution, M heads, N size of B and C.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from beheld.attention.recurrent import recur
from beheld.attention.selective_scan import SelectiveScan
from beheld.attention.ssd import StateSpace
from beheld.models.recurrent import RecurrentMixer
from beheld.models.surgery.operation import Changes
from beheld.models.surgery.parts import text_model


class HeadMixer(RecurrentMixer):
    """A mixer of Mamba-2, for packed tokens of several sequences.

    Args:
        mixer: the module whose weights it takes over, under the same names.
    """

    parts = ("in_proj", "conv1d", "dt_bias", "A_log", "D", "norm", "out_proj")
    in_proj: Any
    conv1d: Any
    dt_bias: Tensor
    A_log: Tensor
    D: Tensor
    norm: Any
    out_proj: Any

    def __init__(self, mixer: Any) -> None:
        super().__init__()
        self.layer_idx = mixer.layer_idx
        for name in self.parts:
            setattr(self, name, getattr(mixer, name))
        self.activate: Callable[[Tensor], Tensor] = mixer.act
        self.sizes = [mixer.intermediate_size, mixer.conv_dim, mixer.num_heads]
        self.groups, self.head_dim, self.state_dim = mixer.n_groups, mixer.head_dim, mixer.ssm_state_size
        self.least, self.most = mixer.time_step_limit

    def project(self, x_TH: Tensor) -> Tensor:
        """Return gates, the convolution's inputs and step sizes side by side: (T, I + C + M)."""
        made: Tensor = self.in_proj(x_TH)
        return made

    def gated(self, out_TI: Tensor, gate_TI: Tensor) -> Tensor:
        """Return normalized outputs (T, I)."""
        made: Tensor = self.norm(out_TI.unsqueeze(0), gate_TI.unsqueeze(0))[0]
        return made

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        """Compute (1, T, H) -> (1, T, H); other arguments concern padding and caches, which do not exist here."""
        gate_TI, x_TC, dt_TM = self.project(hidden_states[0]).split(self.sizes, dim=-1)
        dt_TM = nn.functional.softplus(dt_TM.float() + self.dt_bias.float())
        space = StateSpace(
            self.groups, self.head_dim, self.state_dim, -self.A_log.float().exp(), self.D.float(), self.least, self.most
        )
        weight_CL, bias_C = self.conv1d.weight.squeeze(1), self.conv1d.bias
        out_TI = recur(self.layer_idx, x_TC, weight_CL, bias_C, lambda y_TC: (self.activate(y_TC), dt_TM), space)
        mixed: Tensor = self.out_proj(self.gated(out_TI, gate_TI).to(hidden_states.dtype)).unsqueeze(0)
        return mixed


class ChannelMixer(RecurrentMixer):
    """A mixer of Mamba-1, for packed tokens of several sequences; with norms of step sizes, B and C in some families.

    Args:
        mixer: the module whose weights it takes over, under the same names.
    """

    norms = ("dt_layernorm", "b_layernorm", "c_layernorm")
    in_proj: Any
    conv1d: Any
    x_proj: Any
    dt_proj: Any
    A_log: Tensor
    D: Tensor
    out_proj: Any

    def __init__(self, mixer: Any) -> None:
        super().__init__()
        self.layer_idx = mixer.layer_idx
        own = tuple(name for name in self.norms if hasattr(mixer, name))
        self.parts = ("in_proj", "conv1d", "x_proj", "dt_proj", "A_log", "D", "out_proj", *own)
        self.normalizes = bool(own)
        for name in self.parts:
            setattr(self, name, getattr(mixer, name))
        self.activate: Callable[[Tensor], Tensor] = mixer.act
        self.sizes = [mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size]

    def inputs(self, y_TI: Tensor) -> tuple[Tensor, ...]:
        """Return x (T, I), step sizes (T, I), B and C (T, N) of convolved tokens."""
        x_TI = self.activate(y_TI)
        given = self.x_proj(x_TI).split(self.sizes, dim=-1)
        if self.normalizes:
            given = tuple(getattr(self, name)(each) for name, each in zip(self.norms, given, strict=True))
        dt_TI = nn.functional.softplus(self.dt_proj(given[0]).float())
        return x_TI, dt_TI, given[1], given[2]

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        """Compute (1, T, H) -> (1, T, H); other arguments concern padding and caches, which do not exist here."""
        x_TI, gate_TI = self.in_proj(hidden_states[0]).chunk(2, dim=-1)
        scan = SelectiveScan(-self.A_log.float().exp(), self.D.float())
        out_TI = recur(self.layer_idx, x_TI, self.conv1d.weight.squeeze(1), self.conv1d.bias, self.inputs, scan)
        mixed: Tensor = self.out_proj((out_TI * nn.functional.silu(gate_TI)).unsqueeze(0))
        return mixed


def replace_mixers(model: Any, changes: Changes, kind: type[HeadMixer] | type[ChannelMixer]) -> None:
    """Replace all mixers of the text model, which are the modules with an `A_log`."""
    for parent in list(text_model(model).modules()):
        for name, mixer in list(parent.named_children()):
            if hasattr(mixer, "A_log"):
                made = kind(mixer)
                changes.exchange(parent, name, made, made.parts)


def adapt_heads(model: Any, changes: Changes) -> None:
    """Replace the mixers of Mamba-2; see FamilyModel.adapt."""
    replace_mixers(model, changes, HeadMixer)


def adapt_channels(model: Any, changes: Changes) -> None:
    """Replace the mixers of Mamba-1; see FamilyModel.adapt."""
    replace_mixers(model, changes, ChannelMixer)
