"""The model's forward pass for training: transformers' own weights and layers, but all pictures of a step at once.

transformers runs the tower picture by picture where no flash attention is installed; here pictures are padded to one
length and go together. A test compares the result with the model's own forward. Everything that a step needs besides
the weights is laid out by the host beforehand, so that the device never waits for it.

Shapes: P pictures or frame pairs, S patches (padded), D width, B dialogues, L tokens (padded), N learned tokens.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen2VLForConditionalGeneration

from training.mote.checkpoint import MEAN, MERGE, PATCH, SPECIALS, STD
from training.mote.dialogue import Dialogue

# Patches of nearly every picture, rounded up. Few different shapes may reach the device: each new one costs the
# attention library a plan, half a second.
_USUAL = 960
_LENGTHS = (384, 448, 640, 1152, 1792, 2304)
MEDIA_IDS = (SPECIALS.index("<|image_pad|>"), SPECIALS.index("<|video_pad|>"))


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy of the array on the device, through pinned memory where that lets the host go on meanwhile."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def round_up(value: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-value // step) * step


@lru_cache(maxsize=4096)
def grid_positions(rows: int, columns: int) -> np.ndarray:
    """Row and column of each patch (rows * columns, 2), in merge order."""
    places = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), axis=-1)
    blocks = places.reshape(rows // MERGE, MERGE, columns // MERGE, MERGE, 2)
    return blocks.transpose(0, 2, 1, 3, 4).reshape(-1, 2)


@dataclass(frozen=True)
class Patches:
    """8-bit patches (all, 300 or 600), where each goes in the rectangle (P, S), its place, and what is filled."""

    flat: Tensor
    where: Tensor
    places: Tensor
    mask_P11S: Tensor


def lay_out_patches(flat: Tensor, grids: np.ndarray) -> Patches:
    """The patches of pictures or clips with their grids (items, 3), frame pair by frame pair."""
    frames = [(rows, columns) for pairs, rows, columns in grids.tolist() for _ in range(pairs)]
    counts = np.zeros(round_up(len(frames), 40) if flat.is_cuda else len(frames), np.int64)
    counts[: len(frames)] = [rows * columns for rows, columns in frames]
    longest = max(round_up(int(counts.max()), 32), _USUAL if flat.is_cuda and len(grids) == len(frames) else 0)
    filled = np.arange(longest)[None] < counts[:, None]
    where = np.flatnonzero(filled)
    # An empty row must look at something, or its softmax is undefined.
    filled[:, 0] = True
    places = np.concatenate([grid_positions(*shape) for shape in frames])
    device = flat.device
    mask = to_device(filled, device)[:, None, None, :]
    return Patches(flat, to_device(where, device), to_device(places, device), mask)


@dataclass(frozen=True)
class Rows:
    """Dialogues of similar length as one rectangle.

    `spots` are the flat places of media tokens and `source` the embeddings that go there; `learned` are the flat
    places whose next token `wanted` is to be predicted, `heads` marks where in `learned` an answer begins and
    `topics` says of what topic it is.
    """

    ids_BL: Tensor
    positions_3BL: Tensor
    segments_BL: Tensor
    spots: Tensor
    source: Tensor
    learned: Tensor
    wanted: Tensor
    heads: np.ndarray
    topics: np.ndarray


def lay_out_rows(dialogues: list[tuple[Dialogue, list[int]]], device: torch.device) -> list[Rows]:
    """Dialogues, each with the first embedding of each of its media, in rectangles of a few fixed lengths."""
    by_length: dict[int, list[tuple[Dialogue, list[int]]]] = {}
    for pair in dialogues:
        used = len(pair[0].ids)
        length = next((limit for limit in _LENGTHS if used <= limit), round_up(used, 256))
        by_length.setdefault(length, []).append(pair)
    return [_rectangle(group, length, device) for length, group in sorted(by_length.items())]


def _rectangle(dialogues: list[tuple[Dialogue, list[int]]], length: int, device: torch.device) -> Rows:
    """One rectangle. Padding has segment -1, which looks at nothing but padding."""
    step = (4 if length > 1000 else 16) if device.type == "cuda" else 1
    shape = (round_up(len(dialogues), step), length)
    ids, targets = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    segments = np.full(shape, -1, np.int64)
    positions = np.zeros((3, *shape), np.int64)
    spots, source = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for row, (dialogue, starts) in enumerate(dialogues):
        used = len(dialogue.ids)
        ids[row, :used] = dialogue.ids
        targets[row, :used] = dialogue.targets
        segments[row, :used] = dialogue.segments
        positions[:, row, :used] = dialogue.positions
        spots.append(row * length + np.flatnonzero(np.isin(dialogue.ids, MEDIA_IDS)))
        source += [start + np.arange(item.tokens) for start, item in zip(starts, dialogue.media, strict=True)]
    marked = np.flatnonzero(targets)
    heads = np.flatnonzero(np.diff(marked, prepend=-2) != 1)
    return Rows(
        ids_BL=to_device(ids, device),
        positions_3BL=to_device(positions, device),
        segments_BL=to_device(segments, device),
        spots=to_device(np.concatenate(spots), device),
        source=to_device(np.concatenate(source), device),
        learned=to_device(marked - 1, device),
        wanted=to_device(ids.flat[marked], device),
        heads=heads,
        topics=targets.flat[marked[heads]] - 1,
    )


def _normalised(flat: Tensor, dtype: torch.dtype) -> Tensor:
    """8-bit patches (N, 3 * T * 100) to the values that the processor gives; mean and spread serve all colours."""
    assert len({*MEAN}) == len({*STD}) == 1
    return ((flat.to(torch.float32) / 255 - MEAN[0]) / STD[0]).to(dtype)


def _embed(visual: Any, flat: Tensor) -> Tensor:
    """Patches to vectors. A picture's patch comes once although the model sees it twice: the two kernels add up."""
    kernel = visual.patch_embed.proj.weight
    if flat.shape[1] == 3 * PATCH * PATCH:
        kernel = kernel.sum(2, keepdim=True)
    return F.linear(_normalised(flat, kernel.dtype), kernel.reshape(kernel.shape[0], -1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _block(block: Any, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
    attn = block.attn
    pictures, patches, width = x.shape
    qkv = attn.qkv(block.norm1(x)).view(pictures, patches, 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4)
    q, k = rotate(qkv[0], cos, sin), rotate(qkv[1], cos, sin)
    mixed = F.scaled_dot_product_attention(q, k, qkv[2], attn_mask=mask)
    x = x + attn.proj(mixed.transpose(1, 2).reshape(pictures, patches, width))
    return x + block.mlp(block.norm2(x))


_compiled = torch.compile(_block, dynamic=False)


def see(model: Qwen2VLForConditionalGeneration, patches: Patches) -> Tensor:
    """Embeddings (all tokens, hidden) of the pictures or clips, in the order of their grids."""
    visual: Any = model.model.visual
    pictures, _, _, longest = patches.mask_P11S.shape
    x_flat = _embed(visual, patches.flat)
    angles = patches.places[..., None].float() * visual.rotary_pos_emb.inv_freq.float()
    angles = torch.cat([angles.flatten(1)] * 2, dim=-1)
    x = x_flat.new_zeros(pictures * longest, x_flat.shape[-1]).index_copy(0, patches.where, x_flat)
    spread = angles.new_zeros(pictures * longest, angles.shape[-1]).index_copy(0, patches.where, angles)
    spread = spread.view(pictures, 1, longest, -1)
    cos, sin = spread.cos().to(x.dtype), spread.sin().to(x.dtype)
    x = x.view(pictures, longest, -1)
    run = _compiled if torch.is_grad_enabled() and x.is_cuda and longest == _USUAL else _block
    for block in visual.blocks:
        x = run(block, x, cos, sin, patches.mask_P11S)
    merged: Tensor = visual.merger(x.reshape(pictures * longest, -1).index_select(0, patches.where))
    return merged


def predict(model: Qwen2VLForConditionalGeneration, rows: Rows, seen: Tensor) -> Tensor:
    """Logits (N, vocabulary) in fp32 for the tokens that are to be learned."""
    inner: Any = model.model.language_model
    embeds = inner.embed_tokens(rows.ids_BL)
    picked = seen.index_select(0, rows.source).to(embeds.dtype)
    embeds = embeds.flatten(0, 1).index_copy(0, rows.spots, picked).view(embeds.shape)
    length = rows.ids_BL.shape[1]
    order = torch.ones(length, length, dtype=torch.bool, device=embeds.device).tril()
    own = rows.segments_BL[:, :, None] == rows.segments_BL[:, None, :]
    prefix = (rows.segments_BL[:, None, :] == 0) & (rows.segments_BL[:, :, None] >= 0)
    mask = ((own | prefix) & order)[:, None]
    hidden = inner(
        inputs_embeds=embeds,
        position_ids=rows.positions_3BL,
        attention_mask={"full_attention": mask},
        use_cache=False,
    ).last_hidden_state
    logits: Tensor = model.lm_head(hidden.flatten(0, 1).index_select(0, rows.learned))
    return logits.float()
