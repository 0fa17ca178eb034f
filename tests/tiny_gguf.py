"""GGUF files of tiny checkpoints, written as llama.cpp converts: its names, its order of rows, its metadata."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file

from beheld.checkpoint.gguf.names import _PARTS
from tests import tiny

_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
# A change of what is to be written: metadata by name, and arrays by the file's names.
Edit = Callable[[dict[str, Any], dict[str, Any]], None]


def theirs(name: str, parts: Mapping[str, str] = _PARTS) -> str:
    """The file's name of transformers' weight."""
    stem, suffix = name.rsplit(".", 1)
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{next(k for k, v in parts.items() if v == part)}.{suffix}"


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys as llama.cpp has them: the two that are rotated together are next to each other."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def write(
    source: Path, file: Path, kind: Kind = Kind.F32, edit: Edit | None = None, parts: Mapping[str, str] = _PARTS
) -> Path:
    """Write the checkpoint in `source`, whose model_type is the file's architecture, as one GGUF file.

    Args:
        source: a folder.
        file: what is written.
        kind: of the matrices' numbers.
        edit: changes metadata and arrays before they are written.
        parts: the file's names of a layer's parts -> transformers'.
    """
    config = json.loads((source / "config.json").read_text())
    architecture = config["model_type"]
    said: dict[str, Any] = {
        f"{architecture}.context_length": config["max_position_embeddings"],
        f"{architecture}.embedding_length": config["hidden_size"],
        f"{architecture}.block_count": config["num_hidden_layers"],
        f"{architecture}.feed_forward_length": config["intermediate_size"],
        f"{architecture}.attention.head_count": config["num_attention_heads"],
        f"{architecture}.attention.head_count_kv": config["num_key_value_heads"],
        f"{architecture}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{architecture}.rope.freq_base": float(config.get("rope_theta", 10000.0)),
        **_tokenizer(source, config),
    }
    if "head_dim" in config:
        said[f"{architecture}.attention.key_length"] = config["head_dim"]
        said[f"{architecture}.attention.value_length"] = config["head_dim"]
    arrays: dict[str, Any] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        array = weight.float().numpy()
        if architecture == "llama" and ".q_proj." in name:
            array = permuted(array, config["num_attention_heads"])
        if architecture == "llama" and ".k_proj." in name:
            array = permuted(array, config["num_key_value_heads"])
        arrays[theirs(name, parts)] = array
    if edit is not None:
        edit(said, arrays)
    writer = GGUFWriter(file, said.pop("general.architecture", architecture))
    for name, value in said.items():
        _add(writer, name, value)
    for name, array in arrays.items():
        if isinstance(array, tuple):
            writer.add_tensor(name, array[0], raw_dtype=array[1])
        elif array.ndim > 1 and kind != Kind.F32:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def qwen3(folder: Path) -> Path:
    """A tiny Qwen3 with heads wider than their share of the hidden size, and Qwen2's tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    source = tiny.checkpoint("qwen2")
    said = json.loads((source / "config.json").read_text())
    kept = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads")
    config = Qwen3Config(
        **{name: said[name] for name in kept},
        **{name: said[name] for name in ("vocab_size", "max_position_embeddings", "rms_norm_eps", "eos_token_id")},
        head_dim=32,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    torch.manual_seed(3)
    model = Qwen3ForCausalLM(config)
    folder.mkdir()
    for file in source.iterdir():
        if not file.name.startswith(("model", "config")):
            (folder / file.name).write_bytes(file.read_bytes())
    save_file({name: weight.contiguous() for name, weight in model.state_dict().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps(config.to_dict() | {"architectures": ["Qwen3ForCausalLM"], "rope_theta": 10000.0})
    )
    return folder


def _add(writer: GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)


def _tokenizer(source: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer's metadata."""
    raw = json.loads((source / "tokenizer.json").read_text())
    settings = json.loads((source / "tokenizer_config.json").read_text())
    ids = raw["model"]["vocab"] | {token["content"]: token["id"] for token in raw["added_tokens"]}
    special = {token["content"] for token in raw["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    spare = range(len(tokens), config["vocab_size"])
    kinds = [3 if token in special else 6 if token.startswith("<0x") else 1 for token in tokens]
    said: dict[str, Any] = {
        "tokenizer.ggml.tokens": [*tokens, *(f"[PAD{index}]" for index in spare)],
        "tokenizer.ggml.token_type": [*kinds, *(5 for _ in spare)],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.chat_template": settings["chat_template"],
    }
    if raw["model"]["byte_fallback"]:
        scores = [-float(index) for index in range(config["vocab_size"])]
        return said | {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.bos_token_id": config["bos_token_id"],
            "tokenizer.ggml.unknown_token_id": ids["<unk>"],
        }
    return said | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.merges": [" ".join(pair) for pair in raw["model"]["merges"]],
        "tokenizer.ggml.add_bos_token": False,
    }


def idefics3(source: Path, folder: Path, kind: Kind = Kind.F32, edit: Edit | None = None) -> Path:
    """Write an Idefics 3 checkpoint as two files, the text model's and `mmproj-a.gguf`, and return the first.

    Args:
        source: a folder.
        folder: where the files are written.
        kind: of the text model's matrices' numbers.
        edit: changes metadata and arrays of the vision part before they are written.
    """
    config, preprocessor, weights = _parts(source)
    file = _text_file(source, folder, "model.text_model.", {}, kind)
    vision = config["vision_config"]
    said = _vision_said(vision | {"layer_norm_eps": 1e-6}, preprocessor) | {
        "clip.projector_type": "idefics3",
        "clip.vision.image_size": vision["image_size"],
        "clip.vision.projector.scale_factor": config["scale_factor"],
        "clip.vision.preproc_image_size": preprocessor["size"]["longest_edge"],
    }
    arrays = {
        _vision_name(name, _IDEFICS3): weight.float().numpy()
        for name, weight in weights.items()
        if name.startswith(("model.vision_model.", "model.connector."))
    }
    _write_vision(folder, said, arrays, edit)
    return file


def qwen3_vl(source: Path, folder: Path, kind: Kind = Kind.F32, edit: Edit | None = None) -> Path:
    """Write a Qwen3-VL checkpoint as two files; see `idefics3`."""
    config, preprocessor, weights = _parts(source)
    sections = config["text_config"]["rope_scaling"]["mrope_section"]
    positions = {"model_type": "qwen3vl", "sections": [*sections, 0]}
    file = _text_file(source, folder, "model.language_model.", positions, kind)
    vision = config["vision_config"]
    deep = vision["deepstack_visual_indexes"]
    named = {"num_hidden_layers": vision["depth"], "num_attention_heads": vision["num_heads"]}
    said = _vision_said(vision | named | {"layer_norm_eps": 1e-6}, preprocessor) | {
        "clip.projector_type": "qwen3vl_merger",
        "clip.vision.image_size": int(vision["num_position_embeddings"] ** 0.5) * vision["patch_size"],
        "clip.vision.spatial_merge_size": vision["spatial_merge_size"],
        "clip.vision.is_deepstack_layers": [index in deep for index in range(vision["depth"])],
        "clip.vision.image_min_pixels": preprocessor["size"]["shortest_edge"],
        "clip.vision.image_max_pixels": preprocessor["size"]["longest_edge"],
    }
    arrays: dict[str, Any] = {}
    for name, weight in weights.items():
        if not name.startswith("model.visual."):
            continue
        array = weight.float().numpy()
        if name == "model.visual.patch_embed.proj.weight":
            arrays["v.patch_embd.weight"], arrays["v.patch_embd.weight.1"] = (
                np.ascontiguousarray(array[:, :, time]) for time in (0, 1)
            )
            continue
        *parts, last, suffix = name.split(".")
        if "deepstack_merger_list" in parts:
            layer = deep[int(parts[-1])]
            arrays[f"v.deepstack.{layer}.{last.removeprefix('linear_')}.{suffix}"] = array
        elif "merger" in parts:
            arrays[f"{ {'norm': 'v.post_ln', 'linear_fc1': 'mm.0', 'linear_fc2': 'mm.2'}[last] }.{suffix}"] = array
        else:
            own = f"attn.{last}" if "attn" in parts else "patch" if "patch_embed" in parts else last
            arrays[_vision_name(name, {last: _QWEN3_VL[own]})] = array
    _write_vision(folder, said, arrays, edit)
    return file


_GEMMA3_PARTS = _PARTS | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def gemma3(source: Path, folder: Path, kind: Kind = Kind.F32, edit: Edit | None = None) -> Path:
    """Write a Gemma 3 checkpoint as two files; see `idefics3`. The converter adds 1 to its norms' weights."""
    config, preprocessor, weights = _parts(source)
    own = config["text_config"]

    def of_text(metadata: dict[str, Any], arrays: dict[str, Any]) -> None:
        metadata["gemma3.attention.sliding_window"] = own["sliding_window"]
        metadata["gemma3.attention.sliding_window_pattern"] = own["sliding_window_pattern"]
        metadata["tokenizer.ggml.add_space_prefix"] = False
        for name in arrays:
            arrays[name] = arrays[name] + ("norm" in name)

    file = _text_file(source, folder, "language_model.", {"model_type": "gemma3"}, kind, of_text, _GEMMA3_PARTS)
    vision = config["vision_config"]
    patches = vision["image_size"] // vision["patch_size"]
    said = _vision_said(vision | {"layer_norm_eps": 1e-6}, preprocessor) | {
        "clip.projector_type": "gemma3",
        "clip.vision.image_size": vision["image_size"],
        "clip.vision.projector.scale_factor": patches // int(config["mm_tokens_per_image"] ** 0.5),
    }
    arrays: dict[str, Any] = {}
    for name, weight in weights.items():
        array = weight.float().numpy()
        if name.startswith("vision_tower."):
            arrays[_vision_name(name, _IDEFICS3)] = array
        elif name.endswith("mm_soft_emb_norm.weight"):
            arrays["mm.soft_emb_norm.weight"] = array + 1
        elif name.startswith("multi_modal_projector."):
            arrays["mm.input_projection.weight"] = array
    _write_vision(folder, said, arrays, edit)
    return file


def qwen2_vl(source: Path, folder: Path, kind: Kind = Kind.F32, edit: Edit | None = None) -> Path:
    """Write a Qwen2-VL or Qwen2.5-VL checkpoint as two files; see `idefics3`. The converter cuts queries, keys and
    values apart."""
    config, preprocessor, weights = _parts(source)
    positions = {"model_type": "qwen2vl", "sections": [*config["rope_scaling"]["mrope_section"], 0]}
    file = _text_file(source, folder, "model.", positions, kind)
    vision = config["vision_config"]
    windowed = "window_size" in vision
    widths = {} if windowed else {"hidden_size": vision["embed_dim"], "intermediate_size": vision["hidden_size"]}
    named = {"num_hidden_layers": vision["depth"], "num_attention_heads": vision["num_heads"], "layer_norm_eps": 1e-6}
    said = _vision_said(vision | named | widths, preprocessor) | {
        "clip.projector_type": "qwen2.5vl_merger" if windowed else "qwen2vl_merger",
        "clip.vision.image_size": 560,
        "clip.vision.image_min_pixels": preprocessor["min_pixels"],
        "clip.vision.image_max_pixels": preprocessor["max_pixels"],
    }
    if windowed:
        said["clip.vision.n_wa_pattern"] = vision["fullatt_block_indexes"][0] + 1
        said["clip.vision.window_size"] = vision["window_size"]
    arrays: dict[str, Any] = {}
    for name, weight in weights.items():
        if not name.startswith("visual."):
            continue
        array = weight.float().numpy()
        *parts, last, suffix = name.split(".")
        if "patch_embed" in parts:
            for time, end in enumerate(("", ".1")):
                arrays[f"v.patch_embd.weight{end}"] = np.ascontiguousarray(array[:, :, time])
        elif last == "qkv":
            for letter, part in zip("qkv", np.split(array, 3), strict=True):
                arrays[f"v.blk.{parts[2]}.attn_{letter}.{suffix}"] = part
        elif "merger" in parts:
            arrays[f"{'v.post_ln' if last == 'ln_q' else f'mm.{last}'}.{suffix}"] = array
        else:
            arrays[_vision_name(name, _QWEN2_VL)] = array
    _write_vision(folder, said, arrays, edit)
    return file


def llava(source: Path, folder: Path, kind: Kind = Kind.F32, edit: Edit | None = None) -> Path:
    """Write a LLaVA-1.5 checkpoint as two files; see `idefics3`. The converter ends the tower at the layer that is
    projected, and calls the first matrix of an MLP the second."""
    config, preprocessor, weights = _parts(source)
    file = _text_file(source, folder, "language_model.", {}, kind)
    vision = config["vision_config"]
    layers = vision["num_hidden_layers"] + config["vision_feature_layer"] + 1
    said = _vision_said(vision | {"layer_norm_eps": 1e-5, "num_hidden_layers": layers}, preprocessor) | {
        "clip.has_llava_projector": True,
        "clip.projector_type": "mlp",
        "clip.use_gelu": False,
        "clip.vision.image_size": vision["image_size"],
        "clip.vision.projection_dim": vision["projection_dim"],
        "clip.vision.feature_layer": [layers],
    }
    del said["general.type"]
    tower = "vision_tower.vision_model."
    swapped = _IDEFICS3 | {"pre_layrnorm": "v.pre_ln", "fc1": "ffn_down", "fc2": "ffn_up"}
    arrays: dict[str, Any] = {}
    for name, weight in weights.items():
        if name.startswith((f"{tower}post_layernorm", *(f"{tower}encoder.layers.{layers + n}." for n in range(9)))):
            continue
        array = weight.float().numpy()
        if name.endswith("class_embedding"):
            arrays["v.class_embd"] = array
        elif name.startswith(tower):
            arrays[_vision_name(name, swapped)] = array
        elif name.startswith("multi_modal_projector."):
            arrays[
                name.replace("multi_modal_projector.linear_1", "mm.0").replace("multi_modal_projector.linear_2", "mm.2")
            ] = array
    _write_vision(folder, said, arrays, edit)
    return file


def _parts(source: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, torch.Tensor]]:
    config, preprocessor = (
        json.loads((source / name).read_text()) for name in ("config.json", "preprocessor_config.json")
    )
    return config, preprocessor, _weights(source)


def _weights(source: Path) -> dict[str, torch.Tensor]:
    return {name: weight for file in source.glob("*.safetensors") for name, weight in load_file(file).items()}


def _text_file(
    source: Path,
    folder: Path,
    prefix: str,
    said: dict[str, Any],
    kind: Kind,
    edit: Edit | None = None,
    parts: Mapping[str, str] = _PARTS,
) -> Path:
    """Write the text model of a checkpoint, whose weights' names begin so, and return the file."""
    text = folder / "text"
    text.mkdir(parents=True)
    (text / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    settings = json.loads((source / "tokenizer_config.json").read_text())
    jinja, other = source / "chat_template.jinja", source / "chat_template.json"
    template = jinja.read_text() if jinja.is_file() else json.loads(other.read_text())["chat_template"]
    (text / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    config = json.loads((source / "config.json").read_text())
    config = config.get("text_config", config)
    generation = json.loads((source / "generation_config.json").read_text())
    ends = generation["eos_token_id"]
    config |= {"tie_word_embeddings": False, "eos_token_id": ends if isinstance(ends, int) else ends[0], **said}
    (text / "config.json").write_text(json.dumps({"bos_token_id": generation["bos_token_id"]} | config))
    own = {
        f"model.{name.removeprefix(prefix).removeprefix('model.')}".replace("model.lm_head", "lm_head"): weight
        for name, weight in _weights(source).items()
        if name.startswith((prefix, "lm_head"))
    }
    save_file(own, text / "model.safetensors")

    def edited(metadata: dict[str, Any], arrays: dict[str, Any]) -> None:
        if "sections" in said:
            metadata[f"{config['model_type']}.rope.dimension_sections"] = said["sections"]
        if edit is not None:
            edit(metadata, arrays)

    return write(text, folder / "a.gguf", kind, edited, parts)


def _vision_said(vision: dict[str, Any], preprocessor: dict[str, Any]) -> dict[str, Any]:
    return {
        "general.type": "mmproj",
        "clip.has_vision_encoder": True,
        "clip.use_gelu": True,
        "clip.vision.patch_size": vision["patch_size"],
        "clip.vision.embedding_length": vision["hidden_size"],
        "clip.vision.feed_forward_length": vision["intermediate_size"],
        "clip.vision.block_count": vision["num_hidden_layers"],
        "clip.vision.attention.head_count": vision["num_attention_heads"],
        "clip.vision.attention.layer_norm_epsilon": vision["layer_norm_eps"],
        "clip.vision.image_mean": preprocessor["image_mean"],
        "clip.vision.image_std": preprocessor["image_std"],
    }


def _write_vision(folder: Path, said: dict[str, Any], arrays: dict[str, Any], edit: Edit | None) -> None:
    if edit is not None:
        edit(said, arrays)
    writer = GGUFWriter(folder / "mmproj-a.gguf", "clip")
    for name, value in said.items():
        _add(writer, name, value)
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# llama.cpp's names, by what distinguishes transformers'.
_IDEFICS3 = {
    "patch_embedding": "v.patch_embd",
    "position_embedding": "v.position_embd",
    "post_layernorm": "v.post_ln",
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "out_proj": "attn_out",
    "fc1": "ffn_up",
    "fc2": "ffn_down",
    "proj": "mm.model.fc",
}
_QWEN2_VL = {
    "norm1": "ln1",
    "norm2": "ln2",
    "proj": "attn_out",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "fc1": "ffn_up",
    "fc2": "ffn_down",
}
_QWEN3_VL = {
    "patch": "v.patch_embd",
    "pos_embed": "v.position_embd",
    "norm1": "ln1",
    "norm2": "ln2",
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_out",
    "linear_fc1": "ffn_up",
    "linear_fc2": "ffn_down",
}


def _vision_name(name: str, names: dict[str, str]) -> str:
    """The file's name of transformers' weight of a tower."""
    *parts, last, suffix = name.split(".")
    layer = next((part for part in parts if part.isdecimal()), None)
    return f"{names[last]}.{suffix}" if layer is None else f"v.blk.{layer}.{names[last]}.{suffix}"
