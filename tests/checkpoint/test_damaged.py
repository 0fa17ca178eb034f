"""Damaged and hostile checkpoints are refused at start, in words that name the file, the key and the remedy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from beheld import AsyncLLM
from beheld.core.errors import ModelError
from tests import tiny
from tests.checkpoint.trials import Trials

pytestmark = pytest.mark.case(112)

Damage = Callable[[Path], None]

NAN = float("nan")
_GONE = object()
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{{ messages[0].content }}"
_DOUBLING = {"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}
_SLOW_SPLIT = {"type": "Split", "pattern": {"Regex": "(?:[a-z]+)*!"}, "behavior": "Isolated", "invert": False}


def edited(file: str, /, **entries: Any) -> Damage:
    """Set entries of a JSON file; "a__b" is b within a."""

    def damage(folder: Path) -> None:
        path = folder / file
        raw = json.loads(path.read_text()) if path.exists() else {}
        for name, value in entries.items():
            *outer, last = name.split("__")
            place = raw
            for each in outer:
                place = place[each]
            if value is _GONE:
                del place[last]
            else:
                place[last] = value
        path.write_text(json.dumps(raw))

    return damage


def written(file: str, text: str) -> Damage:
    return lambda folder: bool((folder / file).write_text(text)) and None


def removed(file: str) -> Damage:
    return lambda folder: (folder / file).unlink()


def weight(part: str, value: float, place: int = 0) -> Damage:
    """One number of the first weight whose name holds `part`."""

    def damage(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        weights = load_file(folder / "model.safetensors")
        weights[next(name for name in weights if part in name)].view(-1)[place] = value
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    return damage


def filled(part: str, value: float) -> Damage:
    """All numbers of all weights whose names hold `part`."""

    def damage(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        weights = load_file(folder / "model.safetensors")
        for name in weights:
            if part in name:
                weights[name].fill_(value)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    return damage


def header(change: Callable[[dict[str, Any]], None]) -> Damage:
    """Change the header of the weights."""

    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        entries = json.loads(data[8 : 8 + length])
        change(entries)
        text = json.dumps(entries).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    return damage


# Name -> (checkpoint, damage, what the refusal says).
FILES: Mapping[str, tuple[str, Damage, tuple[str, ...]]] = {
    "endless n-grams": (
        "llama",
        edited("generation_config.json", no_repeat_ngram_size=10**9),
        ("generation_config.json", "no_repeat_ngram_size", "1024"),
    ),
    "top_k that is a list": ("llama", edited("generation_config.json", top_k=[1]), ("generation_config.json", "top_k")),
    "temperature that no request may have": (
        "llama",
        edited("generation_config.json", temperature=101.0),
        ("generation_config.json", "temperature", "0 to 100"),
    ),
    "images that are enlarged without end": (
        "qwen2_vl",
        edited("preprocessor_config.json", min_pixels=2**31),
        ("preprocessor_config.json", "min_pixels"),
    ),
    "temperature NaN": (
        "llama",
        edited("generation_config.json", temperature=NAN),
        ("generation_config.json", "temperature"),
    ),
    "words that are no ids": (
        "llama",
        edited("generation_config.json", bad_words_ids=[3]),
        ("generation_config.json", "bad_words_ids"),
    ),
    "normalizer that multiplies": (
        "llama",
        edited("tokenizer.json", normalizer={"type": "Sequence", "normalizers": [_DOUBLING] * 40}),
        ("tokenizer.json", "normalizer"),
    ),
    "split that backtracks": (
        "qwen2_vl",
        edited("tokenizer.json", pre_tokenizer=_SLOW_SPLIT),
        ("tokenizer.json", "pre_tokenizer.pattern.Regex"),
    ),
    "no heads": ("llama", edited("config.json", num_attention_heads=0), ("config.json", "num_attention_heads")),
    "heads that do not divide": ("llama", edited("config.json", num_attention_heads=5), ("multiple", "heads")),
    "key heads that do not divide": (
        "llama",
        edited("config.json", num_key_value_heads=3),
        ("config.json", "num_key_value_heads"),
    ),
    "unknown activation": ("llama", edited("config.json", hidden_act="nonesuch"), ("config.json", "hidden_act")),
    "config nested without end": (
        "llama",
        written("config.json", '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"),
        ("config.json", "nested"),
    ),
    "config nested deeply": (
        "llama",
        written("config.json", '{"model_type": "llama", "a":' + "[" * 900 + "]" * 900 + "}"),
        ("config.json", "nested"),
    ),
    "template file that is a list": ("llama", written("chat_template.json", "[1]"), ("chat_template.json",)),
    "attention from the hub": (
        "llama",
        edited("config.json", attn_implementation="someone/kernel"),
        ("config.json", "attn_implementation"),
    ),
    "attention from the hub, written by transformers": (
        "qwen2_vl",
        edited("config.json", _attn_implementation={"text_config": "someone/kernel"}),
        ("config.json", "_attn_implementation"),
    ),
    "a million layers": ("llama", edited("config.json", num_hidden_layers=10**6), ("config.json", "num_hidden_layers")),
    "a window that is a list": (
        "llama",
        edited("config.json", sliding_window=[4, 8]),
        ("config.json", "sliding_window"),
    ),
    "epsilon NaN": ("llama", edited("config.json", rms_norm_eps=NAN), ("config.json", "rms_norm_eps")),
    "rope of base 0": ("llama", edited("config.json", rope_theta=0), ("config.json", "rope_theta")),
    "rope of base 0, as it is written now": (
        "llama",
        edited("config.json", rope_parameters={"rope_type": "default", "rope_theta": 0}),
        ("config.json", "rope_parameters.rope_theta"),
    ),
    "rope stretched by nothing": (
        "llama",
        edited("config.json", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 1e-300}),
        ("config.json", "rope_parameters.factor"),
    ),
    "image_std 0": (
        "qwen2_vl",
        edited("preprocessor_config.json", image_std=[0, 0, 0]),
        ("preprocessor_config.json", "image_std"),
    ),
    "image_mean NaN": (
        "qwen2_vl",
        edited("preprocessor_config.json", image_mean=[NAN, 0, 0]),
        ("preprocessor_config.json", "image_mean"),
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_broken_file_is_refused(name: str, trials: Trials, tmp_path: Path) -> None:
    check_refused(trials, tmp_path, *FILES[name])


def check_refused(trials: Trials, tmp_path: Path, family: str, damage: Damage, says: tuple[str, ...]) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny.checkpoint(family), folder)
    damage(folder)
    found = trials.of(folder, media=family == "qwen2_vl", limit_s=20)
    assert found.end == "refused", found
    assert found.text.startswith(("ModelError", "ConfigError")), found
    for word in says:
        assert word in found.text
    assert found.seconds < 5
    assert found.peak_bytes < 1 << 30


@pytest.mark.parametrize("family", ["llama", "qwen2_vl"])
def test_a_healthy_checkpoint_answers(family: str, trials: Trials) -> None:
    found = trials.of(tiny.checkpoint(family), media=family == "qwen2_vl")
    assert found.end == "answered", found


@pytest.mark.parametrize("family", ["llama", "qwen2_vl"])
def test_rope_parameters_that_are_null_leave_it_to_the_class(family: str, trials: Trials, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny.checkpoint(family), folder)
    edited("config.json", rope_parameters=None)(folder)
    assert trials.of(folder).end in ("answered", "refused")


WEIGHTS: Mapping[str, tuple[str, Damage, tuple[str, ...]]] = {
    "a weight NaN": ("llama", weight("down_proj", NAN), ("down_proj.weight",)),
    "a weight infinite": ("llama", weight("down_proj", float("inf")), ("down_proj.weight",)),
    "a weight near infinity": ("llama", weight("down_proj", 3e38), ("down_proj.weight",)),
    "a token's embedding NaN": ("llama", weight("embed_tokens", NAN, -1), ("embed_tokens.weight",)),
    "a tower's weight NaN": ("qwen2_vl", weight("visual.blocks.0", NAN), ("visual.blocks.0",)),
    "a vocabulary that the files do not hold": (
        "llama",
        edited("config.json", vocab_size=10**7),
        ("config.json", "belongs to these weights"),
    ),
    "a weight outside of the file": (
        "llama",
        header(lambda entries: entries["model.norm.weight"].update(data_offsets=[0, 1 << 40])),
        ("model.safetensors", "model.norm.weight"),
    ),
    "a header that is a list": (
        "llama",
        lambda folder: bool((folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"[]")) and None,
        ("model.safetensors", "header"),
    ),
    "a file cut short": (
        "llama",
        lambda folder: bool((folder / "model.safetensors").write_bytes(b"\xff" * 20)) and None,
        ("model.safetensors", "cut short"),
    ),
    "finite weights whose products are not": ("llama", filled("_proj", 9e17), ("LlamaForCausalLM", "text")),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_that_give_nothing_finite_are_refused(name: str, trials: Trials, tmp_path: Path) -> None:
    check_refused(trials, tmp_path, *WEIGHTS[name])


MEDIA: Mapping[str, tuple[str, Damage, tuple[str, ...]]] = {
    "no preprocessor": ("qwen2_vl", removed("preprocessor_config.json"), ("preprocessor_config.json", "image")),
    "a preprocessor of another family": (
        "qwen2_vl",
        edited("preprocessor_config.json", image_processor_type="CLIPImageProcessor", processor_class="LlavaProcessor"),
        ("preprocessor_config.json", "image"),
    ),
    "a preprocessor of audio": (
        "qwen2_vl",
        edited(
            "preprocessor_config.json",
            image_processor_type="WhisperFeatureExtractor",
            feature_extractor_type="WhisperFeatureExtractor",
            processor_class="WhisperProcessor",
        ),
        ("preprocessor_config.json", "image"),
    ),
    "another preprocessor in LLaVA": (
        "llava",
        edited(
            "preprocessor_config.json", image_processor_type="Qwen2VLImageProcessor", processor_class="Qwen2VLProcessor"
        ),
        ("preprocessor_config.json", "image"),
    ),
    "a tower whose products are not finite": ("qwen2_vl", filled("visual.blocks", 9e17), ("modality image",)),
}


@pytest.mark.parametrize("name", MEDIA)
def test_a_checkpoint_that_makes_nothing_of_media_is_refused(name: str, trials: Trials, tmp_path: Path) -> None:
    check_refused(trials, tmp_path, *MEDIA[name])


def test_a_modality_that_is_switched_off_needs_no_preprocessor(trials: Trials, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny.checkpoint("qwen2_vl"), folder)
    removed("preprocessor_config.json")(folder)
    found = trials.of(folder, limit_mm_per_prompt={"image": 0, "video": 0})
    assert found.end == "answered", found


@pytest.mark.parametrize("family", ["llama", "qwen2_vl"])
def test_an_engine_in_a_process_refuses_the_same(family: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny.checkpoint(family), folder)
    if family == "llama":
        weight("down_proj", NAN)(folder)
    else:
        filled("visual.blocks", 9e17)(folder)
    with pytest.raises(ModelError, match=r"down_proj|modality image"):
        AsyncLLM(str(folder), engine="process", max_model_len=128, kv_cache_memory_bytes=4 << 20)


def test_a_template_that_never_ends_is_refused(trials: Trials, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny.checkpoint("llama"), folder)
    edited("tokenizer_config.json", chat_template=LOOP)(folder)
    # A process that can be killed has to be begun for it, which takes a busy machine many seconds.
    found = trials.of(folder, limit_s=90)
    assert found.end == "refused", found
    assert "chat template takes more than 2 s" in found.text
