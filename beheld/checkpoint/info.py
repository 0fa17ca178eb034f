"""What a checkpoint says of itself: its transformers configuration, and ModelInfo made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from beheld.checkpoint import quantized
from beheld.checkpoint.checks.config import check_activations, check_heads
from beheld.checkpoint.checks.entries import refused
from beheld.checkpoint.convert import family_of_config, read_here
from beheld.checkpoint.files import CONFIG, read_json
from beheld.checkpoint.pooling import longest, pooler_of
from beheld.checkpoint.remote_code import own_first
from beheld.checkpoint.secondary import described, secondary_weights
from beheld.core.config import EngineArgs, KVGroup, ModelInfo, StateShape
from beheld.core.errors import ConfigError, ModelError, first_line
from beheld.families import registry
from beheld.families.family import UNDEFINED, Family, OldestTransformers
from beheld.families.text_types import NEW_TYPES
from beheld.utils.log import get_logger
from beheld.utils.version import numbers_of

logger = get_logger(__name__)

_TOKEN_FIELDS = {
    "image": ("image_token_id", "image_token_index"),
    "video": ("video_token_id", "video_token_index"),
    "audio": ("audio_token_id", "audio_token_index"),
}
# What comes of entries that are missing or of another kind than the class expects.
_OF_VALUES = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
# Files that name the processor's class.
_NAMING_PROCESSORS = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
# What a text part's class must not take its defaults for.
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "vocab_size")
_LAYER_KINDS = {
    "attention": "full",
    "chunked_attention": "chunked",
    "conv": "conv",
    "full_attention": "full",
    "linear_attention": "recurrent",
    "sliding_attention": "sliding",
}
# Layers that keep nothing of a prompt, such with both attention and a recurrent state, and such with an indexer.
_STATELESS = ("moe", "mlp")
_BOTH = "hybrid"
_INDEXED = "indexed_attention"
# Names of kinds in transformers before 5.18, and in files that it wrote.
_RENAMED = {"deepseek_sparse_attention": _INDEXED, "qwen_sparse_attention": _INDEXED}
# Positions of a model that has no bound of its own: without attention, a state is as large however long the prompt.
_UNBOUNDED = 1 << 17


def read_config(path: Path, args: EngineArgs) -> Any:
    """The transformers configuration of the checkpoint in `path`, with `args.hf_overrides` applied.

    Raises:
        ModelError: transformers does not know the architecture, or the file is broken.
        ConfigError: the option `quantization` names another method than the checkpoint's.
    """
    raw: Mapping[str, Any] = read_json(path / CONFIG)
    family = registry.facts(family_of_config(raw))
    _need_package(family, raw)
    _need_transformers(family, raw)
    quantized.check(args.quantization, raw)
    raw = described(raw, path, args)
    check_activations(raw)
    from transformers import AutoConfig

    try:
        config = read_here(raw)
        is_ours = config is not None
        if config is None:
            config = own_first(
                lambda trust: AutoConfig.from_pretrained(str(path), trust_remote_code=trust),
                trusted=args.trust_remote_code,
            )
    except ModelError:
        raise
    except Exception as error:
        kind = raw.get("model_type") or "unnamed"
        raise ModelError(
            f"The model type {kind!r} is not one this version of transformers can read: {first_line(error)}.",
            "Update transformers, or use a checkpoint in transformers' own layout.",
        ) from error
    if not is_ours:
        _refuse_unread(raw, config)
    for modality, tokens in family.placeholder_tokens.items():
        setattr(config, _TOKEN_FIELDS[modality][0], _token_id(path, tokens))
    return _part_that_reads(_override(config, args.hf_overrides))


def _refuse_unread(raw: Mapping[str, Any], config: Any) -> None:
    """Refuse a file with the text's sizes at its top level, where the class does not read them.

    Without an error, the class would use its defaults instead.
    """
    text = config.get_text_config(decoder=True)
    # An encoder-decoder without sub-configurations gives a copy, with the decoder's sizes under the usual names.
    if (
        text is config
        or not config.sub_configs
        or any(getattr(config, name, None) is text for name in config.sub_configs if name in raw)
    ):
        return
    for name in _SIZES:
        if name in raw and getattr(text, name, raw[name]) != raw[name]:
            raise ModelError(
                f"config.json says {name} {raw[name]} at its top, where {type(config).__name__} does not read it "
                f"and takes {getattr(text, name)}.",
                "Use a checkpoint in transformers' own layout, with a text_config.",
            )


def _part_that_reads(config: Any) -> Any:
    """The configuration of the part that reads, of a model that also speaks; any other as it is."""
    architecture = registry.facts(registry.find(config.model_type)).reads_by
    thinker = getattr(config, "thinker_config", None)
    if not architecture or thinker is None:
        return config
    logger.info("Of %s only the part that answers in text is loaded; what speaks is left out.", config.model_type)
    thinker.architectures = [architecture]
    thinker.dtype = getattr(thinker, "dtype", None) or getattr(config, "dtype", None)
    return thinker


def _need_package(family: Family, raw: Mapping[str, Any]) -> None:
    """Refuse a family whose package is not installed, before transformers fails on it."""
    if family.package and find_spec(family.package) is None:
        raise ModelError(
            f"Models of the type {raw.get('model_type')!r} need the package {family.package}, which is not installed.",
            f"Install it: pip install {family.package}",
        )


def _need_transformers(family: Family, raw: Mapping[str, Any]) -> None:
    """Refuse a family that the installed transformers does not define, or whose answers it computes wrongly."""
    kind, oldest = raw.get("model_type"), family.oldest
    if oldest is None and isinstance(kind, str) and kind in NEW_TYPES:
        oldest = OldestTransformers(NEW_TYPES[kind], UNDEFINED)
    if oldest is None:
        return
    import transformers

    if numbers_of(transformers.__version__) < numbers_of(oldest.version):
        raise ModelError(
            f"Models of the type {kind!r} need transformers {oldest.version}: "
            f"{transformers.__version__}, which is installed, {oldest.flaw}.",
            f"Install it: pip install 'transformers>={oldest.version}'",
        )


def _override(config: Any, overrides: Mapping[str, Any] | Callable[[Any], Any] | None) -> Any:
    if overrides is None:
        return config
    if callable(overrides):
        changed = overrides(config)
        if changed is None:
            raise ConfigError("The hf_overrides function gave None.", "It must return the configuration.")
        return changed
    for name, value in overrides.items():
        if not hasattr(config, name):
            logger.warning("hf_overrides sets %r, which %s does not have.", name, type(config).__name__)
        current = getattr(config, name, None)
        if isinstance(value, Mapping) and hasattr(current, "to_dict"):
            _override(current, value)
        else:
            setattr(config, name, value)
    return config


def read_info(path: Path, args: EngineArgs, config: Any = None) -> ModelInfo:
    """ModelInfo of the checkpoint in `path`; `config` saves reading its configuration again.

    Raises:
        ModelError: the layout is one that the engine cannot run, named.
    """
    config = read_config(path, args) if config is None else config
    try:
        return _info(path, args, config)
    except (ModelError, ConfigError):
        raise
    except _OF_VALUES as error:
        # What a value means is known to the class that reads it, and that it is of the wrong kind only here.
        raise ModelError(
            f"config.json cannot be used: an entry of {type(config).__name__} is missing or of the wrong kind "
            f"({type(error).__name__}: {first_line(error)}).",
            "Mend config.json, or fetch the checkpoint again.",
        ) from error


def _info(path: Path, args: EngineArgs, config: Any) -> ModelInfo:
    package = _family(path, config)
    family = registry.facts(package)
    if family.refused:
        raise ModelError(
            f"{_architecture(config)} cannot be run yet: {family.refused}.",
            "`beheld models` lists the families that can.",
        )
    text = config.get_text_config(decoder=True)
    check_heads(text)
    generation = read_json(path / "generation_config.json")
    encodes = bool(getattr(config, "is_encoder_decoder", False))
    if encodes and not family.encoder_reads:
        runs = [kind for each in registry.families().values() if each.encoder_reads for kind in each.model_types]
        raise ModelError(
            f"{_architecture(config)} is an encoder-decoder model.",
            f"Of those only {', '.join(runs)} can be run so far.",
        )
    if family.encoder_reads and _architecture(config).endswith("ForCausalLM"):
        raise ModelError(
            f"{_architecture(config)} is the decoder of an encoder-decoder model, without its encoder.",
            "Use a checkpoint of the whole model.",
        )
    state = family.state(text) if family.state is not None else None
    # An encoder keeps nothing of a prompt, which one step computes.
    groups: tuple[KVGroup, ...] = ()
    if not family.encodes:
        dense = family.dense_up_to is not None
        groups = family.kv_groups(config) if family.kv_groups is not None else kv_groups(text, state, dense=dense)
    cross = family.cross_group(config) if family.cross_group is not None else None
    placeholders = _placeholders(config, family)
    pooler = pooler_of(path, args, config, family)
    first = 0 if family.first_position is None else family.first_position(config)
    reach = _reach(text) - first
    dense_reach = reach if family.dense_up_to is None else min(reach, family.dense_up_to(text))
    both_ways = family.both_ways
    if getattr(text, "use_bidirectional_attention", None) == "vision" and both_ways == "nowhere":
        both_ways = "windowed media"
    if both_ways != "nowhere" and any(group.values_in_keys for group in groups):
        raise ModelError(f"{_architecture(config)} reads media both ways in layers with latents, which cannot run yet.")
    return ModelInfo(
        path=str(path),
        name=args.model or "mote",
        architecture=family.late.get(_architecture(config), _architecture(config)),
        model_type=config.model_type,
        family=package,
        checkpoint_dtype=_dtype_name(config, text),
        vocab_size=text.vocab_size if family.head_size is None else family.head_size(config),
        num_ids=text.vocab_size + (getattr(text, "additional_vocab_size", None) or 0),
        hidden_size=text.hidden_size,
        num_layers=getattr(text, "decoder_layers", text.num_hidden_layers) if encodes else text.num_hidden_layers,
        max_model_len=dense_reach if pooler is None else min(dense_reach, longest(path) or dense_reach),
        sparse_reach=reach if dense_reach < reach else None,
        pooler=pooler,
        modalities=tuple(placeholders),
        placeholder_ids=placeholders,
        # In text without media all axes of a position are equal, so one is enough: the text model repeats it.
        position_axes=2 if family.encodes else _axes(text) if placeholders else 1,
        eos_ids=_ids(generation.get("eos_token_id"))
        | _ids(getattr(text, "eos_token_id", None))
        | _ids(getattr(config, "eos_token_id", None))
        | _ids(None if family.ends is None else family.ends(config, generation)),
        pad_id=_one(getattr(text, "pad_token_id", None)),
        kv_groups=(*groups, *(() if cross is None else (cross,))),
        rope_switch=_rope_switch(text),
        atomic_spans=both_ways in ("media", "whole media", "windowed media"),
        both_ways=both_ways,
        plain_attention=family.plain_attention,
        call_formats=family.calls,
        reasoning_formats=family.reasoning,
        grounding=family.grounding,
        deeper=0 if family.deeper is None else family.deeper(config),
        joint_ids=_added_ids(path, family.joint_tokens),
        encoder_reads=family.encoder_reads if encodes else "",
        decoder_start_id=_decoder_start(config, text, generation) if encodes else None,
        secondary=secondary_weights(path, args),
        quantized_by=(quantized.stated(read_json(path / CONFIG)) or {}).get("quant_method"),
    )


def _family(path: Path, config: Any) -> str:
    """The family of the checkpoint in `path`, as the registry names it."""
    processors = [read_json(path / file).get("processor_class") for file in _NAMING_PROCESSORS]
    return registry.find(config.model_type, (_architecture(config),), [name for name in processors if name])


def _added_ids(path: Path, tokens: tuple[str, ...]) -> frozenset[int]:
    """The ids of tokens that were added to the tokenizer's own; those that it does not have are left out."""
    if not tokens:
        return frozenset()
    added = added_tokens(path)
    return frozenset(added[token] for token in tokens if token in added)


def _token_id(path: Path, tokens: str | tuple[str, ...]) -> int:
    """The id of a token that was added to the tokenizer's own; of several, of the first that was.

    Raises:
        ModelError: its files have none.
    """
    names = (tokens,) if isinstance(tokens, str) else tokens
    known = added_tokens(path)
    index = next((known[name] for name in names if name in known), None)
    if index is None:
        raise ModelError(
            f"The tokenizer has no token {names[0]!r}, which stands for one embedding in a prompt.",
            "Fetch the checkpoint again: tokenizer_config.json and added_tokens.json, or tokenizer.json, name it.",
        )
    return index


def added_tokens(path: Path) -> dict[str, int]:
    """Token -> id of those that were added to the tokenizer's own, by its files in `path`."""
    named = read_json(path / "tokenizer_config.json").get("added_tokens_decoder") or {}
    found: dict[str, int] = dict(read_json(path / "added_tokens.json"))
    found |= {entry["content"]: int(index) for index, entry in named.items()}
    return found | {
        entry["content"]: entry["id"] for entry in read_json(path / "tokenizer.json").get("added_tokens") or ()
    }


def _decoder_start(config: Any, text: Any, generation: Mapping[str, Any]) -> int:
    """The token that starts every answer: as transformers' generate finds it.

    Raises:
        ModelError: none is named.
    """
    for name in ("decoder_start_token_id", "bos_token_id"):
        for found in (generation.get(name), getattr(text, name, None), getattr(config, name, None)):
            if isinstance(found, int):
                return found
    raise ModelError(f"{text.model_type} does not name its decoder_start_token_id.", "Add it to config.json.")


# Kind of a layer -> the setting with the positions that it sees.
_WINDOWS = {"sliding": "sliding_window", "chunked": "attention_chunk_size", "conv": "conv_L_cache"}


def _positions(text: Any, name: str) -> int | None:
    """A setting that counts positions. Earlier checks let lists pass, which some models have for some settings."""
    found = getattr(text, name, None)
    if found is not None and not isinstance(found, int):
        raise refused(CONFIG, name, found, "a whole number")
    return found


def kv_groups(text: Any, state: StateShape | None = None, *, dense: bool = False) -> tuple[KVGroup, ...]:
    """The layer groups of a text configuration: layers of the same kind, window and shape share one.

    Args:
        state: what its recurrent layers keep, if the family says it.
        dense: layers with an indexer attend to all positions; see Family.dense_up_to.

    Raises:
        ModelError: a layer is of a kind that has no cache here.
    """
    windows = {kind: _positions(text, name) for kind, name in _WINDOWS.items()}
    window = windows["sliding"]
    types = getattr(text, "layer_types", None)
    if not types:
        types = ["sliding_attention" if window else "full_attention"] * text.num_hidden_layers
    types = [_RENAMED.get(name, name) for name in types[: text.num_hidden_layers]]
    cross_layers = frozenset(getattr(text, "cross_attention_layers", None) or ())
    # The last layers of some models read the keys and values of the last one of their kind before them.
    own = text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", None) or 0)
    layers_by_form: dict[tuple[str, _Form], list[int]] = {}
    readers_by_source: dict[int, list[int]] = {}
    recurrent: list[int] = []
    for layer, name in enumerate(types):
        if layer in cross_layers or name in _STATELESS:
            continue
        kind = "full" if name == _BOTH or (dense and name == _INDEXED) else _LAYER_KINDS.get(name)
        recurs = kind == "recurrent" or name == _BOTH
        if kind is None or (recurs and state is None):
            missing = "a recurrence that has no mixer here yet" if recurs else "which cannot be run yet"
            raise ModelError(
                f"Layer {layer} of {text.model_type} is of kind {name!r}, {missing}.",
                "Models with full, sliding and chunked attention, short convolutions, the gated delta rule, the state "
                "spaces of Mamba and the lightning attention of MiniMax-Text-01 can.",
            )
        if recurs:
            recurrent.append(layer)
        if kind == "recurrent":
            continue
        if layer >= own:
            source = max((i for i in range(own) if types[i] == name), default=None)
            if source is None:
                raise ModelError(f"Layer {layer} of {text.model_type} reads a cache that no layer before it writes.")
            readers_by_source.setdefault(source, []).append(layer)
            continue
        # A convolution has one input of the hidden size where attention has keys.
        form = _Form(1, text.hidden_size, 0) if kind == "conv" else _form(text, layer, dense=dense)
        kind = kind if windows.get(kind) else "latent" if form.values_in_keys else "full"
        if form.values_in_keys and kind != "latent":
            raise ModelError(f"Layer {layer} of {text.model_type} has latents and a window, which cannot be run yet.")
        layers_by_form.setdefault((kind, form), []).append(layer)
    groups = [
        KVGroup(
            kind,
            tuple(layers),
            *form[:3],
            windows.get(kind),
            tuple((reader, source) for source in layers for reader in readers_by_source.get(source, ())),
            values_in_keys=form.values_in_keys,
        )
        for (kind, form), layers in layers_by_form.items()
    ]
    if recurrent:
        groups.append(KVGroup("recurrent", tuple(recurrent), 0, 0, 0, state=state))
    return tuple(groups)


class _Form(NamedTuple):
    """What a layer keeps of a position; see KVGroup."""

    num_kv_heads: int
    head_dim: int
    value_dim: int
    values_in_keys: bool = False


def _form(text: Any, layer: int, *, dense: bool) -> _Form:
    """What one layer keeps of a position; in some models layers differ."""
    if getattr(text, "is_heterogeneous", False):
        text = text.per_layer_config[layer]
    rank, rotary = getattr(text, "kv_lora_rank", None), getattr(text, "qk_rope_head_dim", None)
    if rank and rotary:
        if getattr(text, "index_topk", None) and not dense:
            raise ModelError(
                f"An indexer of {text.model_type} chooses the positions that a query sees, which cannot be run yet.",
                "Models of latent attention (MLA) without an indexer can.",
            )
        return _Form(1, rank + rotary, rank, values_in_keys=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return _Form(heads, head_dim, head_dim)


def _reach(text: Any) -> int:
    """The longest sequence that a text configuration is made for, rotary scaling counted in.

    "linear" and "yarn" scalings multiply the length that the model was trained on. With "llama3" and "longrope" the
    configuration gives the scaled length already. "dynamic" follows the longest sequence of a batch, so answers would
    depend on their batch mates. If every kind of layer has its own scaling, the configuration gives the model's length.
    A model without attention has no bound.
    """
    # `dir` does not read: of what differs from layer to layer, transformers' configurations give no one value.
    unbounded = "num_attention_heads" not in {*dir(text), *text.attribute_map}
    # Decoders after speech encoders have a length of their own.
    lengths = (
        getattr(text, name, None) for name in ("max_position_embeddings", "max_target_positions", "max_text_positions")
    )
    named = int(next((length for length in lengths if length), 0))
    known = named if named > 0 else _UNBOUNDED if unbounded else 2048
    rope = _rope(text) or {}
    kind, factor = rope.get("rope_type") or rope.get("type"), rope.get("factor")
    if kind not in ("linear", "yarn") or not isinstance(factor, int | float):
        return known
    trained = (rope.get("original_max_position_embeddings") if kind == "yarn" else None) or known
    return max(known, int(trained * factor))


def _axes(text: Any) -> int:
    """How many axes positions have: as many as config.json names sections, or as the class has of its own.

    A text class that knows sections has three where config.json leaves them to it. Whether the model does is checked
    once it is loaded, in models/hf.py: HunYuan's has none then.
    """
    named = (_rope(text) or {}).get("mrope_section")
    if named:
        return len(named)
    known = getattr(type(text), "ignore_keys_at_rope_validation", None) or ()
    return 3 if "mrope_section" in known else 1


def _rope_switch(text: Any) -> int | None:
    """The longest sequence with the short rotary scale, in models that have two."""
    rope = _rope(text) or {}
    if (rope.get("rope_type") or rope.get("type")) != "longrope":
        return None
    known = rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
    return int(known) if known else None


def _placeholders(config: Any, family: Family) -> dict[str, int]:
    """Modality -> the id that marks one embedding's place."""
    if family.placeholders is not None:
        return family.placeholders(config)
    found: dict[str, int] = {}
    for modality, names in _TOKEN_FIELDS.items():
        for name in names:
            value = getattr(config, name, None)
            if isinstance(value, int):
                found[modality] = value
                break
    if getattr(config, "audio_config", "there") is None:
        # Larger models of a family name the token, but have no tower for it.
        found.pop("audio", None)
    if family.videos_as_images and "image" in found:
        found["video"] = found["image"]
    return {modality: found[modality] for modality in _TOKEN_FIELDS if modality in found}


def _architecture(config: Any) -> str:
    names = getattr(config, "architectures", None) or [config.model_type]
    return str(names[0])


def _rope(text: Any) -> Mapping[str, Any] | None:
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    return rope if isinstance(rope, Mapping) else None


def _dtype_name(config: Any, text: Any) -> str:
    dtype = getattr(config, "dtype", None) or getattr(text, "dtype", None) or "float32"
    return str(dtype).removeprefix("torch.")


def _ids(value: Any) -> frozenset[int]:
    if isinstance(value, int):
        return frozenset((value,))
    return frozenset(v for v in value or () if isinstance(v, int))


def _one(value: Any) -> int | None:
    return value if isinstance(value, int) else next(iter(value), None) if value else None
