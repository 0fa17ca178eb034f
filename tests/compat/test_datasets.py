"""Prompts for scripts that measure: random ones, and those of a user's file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from beheld.compat.datasets import SampleRequest, add_dataset_parser, get_samples
from beheld.core.errors import ConfigError
from tests import tiny


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(tiny.checkpoint("qwen2"))


def samples(tokenizer: Any, *words: str) -> list[SampleRequest]:
    parser = argparse.ArgumentParser()
    add_dataset_parser(parser)
    return get_samples(parser.parse_args(words), tokenizer)


def test_random_prompts_have_the_lengths_and_the_prefix(tokenizer: Any) -> None:
    words = ("--num-prompts", "3", "--random-input-len", "7", "--random-prefix-len", "2", "--random-output-len", "5")
    made = samples(tokenizer, *words)
    assert [(one.prompt_len, one.expected_output_len) for one in made] == [(9, 5)] * 3
    assert len({one.prompt for one in made}) == 3
    assert made == samples(tokenizer, *words)
    assert made != samples(tokenizer, *words, "--seed", "1")
    spread = samples(tokenizer, "--num-prompts", "20", "--random-input-len", "100", "--random-range-ratio", "0.5")
    assert len({one.prompt_len for one in spread}) > 5
    assert all(50 <= one.prompt_len <= 150 for one in spread)


def test_prompts_of_a_file(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("one", "two")))
    own = ("--dataset-name", "custom", "--dataset-path", str(path), "--disable-shuffle")
    plain = samples(tokenizer, *own, "--num-prompts", "3", "--skip-chat-template")
    assert [one.prompt for one in plain] == ["one", "two", "one"]
    assert len(samples(tokenizer, *own, "--num-prompts", "3", "--no-oversample")) == 2
    (first,) = samples(tokenizer, *own, "--num-prompts", "1")
    assert "one" in first.prompt
    assert first.prompt != "one"
    talks = [{"conversations": [{"value": "ask"}, {"value": "a reply"}]}, {"conversations": []}]
    path.write_text(json.dumps(talks))
    (talk,) = samples(tokenizer, "--dataset-name", "sharegpt", "--dataset-path", str(path), "--num-prompts", "1")
    assert (talk.prompt, talk.expected_output_len) == ("ask", len(tokenizer("a reply").input_ids))


def test_what_cannot_be_read_is_told(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    for words, told in (
        (("--dataset-name", "hf"), "not available"),
        (("--dataset-name", "custom"), "cannot be read"),
        (("--dataset-name", "custom", "--dataset-path", str(tmp_path / "empty")), "no prompts"),
    ):
        with pytest.raises(ConfigError, match=told):
            samples(tokenizer, *words)
