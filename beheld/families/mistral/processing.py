"""The folder that is read in place of one in Mistral's own layout, with its tokenizer in transformers' form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from beheld.checkpoint.files import CONFIG, read_json
from beheld.core.errors import ModelError
from beheld.families.mistral.config import MODEL_TYPE, PARAMS, convert

_WEIGHTS = "consolidated.safetensors"
_TEKKEN = "tekken.json"
_IMAGES = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_processor_type": "PixtralImageProcessor",
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "processor_class": "PixtralProcessor",
    "resample": 3,
    "rescale_factor": 1 / 255,
}
_SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
_MARKS = {"image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]", "image_token": "[IMG]"}


def files(folder: Path) -> dict[str, Any]:
    """Return the files of a folder that is read in place of this one; see PublisherLayout.

    Raises:
        ModelError: a file is missing, or holds what is not read here.
    """
    params = read_json(folder / PARAMS)
    # Their files are all of this type; params.json names none.
    config = {"model_type": MODEL_TYPE, "params": params, "torch_dtype": "bfloat16"}
    kind, _ = convert(config)
    found: dict[str, Any] = {CONFIG: config, **_weights(folder), **_tokenizer(folder)}
    tower = params.get("vision_encoder")
    if tower is None:
        return found
    size = {"longest_edge": tower.get("max_image_size") or tower["image_size"]}
    side = tower["patch_size"]
    found["preprocessor_config.json"] = _IMAGES | {"patch_size": {"height": side, "width": side}, "size": size}
    marks: dict[str, Any] = _MARKS | {"patch_size": side, "processor_class": "PixtralProcessor"}
    if kind == "mistral3":
        marks["spatial_merge_size"] = tower["spatial_merge_size"]
    found["processor_config.json"] = marks
    return found


def _weights(folder: Path) -> dict[str, Any]:
    """Return links to the files of weights, under names that a loader looks for."""
    if (folder / _WEIGHTS).is_file():
        return {"model.safetensors": (folder / _WEIGHTS).absolute()}
    shards = sorted(folder.glob("consolidated-*-of-*.safetensors"))
    if not shards:
        raise ModelError(f"{folder} holds no {_WEIGHTS}.", "Fetch the checkpoint again.")
    index = folder / f"{_WEIGHTS}.index.json"
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or set(map(str, table.values())) != {shard.name for shard in shards}:
        raise ModelError(
            f"{index.name} does not name the files of weights that are there.", "Fetch the checkpoint again."
        )
    renamed = {shard.name: shard.name.replace("consolidated", "model") for shard in shards}
    made: dict[str, Any] = {renamed[shard.name]: shard.absolute() for shard in shards}
    made["model.safetensors.index.json"] = {"weight_map": {name: renamed[file] for name, file in table.items()}}
    return made


def _tokenizer(folder: Path) -> dict[str, Any]:
    """Return the tokenizer's files, as transformers reads them, and the chat template of tekken.json's version."""
    import json
    import tempfile

    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer, MistralConfig

    pieces = sorted(folder.glob("tokenizer.model*"))
    if not (folder / _TEKKEN).is_file():
        if not pieces:
            raise ModelError(f"{folder} has neither {_TEKKEN} nor tokenizer.model.", "Fetch the checkpoint again.")
        return {
            "tokenizer.model": pieces[-1].absolute(),
            "tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer"},
        }
    version = str(read_json(folder / _TEKKEN).get("config", {}).get("version", ""))
    with tempfile.TemporaryDirectory(prefix="beheld-tekken-") as draft:
        (Path(draft) / _TEKKEN).symlink_to((folder / _TEKKEN).absolute())
        made = AutoTokenizer.from_pretrained(draft, config=MistralConfig(), mistral_format=False)
        known = made.get_vocab()
        marks = {name: token for name, token in _SPECIAL.items() if token in known}
        begin = marks["bos_token"]
        # Every text begins with it.
        made.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, known[begin])]
        )
        made.save_pretrained(draft)
        found: dict[str, Any] = {
            path.name: path.read_text(encoding="utf-8") for path in Path(draft).glob("*.json") if path.name != _TEKKEN
        }
    written: dict[str, Any] = json.loads(found["tokenizer_config.json"])
    # Its backend reads tokenizer.json; mistral-common is not asked.
    found["tokenizer_config.json"] = written | marks | {"tokenizer_class": "PreTrainedTokenizerFast"}
    name = "chat_template_v3.jinja" if version in ("v1", "v2", "v3") else "chat_template_v7.jinja"
    return found | {"chat_template.jinja": (Path(__file__).parent / name).read_text(encoding="utf-8")}
