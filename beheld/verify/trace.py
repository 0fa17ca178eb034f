"""What each side records for one question, stage by stage.

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
    """A question for both sides.

    Attributes:
        text: a question for the chat template, or the whole prompt with the family's own placeholders.
        images: files, or anything that PIL opens.
        videos: pairs of frames, uint8 (frames, height, width, 3), and metadata: "fps", "total_num_frames",
            "frames_indices", "duration".
        audios: pairs of mono samples and their rate in Hz.
        templated: "chat" applies the chat template to the question, "plain" uses the text unchanged.
        max_tokens: the number of tokens to answer, greedily, ignoring stop conditions.
        files: "video" or "audio" -> the file that beheld read each item of that kind from, None for items without one;
            kinds without any file are absent.
    """

    text: str
    images: Sequence[Any] = ()
    templated: str = "chat"
    max_tokens: int = 12
    videos: Sequence[tuple[Any, dict[str, Any]]] = ()
    audios: Sequence[tuple[Any, int]] = ()
    files: Mapping[str, Sequence[Path | None]] = field(default_factory=dict)

    @property
    def media(self) -> dict[str, Sequence[Any]]:
        """Return the items by modality, for the modalities in the question."""
        kinds = {"image": self.images, "video": self.videos, "audio": self.audios}
        return {kind: items for kind, items in kinds.items() if items}


@dataclass(eq=False)
class Trace:
    """One side's results for a question; stages that the side does not have stay empty.

    Attributes:
        decoded: modality -> frames or samples of each of its items, if any came from a file.
        undecoded: modality -> why this side could not read its files and used the other side's decoding.
        rendered: the prompt as text.
        prompt_ids: with all placeholders expanded.
        media_ids: the ids of placeholders for media embeddings.
        features: the processor's tensors by name: one for the whole prompt, or one per item that has it.
        encoded: modality -> the tower's output (E, H) for all items of that kind.
        embeds_TH: the prompt's embeddings, media embeddings included.
        positions: (X, T) of the prompt, then of each answered token.
        logits: (V) from which each answered token was chosen.
        token_ids: the answer.
        converted: what was converted for a side that could not read the checkpoint by itself, in words; else empty.
        shiftable: whether the model depends only on distances between positions, as with rotary embeddings.
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
