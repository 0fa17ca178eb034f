"""The entries of a GGUF file with the model that a config.json describes: the other way than config.py.

What a file cannot say is found by reading it back: `unsaid` compares the two configurations.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from beheld.checkpoint.gguf.config import EPSILON, NUMBERS, SCALINGS, WINDOW, llama3_divisors
from beheld.families import registry
from beheld.families.family import Family, GGUFLayout

# Entries of config.json that no answer depends on, or that follow from others.
_IDLE = frozenset(
    (
        *(
            "_name_or_path",
            "architectures",
            "auto_map",
            "chunk_size_feed_forward",
            "dtype",
            "id2label",
            "initializer_range",
        ),
        *("is_encoder_decoder", "label2id", "max_window_layers", "model_type", "output_attentions", "pretraining_tp"),
        *("output_hidden_states", "output_router_logits", "problem_type", "quantization_config", "return_dict"),
        *("router_aux_loss_coef", "torch_dtype", "transformers_version", "use_cache", "use_sliding_window"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "no_rope_layer_interval"),
    )
)
_DROPOUTS = ("dropout", "pdrop")
# Values that mean as little as an entry that is missing.
_NOTHING: tuple[Any, ...] = (None, False, 0, [], {}, ())
# Files hold floats of 32 bits.
_TOLERANCE = 1e-6


class TextEntries(NamedTuple):
    """What a file states of its text model.

    Attributes:
        entries: by name, without the architecture before it.
        divisors: of the frequencies of rotated pairs; None if the file has none.
    """

    entries: dict[str, Any]
    divisors: list[float] | None


def layout_of(model_type: str) -> tuple[Family, GGUFLayout] | None:
    """Return how models of this type are written, and the family whose layout that is; None if they are not."""
    for family in registry.families().values():
        layout = family.gguf
        if layout is not None and model_type in (*family.model_types, *layout.written_from):
            return family, layout
    return None


def written_types() -> list[str]:
    """Return the model types that are written."""
    layouts = [(family, family.gguf) for family in registry.families().values() if family.gguf is not None]
    return sorted({kind for family, layout in layouts for kind in (*family.model_types, *layout.written_from)})


def content_of(config: Any) -> dict[str, Any]:
    """Return what a configuration of transformers says, with all names that its class has for an entry."""
    content = config.to_dict()
    return content | {other: content[own] for other, own in config.attribute_map.items() if own in content}


def text_entries(content: Mapping[str, Any], family: Family, layout: GGUFLayout) -> TextEntries:
    """Return what a file states of a text model.

    Args:
        content: see `content_of`.
        family: whose layout it is.
        layout: the family's.
    """
    own: Mapping[str, Any] = {}
    if layout.adapted_from is not None:
        module, _, name = layout.adapted_from.partition(":")
        package = registry.find(family.model_types[0], ())
        back: Callable[[Mapping[str, Any]], tuple[dict[str, Any], dict[str, Any]]] = getattr(
            importlib.import_module(f"{package}.{module}"), name
        )
        content, own = back(content)
    head_dim = head_dim_of(content)
    found = {entry: content[name] for name, entry in NUMBERS.items() if content.get(name) is not None}
    found |= {NUMBERS["head_dim"]: head_dim, "attention.value_length": head_dim, "rope.dimension_count": head_dim}
    found |= {EPSILON: float(content["rms_norm_eps"]), "vocab_size": content["vocab_size"]}
    positions, divisors = _positions(content["rope_parameters"], head_dim)
    stated = {entry: content.get(name) for name, entry in layout.entries.items()}
    # Files say by 0 that no layer has a window.
    stated = {entry: 0 if value is None and entry == WINDOW else value for entry, value in stated.items()}
    found |= {**positions, **{entry: value for entry, value in stated.items() if value is not None}, **own}
    return TextEntries(found, divisors)


def head_dim_of(content: Mapping[str, Any]) -> int:
    """Return the numbers of a head."""
    return int(content.get("head_dim") or content["hidden_size"] // content["num_attention_heads"])


def unsaid(meant: Any, found: Any) -> dict[str, tuple[Any, Any]]:
    """Return the entries in which two configurations of transformers differ that an answer may depend on.

    Returns:
        Their names -> the value in `meant` and in `found`.
    """
    contents, known = [], set[str]()
    for config in (meant, found):
        contents.append({**config.to_dict(), "head_dim": head_dim_of(config.to_dict())})
        # Whatever else a publisher's config.json says, the class does not know.
        known |= type(config)().to_dict().keys() | {"head_dim"}
    known = {name for name in known - _IDLE if not name.endswith(_DROPOUTS)}
    pairs = {name: (contents[0].get(name), contents[1].get(name)) for name in sorted(known)}
    return {name: pair for name, pair in pairs.items() if not _alike(*pair)}


def _alike(one: Any, other: Any) -> bool:
    if one in _NOTHING and other in _NOTHING:
        return True
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return all(_alike(one.get(name), other.get(name)) for name in one.keys() | other.keys())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    numbers = (int, float)
    if isinstance(one, numbers) and isinstance(other, numbers) and not isinstance(one, bool):
        return math.isclose(one, other, rel_tol=_TOLERANCE)
    return bool(one == other)


def _positions(said: Mapping[str, Any], head_dim: int) -> tuple[dict[str, Any], list[float] | None]:
    """Return the entries of positions and the divisors of frequencies; what they cannot say is left out."""
    kind, theta = said.get("rope_type", "default"), float(said["rope_theta"])
    found: dict[str, Any] = {"rope.freq_base": theta}
    if kind == "llama3":
        return found, llama3_divisors(float(said["factor"]), theta, head_dim)
    if kind in SCALINGS:
        found |= {"rope.scaling.type": kind, "rope.scaling.factor": float(said["factor"])}
        original = said.get("original_max_position_embeddings")
        found |= {} if original is None else {"rope.scaling.original_context_length": int(original)}
    return found, None
