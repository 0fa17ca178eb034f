"""The argument parser of scripts: spellings, choices, files of options."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beheld.compat.arguments import FlexibleArgumentParser


def make() -> FlexibleArgumentParser:
    parser = FlexibleArgumentParser(description="A script.")
    parser.add_argument("--model-type", "-m", default="llava", choices={"llava": 1, "qwen2_vl": 2}.keys())
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--max_tokens", type=int, default=8)
    parser.add_argument("--time-generate", action="store_true")
    parser.add_argument("--cache", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--names", nargs="+", default=[])
    return parser


@given(st.data())
def test_dashes_and_underscores_are_one(data: st.DataObject) -> None:
    def spelled(name: str) -> str:
        return "--" + "".join(data.draw(st.sampled_from("-_")) if c in "-_" else c for c in name)

    equals = data.draw(st.booleans())

    def pair(name: str, value: str) -> list[str]:
        return [f"{spelled(name)}={value}"] if equals else [spelled(name), value]

    words = [*pair("num-prompts", "2"), *pair("max-tokens", "3"), *pair("model-type", "qwen2_vl")]
    found = make().parse_args([*words, spelled("time-generate")])
    assert (found.num_prompts, found.max_tokens, found.model_type, found.time_generate) == (2, 3, "qwen2_vl", True)


def test_values_are_left_alone() -> None:
    parser = make()
    parser.add_argument("rest", nargs="*")
    assert parser.parse_args(["-m", "qwen2_vl"]).model_type == "qwen2_vl"
    assert parser.parse_args(["--names", "a_b", "c-d"]).names == ["a_b", "c-d"]
    assert parser.parse_args(["--", "--num_prompts"]).rest == ["--num_prompts"]
    assert parser.parse_args(["--num_pro", "2"]).num_prompts == 2


def test_what_is_wrong_ends_the_script_as_argparse_does(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--model_type", "gpt"], ["--num-promtps", "2"], ["--no_such_thing"]):
        with pytest.raises(SystemExit) as caught:
            make().parse_args(words)
        assert caught.value.code == 2
    assert "--no_such_thing" in capsys.readouterr().err


def test_options_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("num_prompts: 7\nmax-tokens: 9\ntime_generate: true\ncache: false\nnames: [a, b]\n")
    found = make().parse_args(["--config", str(path), "--max-tokens", "10"])
    assert (found.num_prompts, found.max_tokens, found.time_generate) == (7, 10, True)
    assert (found.cache, found.names) == (False, ["a", "b"])
    assert make().parse_args([f"--config={path}"]).max_tokens == 9
    path.write_text("no_such_switch: false")
    with pytest.raises(SystemExit):
        make().parse_args(["--config", str(path)])
    path.write_text("- 1")
    for words in (["--config", str(path)], ["--config", str(tmp_path / "none")], ["--config"]):
        with pytest.raises(SystemExit):
            make().parse_args(words)
    assert "not a mapping" in capsys.readouterr().err


def test_a_config_of_the_scripts_own_is_its_own() -> None:
    parser = make()
    parser.add_argument("--config")
    assert parser.parse_args(["--config", "mine"]).config == "mine"
