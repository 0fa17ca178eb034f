"""A tokenizer from a stranger is checked and tried before it reads anybody's text."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from beheld.checkpoint.checks.tokenizer import check_tokenizer
from beheld.core.errors import ModelError
from beheld.inputs.prompt.tokenizer_trial import try_tokenizer
from tests import tiny

pytestmark = pytest.mark.case(122)

_DOUBLING = {"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}
_TEXT = {"Sequence": {"id": "A", "type_id": 0}}
_AROUND = {"type": "TemplateProcessing", "single": [_TEXT], "pair": [_TEXT], "special_tokens": {}}
_PADDING = {"strategy": "BatchLongest", "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
# Entries of tokenizer.json, and the key that the refusal names.
FILES: dict[str, tuple[dict[str, Any], str]] = {
    "decoder": ({"decoder": {"type": "Sequence", "decoders": [_DOUBLING] * 40}}, r"decoder.decoders\[5\]"),
    "slow decoder": (
        {"decoder": _DOUBLING | {"pattern": {"Regex": "(a+)+b"}, "content": "a"}},
        "decoder.pattern.Regex",
    ),
    "template": ({"post_processor": _AROUND | {"single": [_TEXT] * 3}}, "post_processor.single"),
    "templates in a row": (
        {"post_processor": {"type": "Sequence", "processors": [_AROUND | {"single": [_TEXT] * 50}]}},
        r"post_processor.processors\[0\].single",
    ),
    "ids": (
        {"post_processor": _AROUND | {"special_tokens": {"a": {"id": "a", "ids": [1] * 10_000, "tokens": ["a"]}}}},
        "post_processor.special_tokens.a",
    ),
    "padding": ({"padding": _PADDING | {"pad_to_multiple_of": 10**9}}, "padding.pad_to_multiple_of"),
    "token": ({"model": {"type": "BPE", "vocab": {"a" * (1 << 20): 5}, "merges": []}}, "model.vocab"),
    "token of a list": ({"model": {"type": "Unigram", "vocab": [["a" * (1 << 20), 0.5]]}}, "model.vocab"),
    "added token": ({"added_tokens": [{"id": 3, "content": "a" * (1 << 20)}]}, "added_tokens"),
}


@pytest.mark.parametrize("name", FILES)
def test_what_a_file_may_not_say_is_refused_by_key(name: str, tmp_path: Path) -> None:
    entries, key = FILES[name]
    raw = json.loads((tiny.checkpoint("llama") / "tokenizer.json").read_text(encoding="utf-8"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")
    check_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw | entries), encoding="utf-8")
    with pytest.raises(ModelError, match=f"^tokenizer.json: {key} is ") as caught:
        check_tokenizer(tmp_path)
    assert caught.value.remedy
    assert len(str(caught.value)) < 500


def made(**parts: Any) -> Any:
    """A tokenizer that no tokenizer.json describes, as of formats that transformers converts."""
    backend = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, "<unk>"))
    for name, part in parts.items():
        setattr(backend, name, part)
    return SimpleNamespace(backend_tokenizer=backend)


def test_what_other_formats_say_is_refused() -> None:
    doubling = normalizers.Sequence([normalizers.Replace("a", "aa")] * 40)
    with pytest.raises(ModelError, match="normalizer") as caught:
        try_tokenizer(made(normalizer=doubling))
    assert caught.value.remedy
    with pytest.raises(ModelError, match=r"pre_tokenizer.pattern.Regex"):
        try_tokenizer(made(pre_tokenizer=pre_tokenizers.Split(Regex("(?:a+)+b"), "isolated")))
    with pytest.raises(ModelError, match="post_processor"):
        try_tokenizer(made(post_processor=processors.TemplateProcessing(single=["$A"] * 50, special_tokens=[])))


_TRIAL = """
import os
from types import SimpleNamespace
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from beheld.core.errors import ModelError
from beheld.inputs.prompt import tokenizer_trial
tokenizer_trial._MOST_S = 0.2
backend = Tokenizer(models.WordLevel({"a": 0}, "a"))
# No group repeats what repeats, and no usual text has this letter.
backend.pre_tokenizer = pre_tokenizers.Split(Regex("(?:\\u0416|\\u0416)*b"), "isolated")
try:
    tokenizer_trial.try_tokenizer(SimpleNamespace(backend_tokenizer=backend))
except ModelError as error:
    print(error, flush=True)
os._exit(0)
"""


def test_a_tokenizer_that_takes_too_long_is_refused() -> None:
    """In a process of its own: what the library has begun cannot be interrupted."""
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", _TRIAL], capture_output=True, text=True, timeout=60)
    # Some machines reach the library's own limit of tries first.
    refusals = ("takes more than 0.2 s for 2000 equal letters", "its patterns try too often")
    assert any(words in done.stdout for words in refusals), done.stderr
    assert time.perf_counter() - begin < 20


@pytest.mark.parametrize("family", ["llama", "qwen2_vl"])
def test_usual_tokenizers_pass_in_little_time(family: str) -> None:
    backend = Tokenizer.from_file(str(tiny.checkpoint(family) / "tokenizer.json"))
    begin = time.thread_time()
    try_tokenizer(SimpleNamespace(backend_tokenizer=backend))
    assert time.thread_time() - begin < 1
    try_tokenizer(SimpleNamespace())
