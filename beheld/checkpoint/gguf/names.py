"""The weights of a GGUF file under transformers' names, and the other way."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from beheld.checkpoint.gguf.header import Header, StoredTensor
from beheld.core.errors import ModelError

ROPE_FACTORS = "rope_freqs.weight"
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
_THEIR_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def renamed(name: str, parts: Mapping[str, str]) -> str | None:
    """Return transformers' name of a tensor; None if there is none. Experts' has "{}" for the expert's number.

    Args:
        parts: names of a layer's parts that differ; see GGUFLayout.
    """
    layer = _LAYER.fullmatch(name)
    if layer is not None:
        part = parts.get(layer[2], _PARTS.get(layer[2]))
        return None if part is None else f"model.layers.{layer[1]}.{part}.{layer[3]}"
    stem, _, suffix = name.rpartition(".")
    return f"{_NAMES[stem]}.{suffix}" if stem in _NAMES and suffix in ("weight", "bias") else None


class StoredName(NamedTuple):
    """A file's name of a tensor, and the expert whose part of it is meant; None for the whole."""

    name: str
    expert: int | None = None


def stored_name(theirs: str, parts: Mapping[str, str]) -> StoredName | None:
    """Return the file's name of a weight by transformers' name, the other way than `renamed`; None if there is none."""
    layer = _THEIR_LAYER.fullmatch(theirs)
    if layer is None:
        stem, _, suffix = theirs.rpartition(".")
        found = next((own for own, other in _NAMES.items() if other == stem), None)
        return None if found is None or suffix not in ("weight", "bias") else StoredName(f"{found}.{suffix}")
    for own, other in (_PARTS | dict(parts)).items():
        place = re.fullmatch(re.escape(other).replace(r"\{\}", r"(\d+)"), layer[2])
        if place is not None:
            return StoredName(f"blk.{layer[1]}.{own}.{layer[3]}", int(place[1]) if place.groups() else None)
    return None


def unknown_names(header: Header, parts: Mapping[str, str]) -> list[str]:
    """Return the names of tensors that no model here has."""
    return sorted(name for name in header.tensors if name != ROPE_FACTORS and renamed(name, parts) is None)


def rope_factors(header: Header, file: Path) -> list[float] | None:
    """Return what frequencies of the rotary embedding are divided by; None for nothing.

    Raises:
        ModelError: they are no list of numbers in float32.
    """
    stored: StoredTensor | None = header.tensors.get(ROPE_FACTORS)
    if stored is None:
        return None
    if stored.kind != "F32" or len(stored.shape) != 1 or stored.shape[0] > 1 << 16:
        raise ModelError(f"{file.name}: {ROPE_FACTORS!r} is no list of numbers in float32.", "Fetch the file again.")
    with file.open("rb") as opened:
        opened.seek(stored.start)
        found = list(struct.unpack(f"<{stored.shape[0]}f", opened.read(stored.num_bytes)))
    if not all(number > 0 for number in found):
        raise ModelError(f"{file.name}: {ROPE_FACTORS!r} holds numbers that are not above 0.", "Fetch the file again.")
    return None if all(number == 1 for number in found) else found
