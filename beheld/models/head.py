"""From hidden states to logits.

Shapes: S hidden states, H hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

from torch import Tensor

from beheld.models.surgery.operation import Changes


class Head(Protocol):
    """Computes logits from hidden states."""

    def __call__(self, hidden_SH: Tensor) -> Tensor:
        """Return logits (S, V)."""


class ModelHead:
    """The head and what the model does to its logits (soft caps, scales, banned ids).

    The model's own code does it: its forward is called, and its core returns the given hidden states.

    Args:
        speaker: the module whose forward calls the core and then the head.
        core: its part that computes hidden states; its forward is replaced.
    """

    def __init__(self, speaker: Any, core: Any, changes: Changes) -> None:
        self._speaker = speaker
        self._given_1SH: Tensor | None = None
        forward = core.forward

        @functools.wraps(forward)
        def answering(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs) if self._given_1SH is None else _Answer(self._given_1SH)

        changes.set(core, "forward", answering)

    def __call__(self, hidden_SH: Tensor) -> Tensor:
        """See Head."""
        self._given_1SH = hidden_SH.unsqueeze(0)
        try:
            output = self._speaker(inputs_embeds=self._given_1SH, use_cache=False)
        finally:
            self._given_1SH = None
        logits_SV: Tensor = output.logits[0]
        return logits_SV


class _Answer:
    """A core's result, as far as a head reads it: hidden states, and None for all else that models return."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
