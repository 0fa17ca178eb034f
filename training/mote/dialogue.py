"""Turns media and exchanges into token ids, positions and labels, several exchanges over the same pictures.

A dialogue is one prefix (system prompt, pictures) and segments. Each segment is a question and its answer; it sees the
prefix and itself, and its positions go on where the prefix ends, so that ten questions cost their pictures once:

    prefix | segment 1 | segment 2 | ...     segment 2 never sees segment 1
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random

import numpy as np
from tokenizers import Tokenizer

from training.mote.checkpoint import MERGE, SPECIALS
from training.mote.questions import Exchange
from training.mote.wording import SYSTEMS, roughen

Grid = tuple[int, int, int]
_IMAGE, _VIDEO = SPECIALS.index("<|image_pad|>"), SPECIALS.index("<|video_pad|>")
TOPICS = ("description", "attributes", "text", "several", "motion", "talk")


@dataclass(frozen=True)
class Media:
    """A picture or clip of a shard: its index there, whether it is a clip, and its grid."""

    index: int
    clip: bool
    grid: Grid

    @property
    def tokens(self) -> int:
        """How many tokens it takes."""
        return self.grid[0] * self.grid[1] * self.grid[2] // MERGE**2


@dataclass(frozen=True)
class Dialogue:
    """Arrays of one length: ids, positions (3, length), segment (0 is the prefix), target (0, or 1 + topic)."""

    ids: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    targets: np.ndarray
    media: tuple[Media, ...]


class Writer:
    """Collects tokens with their positions, segment by segment."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._encode = lru_cache(maxsize=4096)(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
        self.reset()

    def reset(self) -> None:
        """Forget everything and start a new dialogue."""
        self._ids: list[int] = []
        self._targets: list[int] = []
        self._segments: list[int] = []
        self._positions: list[np.ndarray] = []
        self._media: list[Media] = []
        self._next = 0
        self._segment = 0
        self._fork = 0

    def start_segment(self) -> None:
        """Begin a segment: it follows the prefix, whatever came between."""
        if self._segment == 0:
            self._fork = self._next
        self._segment += 1
        self._next = self._fork

    def text(self, text: str, target: int = 0) -> None:
        """Add text, as what is to be learned where `target` is not 0."""
        ids = self._encode(text)
        self._add(ids, np.broadcast_to(np.arange(self._next, self._next + len(ids)), (3, len(ids))), target)
        self._next += len(ids)

    def media(self, media: Media) -> None:
        """Add a picture or clip between its marks; it takes as many positions as its longer side."""
        self.text("<|vision_start|>")
        frames, rows, columns = media.grid[0], media.grid[1] // MERGE, media.grid[2] // MERGE
        grid = np.stack(np.meshgrid(np.arange(frames), np.arange(rows), np.arange(columns), indexing="ij"))
        self._add([_VIDEO if media.clip else _IMAGE] * media.tokens, grid.reshape(3, -1) + self._next, 0)
        self._next += max(rows, columns)
        self._media.append(media)
        self.text("<|vision_end|>")

    def _add(self, ids: Sequence[int], positions: np.ndarray, target: int) -> None:
        self._ids += ids
        self._positions.append(positions)
        self._segments += [self._segment] * len(ids)
        self._targets += [target] * len(ids)

    def finish(self) -> Dialogue:
        """The dialogue collected so far."""
        return Dialogue(
            np.array(self._ids, np.int16),
            np.concatenate(self._positions, axis=1).astype(np.int16),
            np.array(self._segments, np.int16),
            np.array(self._targets, np.int16),
            tuple(self._media),
        )


def write_dialogue(
    writer: Writer, rng: Random, media: Sequence[Media], exchanges: Sequence[Exchange], media_last: bool = False
) -> Dialogue:
    """A dialogue of `exchanges` about `media`; with `media_last` the first question stands before the pictures."""
    writer.reset()
    if rng.random() < 0.4:
        writer.text(f"<|im_start|>system\n{rng.choice(SYSTEMS)}<|im_end|>\n")
    writer.text("<|im_start|>user\n")
    separator = rng.choices(("", "\n", " "), (70, 20, 10))[0]
    if media_last:
        writer.text(_typed(rng, exchanges[0]) + separator)
        _write_media(writer, rng, media, separator)
        _write_answer(writer, exchanges[0])
        return writer.finish()
    _write_media(writer, rng, media, separator)
    after = separator if media else ""
    index = 0
    while index < len(exchanges):
        writer.start_segment()
        writer.text(after + _typed(rng, exchanges[index]))
        _write_answer(writer, exchanges[index])
        index += 1
        if index < len(exchanges) and rng.random() < 0.12:
            writer.text("\n<|im_start|>user\n" + _typed(rng, exchanges[index]))
            _write_answer(writer, exchanges[index])
            index += 1
    return writer.finish()


def _typed(rng: Random, exchange: Exchange) -> str:
    return roughen(rng, exchange.question)


def _write_media(writer: Writer, rng: Random, media: Sequence[Media], separator: str) -> None:
    named = len(media) > 1 and rng.random() < 0.12
    for number, item in enumerate(media, 1):
        if named:
            writer.text(f"Picture {number}: ")
        elif number > 1 and separator:
            writer.text(separator)
        writer.media(item)


def _write_answer(writer: Writer, exchange: Exchange) -> None:
    writer.text("<|im_end|>\n<|im_start|>assistant\n")
    writer.text(exchange.answer + "<|im_end|>", target=1 + TOPICS.index(exchange.topic))
