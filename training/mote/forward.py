"""The model's forward pass for training: transformers' own weights and layers, but all pictures of a step at once.

transformers runs the tower picture by picture where no flash attention is installed; here pictures are padded to one
length and go together. A test compares the result with the model's own forward.

Shapes: P pictures or frame pairs, S patches (padded), D width, B dialogues, L tokens (padded).
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen2VLForConditionalGeneration

from training.mote.checkpoint import MEAN, MERGE, PATCH, STD
from training.mote.dialogue import Dialogue

# Patches of nearly every picture, rounded up.
_USUAL = 960


@dataclass(frozen=True)
class Patches:
    """Patches of one step, flat and in 8 bits, with what is needed to lay them out."""

    flat: Tensor
    grids: np.ndarray


def grid_positions(rows: int, columns: int) -> np.ndarray:
    """Row and column of each patch (rows * columns, 2), in merge order."""
    places = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), axis=-1)
    blocks = places.reshape(rows // MERGE, MERGE, columns // MERGE, MERGE, 2)
    return blocks.transpose(0, 2, 1, 3, 4).reshape(-1, 2)


def _normalised(flat: Tensor, dtype: torch.dtype) -> Tensor:
    """8-bit patches (N, 3 * T * 100) to the values that the processor gives."""
    split = flat.view(flat.shape[0], 3, -1).to(torch.float32) / 255
    mean = torch.tensor(MEAN, device=flat.device)[:, None]
    std = torch.tensor(STD, device=flat.device)[:, None]
    return ((split - mean) / std).to(dtype)


def _embed(visual: nn.Module, flat: Tensor) -> Tensor:
    """Patches to vectors. A picture's patch comes once although the model sees it twice: the two kernels add up."""
    kernel = visual.patch_embed.proj.weight
    values = _normalised(flat, kernel.dtype)
    if values.shape[-1] == PATCH * PATCH:
        kernel = kernel.sum(2, keepdim=True)
    return F.linear(values.reshape(flat.shape[0], -1), kernel.reshape(kernel.shape[0], -1))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _block(block: nn.Module, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
    attn = block.attn
    pictures, patches, width = x.shape
    qkv = attn.qkv(block.norm1(x)).view(pictures, patches, 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4)
    q, k = _rotate(qkv[0], cos, sin), _rotate(qkv[1], cos, sin)
    mixed = F.scaled_dot_product_attention(q, k, qkv[2], attn_mask=mask)
    x = x + attn.proj(mixed.transpose(1, 2).reshape(pictures, patches, width))
    return x + block.mlp(block.norm2(x))


_compiled = torch.compile(_block, dynamic=False)


def round_up(value: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-value // step) * step


def see(model: Qwen2VLForConditionalGeneration, patches: Patches) -> Tensor:
    """Embeddings (all tokens, hidden) of the pictures or clips, in the order of the grids, frame pair by frame pair."""
    visual = model.model.visual
    device = patches.flat.device
    frames = [(rows, columns) for pairs, rows, columns in patches.grids.tolist() for _ in range(pairs)]
    counts = np.zeros(round_up(len(frames), 40), np.int64)
    counts[: len(frames)] = [rows * columns for rows, columns in frames]
    # Few different shapes may reach the device: each new one costs the attention library a plan, half a second.
    longest = max(round_up(int(counts.max()), 32), _USUAL if len(patches.grids) == len(frames) else 0)
    filled = np.arange(longest)[None] < counts[:, None]
    # An empty row must look at something, or its softmax is undefined.
    filled_or_first = filled.copy()
    filled_or_first[:, 0] = True
    places = {shape: grid_positions(*shape) for shape in set(frames)}
    positions = torch.from_numpy(np.concatenate([places[shape] for shape in frames])).to(device)
    where = torch.from_numpy(np.flatnonzero(filled)).to(device)
    mask = torch.from_numpy(filled_or_first).to(device)[:, None, None, :]
    x_flat = _embed(visual, patches.flat)
    angles = positions[..., None].float() * visual.rotary_pos_emb.inv_freq.to(device, torch.float32)
    angles = torch.cat([angles.flatten(1)] * 2, dim=-1)
    x = x_flat.new_zeros(len(counts) * longest, x_flat.shape[-1]).index_copy(0, where, x_flat)
    spread = angles.new_zeros(len(counts) * longest, angles.shape[-1]).index_copy(0, where, angles)
    spread = spread.view(len(counts), 1, longest, -1)
    cos, sin = spread.cos().to(x.dtype), spread.sin().to(x.dtype)
    x = x.view(len(counts), longest, -1)
    run = _compiled if torch.is_grad_enabled() and x.is_cuda and longest == _USUAL else _block
    for block in visual.blocks:
        x = run(block, x, cos, sin, mask)
    return visual.merger(x.reshape(len(counts) * longest, -1).index_select(0, where))


@dataclass(frozen=True)
class Rows:
    """Dialogues of similar length as one rectangle; `source` says which embedding a token takes its vector from."""

    ids_BL: Tensor
    positions_3BL: Tensor
    segments_BL: Tensor
    targets_BL: Tensor
    source_BL: Tensor


def lay_out(dialogues: list[tuple[Dialogue, list[int]]], length: int, device: torch.device) -> Rows:
    """One rectangle of dialogues of at most `length` tokens, each with the first embedding of each of its media.

    Padding has segment -1, which no token looks at but itself.
    """
    shape = (round_up(len(dialogues), 4 if length > 1000 else 16), length)
    ids, targets = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    segments, source = np.full(shape, -1, np.int64), np.full(shape, -1, np.int64)
    positions = np.zeros((3, *shape), np.int64)
    for row, (dialogue, starts) in enumerate(dialogues):
        used = len(dialogue.ids)
        ids[row, :used] = dialogue.ids
        targets[row, :used] = dialogue.targets
        segments[row, :used] = dialogue.segments
        positions[:, row, :used] = dialogue.positions
        spots = np.flatnonzero((dialogue.ids == 6) | (dialogue.ids == 7))
        if len(spots):
            numbers = [start + np.arange(item.tokens) for start, item in zip(starts, dialogue.media, strict=True)]
            source[row, spots] = np.concatenate(numbers)
    arrays = (ids, positions, segments, targets, source)
    return Rows(*(torch.from_numpy(array).to(device, non_blocking=True) for array in arrays))


def predict(model: Qwen2VLForConditionalGeneration, rows: Rows, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (N, vocabulary) for every token that is to be learned, the tokens themselves, and where each stands."""
    inner = model.model.language_model
    embeds = inner.embed_tokens(rows.ids_BL)
    source = rows.source_BL.flatten()
    spots = (source >= 0).nonzero()[:, 0]
    picked = seen.index_select(0, source.index_select(0, spots)).to(embeds.dtype)
    embeds = embeds.flatten(0, 1).index_copy(0, spots, picked).view(embeds.shape)
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
    learned = rows.targets_BL[:, 1:] > 0
    logits = model.lm_head(hidden[:, :-1][learned])
    return logits.float(), rows.ids_BL[:, 1:][learned], learned.nonzero()
