"""What config.json may say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.checkpoint.checks.entries import Numbers, check_numbers, refused, settings
from beheld.checkpoint.files import CONFIG
from beheld.core.errors import ModelError

_LAYERS = Numbers(1, 1024, whole=True)
_PARTS = Numbers(0, 1024, whole=True)
_HEADS = Numbers(1, 4096, whole=True, each=True)
_SIZE = Numbers(1, 1 << 24, whole=True, each=True)
_INNER = Numbers(0, 1 << 24, whole=True, each=True)
_EPS = Numbers(0, 1)
_BASE = Numbers(0, 1e12, above=True)
_LENGTH = Numbers(1, 1 << 31, whole=True)
_ID = Numbers(-1, 1 << 31, whole=True, each=True)

_BOUNDS = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), _LAYERS),
    **dict.fromkeys(("num_layers", "depth", "encoder_layers", "decoder_layers", "num_kv_shared_layers"), _PARTS),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_heads", "encoder_attention_heads"), _HEADS),
    **dict.fromkeys(("decoder_attention_heads", "attention_heads", "n_head"), _HEADS),
    **dict.fromkeys(("hidden_size", "head_dim", "d_model", "vocab_size", "patch_size", "image_size"), _SIZE),
    **dict.fromkeys(("num_channels", "in_channels", "in_chans", "spatial_merge_size", "temporal_patch_size"), _SIZE),
    **dict.fromkeys(("intermediate_size", "embed_dim", "ffn_dim", "num_experts", "num_local_experts"), _INNER),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon", "norm_epsilon"), _EPS),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq", "rotary_emb_base"), _BASE),
    "factor": Numbers(1e-3, 1e6),
    "max_position_embeddings": _LENGTH,
    "original_max_position_embeddings": _LENGTH,
    "mrope_section": Numbers(0, 1 << 16, whole=True, each=True),
    "sliding_window": Numbers(-1, 1 << 31, whole=True),
    **dict.fromkeys(("image_token_id", "image_token_index", "video_token_id", "video_token_index"), _ID),
    **dict.fromkeys(("audio_token_id", "audio_token_index", "bos_token_id", "eos_token_id", "pad_token_id"), _ID),
}
_DTYPES = ("float32", "float16", "bfloat16", "float64", "float", "half", "auto", "float8_e4m3fn", "float8_e5m2")
# Names of attention that transformers has; any other may be a kernel that it would fetch from the hub and run.
_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")


def check_config(raw: Mapping[str, Any]) -> None:
    """Refuse what no model's configuration says.

    Raises:
        ModelError: it names the key.
    """
    check_numbers(CONFIG, raw, _BOUNDS)
    for where, name, value in settings(raw):
        if name == "model_type" and not isinstance(value, str):
            raise refused(CONFIG, where, value, "a name")
        if name == "architectures" and value is not None and not _are_names(value):
            raise refused(CONFIG, where, value, "a list of names")
        if name in ("dtype", "torch_dtype") and isinstance(value, str) and value.removeprefix("torch.") not in _DTYPES:
            raise refused(CONFIG, where, value, f"one of {', '.join(_DTYPES)}")
        if name.endswith("_implementation"):
            _check_implementation(where, name, value)
        if name.endswith("_config") and not isinstance(value, Mapping | list | str | None):
            raise refused(CONFIG, where, value, "an object")


_COMMON_ACTIVATIONS = frozenset(("gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu"))


def check_activations(raw: Mapping[str, Any]) -> None:
    """Refuse activation functions that neither transformers nor torch has.

    Both are imported only for an uncommon name: here the import would delay what a start does at the same time.

    Raises:
        ModelError: it names the key.
    """
    for where, name, value in settings(raw):
        if name not in ("hidden_act", "hidden_activation", "activation_function", "projector_hidden_act"):
            continue
        if value is not None and not isinstance(value, str):
            raise refused(CONFIG, where, value, "the name of an activation function")
        if value is not None and value not in _COMMON_ACTIVATIONS and not _is_activation(value):
            raise refused(CONFIG, where, value, 'an activation function that transformers has, such as "silu"')


def _is_activation(name: str) -> bool:
    from torch.nn import functional
    from transformers.activations import ACT2FN

    return name in ACT2FN or hasattr(functional, name)


def check_heads(text: Any) -> None:
    """Refuse attention heads that do not share the hidden size, or their keys and values, evenly.

    Args:
        text: the configuration of the text model, as its class read it.

    Raises:
        ModelError: it names the key.
    """
    if getattr(text, "is_heterogeneous", False):
        # Layers differ, and each has a configuration of its own.
        return
    for name in ("vocab_size", "hidden_size"):
        if not hasattr(text, name):
            raise ModelError(
                f"{type(text).__name__} has no {name}: a model that is not one stack of layers over one vocabulary "
                "cannot be run yet."
            )
    attends = hasattr(text, "num_attention_heads")
    for name in ("vocab_size", "hidden_size", *(("num_attention_heads",) if attends else ())):
        value = getattr(text, name, None)
        if isinstance(value, bool) or not isinstance(value, int | list) or value == 0:
            raise refused(CONFIG, name, value, "a whole number from 1")
    if not attends:
        return
    hidden, heads = text.hidden_size, text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None)
    if not isinstance(heads, int) or not isinstance(hidden, int):
        return
    if not getattr(text, "head_dim", None) and hidden % heads:
        raise refused(CONFIG, "num_attention_heads", heads, f"a divisor of hidden_size, which is {hidden}")
    if isinstance(kv_heads, int) and kv_heads and heads % kv_heads:
        raise refused(CONFIG, "num_key_value_heads", kv_heads, f"a divisor of num_attention_heads, which is {heads}")


def _check_implementation(where: str, name: str, value: Any) -> None:
    # Mappings name one for each part of the model.
    for each in value.values() if isinstance(value, Mapping) else (value,):
        plain = each is None or (isinstance(each, str) and "/" not in each and ":" not in each)
        if not plain or ("attn" in name and each not in (None, *_ATTENTION)):
            known = ", ".join(_ATTENTION)
            raise refused(CONFIG, where, value, f"one of {known}, or left out: others are code that would be fetched")


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)
