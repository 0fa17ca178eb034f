"""Damaged and hostile checkpoints are refused at start, in words that name the file, the key and the remedy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.checkpoint.trials import Trials

Damage = Callable[[Path], None]

NAN = float("nan")
_GONE = object()
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{{ messages[0].content }}"
_DOUBLING = {"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}
_SLOW_SPLIT = {"type": "Split", "pattern": {"Regex": "(?:[a-z]+)*!"}, "behavior": "Isolated", "invert": False}


@pytest.fixture(scope="module")
def trials() -> Iterator[Trials]:
    with Trials(tiny.checkpoint("llama"), tiny.checkpoint("qwen2_vl")) as found:
        yield found


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
    "epsilon NaN": ("llama", edited("config.json", rms_norm_eps=NAN), ("config.json", "rms_norm_eps")),
    "rope of base 0": ("llama", edited("config.json", rope_theta=0), ("config.json", "rope_theta")),
    "rope of base 0, as it is written now": (
        "llama",
        edited("config.json", rope_parameters={"rope_type": "default", "rope_theta": 0}),
        ("config.json", "rope_parameters.rope_theta"),
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
