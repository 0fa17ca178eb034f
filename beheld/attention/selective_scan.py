"""The state space of Mamba-1: every channel has a state of its own, each number of which decays at its own rate.

    s = exp(d A) s + d x B;   y = s C + D x         d > 0 is the channel's step size, A < 0

Decays differ within a channel, so many tokens are not a matrix product; Gu and Dao, "Mamba: Linear-Time Sequence
Modeling with Selective State Spaces", 2023, compute them in turn. So do we, within chunks whose decays and additions
are made at once.

Shapes: T tokens, B sequences, I channels, N numbers of a channel's state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# The most numbers that decays and additions of a chunk take.
_CHUNK_NUMBERS = 1 << 21


@dataclass(frozen=True, eq=False)
class SelectiveScan:
    """See Recurrence. Inputs are x (I), d (I), B (N) and C (N) of each token; a state is (I, N).

    Attributes:
        a_IN, d_I: A and D of each channel, float32.
    """

    a_IN: Tensor
    d_I: Tensor

    def step(self, states_B: Tensor, *inputs: Tensor) -> Tensor:
        """Compute one token of each sequence; returns (B, I)."""
        x_BI, dt_BI, b_BN, c_BN = (each.float() for each in inputs)
        states_B.mul_((dt_BI.unsqueeze(-1) * self.a_IN).exp_())
        states_B.addcmul_((dt_BI * x_BI).unsqueeze(-1), b_BN.unsqueeze(-2))
        out_BI = torch.matmul(states_B, c_BN.unsqueeze(-1)).squeeze(-1)
        return out_BI.addcmul_(x_BI, self.d_I).to(inputs[0].dtype)

    def scan(self, state: Tensor, *inputs: Tensor) -> Tensor:
        """Compute consecutive tokens of one sequence; returns (T, I)."""
        x_TI, dt_TI, b_TN, c_TN = (each.float() for each in inputs)
        length = max(1, _CHUNK_NUMBERS // self.a_IN.numel())
        out_TI = torch.empty_like(x_TI)
        for low in range(0, len(x_TI), length):
            own = slice(low, low + length)
            decay_LIN = (dt_TI[own].unsqueeze(-1) * self.a_IN).exp_()
            states_LIN = (dt_TI[own] * x_TI[own]).unsqueeze(-1) * b_TN[own].unsqueeze(-2)
            before_IN = state
            for now_IN, decay_IN in zip(states_LIN, decay_LIN, strict=True):
                before_IN = now_IN.addcmul_(before_IN, decay_IN)
            state.copy_(before_IN)
            out_TI[own] = torch.matmul(states_LIN, c_TN[own].unsqueeze(-1)).squeeze(-1)
        return out_TI.addcmul_(x_TI, self.d_I).to(inputs[0].dtype)
