"""The publisher's weights under transformers' names, with the adapter of one task merged into them.

A weight W that has adapters is stored as `parametrizations.weight.original`, next to matrices A and B for each task, as
`parametrizations.weight.0.lora_A` and `lora_B`. The task's weight is W + B A * alpha / rank; of embeddings, W + A B.

Shapes: N tasks, R rank, V rows of a weight, H its columns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from beheld.core.errors import ModelError
from beheld.families.jina_embeddings_v3.config import TASK, is_rotary, number_of
from beheld.utils.log import get_logger

logger = get_logger(__name__)

_STORED, _ORIGINAL = ".parametrizations.weight", ".parametrizations.weight.original"
_ADAPTERS = tuple(f"{_STORED}.0.lora_{letter}" for letter in "AB")
# A name, or a part of it -> transformers'.
_NAMES = (
    (r"^roberta\.", ""),
    (r"^emb_ln\.", "embeddings.LayerNorm."),
    (r"^encoder\.layers\.", "layers."),
    (r"\.mixer\.out_proj\.", ".self_attn.o_proj."),
    (r"\.norm1\.", ".post_attention_layernorm."),
    (r"\.norm2\.", ".post_mlp_layernorm."),
)
_JOINED = ".mixer.Wqkv."


def merge(weights: Mapping[str, Tensor], raw: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """Return the weights under transformers' names; None if they are not in this layout. See FamilyModel.renamed.

    Raises:
        ModelError: adapters are missing.
    """
    if not is_rotary(raw):
        return None
    task = number_of(raw)
    made: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if name.endswith(_ADAPTERS):
            continue
        if name.endswith(_ORIGINAL):
            whole = name.removesuffix(_ORIGINAL)
            made |= _named(f"{whole}.weight", _adapted(weights, whole, weight, task, raw))
        else:
            made |= _named(name, weight)
    if task is not None:
        logger.info("The adapter of the task %r is merged into the weights; those of other tasks are left out.", TASK)
    return made


def _adapted(weights: Mapping[str, Tensor], whole: str, weight_VH: Tensor, task: int | None, raw: Any) -> Tensor:
    """Return a weight with the task's adapter, in its own type."""
    if task is None:
        return weight_VH
    try:
        first_N, second_N = (weights[f"{whole}{name}"] for name in _ADAPTERS)
        a, b = first_N[task].float(), second_N[task].float()
        change_VH = a @ b if "embeddings" in whole else b @ a
        scale = raw["lora_alpha"] / raw["lora_rank"]
        return (weight_VH.float() + change_VH.view(weight_VH.shape) * scale).to(weight_VH.dtype)
    except (KeyError, IndexError, RuntimeError) as error:
        raise ModelError(f"The adapter of {whole} cannot be read: {error}.", "Fetch the checkpoint again.") from error


def _named(name: str, weight: Tensor) -> dict[str, Tensor]:
    for theirs, ours in _NAMES:
        name = re.sub(theirs, ours, name)
    if _JOINED not in name:
        return {name: weight}
    return {
        name.replace(_JOINED, f".self_attn.{letter}_proj."): part.contiguous()
        for letter, part in zip("qkv", weight.chunk(3), strict=True)
    }
