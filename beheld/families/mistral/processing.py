"""The folder that is read in place of one in Mistral's own layout, with its tokenizer in transformers' form."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from beheld.checkpoint.files import CONFIG, read_json
from beheld.core.errors import ModelError
from beheld.families.mistral.config import MODEL_TYPE, PARAMS, convert

_WEIGHTS = "consolidated.safetensors"
_TEKKEN, _PIECES, _SETTINGS = "tekken.json", "tokenizer.model", "tokenizer_config.json"
_VERSIONS = (1, 2, 3, 7, 11, 13, 15)
_UNSTATED = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
# The first whose turns have tokens of their own.
_OLDEST_CHATS = 2
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
    """Return the tokenizer's files, as transformers reads them, and the chat template of its format's version."""
    import json
    import tempfile

    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer, MistralConfig

    source, version = _vocabulary(folder)
    with tempfile.TemporaryDirectory(prefix="beheld-tekken-") as draft:
        stored = read_json(source) if source.name == _TEKKEN else {}
        if stored and not stored.get("special_tokens"):
            marked = json.dumps(stored | {"special_tokens": _unstated()})
            (Path(draft) / _TEKKEN).write_text(marked, encoding="utf-8")
        else:
            (Path(draft) / (_TEKKEN if stored else _PIECES)).symlink_to(source.absolute())
        if not stored:
            settings = json.dumps({"tokenizer_class": "LlamaTokenizer"})
            (Path(draft) / _SETTINGS).write_text(settings, encoding="utf-8")
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
    written: dict[str, Any] = json.loads(found[_SETTINGS])
    # Its backend reads tokenizer.json; mistral-common is not asked.
    found[_SETTINGS] = written | marks | {"tokenizer_class": "PreTrainedTokenizerFast"}
    if version < _OLDEST_CHATS:
        return found
    template = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")
    return found | {"chat_template.jinja": f"{{%- set version = {version} -%}}\n{template}"}


def _unstated() -> list[dict[str, Any]]:
    """Return the special tokens of files that name none: those of 2024."""
    return [{"is_control": True, "rank": rank, "token_str": token} for rank, token in enumerate(_UNSTATED)]


def _vocabulary(folder: Path) -> tuple[Path, int]:
    """Return the tokenizer's file, and the version of its format: tekken.json's, or the end of the file's name.

    Raises:
        ModelError: there is none, or its version is not known.
    """
    source = folder / _TEKKEN
    if source.is_file():
        stated = str(read_json(source).get("config", {}).get("version", ""))
    else:
        pieces = sorted(folder.glob("tokenizer.model*"))
        if not pieces:
            raise ModelError(f"{folder} has neither {_TEKKEN} nor {_PIECES}.", "Fetch the checkpoint again.")
        source = pieces[-1]
        stated = source.suffix[1:] if source.name != _PIECES else "v1"
    # As in v7m1, which reads images, too.
    found = re.fullmatch(r"v(\d+)(m\d+)?", stated)
    if found is None or int(found[1]) not in _VERSIONS:
        known = ", ".join(f"v{version}" for version in _VERSIONS)
        raise ModelError(
            f"{source.name} has the version {stated!r} of Mistral's format, which is not known; known are {known}.",
            "Use the checkpoint in transformers' layout (config.json).",
        )
    return source, int(found[1])
