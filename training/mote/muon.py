"""The optimiser: Muon for matrices, AdamW for the rest, on fp32 masters of bf16 weights.

Muon (Keller Jordan and others, 2024) replaces the momentum of a matrix by the nearest orthogonal one, found by five
Newton-Schulz steps; matrices of one shape go together, because for a model this small launches cost more than sums.
"""

from typing import Any, TypedDict

import torch
from torch import Tensor, nn


class State(TypedDict):
    """What a run needs to go on: fp32 matrices with their momenta, the other masters, and AdamW's own state."""

    stacks: list[Tensor]
    momenta: list[Tensor]
    masters: list[Tensor]
    adam: dict[str, Any]


_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonal(momentum: Tensor) -> Tensor:
    """About the nearest matrix with all singular values near 1, for each of (N, rows, columns)."""
    a, b, c = _COEFFICIENTS
    x = momentum.to(torch.bfloat16)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(momentum.dtype)


def _gradient(weight: nn.Parameter) -> Tensor:
    assert weight.grad is not None
    return weight.grad.float()


class Muon:
    """Holds masters and moments of a model's weights; `step` moves masters and rounds them into the model."""

    def __init__(self, model: nn.Module, weight_decay: float = 0.05) -> None:
        named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
        self._decay = weight_decay
        groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
        others = []
        for name, weight in named:
            if weight.ndim == 2 and "embed_tokens" not in name and "lm_head" not in name:
                groups.setdefault(tuple(weight.shape), []).append(weight)
            else:
                others.append(weight)
        self._groups = list(groups.values())
        self._stacks = [torch.stack([weight.detach().float() for weight in group]) for group in self._groups]
        self._momenta = [torch.zeros_like(stack) for stack in self._stacks]
        self._others = others
        self._masters = [weight.detach().float().clone().requires_grad_() for weight in others]
        self._adam = torch.optim.AdamW(self._masters, betas=(0.9, 0.98), weight_decay=0.0, eps=1e-10)
        self._weights = [weight for _, weight in named]

    def step(self, rate: float, momentum: float = 0.95) -> Tensor:
        """One step at a learning rate; gradients are clipped to norm 1 and cleared. Returns their norm."""
        norm = torch.nn.utils.clip_grad_norm_(self._weights, 1.0)
        for group, stack, moment in zip(self._groups, self._stacks, self._momenta, strict=True):
            grad = torch.stack([_gradient(weight) for weight in group])
            moment.lerp_(grad, 1 - momentum)
            update = orthogonal(grad.lerp(moment, momentum))
            # 0.2 of the root of the longer side gives the update the size that AdamW's has, so one rate serves both.
            scale = 0.2 * max(stack.shape[-2:]) ** 0.5
            stack.mul_(1 - rate * self._decay).add_(update, alpha=-rate * scale)
            torch._foreach_copy_([weight.data for weight in group], list(stack))
        for master, weight in zip(self._masters, self._others, strict=True):
            master.grad = _gradient(weight)
        for settings in self._adam.param_groups:
            settings["lr"] = rate
        self._adam.step()
        torch._foreach_copy_([weight.data for weight in self._others], [master.detach() for master in self._masters])
        for weight in self._weights:
            weight.grad = None
        return norm

    def state(self) -> State:
        """Everything needed to go on exactly where this left off."""
        return {
            "stacks": self._stacks,
            "momenta": self._momenta,
            "masters": self._masters,
            "adam": self._adam.state_dict(),
        }

    def restore(self, state: State) -> None:
        """Take up a state saved by `state`, into the model too."""
        with torch.no_grad():
            pairs = (
                (self._stacks, state["stacks"]),
                (self._momenta, state["momenta"]),
                (self._masters, state["masters"]),
            )
            for own, kept in pairs:
                for mine, saved in zip(own, kept, strict=True):
                    mine.copy_(saved)
            self._adam.load_state_dict(state["adam"])
            for group, stack in zip(self._groups, self._stacks, strict=True):
                torch._foreach_copy_([weight.data for weight in group], list(stack))
            torch._foreach_copy_([weight.data for weight in self._others], [m.detach() for m in self._masters])
