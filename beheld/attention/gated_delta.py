"""The gated delta rule: a state is decayed, what it says of a key is read, and the difference to a value is written.

    S = exp(g) S;   S = S + k (beta (v - k S))^T;   o = q S

Many tokens are computed in chunks (Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence
Length", 2024, and "Gated Delta Networks", 2024). Within a chunk, what each token writes depends on what all before it
write; that is a triangular system, solved for all chunks at once:

    (I + A) U = beta V,  (I + A) W = beta exp(G) K,  A_ij = beta_i exp(G_i - G_j) k_i k_j for j < i, G the sum of g

and a chunk then writes U - W S, S being the state before it.

Shapes: T tokens, B sequences, H heads of values, J heads of keys and queries (each for H / J of the others), K and V
sizes of a key and a value, N chunks, L tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

_CHUNK = 64
EPSILON = 1e-6


class Gates(NamedTuple):
    """What a layer makes its tokens' decay of, (H,) each; see `decay_of`. How much is written is sigmoid(b)."""

    log_rate_H: Tensor
    offset_H: Tensor


def decay_of(a_TH: Tensor, log_rate_H: Tensor, offset_H: Tensor) -> Tensor:
    """Return g = -exp(log_rate) softplus(a + offset), float32."""
    return -log_rate_H.float().exp() * nn.functional.softplus(a_TH.float() + offset_H)


@dataclass(frozen=True)
class GatedDelta:
    """See Recurrence. Inputs are q (J * K), k (J * K) and v (H * V) of each token side by side, then g and beta (H)."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int

    def _parts(self, x_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q and k, normalized, and v: (T, H, K or V), float32."""
        size = self.key_heads * self.key_dim
        q_TC, k_TC, v_TC = x_TC.float().split([size, size, self.value_heads * self.value_dim], dim=-1)
        q_TJK, k_TJK = (each.unflatten(-1, (self.key_heads, self.key_dim)) for each in (q_TC, k_TC))
        share = self.value_heads // self.key_heads
        q_THK = (unit(q_TJK) * self.key_dim**-0.5).repeat_interleave(share, dim=1)
        k_THK = unit(k_TJK).repeat_interleave(share, dim=1)
        return q_THK, k_THK, v_TC.unflatten(-1, (self.value_heads, self.value_dim))

    def step(self, states_B: Tensor, *inputs: Tensor) -> Tensor:
        """Compute one token of each sequence; states are (B, H, K, V)."""
        x_BC, g_BH, beta_BH = inputs[0], inputs[1].float(), inputs[2].float()
        q_BHK, k_BHK, v_BHV = self._parts(x_BC)
        states_B.mul_(g_BH.exp()[..., None, None])
        said_BHV = torch.matmul(k_BHK.unsqueeze(-2), states_B).squeeze(-2)
        delta_BHV = (v_BHV - said_BHV) * beta_BH.unsqueeze(-1)
        states_B.addcmul_(k_BHK.unsqueeze(-1), delta_BHV.unsqueeze(-2))
        return torch.matmul(q_BHK.unsqueeze(-2), states_B).squeeze(-2).to(x_BC.dtype)

    def scan(self, state: Tensor, *inputs: Tensor) -> Tensor:
        """Compute consecutive tokens of one sequence; its state is (H, K, V)."""
        x_TC, count = inputs[0], len(inputs[0])
        length = min(_CHUNK, count)
        q_HNLK, k_HNLK, v_HNLV = (_chunks(each, length) for each in self._parts(x_TC))
        # Padding neither decays nor writes: g and beta are 0 there.
        g_HNL, beta_HNL = (_chunks(each.float().unsqueeze(-1), length).squeeze(-1) for each in inputs[1:])
        sums_HNL = g_HNL.cumsum(-1)
        later = torch.ones(length, length, dtype=torch.bool, device=x_TC.device).triu(1)
        decay_HNLL = (sums_HNL.unsqueeze(-1) - sums_HNL.unsqueeze(-2)).masked_fill_(later, -torch.inf).exp_()
        beta_HNL1 = beta_HNL.unsqueeze(-1)
        system_HNLL = torch.matmul(k_HNLK * beta_HNL1, k_HNLK.mT).mul_(decay_HNLL)
        seen_HNL1 = sums_HNL.exp().unsqueeze(-1)
        given_HNL = torch.cat([v_HNLV * beta_HNL1, k_HNLK * (beta_HNL1 * seen_HNL1)], dim=-1)
        # The diagonal is taken to be 1, whatever stands there.
        solved_HNL = torch.linalg.solve_triangular(system_HNLL, given_HNL, upper=False, unitriangular=True)
        u_HNLV, w_HNLK = solved_HNL.split([self.value_dim, self.key_dim], dim=-1)
        within_HNLL = torch.matmul(q_HNLK, k_HNLK.mT).mul_(decay_HNLL)
        q_HNLK = q_HNLK * seen_HNL1
        left_HNLK = k_HNLK * (sums_HNL[..., -1:] - sums_HNL).exp().unsqueeze(-1)
        rest_HN11 = sums_HNL[..., -1, None, None].exp()
        out_HNLV = torch.empty_like(v_HNLV)
        for chunk in range(v_HNLV.shape[1]):
            written_HLV = u_HNLV[:, chunk] - w_HNLK[:, chunk] @ state
            out_HNLV[:, chunk] = q_HNLK[:, chunk] @ state + within_HNLL[:, chunk] @ written_HLV
            state.mul_(rest_HN11[:, chunk]).add_(left_HNLK[:, chunk].mT @ written_HLV)
        return out_HNLV.flatten(1, 2)[:, :count].transpose(0, 1).to(x_TC.dtype)


def unit(x: Tensor) -> Tensor:
    """Return vectors of length one, along the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON)


def _chunks(x_THC: Tensor, length: int) -> Tensor:
    """(T, H, C) -> (H, N, L, C), the last chunk padded with zeros."""
    padded_THC = torch.nn.functional.pad(x_THC, (0, 0, 0, 0, 0, -len(x_THC) % length))
    return padded_THC.unflatten(0, (-1, length)).permute(2, 0, 1, 3).contiguous()
