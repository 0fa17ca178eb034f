"""The last layer of mote alone: dialogues are run up to it once, so that training it costs little.

Shapes: B items, L tokens (padded), N tokens (padded) after which one is learned, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from training.mote.dialogue import Dialogue
from training.mote.forward import MEDIA_IDS, rotate

_LONGEST = 1152


@dataclass(frozen=True)
class Item:
    """A dialogue at the border of the last layer: L tokens, of which N come before one that is learned.

    Attributes:
        hidden: what enters the layer (L, D), half.
        positions: (3, L).
        segments: (L,).
        learned: places of the N tokens.
        wanted: the N tokens that follow them.
        heads: where in `learned` an answer begins.
        before: logarithms of the probabilities (N, vocabulary) that the model gives, half.
    """

    hidden: Tensor
    positions: Tensor
    segments: Tensor
    learned: Tensor
    wanted: Tensor
    heads: np.ndarray
    before: Tensor


@torch.inference_mode()
def entered(model: Any, dialogues: Sequence[Dialogue], seen: Sequence[Tensor], num_pictures: int) -> list[Item]:
    """The items of dialogues with the embeddings of pictures and then of clips; long ones are left out."""
    inner, items = model.model.language_model, []
    for dialogue in dialogues:
        length = len(dialogue.ids)
        if length > _LONGEST:
            continue
        parts = [seen[num_pictures * medium.clip + medium.index].float() for medium in dialogue.media]
        ids, positions, segments = (
            torch.from_numpy(array.astype(np.int64)) for array in (dialogue.ids, dialogue.positions, dialogue.segments)
        )
        hidden = inner.embed_tokens(ids)
        if parts:
            hidden[torch.isin(ids, torch.tensor(MEDIA_IDS))] = torch.cat(parts)
        hidden, mask = hidden[None], _mask(segments[None])
        places = inner.rotary_emb(hidden, positions[:, None])
        for layer in inner.layers[:-1]:
            made = layer(hidden, attention_mask=mask[:, None], position_embeddings=places)
            hidden = made[0] if isinstance(made, tuple) else made
        marked = np.flatnonzero(dialogue.targets)
        heads = np.flatnonzero(np.diff(marked, prepend=-2) != 1)
        learned = torch.from_numpy(marked - 1)
        item = Item(hidden[0].half(), positions, segments, learned, ids[marked], heads, torch.empty(0))
        items.append(replace(item, before=answered(model, [item]).half()))
    return items


def _mask(segments: Tensor) -> Tensor:
    """Who sees whom (B, L, L): tokens of one's own segment and of the prefix, up to oneself."""
    length = segments.shape[1]
    own = segments[:, :, None] == segments[:, None, :]
    prefix = (segments[:, None, :] == 0) & (segments[:, :, None] >= 0)
    return (own | prefix) & torch.ones(length, length, dtype=torch.bool).tril()


def answered(model: Any, items: Sequence[Item]) -> Tensor:
    """Logarithms of the probabilities (all learned tokens, vocabulary); the last layer asks for those tokens alone."""
    inner = model.model.language_model
    layer, rows = inner.layers[-1], len(items)
    attn, most = layer.self_attn, max(len(item.learned) for item in items)
    longest = max(len(item.segments) for item in items)
    hidden = torch.zeros(rows, longest, items[0].hidden.shape[1])
    positions = torch.zeros(3, rows, longest, dtype=torch.long)
    # Padding is of a segment of its own, and asks at place 0.
    segments = torch.full((rows, longest), -1)
    asking, filled = torch.zeros(rows, most, dtype=torch.long), torch.zeros(rows, most, dtype=torch.bool)
    for row, item in enumerate(items):
        length, count = len(item.segments), len(item.learned)
        hidden[row, :length], positions[:, row, :length] = item.hidden.float(), item.positions
        segments[row, :length] = item.segments
        asking[row, :count], filled[row, :count] = item.learned, True
    cos, sin = inner.rotary_emb(hidden, positions)
    normed = layer.input_layernorm(hidden)
    each = torch.arange(rows)[:, None]

    def heads(made: Tensor) -> Tensor:
        return made.view(*made.shape[:2], -1, attn.head_dim).transpose(1, 2)

    query = rotate(heads(attn.q_proj(normed[each, asking])), cos[each, asking][:, None], sin[each, asking][:, None])
    key = rotate(heads(attn.k_proj(normed)), cos[:, None], sin[:, None])
    mixed = functional.scaled_dot_product_attention(
        query, key, heads(attn.v_proj(normed)), attn_mask=_mask(segments)[each, asking][:, None], enable_gqa=True
    )
    made = hidden[each, asking] + attn.o_proj(mixed.transpose(1, 2).flatten(2))
    made = (made + layer.mlp(layer.post_attention_layernorm(made)))[filled]
    found: Tensor = model.lm_head(inner.norm(made)).log_softmax(-1)
    return found


def divergence(model: Any, items: Sequence[Item]) -> Tensor:
    """The mean divergence from the model before over the tokens of the answers."""
    before = torch.cat([item.before for item in items]).float()
    return functional.kl_div(answered(model, items), before, log_target=True, reduction="none").sum(-1).mean()


def entropy(model: Any, items: Sequence[Item]) -> Tensor:
    """The mean cross-entropy of the sentence; its first two tokens, which decide, count five times."""
    wanted = torch.cat([item.wanted for item in items])
    losses = functional.nll_loss(answered(model, items), wanted, reduction="none")
    weights, start = torch.ones_like(losses), 0
    for item in items:
        for ahead in (0, 1):
            weights[start + torch.from_numpy(item.heads) + ahead] = 5.0
        start += len(item.wanted)
    return (losses * weights).sum() / weights.sum()


@torch.no_grad()
def right_answers(model: Any, items: Sequence[Item]) -> tuple[int, int, int]:
    """How many answers are right to the last token where the true one is fed in; how many were; and of how many."""
    right = was = asked = 0
    for start in range(0, len(items), 16):
        some = items[start : start + 16]
        now = answered(model, some).argmax(-1).split([len(item.wanted) for item in some])
        for item, said in zip(some, now, strict=True):
            for made, count in ((said, 0), (item.before.float().argmax(-1), 1)):
                whole = int(np.minimum.reduceat((made == item.wanted).numpy().astype(np.int8), item.heads).sum())
                right, was = right + whole * (1 - count), was + whole * count
            asked += len(item.heads)
    return right, was, asked
