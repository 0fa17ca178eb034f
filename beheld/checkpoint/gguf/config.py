"""config.json and generation_config.json of a GGUF file's metadata."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from beheld.checkpoint.gguf.header import Header
from beheld.checkpoint.gguf.names import rope_factors, unknown_names
from beheld.core.errors import ModelError
from beheld.families import registry
from beheld.families.family import Family

METHOD = "gguf"
"""The `quant_method` of such a checkpoint."""
_UNQUANTIZED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_ELSEWHERE = "Use the model's checkpoint in transformers' layout instead."
WINDOW = "attention.sliding_window"
EPSILON = "attention.layer_norm_rms_epsilon"
# Entries of config.json -> the files', without the architecture before them; whole numbers.
NUMBERS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
}
# The kinds of scaled positions that files name.
SCALINGS = ("linear", "yarn")
# Llama 3.1's scale of positions, which files state by its divisors: two factors of frequency, and a length.
LLAMA3_SCALE = (1.0, 4.0, 8192)
# Entries that change what is computed, and the values with which they do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "attention.scale": (0.0,),
    WINDOW: (0,),
    "attention.causal": (True,),
    "logit_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "use_parallel_residual": (False,),
}
# Texts that end an answer wherever they are control tokens, whatever else the file names.
_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "<|end|>", "</s>")
END_ENTRIES = ("eos_token_id", "eot_token_id", "eom_token_id")
_CONTROL = 3


def families_by_architecture() -> dict[str, Family]:
    """Return the families whose GGUF files can be read, by the files' name of the architecture."""
    known = [(family.gguf, family) for family in registry.families().values() if family.gguf is not None]
    return {name: family for layout, family in known for name in (layout.architecture, *layout.also)}


def is_vision_part(said: Mapping[str, Any]) -> bool:
    """Return whether a file with this metadata holds the part of a model that reads images or audio (mmproj)."""
    return said.get("general.type") == "mmproj" or said.get("general.architecture") == "clip"


def config_of(header: Header, file: Path) -> dict[str, Any]:
    """Return the content of config.json.

    Raises:
        ModelError: the file is no language model of a known architecture, is a part of one, or lacks an entry.
    """
    said = header.metadata
    architecture, family = _family(header, file)
    layout = family.gguf
    assert layout is not None
    number = _Numbers(said, architecture, file)
    for name, neutral in _NEUTRAL.items():
        if name in layout.entries.values():
            continue
        value = said.get(f"{architecture}.{name}", neutral[0])
        if value not in neutral:
            raise ModelError(f"{file.name}: {architecture}.{name} is {value!r}, which cannot be run here.", _ELSEWHERE)
    unknown = unknown_names(header, layout.parts)
    if unknown:
        raise ModelError(
            f"{file.name} has {len(unknown)} weights that no {architecture} model has, for example {unknown[0]!r}.",
            _ELSEWHERE,
        )
    hidden, heads = (number(NUMBERS[name]) for name in ("hidden_size", "num_attention_heads"))
    defaults = {"num_key_value_heads": heads, "head_dim": max(1, hidden // heads)}
    if "expert_count" in layout.entries.values():
        defaults["intermediate_size"] = 1
    numbers = {name: number(entry, defaults.get(name)) for name, entry in NUMBERS.items()}
    head_dim = numbers["head_dim"]
    _check_head_dim(said, architecture, head_dim, file)
    kinds = {stored.kind for name, stored in header.tensors.items() if len(stored.shape) > 1}
    plain = kinds.pop() if len(kinds) == 1 else ""
    config = {
        "architectures": [layout.model_class],
        "model_type": family.model_types[0],
        "hidden_act": "silu",
        **numbers,
        "rms_norm_eps": said.get(f"{architecture}.{EPSILON}", 1e-5),
        "rope_parameters": _rope(header, architecture, head_dim, file),
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": said.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": said.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": said.get("tokenizer.ggml.padding_token_id"),
        "dtype": _UNQUANTIZED.get(plain, "bfloat16"),
        "transformers_weights": str(file),
        "quantization_config": {"quant_method": METHOD},
    }
    config |= {name: tensor in header.tensors for name, tensor in layout.biases.items()}
    prefix = f"{architecture}."
    own = {name.removeprefix(prefix): value for name, value in said.items() if name.startswith(prefix)}
    # Files of Phi-4 say by 0 that no layer has a window, which transformers says by leaving it out.
    stated = {entry: value for entry, value in own.items() if entry != WINDOW or value != 0}
    config |= {**layout.added, **{name: stated[entry] for name, entry in layout.entries.items() if entry in stated}}
    if layout.adapt is None:
        return config
    module, _, name = layout.adapt.partition(":")
    package = registry.find(family.model_types[0], ())
    adapt: Callable[[dict[str, Any], Mapping[str, Any]], dict[str, Any]] = getattr(
        importlib.import_module(f"{package}.{module}"), name
    )
    return adapt(config, own)


def generation_config_of(header: Header) -> dict[str, Any]:
    """Return the content of generation_config.json: the tokens that end an answer."""
    said = header.metadata
    ends = {said[f"tokenizer.ggml.{name}"] for name in END_ENTRIES if f"tokenizer.ggml.{name}" in said}
    tokens, kinds = said.get("tokenizer.ggml.tokens") or [], said.get("tokenizer.ggml.token_type") or []
    ends |= {
        index
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == _CONTROL and token in _ENDS
    }
    return {"eos_token_id": sorted(ends)} if ends else {}


def _family(header: Header, file: Path) -> tuple[str, Family]:
    said = header.metadata
    architecture = said.get("general.architecture")
    if is_vision_part(said):
        raise ModelError(
            f"{file.name} is an mmproj file: the part of a model that reads images or audio, without the "
            "language model.",
            "Give the language model's own GGUF file; the mmproj file next to it, or the one that the option mmproj "
            "names, is read with it.",
        )
    if said.get("general.type", "model") != "model":
        raise ModelError(f"{file.name} is not a model, but of the type {said['general.type']!r}.", _ELSEWHERE)
    if said.get("split.count", 1) != 1:
        raise ModelError(
            f"{file.name} is one of {said['split.count']} files that hold the model together.",
            "Join them first: llama-gguf-split --merge FIRST_FILE WHOLE_FILE.",
        )
    known = families_by_architecture()
    if architecture not in known:
        raise ModelError(
            f"{file.name} holds a model of the architecture {architecture!r}; "
            f"GGUF files of {', '.join(sorted(known))} can be run.",
            _ELSEWHERE,
        )
    if "token_embd.weight" not in header.tensors:
        raise ModelError(f"{file.name} has no weights 'token_embd.weight'.", "Fetch the file again.")
    return str(architecture), known[architecture]


class _Numbers:
    """Whole numbers of an architecture's entries."""

    def __init__(self, said: Mapping[str, Any], architecture: str, file: Path) -> None:
        self._said, self._architecture, self._file = said, architecture, file

    def __call__(self, name: str, default: int | None = None) -> int:
        value = self._said.get(f"{self._architecture}.{name}", default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            said = "is missing" if value is None else f"is {value!r}"
            raise ModelError(
                f"{self._file.name}: {self._architecture}.{name} {said}, and must be a whole number from 1.",
                "Convert the model again, or fetch the file again.",
            )
        return value


def _check_head_dim(said: Mapping[str, Any], architecture: str, head_dim: int, file: Path) -> None:
    """Refuse heads of which only a part is rotated, or whose values are of another size than their keys."""
    for name in ("rope.dimension_count", "attention.value_length"):
        value = said.get(f"{architecture}.{name}", head_dim)
        if value != head_dim:
            raise ModelError(
                f"{file.name}: {architecture}.{name} is {value!r} where heads have {head_dim}, which "
                "cannot be run here.",
                _ELSEWHERE,
            )


def _rope(header: Header, architecture: str, head_dim: int, file: Path) -> dict[str, Any]:
    """Return the rotary embedding's parameters.

    Raises:
        ModelError: they are of a kind that is unknown here.
    """
    prefix = f"{architecture}.rope."
    said = {name.removeprefix(prefix): value for name, value in header.metadata.items() if name.startswith(prefix)}
    theta = float(said.get("freq_base", 10_000.0))
    factors = rope_factors(header, file)
    kind = said.get("scaling.type", "none")
    # Older files have a linear scale alone.
    factor = float(said.get("scaling.factor", said.get("scale_linear", 0.0)) or 1.0)
    if kind == "none" and factor != 1.0:
        kind = "linear"
    if factors is not None and kind == "none":
        return {"rope_theta": theta, **_llama3(factors, theta, head_dim, file)}
    if factors is None and (kind == "none" or (kind == "linear" and factor == 1.0)):
        return {"rope_theta": theta, "rope_type": "default"}
    original = said.get("scaling.original_context_length")
    known = {"scaling.type", "scaling.factor", "scaling.original_context_length", "scaling.finetuned"}
    unknown = {name for name in said if name.startswith("scaling.")} - known
    if factors is not None or kind not in SCALINGS or unknown or (kind == "yarn" and not original):
        raise ModelError(
            f"{file.name}: positions are scaled in a way that is not read from GGUF files "
            f"({', '.join([repr(kind), *sorted(unknown)])}).",
            _ELSEWHERE,
        )
    found = {"rope_theta": theta, "rope_type": kind, "factor": factor}
    return found if original is None else found | {"original_max_position_embeddings": int(original)}


def llama3_divisors(factor: float, theta: float, head_dim: int) -> list[float]:
    """Return what Llama 3.1's scale with this greatest factor divides the frequencies by."""
    low, high, original = LLAMA3_SCALE
    found = []
    for index in range(head_dim // 2):
        length = 2 * math.pi * theta ** (2 * index / head_dim)
        smooth = min(1.0, max(0.0, (original / length - low) / (high - low)))
        found.append(1 / ((1 - smooth) / factor + smooth))
    return found


def _llama3(factors: list[float], theta: float, head_dim: int, file: Path) -> dict[str, Any]:
    """Return the parameters that Llama 3.1's scale has if it gives these divisors of frequencies.

    Raises:
        ModelError: it does not.
    """
    greatest = max(factors)
    wanted = llama3_divisors(greatest, theta, head_dim)
    if len(wanted) != len(factors) or any(abs(a / b - 1) > 1e-3 for a, b in zip(factors, wanted, strict=True)):
        raise ModelError(f"{file.name}: its 'rope_freqs.weight' is not the scale of Llama 3.1 and 3.2.", _ELSEWHERE)
    low, high, original = LLAMA3_SCALE
    return {
        "rope_type": "llama3",
        "factor": greatest,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
