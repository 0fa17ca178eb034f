"""The state space of Mamba-2 ("SSD"): a state is decayed by one number per head, and x B is added to it.

    S = exp(d A) S + d x B^T;   y = S C + D x         d > 0 is the token's step size, A < 0

Many tokens are computed in chunks (Dao and Gu, "Transformers are SSMs", 2024, section 6). Within a chunk it is
attention without a softmax: y_i = sum over j <= i of exp(G_i - G_j) (C_i B_j) d_j x_j, G the sum of d A; the state
before the chunk adds exp(G_i) S C_i.

Shapes: T tokens, B sequences, H heads, P size of a head, G groups (heads of one group share B and C), M = H / G, N size
of B and C, R chunks, L tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Longer chunks take more steps of decay for each token, shorter ones more calls; with large heads all cost the same.
_CHUNK = 32


@dataclass(frozen=True, eq=False)
class StateSpace:
    """See Recurrence. Inputs are x (H * P), B (G * N) and C (G * N) of each token side by side, then d (H).

    A state is (H, P, N).

    Attributes:
        a_H, d_H: A and D of each head, float32.
        least, most: bounds of d in `scan`. transformers applies them to prompts and not to the tokens of an answer.
    """

    groups: int
    head_dim: int
    state_dim: int
    a_H: Tensor
    d_H: Tensor
    least: float = 0.0
    most: float = float("inf")

    def _parts(self, x_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return x (T, G, M, P), B and C (T, G, N), float32."""
        heads, width = len(self.a_H), self.groups * self.state_dim
        x_TX, b_TX, c_TX = x_TC.float().split([heads * self.head_dim, width, width], dim=-1)
        x_TGMP = x_TX.unflatten(-1, (self.groups, heads // self.groups, self.head_dim))
        return x_TGMP, b_TX.unflatten(-1, (self.groups, -1)), c_TX.unflatten(-1, (self.groups, -1))

    def step(self, states_B: Tensor, *inputs: Tensor) -> Tensor:
        """Compute one token of each sequence; returns (B, H * P)."""
        x_BC, dt_BH = inputs[0], inputs[1].float()
        x_BGMP, b_BGN, c_BGN = self._parts(x_BC)
        dt_BGM = dt_BH.unflatten(-1, (self.groups, -1))
        states_BGMPN = states_B.unflatten(1, (self.groups, -1))
        states_BGMPN.mul_((dt_BH * self.a_H).exp().unflatten(-1, (self.groups, -1))[..., None, None])
        states_BGMPN.addcmul_((x_BGMP * dt_BGM.unsqueeze(-1)).unsqueeze(-1), b_BGN[:, :, None, None])
        out_BGX = torch.matmul(states_BGMPN.flatten(2, 3), c_BGN.unsqueeze(-1)).squeeze(-1)
        out_BGMP = out_BGX.view_as(x_BGMP) + x_BGMP * self.d_H.view(self.groups, -1, 1)
        return out_BGMP.flatten(1).to(x_BC.dtype)

    def scan(self, state: Tensor, *inputs: Tensor) -> Tensor:
        """Compute consecutive tokens of one sequence; returns (T, H * P)."""
        x_TC, count = inputs[0], len(inputs[0])
        length = min(_CHUNK, count)
        dt_TH = inputs[1].float().clamp(self.least, self.most)
        x_TGMP, b_TGN, c_TGN = self._parts(x_TC)
        dt_TGM = dt_TH.unflatten(-1, (self.groups, -1))
        # Padding neither decays nor adds: d is 0 there.
        written_GMRLP = _chunks(x_TGMP * dt_TGM.unsqueeze(-1), length).permute(2, 3, 0, 1, 4)
        steps_GMRL = _chunks(dt_TGM * self.a_H.view(self.groups, -1), length).permute(2, 3, 0, 1)
        b_GRLN, c_GRLN = (_chunks(each, length).permute(2, 0, 1, 3).contiguous() for each in (b_TGN, c_TGN))
        # Differences of sums, of which only float64 keeps the small ones.
        sums_GMRL = steps_GMRL.double().cumsum(-1)
        seen_GRLL = torch.matmul(c_GRLN, b_GRLN.mT)
        later_LL = torch.ones(length, length, dtype=torch.bool, device=x_TC.device).triu(1)
        decay_GMRLL = (sums_GMRL.unsqueeze(-1) - sums_GMRL.unsqueeze(-2)).float().masked_fill_(later_LL, -torch.inf)
        out_GMRLP = torch.matmul(decay_GMRLL.exp_().mul_(seen_GRLL.unsqueeze(1)), written_GMRLP)
        before_GMRL1 = sums_GMRL.float().exp().unsqueeze(-1)
        written_GMRLP = written_GMRLP * (sums_GMRL[..., -1:] - sums_GMRL).float().exp().unsqueeze(-1)
        state_GXN = state.view(self.groups, -1, self.state_dim)
        for chunk in range(b_GRLN.shape[1]):
            given_GLX = torch.matmul(c_GRLN[:, chunk], state_GXN.mT)
            given_GMLP = given_GLX.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            out_GMRLP[:, :, chunk].addcmul_(given_GMLP, before_GMRL1[:, :, chunk])
            added_GLX = written_GMRLP[:, :, chunk].transpose(1, 2).flatten(2)
            decay_GM11 = before_GMRL1[:, :, chunk, -1:]
            state_GXN.unflatten(1, (-1, self.head_dim)).mul_(decay_GM11)
            state_GXN.baddbmm_(added_GLX.mT, b_GRLN[:, chunk])
        out_TGMP = out_GMRLP.flatten(2, 3)[:, :, :count].permute(2, 0, 1, 3)
        return (out_TGMP + x_TGMP * self.d_H.view(self.groups, -1, 1)).flatten(1).to(x_TC.dtype)


def _chunks(x: Tensor, length: int) -> Tensor:
    """(T, ...) -> (R, L, ...), the last chunk padded with zeros."""
    padded = torch.nn.functional.pad(x, (0, 0) * (x.dim() - 1) + (0, -len(x) % length))
    return padded.unflatten(0, (-1, length))
