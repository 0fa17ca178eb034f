"""The configuration of an XLM-RoBERTa with rotary positions, under the names of transformers' class."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from beheld.core.errors import ModelError

_TYPE, _CLASS = "jina_embeddings_v3", "JinaEmbeddingsV3Model"
_CLASSES = ("XLMRobertaModel", "XLMRobertaLoRA")
_REPLACED = ("architectures", "auto_map", "model_type", "position_embedding_type", "rotary_emb_base", "rotary_emb_dim")
TASK = "text-matching"
"""The task whose adapter is merged, as in vLLM."""
_ADAPTERS = "lora_adaptations"


def is_rotary(raw: Mapping[str, Any]) -> bool:
    """Return whether the content of a config.json describes such an encoder."""
    return raw.get("position_embedding_type") == "rotary"


def convert(raw: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the model type and the content of config.json for transformers' class; see Family.convert.

    Raises:
        ModelError: it has another head, rotates a part of each head only, or has no adapter of TASK.
    """
    named = (raw.get("architectures") or _CLASSES)[0]
    head_dim = raw["hidden_size"] // raw["num_attention_heads"]
    rotated = raw.get("rotary_emb_dim") or head_dim
    if named not in _CLASSES:
        raise ModelError(
            f"{named} with 'rotary' positions is not built: only encoders without a head are.",
            "Use another model of this kind, such as BAAI/bge-reranker-v2-m3.",
        )
    if rotated != head_dim:
        raise ModelError(f"config.json rotates {rotated} of the {head_dim} numbers of a head, which is not built.")
    number_of(raw)
    made = {name: copy.deepcopy(value) for name, value in raw.items() if name not in _REPLACED}
    rope = {"rope_type": "default", "rope_theta": float(raw.get("rotary_emb_base") or 10000.0)}
    return _TYPE, made | {"architectures": [_CLASS], "rope_parameters": rope}


def number_of(raw: Mapping[str, Any]) -> int | None:
    """Return which of the checkpoint's adapters is TASK's; None if it has no adapters.

    Raises:
        ModelError: it has none of that task.
    """
    tasks = raw.get(_ADAPTERS)
    if not tasks:
        return None
    if TASK not in tasks:
        raise ModelError(
            f"config.json names adapters for {', '.join(map(str, tasks))}, and none for {TASK}, which is merged.",
            "Use a checkpoint whose adapters are merged already.",
        )
    return int(tasks.index(TASK))
