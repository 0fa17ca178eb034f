"""RWKV-4's recurrence: a mean of all values so far, weighted by their keys and by how long ago they were.

    y = (a + exp(u + k) v) / (b + exp(u + k));   a = exp(-w) a + exp(k) v;   b = exp(-w) b + exp(k)

a and b are kept relative to the largest exponent m so far. A state is (3, A): a, b and m; where b is 0, there is none.

Shapes: T tokens, B sequences, A channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_LOWEST = -1e38


@dataclass(frozen=True, eq=False)
class WeightedMean:
    """See Recurrence. Inputs are k (A) and v (A) of each token.

    Attributes:
        decay_A, first_A: w > 0 and u of each channel, float32.
    """

    decay_A: Tensor
    first_A: Tensor

    def step(self, states_B: Tensor, *inputs: Tensor) -> Tensor:
        """Compute one token of each sequence; states are (B, 3, A)."""
        k_BA, v_BA = (each.float() for each in inputs)
        a_BA, b_BA, m_BA = states_B.unbind(1)
        m_BA = torch.where(b_BA > 0, m_BA, _LOWEST)
        most_BA = torch.maximum(m_BA, k_BA + self.first_A)
        old_BA, new_BA = (m_BA - most_BA).exp(), (k_BA + self.first_A - most_BA).exp()
        out_BA = (old_BA * a_BA + new_BA * v_BA) / (old_BA * b_BA + new_BA)
        most_BA = torch.maximum(m_BA - self.decay_A, k_BA)
        old_BA, new_BA = (m_BA - self.decay_A - most_BA).exp(), (k_BA - most_BA).exp()
        states_B.copy_(torch.stack([old_BA * a_BA + new_BA * v_BA, old_BA * b_BA + new_BA, most_BA], dim=1))
        return out_BA.to(inputs[0].dtype)

    def scan(self, state: Tensor, *inputs: Tensor) -> Tensor:
        """Compute consecutive tokens of one sequence in turn; its state is (3, A)."""
        states_1 = state.unsqueeze(0)
        return torch.cat([self.step(states_1, *(each[t : t + 1] for each in inputs)) for t in range(len(inputs[0]))])


@dataclass(frozen=True)
class Stateless:
    """See Recurrence: it hands its first input on, and leaves its state as it is."""

    def step(self, states_B: Tensor, *inputs: Tensor) -> Tensor:
        """Return the input."""
        return inputs[0]

    def scan(self, state: Tensor, *inputs: Tensor) -> Tensor:
        """Return the input."""
        return inputs[0]
