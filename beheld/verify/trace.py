"""What both sides record of one question, stage by stage.

Shapes: E embeddings, H hidden size, T tokens, X position axes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        text: a question for the chat template, or the whole prompt with the family's own markers.
        images: files, or anything that PIL opens.
        templated: "chat" puts the question through the chat template, "plain" takes the text as it is.
        max_tokens: how many tokens are answered, greedily, whatever ends the text.
    """

    text: str
    images: Sequence[Any] = ()
    templated: str = "chat"
    max_tokens: int = 12


@dataclass(eq=False)
class Trace:
    """What one side made of a question; what it has no such stage for stays empty.

    Attributes:
        rendered: the prompt as text.
        prompt_ids: with all placeholders replaced.
        features: the processor's tensors by name, those of all items one after the other.
        encoded_EH: what the tower gave for all items.
        embeds_TH: the prompt's embeddings with those of the items in their places.
        positions: (X, T) of the prompt, then of each token answered.
        logits: (V) that chose each answered token.
        token_ids: the answer.
        converted: in words, what was converted for a side that could not read the checkpoint by itself; else empty.
    """

    rendered: str | None = None
    prompt_ids: tuple[int, ...] = ()
    features: dict[str, Tensor] = field(default_factory=dict)
    encoded_EH: Tensor | None = None
    embeds_TH: Tensor | None = None
    positions: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    converted: str = ""
