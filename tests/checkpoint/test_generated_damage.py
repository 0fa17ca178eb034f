"""Damages of every kind to every file of a checkpoint: a clear refusal or an answer, soon and in little memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from beheld.checkpoint.files import read_json
from beheld.core.errors import ModelError
from tests import tiny
from tests.checkpoint.trials import Trial, Trials
from tests.long import LONG

pytestmark = pytest.mark.case(113)

# Damages to all files of a checkpoint, then to one file alone, of which among those of all files are too few to meet
# what its check guards. Text trials take a third of the time of those with an image.
COUNTS = {
    ("llama", ""): 90,
    ("sharded", ""): 60,
    ("qwen2_vl", ""): 60,
    ("llama", "generation_config.json"): 24,
    ("llama", "config.json"): 24,
    ("llama", "tokenizer.json"): 18,
    ("qwen2_vl", "preprocessor_config.json"): 24,
}
_TIMES = 10 if LONG else 1
_MORE_S = 5.0
_MORE_BYTES = 1 << 30
# Values that a setting may be given.
HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 7, 2**31, 10**9, 10**30, 0.0, -0.5, 1e-300, 1e30, float("nan"), float("inf")),
    *("", "nonesuch", "someone/kernel", "x" * 5000, "{% for %}", "../../../etc/passwd"),
    *(
        [],
        [0],
        [None],
        [[]],
        [float("nan")] * 3,
        ["a", 1],
        list(range(1000)),
        {},
        {"a": {"b": [1]}},
        {"type": "nonesuch"},
    ),
)
_DOUBLING = {"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}
_SLOW_SPLIT = {"type": "Split", "pattern": {"Regex": "(?:[a-z]+)*!"}, "behavior": "Isolated", "invert": False}
# What only these settings may be given.
OWN: dict[str, tuple[Any, ...]] = {
    "normalizer": ({"type": "Sequence", "normalizers": [_DOUBLING] * 40}, {"type": "Prepend", "prepend": "a" * 10**6}),
    "pre_tokenizer": (_SLOW_SPLIT, {"type": "Sequence", "pretokenizers": [_SLOW_SPLIT] * 2}),
    "padding": ({"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "a"},),
}
# Settings that a file may lack, and that are heeded.
ADDED: dict[str, tuple[str, ...]] = {
    "config.json": (
        *("rope_parameters", "rope_scaling", "attn_implementation", "quantization_config", "dtype", "sliding_window"),
        *("layer_types", "vision_config", "text_config", "auto_map", "head_dim", "tie_word_embeddings"),
    ),
    "generation_config.json": (
        *("no_repeat_ngram_size", "bad_words_ids", "temperature", "top_k", "top_p", "repetition_penalty"),
        *("max_new_tokens", "max_length", "suppress_tokens", "forced_eos_token_id", "min_length"),
        *("min_new_tokens", "forced_bos_token_id", "min_p", "begin_suppress_tokens", "num_beams", "eos_token_id"),
    ),
    "preprocessor_config.json": ("size", "rescale_factor", "do_resize", "min_pixels", "max_pixels", "image_std"),
    "tokenizer_config.json": ("chat_template", "auto_map", "added_tokens_decoder", "extra_special_tokens"),
    "tokenizer.json": ("truncation", "padding", "post_processor", "decoder", "normalizer", "pre_tokenizer"),
}


def sharded(folder: Path) -> Path:
    """A checkpoint of two files of weights with their index, and the chat template in a file of its own."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny.checkpoint("llama"), folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, index = sorted(weights), {}
    for number, some in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: weights[name] for name in some}, folder / file, {"format": "pt"})
        index |= dict.fromkeys(some, file)
    total = sum(weight.nbytes for weight in weights.values())
    described = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(described))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "chat_template.jinja").write_text(config.pop("chat_template"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of a JSON value; of long lists and vocabularies only the first entries."""
    entries = (
        list(value.items())[:40]
        if isinstance(value, dict)
        else list(enumerate(value))[:3]
        if isinstance(value, list)
        else []
    )
    found = [] if not path else [path]
    for name, entry in entries:
        found += places(entry, (*path, name))
    return found


@st.composite
def settings_of(draw: Callable[[st.SearchStrategy[Any]], Any], folder: Path, file: str) -> tuple[str, str, Any]:
    """A damage to a setting of one file: one that it has, or one of ADDED."""
    has = [place for place in places(json.loads((folder / file).read_text())) if len(place) == 1]
    place = draw(st.sampled_from(sorted({*has, *((name,) for name in ADDED[file])})))
    return file, "set", (place, draw(st.sampled_from((*OWN.get(place[0], ()) * 10, *HOSTILE))))


@st.composite
def damages(draw: Callable[[st.SearchStrategy[Any]], Any], folder: Path) -> tuple[str, str, Any]:
    """(file, kind, what); kinds are "set", "drop", "cut", "bytes", "text" and "gone"."""
    file = draw(st.sampled_from(sorted(path.name for path in folder.iterdir())))
    size = (folder / file).stat().st_size
    kinds = ["set", "set", "set", "set", "drop", "drop"] if file.endswith(".json") else []
    kinds += ["add", "add"] if file in ADDED else []
    kind = draw(st.sampled_from([*kinds, "cut", "bytes", "text", "gone"]))
    if kind == "add":
        return file, "set", ((draw(st.sampled_from(ADDED[file])),), draw(st.sampled_from(HOSTILE)))
    if kind in ("set", "drop"):
        place = draw(st.sampled_from(places(json.loads((folder / file).read_text()))))
        return file, kind, (place, draw(st.sampled_from(HOSTILE)) if kind == "set" else None)
    if kind == "cut":
        return file, kind, draw(st.integers(0, size - 1))
    if kind == "bytes":
        near = min(size, 2000)
        spots = st.lists(st.tuples(st.integers(0, near - 1), st.integers(0, 255)), min_size=1, max_size=4)
        return file, kind, draw(spots)
    if kind == "text":
        return file, kind, draw(st.sampled_from(("", "[]", "null", "{}", '"a"', "[" * 5000, "\0" * 100, "<html>")))
    return file, kind, None


def damage(folder: Path, file: str, kind: str, what: Any) -> None:
    """Do it."""
    path = folder / file
    if kind == "gone":
        path.unlink()
    elif kind == "text":
        path.write_text(what)
    elif kind == "cut":
        path.write_bytes(path.read_bytes()[:what])
    elif kind == "bytes":
        data = bytearray(path.read_bytes())
        for place, value in what:
            data[place] = value
        path.write_bytes(bytes(data))
    else:
        raw = json.loads(path.read_text())
        (*outer, last), value = what
        inner = raw
        for name in outer:
            inner = inner[name]
        if kind == "set":
            inner[last] = value
        else:
            del inner[last]
        path.write_text(json.dumps(raw))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("family", "file"), COUNTS)
def test_a_damaged_checkpoint_is_refused_or_answers(family: str, file: str, trials: Trials, tmp_path: Path) -> None:
    healthy_folder = sharded(tmp_path / "healthy") if family == "sharded" else tiny.checkpoint(family)
    wrong: list[tuple[tuple[str, str, Any], Trial]] = []
    ends: list[str] = []
    media = family == "qwen2_vl"
    healthy = trials.of(healthy_folder, media=media)
    assert healthy.end == "answered", healthy

    @settings(
        max_examples=COUNTS[family, file] * _TIMES,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(settings_of(healthy_folder, file) if file else damages(healthy_folder))
    def attempt(found: tuple[str, str, Any]) -> None:
        folder = tmp_path / "model"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(healthy_folder, folder)
        damage(folder, *found)
        trial = trials.of(folder, media=media, limit_s=20)
        ends.append(trial.end)
        late = trial.seconds > healthy.seconds + _MORE_S
        large = trial.peak_bytes > healthy.peak_bytes + _MORE_BYTES
        # A checkpoint without a template, or with one that shows no images, still reads prompts.
        clear = trial.end in ("refused", "answered") or "beheld.core.errors.TemplateError: " in trial.text
        if not clear or late or large:
            wrong.append((found, trial))

    attempt()
    shown = "\n".join(
        f"{str(found)[:200]}: {trial.end} {trial.seconds:.1f} s {trial.text[-700:]}" for found, trial in wrong
    )
    assert not wrong, f"{len(wrong)} of {len(ends)}:\n{shown}"
    assert ends.count("refused") > len(ends) // 5
    assert ends.count("answered") > len(ends) // 20


@pytest.mark.parametrize("content", ["null", "3", '"text"', "[]"])
def test_a_file_that_is_no_object_is_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ModelError, match="is not a JSON object"):
        read_json(file)
