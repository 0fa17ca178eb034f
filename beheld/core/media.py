"""Media as it travels: a reference, then an item with identity, then a span with a position."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

MODALITIES = ("image", "video", "audio")


def item_name(modality: str, number: int) -> str:
    """What errors and receipts call a request's item: "image 2" is the second of its images, whatever else it has."""
    return f"{modality} {number}"


@dataclass(frozen=True)
class MediaRef:
    """What the user gave, not opened yet.

    Attributes:
        modality: "image", "video" or "audio".
        source: a URL, path or data URL (str), raw bytes, a PIL image, an array (frames, height, width, 3), a pair
            (waveform, sampling rate), a pair (frames array, metadata mapping), or embeddings (a tensor, or a mapping of
            tensors such as {"image_embeds": ..., "image_grid_thw": ...}).
        options: processor options of this item alone, merged over the request's and the engine's.
        uuid: the caller's own name for the content, if given.
        place: where it stood in the messages, as "messages.0.content.1.image_url", if it did; errors name it.
    """

    modality: str
    source: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    uuid: str | None = None
    place: str | None = None


def count_by_modality(media: Iterable[MediaRef]) -> dict[str, int]:
    """Modality -> how many items of it there are."""
    return dict(Counter(ref.modality for ref in media))


@dataclass(frozen=True, eq=False)
class MediaItem:
    """One processed image, video or audio: identity, no position.

    Attributes:
        modality: "image", "video" or "audio".
        digest: 32 bytes over the content and every option that changes the features.
        features: the processor's tensors for this item alone, by the processor's own names ("pixel_values",
            "image_grid_thw", ...), or {"embeds": (num_embeds, hidden)} when embeddings were given.
        layout: small integers and floats that positions need, by the processor's names, for example
            {"image_grid_thw": (1, 16, 16)}; stays on the host.
        replacement_ids: the token ids that replace the placeholder.
        embed_mask: which of those take an embedding, one bool each; None means all of them.
        num_embeds: how many take one.
        num_states: how many states of it the layers of a cross group attend to, beside the sequence; an item has either
            embeddings or states.
        feature_bytes: size of `features`, for the caches' bounds.
        lead, tail: ordinary text that the processor puts around the replacement; it is encoded with the prompt's own.
    """

    modality: str
    digest: bytes
    features: Mapping[str, Any]
    layout: Mapping[str, tuple[Any, ...]]
    replacement_ids: tuple[int, ...]
    embed_mask: tuple[bool, ...] | None
    num_embeds: int
    feature_bytes: int = 0
    lead: str = ""
    tail: str = ""
    num_states: int = 0

    @property
    def num_kept(self) -> int:
        """Embeddings or states that the device keeps of it."""
        return self.num_embeds + self.num_states

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """The ranges of `replacement_ids` (start, stop) whose ids all take an embedding."""
        if self.embed_mask is None:
            return ((0, len(self.replacement_ids)),)
        found, start = [], 0
        for takes, group in groupby(self.embed_mask):
            stop = start + sum(1 for _ in group)
            if takes:
                found.append((start, stop))
            start = stop
        return tuple(found)


@dataclass(frozen=True, eq=False)
class MediaSpan:
    """Where an item stands in a request: positions `start` to `stop` (half-open) of its token ids."""

    item: MediaItem
    start: int
    stop: int

    def runs(self) -> tuple[tuple[int, int], ...]:
        """The positions of the request (start, stop) whose tokens all take an embedding."""
        return tuple((self.start + low, self.start + high) for low, high in self.item.runs)

    def embeds_before(self, position: int) -> int:
        """How many of the item's embeddings stand before `position` (a position of the request)."""
        offset = min(max(position - self.start, 0), self.stop - self.start)
        mask = self.item.embed_mask
        return offset if mask is None else sum(mask[:offset])


@dataclass(frozen=True)
class MediaReceipt:
    """What the model saw of one item, and what it did not.

    Attributes:
        modality: "image", "video" or "audio".
        index: counted from 0 among the request's items of this modality, as the caller gave them.
        given: what came in, for example {"source": "path", "format": "PNG", "width": 640, "height": 480}.
        used: what the model saw, for example {"width": 896, "height": 672, "tiles": 5, "exif_rotated": True} or
            {"frames": 16, "width": 448, "height": 336, "timestamps_s": (0.0, 0.5, ...)}. A size is that of the whole
            image where it is largest, without padding; tiles are the pieces that the tower is given, an overview
            included. What cannot be known is left out.
        lost: one sentence for every loss ("transparency was flattened onto white", "284 of 300 frames were not used").
        tokens: placeholder tokens that the item takes in the prompt.
        cached: True if the processed item came from the cache.
        milliseconds: time spent per stage ("fetch", "decode", "digest", "process").
        digest: the item's digest in hexadecimal.
    """

    modality: str
    index: int
    given: Mapping[str, Any]
    used: Mapping[str, Any]
    lost: tuple[str, ...]
    tokens: int
    cached: bool
    milliseconds: Mapping[str, float]
    digest: str = ""

    @property
    def item(self) -> str:
        """What errors call it, too: counted from 1, as "image 2"."""
        return item_name(self.modality, self.index + 1)

    def to_json(self) -> dict[str, Any]:
        """The receipt as plain JSON types."""
        return {
            "item": self.item,
            "modality": self.modality,
            "index": self.index,
            "given": dict(self.given),
            "used": dict(self.used),
            "lost": list(self.lost),
            "tokens": self.tokens,
            "cached": self.cached,
            "milliseconds": {k: round(v, 3) for k, v in self.milliseconds.items()},
            "digest": self.digest,
        }
