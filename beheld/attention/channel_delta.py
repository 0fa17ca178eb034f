"""The delta rule whose gate decays every channel of a key at a rate of its own (Kimi's delta attention).

    S = exp(g) S;   S = S + k (beta (v - k S))^T;   o = q S        g has a number for each row of S

As in gated_delta.py, tokens are computed in chunks. The decay between two tokens differs by channel, so it cannot be
taken out of their product; chunks are short, and computed in turn:

    A_ij = beta_i sum over c of k_ic k_jc exp(G_ic - G_jc) for j < i, G the sum of g

Shapes: T tokens, B sequences, H heads, K and V sizes of a key and a value, L tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from beheld.attention.gated_delta import unit

_CHUNK = 16


@dataclass(frozen=True)
class ChannelDelta:
    """See Recurrence. Inputs are q (H * K), k (H * K) and v (H * V) of each token side by side, g (H, K), beta (H)."""

    heads: int
    key_dim: int
    value_dim: int

    def _parts(self, x_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q and k, normalized, and v: (T, H, K or V), float32."""
        size = self.heads * self.key_dim
        q_THK, k_THK, v_THV = (
            each.unflatten(-1, (self.heads, -1))
            for each in x_TC.float().split([size, size, self.heads * self.value_dim], dim=-1)
        )
        return unit(q_THK) * self.key_dim**-0.5, unit(k_THK), v_THV

    def step(self, states_B: Tensor, *inputs: Tensor) -> Tensor:
        """Compute one token of each sequence; states are (B, H, K, V)."""
        x_BC, g_BHK, beta_BH = inputs[0], inputs[1].float(), inputs[2].float()
        q_BHK, k_BHK, v_BHV = self._parts(x_BC)
        states_B.mul_(g_BHK.exp().unsqueeze(-1))
        said_BHV = torch.matmul(k_BHK.unsqueeze(-2), states_B).squeeze(-2)
        states_B.addcmul_(k_BHK.unsqueeze(-1), ((v_BHV - said_BHV) * beta_BH.unsqueeze(-1)).unsqueeze(-2))
        return torch.matmul(q_BHK.unsqueeze(-2), states_B).squeeze(-2).to(x_BC.dtype)

    def scan(self, state: Tensor, *inputs: Tensor) -> Tensor:
        """Compute consecutive tokens of one sequence; its state is (H, K, V)."""
        x_TC, g_THK, beta_TH = inputs[0], inputs[1].float(), inputs[2].float()
        parts = (*self._parts(x_TC), g_THK, beta_TH.unsqueeze(-1))
        out = []
        for low in range(0, len(x_TC), _CHUNK):
            q_HLK, k_HLK, v_HLV, g_HLK, beta_HL1 = (each[low : low + _CHUNK].transpose(0, 1) for each in parts)
            sums_HLK = g_HLK.cumsum(1)
            later_LL = torch.ones(sums_HLK.shape[1], sums_HLK.shape[1], dtype=torch.bool, device=x_TC.device).triu(1)
            decay_HLLK = sums_HLK.unsqueeze(2) - sums_HLK.unsqueeze(1)
            decay_HLLK = decay_HLLK.masked_fill_(later_LL[None, :, :, None], -torch.inf).exp_()
            system_HLL = torch.einsum("hik,hjk,hijk->hij", k_HLK * beta_HL1, k_HLK, decay_HLLK)
            within_HLL = torch.einsum("hik,hjk,hijk->hij", q_HLK, k_HLK, decay_HLLK)
            seen_HLK = sums_HLK.exp()
            written_HLV = (v_HLV - (k_HLK * seen_HLK) @ state) * beta_HL1
            # The diagonal is taken to be 1, whatever stands there.
            written_HLV = torch.linalg.solve_triangular(system_HLL, written_HLV, upper=False, unitriangular=True)
            out.append((q_HLK * seen_HLK) @ state + within_HLL @ written_HLV)
            left_HLK = k_HLK * (sums_HLK[:, -1:] - sums_HLK).exp()
            state.mul_(seen_HLK[:, -1].unsqueeze(-1)).add_(left_HLK.mT @ written_HLV)
        return torch.cat(out, dim=1).transpose(0, 1).to(x_TC.dtype)
