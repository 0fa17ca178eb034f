"""What both sides record of one question, stage by stage.

Shapes: E embeddings, H hidden size, T tokens, X position axes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        text: a question for the chat template, or the whole prompt with the family's own placeholders.
        images: files, or anything that PIL opens.
        videos: pairs of frames, uint8 (frames, height, width, 3), and what is known of them: "fps",
            "total_num_frames", "frames_indices", "duration".
        sounds: pairs of mono samples and their rate in Hz.
        templated: "chat" puts the question through the chat template, "plain" takes the text as it is.
        max_tokens: how many tokens are answered, greedily, whatever ends the text.
        files: "video" or "audio" -> the file that each item of that kind was read from by beheld, None where there is
            none; kinds without any file are not in it.
    """

    text: str
    images: Sequence[Any] = ()
    templated: str = "chat"
    max_tokens: int = 12
    videos: Sequence[tuple[Any, dict[str, Any]]] = ()
    sounds: Sequence[tuple[Any, int]] = ()
    files: Mapping[str, Sequence[Path | None]] = field(default_factory=dict)

    @property
    def media(self) -> dict[str, Sequence[Any]]:
        """Modality -> its items, of the kinds that are asked about."""
        kinds = {"image": self.images, "video": self.videos, "audio": self.sounds}
        return {kind: items for kind, items in kinds.items() if items}


@dataclass(eq=False)
class Trace:
    """What one side made of a question; what it has no such stage for stays empty.

    Attributes:
        decoded: modality -> frames or samples of each of its items, if any of them came from a file.
        undecoded: modality -> why this side could not read its files, and went on with what the other had read.
        rendered: the prompt as text.
        prompt_ids: with all placeholders replaced.
        media_ids: the ids that stand where embeddings of media go.
        features: the processor's tensors by name: one of the whole prompt, or one of each item that has it.
        encoded: modality -> (E, H) that the tower gave for all items of that kind.
        embeds_TH: the prompt's embeddings with those of the items in their places.
        positions: (X, T) of the prompt, then of each token answered.
        logits: (V) that chose each answered token.
        token_ids: the answer.
        converted: in words, what was converted for a side that could not read the checkpoint by itself; else empty.
        shiftable: whether the model sees distances between positions alone, as rotary ones tell them.
    """

    decoded: dict[str, list[Tensor]] = field(default_factory=dict)
    undecoded: dict[str, str] = field(default_factory=dict)
    rendered: str | None = None
    prompt_ids: tuple[int, ...] = ()
    media_ids: frozenset[int] = frozenset()
    features: dict[str, list[Tensor]] = field(default_factory=dict)
    encoded: dict[str, Tensor] = field(default_factory=dict)
    embeds_TH: Tensor | None = None
    positions: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    converted: str = ""
    shiftable: bool = False
