"""One training step, and the exact-match score that is read off the same forward pass."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen2VLForConditionalGeneration

from training.mote.dialogue import TOPICS, Dialogue
from training.mote.forward import Patches, Rows, lay_out, predict, round_up, see
from training.mote.supply import Loaded

_LENGTHS = (384, 448, 640, 1152, 1792, 2304)


@dataclass
class Score:
    """How many answers there were of each topic, and how many were right to the last token."""

    right: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TOPICS, 0))
    asked: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TOPICS, 0))

    def __str__(self) -> str:
        parts = [f"{topic} {self.right[topic] / self.asked[topic]:.3f}" for topic in TOPICS if self.asked[topic]]
        return ", ".join(parts)


def embed_all(model: Qwen2VLForConditionalGeneration, shards: Sequence[Loaded]) -> tuple[Tensor, list[list[list[int]]]]:
    """Embeddings of all media of the shards, and for each dialogue of each shard where its media begin there."""
    pictures = Patches(
        torch.cat([shard.picture_patches for shard in shards]),
        np.concatenate([shard.picture_grids for shard in shards]),
    )
    clips = Patches(
        torch.cat([shard.clip_patches for shard in shards]),
        np.concatenate([shard.clip_grids for shard in shards]),
    )
    seen = torch.cat([see(model, pictures), see(model, clips)])
    starts = _starts(np.concatenate([pictures.grids, clips.grids]))
    clip_base = len(pictures.grids)
    places, picture, clip = [], 0, clip_base
    for shard in shards:
        places.append(
            [
                [int(starts[(clip if item.clip else picture) + item.index]) for item in dialogue.media]
                for dialogue in shard.dialogues
            ]
        )
        picture += len(shard.picture_grids)
        clip += len(shard.clip_grids)
    return seen, places


def _starts(grids: np.ndarray) -> np.ndarray:
    sizes = grids.prod(axis=1) // 4
    return np.concatenate([[0], np.cumsum(sizes)[:-1]])


def rectangles(dialogues: list[tuple[Dialogue, list[int]]], device: torch.device) -> Iterator[Rows]:
    """The dialogues in rectangles of a few fixed lengths."""
    by_length: dict[int, list[tuple[Dialogue, list[int]]]] = {}
    for pair in dialogues:
        length = next((limit for limit in _LENGTHS if len(pair[0].ids) <= limit), round_up(len(pair[0].ids), 256))
        by_length.setdefault(length, []).append(pair)
    for length, group in sorted(by_length.items()):
        yield lay_out(group, length, device)


def loss_of(model: Qwen2VLForConditionalGeneration, shards: Sequence[Loaded]) -> Tensor:
    """Mean cross-entropy over all answer tokens of the shards."""
    seen, places = embed_all(model, shards)
    pairs = [
        pair for shard, where in zip(shards, places, strict=True) for pair in zip(shard.dialogues, where, strict=True)
    ]
    total, count = torch.zeros((), device=seen.device), 0
    for rows in rectangles(pairs, seen.device):
        logits, wanted, _ = predict(model, rows, seen)
        total = total + F.cross_entropy(logits, wanted, reduction="sum")
        count += len(wanted)
    return total / count


@torch.no_grad()
def score(model: Qwen2VLForConditionalGeneration, shards: Sequence[Loaded]) -> Score:
    """Exact match of whole answers. With the true answer fed in, all tokens right is what greedy decoding gives."""
    result = Score()
    for shard in shards:
        seen, places = embed_all(model, [shard])
        for rows in rectangles(list(zip(shard.dialogues, places[0], strict=True)), seen.device):
            logits, wanted, where = predict(model, rows, seen)
            _count(result, rows, (logits.argmax(-1) == wanted).cpu().numpy(), where.cpu().numpy())
    return result


def _count(result: Score, rows: Rows, right: np.ndarray, where: np.ndarray) -> None:
    """Split the learned tokens into answers: runs of neighbours in one row."""
    flat = where[:, 0] * rows.ids_BL.shape[1] + where[:, 1]
    heads = np.flatnonzero(np.diff(flat, prepend=-2) != 1)
    targets = rows.targets_BL[:, 1:].cpu().numpy()[where[heads, 0], where[heads, 1]]
    whole = np.minimum.reduceat(right.astype(np.int8), heads)
    for target, good in zip(targets, whole, strict=True):
        result.asked[TOPICS[target - 1]] += 1
        result.right[TOPICS[target - 1]] += int(good)
