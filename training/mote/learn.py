"""One training step, and the exact-match score that is read off the same forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen2VLForConditionalGeneration

from training.mote.dialogue import TOPICS
from training.mote.forward import Patches, Rows, lay_out_patches, lay_out_rows, predict, see
from training.mote.supply import Loaded


@dataclass(frozen=True)
class Step:
    """All that a step needs, laid out on the device."""

    pictures: Patches
    clips: Patches
    rows: list[Rows]

    @property
    def answer_tokens(self) -> int:
        """How many tokens are to be learned."""
        return sum(len(rows.wanted) for rows in self.rows)

    def tensors(self) -> list[Tensor]:
        """Every tensor of the step, so that a side stream can hand them over."""
        parts = [self.pictures, self.clips, *self.rows]
        return [value for part in parts for value in vars(part).values() if isinstance(value, Tensor)]


@dataclass
class Score:
    """How many answers there were of each topic, and how many were right to the last token."""

    right: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TOPICS, 0))
    asked: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TOPICS, 0))

    def __str__(self) -> str:
        parts = [f"{topic} {self.right[topic] / self.asked[topic]:.3f}" for topic in TOPICS if self.asked[topic]]
        return ", ".join(parts)


def prepare(shards: Sequence[Loaded]) -> Step:
    """Lay out the media of the shards one after the other, pictures before clips, and the dialogues about them."""
    picture_grids = np.concatenate([shard.picture_grids for shard in shards])
    clip_grids = np.concatenate([shard.clip_grids for shard in shards])
    sizes = np.concatenate([picture_grids, clip_grids]).prod(axis=1) // 4
    starts = np.cumsum(sizes) - sizes
    pairs = []
    picture, clip = 0, len(picture_grids)
    for shard in shards:
        for dialogue in shard.dialogues:
            places = [int(starts[(clip if item.clip else picture) + item.index]) for item in dialogue.media]
            pairs.append((dialogue, places))
        picture += len(shard.picture_grids)
        clip += len(shard.clip_grids)
    pictures = lay_out_patches(torch.cat([shard.picture_patches for shard in shards]), picture_grids)
    clips = lay_out_patches(torch.cat([shard.clip_patches for shard in shards]), clip_grids)
    return Step(pictures, clips, lay_out_rows(pairs, pictures.flat.device))


def loss_of(model: Qwen2VLForConditionalGeneration, step: Step) -> Tensor:
    """Mean cross-entropy over all answer tokens of the step."""
    seen = torch.cat([see(model, step.pictures), see(model, step.clips)])
    losses = [F.cross_entropy(predict(model, rows, seen), rows.wanted, reduction="sum") for rows in step.rows]
    return torch.stack(losses).sum() / step.answer_tokens


@torch.no_grad()
def score(model: Qwen2VLForConditionalGeneration, shards: Sequence[Loaded]) -> Score:
    """Exact match of whole answers. With the true answer fed in, all tokens right is what greedy decoding gives."""
    result = Score()
    for shard in shards:
        step = prepare([shard])
        seen = torch.cat([see(model, step.pictures), see(model, step.clips)])
        for rows in step.rows:
            right = (predict(model, rows, seen).argmax(-1) == rows.wanted).cpu().numpy()
            whole = np.minimum.reduceat(right.astype(np.int8), rows.heads)
            for topic, good in zip(rows.topics, whole, strict=True):
                result.asked[TOPICS[topic]] += 1
                result.right[TOPICS[topic]] += int(good)
    return result
