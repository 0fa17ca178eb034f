"""The stages of a media item: a reference, then an item with an identity, then a span with a position."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

MODALITIES = ("image", "video", "audio")
# vLLM's name for an image, or a part of a video, of a model that reads both alike; here its images are images.
CHUNKS = "vision_chunk"
# The name of a feature: embeddings as the model's own towers give them, (E, H) with all columns. No tower is run.
ENCODED = "encoded"
# The name of a feature of a video that is read together with its audio: which of the item's embeddings are the audio's.
AUDIO_PLACES = "audio_places"
# The options of a request that ask for it: transformers' older name, which vLLM has, and its newer one.
AUDIO_IN_VIDEO = ("use_audio_in_video", "load_audio_from_video")


def item_name(modality: str, number: int) -> str:
    """The name of a request's item in errors and receipts: "image 2" is its second image."""
    return f"{modality} {number}"


@dataclass(frozen=True)
class MediaRef:
    """Media as the user gave it, not opened yet.

    Attributes:
        modality: "image", "video" or "audio".
        source: a URL, path or data URL (str), raw bytes, a PIL image, an array (frames, height, width, 3), a pair
            (waveform, sampling rate), a pair (frames array, metadata mapping), or embeddings (a tensor, or a mapping of
            tensors such as {"image_embeds": ..., "image_grid_thw": ...}).
        options: processor options of this item; they override those of the request and the engine.
        uuid: the caller's identifier of the content, if given.
        place: the item's path in the messages, such as "messages.0.content.1.image_url", for errors; None outside of
            messages.
        of_video: for audio that is read together with a video, the video's number among the request's videos, from 0.
            It has no placeholder of its own; its source is None if it is in the video's file.
    """

    modality: str
    source: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    uuid: str | None = None
    place: str | None = None
    of_video: int | None = None


def count_by_modality(media: Iterable[MediaRef]) -> dict[str, int]:
    """Modality -> number of items with a placeholder of their own."""
    found: dict[str, int] = {}
    for ref in media:
        if ref.of_video is None:
            found[ref.modality] = found.get(ref.modality, 0) + 1
    return found


@dataclass(frozen=True, eq=False)
class MediaItem:
    """One processed image, video or audio clip: it has an identity and no position.

    Attributes:
        modality: "image", "video" or "audio".
        digest: hash (32 bytes) of the content and of every option that changes the features.
        features: the processor's tensors for this item, by the processor's names ("pixel_values",
            "image_grid_thw", ...), {"embeds": (num_embeds, hidden)} if the user gave embeddings, or
            {ENCODED: (num_embeds, columns)} if an encoder elsewhere did.
        layout: small numbers from which positions are computed, by the processor's names, for example
            {"image_grid_thw": (1, 16, 16)}; it stays on the host.
        replacement_ids: the token ids that replace the placeholder.
        embed_mask: for each replacement id, whether an embedding takes its place; None means all.
        num_embeds: number of embeddings.
        num_states: number of states that the layers of a cross group attend to, outside of the sequence; an item has
            either embeddings or states.
        feature_bytes: size of `features`; the caches count it against their limits.
        lead, tail: text that the processor puts before and after the replacement; it is tokenized together with the
            prompt.
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
        """Number of embeddings or states that the device keeps for this item."""
        return self.num_embeds + self.num_states

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """The ranges (start, stop) of `replacement_ids` whose ids all take an embedding."""
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
    """The place of an item in a request: positions `start` to `stop` (half-open) of its token ids."""

    item: MediaItem
    start: int
    stop: int

    def runs(self) -> tuple[tuple[int, int], ...]:
        """The ranges (start, stop) of the request's positions whose tokens all take an embedding."""
        return tuple((self.start + low, self.start + high) for low, high in self.item.runs)

    def embeds_before(self, position: int) -> int:
        """The number of the item's embeddings before `position` (a position of the request)."""
        offset = min(max(position - self.start, 0), self.stop - self.start)
        mask = self.item.embed_mask
        return offset if mask is None else sum(mask[:offset])


@dataclass(frozen=True)
class MediaReceipt:
    """What the model saw of one item, and what was lost.

    Attributes:
        modality: "image", "video" or "audio".
        index: the item's number among the request's items of this modality, from 0, in the caller's order.
        given: the input, for example {"source": "path", "format": "PNG", "width": 640, "height": 480}.
        used: what the model saw, for example {"width": 896, "height": 672, "tiles": 5, "exif_rotated": True,
            "exif_orientation": 6} or
            {"frames": 16, "width": 448, "height": 336, "timestamps_s": (0.0, 0.5, ...)}. A size is the whole image's
            largest size, without padding. `crop` is the part that is left, (x1, y1, x2, y2) in pixels of the
            upright image, if edges were cut off. `tiles` counts the pieces that go to the tower, including an overview.
            Unknown facts are left out.
        lost: one sentence for every loss ("transparency was flattened onto white", "284 of 300 frames were not used").
        tokens: number of placeholder tokens in the prompt.
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
        """The item's name in errors, counted from 1, such as "image 2"."""
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
