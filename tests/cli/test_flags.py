"""Flags that are not known: refused with the nearest one, or answered where they are another server's."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from beheld.cli import main, vllm_flags
from beheld.cli.flags import apply_file
from beheld.cli.parser import Parser
from beheld.cli.serve import add_arguments, server_options
from beheld.core.errors import ConfigError
from beheld.flags.engine import add_engine_flags
from beheld.server.options import ServerOptions
from beheld.utils.log import get_logger

Capture = pytest.CaptureFixture[str]
LIMITS = {"image": 2, "video": 0}
TWICE = ("--limit-mm-per-prompt.image", "2", "--limit-mm-per-prompt.video", "0")


def serve() -> Parser:
    parser = Parser(prog="beheld serve")
    add_arguments(parser)
    parser.vllm_flags = vllm_flags.answer
    return parser


def read(*words: str) -> argparse.Namespace:
    return serve().parse_args(list(words))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serve", "--max-modle-len", "5"], "unknown flag --max-modle-len. Did you mean '--max-model-len'?"),
        (["serve", "m", "--max_modle_len=5"], "unknown flag --max_modle_len. Did you mean '--max-model-len'?"),
        (["serve", "--api", "x"], "unknown flag --api. Did you mean '--api-key'?"),
        (["serve", "--bogus", "3"], "unknown flag --bogus. All flags: beheld serve --help"),
        (["serve", "--max-model", "5"], "unknown flag --max-model."),
        (["ask", "pic.jpg", "--temprature", "1", "Why?"], "unknown flag --temprature. Did you mean '--temperature'?"),
        (["chat", "--sytem", "x"], "Did you mean '--system'?"),
        (["plan", "mote", "--jsn"], "beheld plan: unknown flag --jsn. Did you mean '--json'?"),
        (["verify", "mote", "--txt-only"], "Did you mean '--text-only'?"),
        (["models", "--markdwn"], "Did you mean '--markdown'?"),
        (["doctor", "--josn"], "Did you mean '--json'?"),
        (["bench", "serve", "--client", "3"], "beheld bench serve: unknown flag --client. Did you mean '--clients'?"),
        (["--verison"], "Did you mean '--version'?"),
        (["aks", "photo.jpg"], "Did you mean 'ask'?"),
        (["bench", "--url", "x"], "unknown flag --url. It stands after a command: beheld bench serve --url."),
        (["--port", "80", "serve"], "unknown flag --port. It stands after a command: beheld serve --port."),
        (["ask", "--guided-decoding-backend", "x"], "unknown flag --guided-decoding-backend."),
        (["serve", "a", "b"], "unrecognized arguments: b."),
        (["serve", "m", "-x", "5"], "beheld serve: unknown flag -x."),
        (["serve", "-port=5"], "beheld serve: unknown flag -port. Did you mean '--port'?"),
    ],
)
def test_the_nearest_flag_is_named(words: list[str], said: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main(words)
    assert caught.value.code == 2
    text = capsys.readouterr().err
    assert said in text
    assert len(text.splitlines()) == 1
    assert "--help" in text


def test_a_backend_of_grammars_changes_nothing_and_more_is_refused(capsys: Capture) -> None:
    flag = "--structured-outputs-config"
    for words in (
        [f"{flag}.backend", "xgrammar"],
        [f"{flag}.backend=guidance"],
        [flag, '{"backend": "auto"}'],
        [flag, '{"backend": "guidance", "disable_any_whitespace": true}'],
        [f"{flag}.disable_any_whitespace", "true"],
    ):
        assert read(*words).model_tag is None
    with pytest.raises(SystemExit):
        read(f"{flag}.enable_in_reasoning", "true")
    assert "Leave the rest out" in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name, told in vllm_flags.FLAGS.items() if told.why])
def test_a_flag_that_changes_nothing_takes_its_own_words_and_no_other(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = get_logger(vllm_flags.__name__)
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    told = vllm_flags.FLAGS[name]
    value = [told.only[0] if told.only else "3"] * told.values
    for words in ([f"--{name}", *value, "m"], ["m", f"--{name.replace('-', '_')}", *value], ["m", f"--{name}", *value]):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger.name):
            arguments = read(*words, "--max-model-len", "5")
        assert (arguments.model_tag, arguments.max_model_len) == ("m", 5)
        assert [record.message for record in caplog.records] == [f"--{name} changes nothing: {told.why}."]
    if value:
        assert read(f"--{name}={value[0]}", "m").model_tag == "m"
        with pytest.raises(SystemExit):
            read("m", f"--{name}", "--port", "1")
    if told.only and told.why:
        with pytest.raises(ConfigError, match="not available here"):
            vllm_flags.answer(name, "something else")


@pytest.mark.parametrize("name", [name for name, told in vllm_flags.FLAGS.items() if not told.why])
def test_a_flag_that_would_change_something_is_refused_with_what_to_do(name: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        read("m", f"--{name}", "x")
    assert caught.value.code == 2
    text = capsys.readouterr().err
    assert f"--{name} is not available here. {vllm_flags.FLAGS[name].remedy}" in text


def test_no_flag_of_others_is_one_of_ours() -> None:
    known = serve()._option_string_actions
    assert not [name for name in vllm_flags.FLAGS if f"--{name}" in known]
    for flag, values in vllm_flags.SAME.items():
        (choices,) = [
            each.metadata["choices"] for each in dataclasses.fields(ServerOptions) if each.metadata.get("flag") == flag
        ]
        assert f"--{flag}" in known
        assert set(values.values()) <= set(choices)
        assert not set(values) & set(choices)


@pytest.mark.parametrize("words", [("-sc", "{}"), ("-cc.mode=3",), ("-O3",), ("-O", "3")])
def test_short_flags_of_others_are_answered_as_their_long_ones(words: tuple[str, ...], capsys: Capture) -> None:
    name = vllm_flags.SHORT[words[0].partition("=")[0].partition(".")[0].rstrip("3")]
    if vllm_flags.FLAGS[name].why:
        assert read(*words, "m").model_tag == read("m", *words).model_tag == "m"
        return
    for given in ((*words, "m"), ("m", *words)):
        with pytest.raises(SystemExit):
            read(*given)
        assert f"--{name} is not available here. {vllm_flags.FLAGS[name].remedy}" in capsys.readouterr().err


def test_short_flags_are_known_where_their_long_ones_are() -> None:
    assert set(vllm_flags.SHORT.values()) <= set(vllm_flags.FLAGS)
    assert read("m", "-ep", "-tp", "2").tensor_parallel_size == 2
    found = read("-tp=2", "-pp", "1", "-q", "compressed-tensors", "m")
    assert (found.tensor_parallel_size, found.pipeline_parallel_size, found.model_tag) == (2, 1, "m")
    assert found.quantization == "compressed-tensors"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4096", 4096),
        ("-1", -1),
        ("32k", 32_000),
        ("32K", 32_768),
        ("25.6k", 25_600),
        ("2M", 1 << 21),
        ("1.5g", 15 * 10**8),
    ],
)
def test_whole_numbers_may_be_said_short(text: str, number: int, tmp_path: Path) -> None:
    assert read("--max-model-len", text).max_model_len == number
    file = tmp_path / "options.yaml"
    file.write_text(f"max-model-len: {text}")
    arguments = read()
    apply_file(arguments, file, [serve()._option_string_actions["--max-model-len"]])
    assert arguments.max_model_len == number


@pytest.mark.parametrize("text", ["4096.0", "k", "3x", "1.0005k", "0x10", "", "1e3", "4 k"])
def test_what_is_no_whole_number(text: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        read("--max-model-len", text)
    assert "whole number" in capsys.readouterr().err


def test_forms_have_their_other_names_too() -> None:
    assert read("--reasoning-parser", "deepseek_r1").reasoning_parser == "think"
    assert read("--tool-call-parser", "qwen3_xml").tool_parser == "qwen3_coder"
    with pytest.raises(ConfigError, match=r"--reasoning-parser does not accept 'graphite'\. Known: "):
        server_options(read("--reasoning-parser", "graphite"), None, {})


def test_a_key_that_is_left_out_takes_nobody_elses_word(tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text("x")
    for word in (str(file), "org/model", "https://example.org/x.png", "What is it?", "-"):
        arguments = read("--hf-token", word) if word != "-" else read("--hf-token", "m/n")
        assert arguments.hf_token is True
        assert arguments.model_tag == (word if word != "-" else "m/n")
    assert (read("m", "--hf-token").hf_token, read("m", "--hf-token", "--port", "1").hf_token) == (True, True)
    for key in ("hf_abc.d/e", "abcDEF_1-2"):
        assert read("--hf-token", key, "m").hf_token == key
        assert read("m", f"--hf_token={key}").hf_token == key
    assert read("m", "--hf-token=true").hf_token is True
    for empty in (["--hf-token", ""], ["--hf-token="], ["--hf-token", " "]):
        with pytest.raises(SystemExit):
            read(*empty, "--port", "1")


def test_dashes_and_underscores_may_be_mixed() -> None:
    assert read("m", "--max-model_len", "5", "--max-num_seqs=2").max_model_len == 5


def test_words_behind_a_script_are_the_scripts(capsys: Capture) -> None:
    assert main.main(["run-vllm", "no_such_script.py", "--model-type", "x"]) == 1
    assert "no_such_script.py" in capsys.readouterr().err


def test_the_package_can_be_run() -> None:
    done = subprocess.run([sys.executable, "-m", "beheld", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("beheld ")


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--limit-mm-per-prompt.image", "2"], "limit_mm_per_prompt", {"image": 2}),
        (["--limit_mm_per_prompt.image=2", "--limit-mm-per-prompt.video", "0"], "limit_mm_per_prompt", LIMITS),
        (["--limit-mm-per-prompt.image", "7", *TWICE], "limit_mm_per_prompt", LIMITS),
        (["--mm-processor-kwargs.num_crops=4"], "mm_processor_kwargs", {"num_crops": 4}),
        (["--mm-processor-kwargs.size.longest_edge", "9"], "mm_processor_kwargs", {"size": {"longest_edge": 9}}),
        (["--mm-processor-kwargs.size", '{"a": [1, null]}'], "mm_processor_kwargs", {"size": {"a": [1, None]}}),
        (["--mm-processor-kwargs.do_pan_and_scan", "true"], "mm_processor_kwargs", {"do_pan_and_scan": True}),
        (["--mm-processor-kwargs.mode", "a=b c"], "mm_processor_kwargs", {"mode": "a=b c"}),
        (["--mm-processor-kwargs.low", "-1"], "mm_processor_kwargs", {"low": -1}),
        (["--hf-overrides.architectures+", "A,B"], "hf_overrides", {"architectures": ["A", "B"]}),
        (["--media-io-kwargs.video.num_frames", "16"], "media_io_kwargs", {"video": {"num_frames": 16}}),
        (["--limit-mm-per-prompt", '{"image": 2}'], "limit_mm_per_prompt", {"image": 2}),
    ],
)
def test_json_may_be_given_entry_by_entry(words: list[str], name: str, value: Any) -> None:
    for line in ([*words, "m", "--port", "1"], ["m", "--port", "1", *words], ["m", *words, "--port", "1"]):
        arguments = read(*line)
        assert (getattr(arguments, name), arguments.model_tag, arguments.port) == (value, "m", 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--limit-mm-per-prompt.image"], "--limit-mm-per-prompt.image: expected one argument"),
        (["--limit-mm-per-prompt.image", "--port", "1"], "--limit-mm-per-prompt.image: expected one argument"),
        (["--limit-mm-per-prompt.", "1"], "empty name"),
        (["--mm-processor-kwargs.a..b=1"], "empty name"),
        (["--mm-processor-kwargs.+=1"], "empty name"),
        (["--mm-processor-kwargs.a", "1", "--mm-processor-kwargs.a.b", "1"], "a value and entries under 'a'"),
        (["--limit-mm-per-prompt.image", "2", "--limit_mm_per_prompt", "{}"], "whole and by entries"),
        (["--limit-mm-per-prompt={}", "--limit_mm_per_prompt.image", "2"], "whole and by entries"),
        (["--max-model-len.x", "2"], "unknown flag --max-model-len.x. Did you mean '--max-model-len'?"),
        (["--limit-mm-per-promt.image", "2"], "unknown flag --limit-mm-per-promt.image. Did you mean '--limit-mm-per"),
        (["--ec-transfer-config.method", "x"], vllm_flags.FLAGS["ec-transfer-config"].remedy),
    ],
)
def test_entries_that_say_nothing_or_two_things(words: list[str], said: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        read("m", *words)
    assert said in capsys.readouterr().err


def test_other_commands_take_entries_too() -> None:
    parser = Parser(prog="beheld ask")
    parser.any_order = True
    parser.add_argument("words", nargs="+")
    add_engine_flags(parser)
    arguments = parser.parse_args(
        ["a.png", "--limit-mm-per-prompt.image", "2", "What?", "--", "--limit-mm-per-prompt.x"]
    )
    assert arguments.limit_mm_per_prompt == {"image": 2}
    assert arguments.words == ["a.png", "What?", "--limit-mm-per-prompt.x"]


def test_patterns_of_files_that_are_never_read_change_nothing() -> None:
    assert vllm_flags.answer("ignore-patterns", "original/**/*") == 1
    with pytest.raises(ConfigError, match="not available"):
        vllm_flags.answer("ignore-patterns", "*.bin")


@pytest.mark.parametrize("value", ['{"backend": "xgrammar"}', '{"backend":"xgrammar"}'])
def test_json_is_read_however_it_is_written(value: str) -> None:
    assert vllm_flags.answer("structured-outputs-config", value) == 1


def test_logits_processors_by_name_find_vllms_modules() -> None:
    name = "vllm.model_executor.models.deepseek_ocr:NGramPerReqLogitsProcessor"
    script = f"""
from beheld.cli.flags import engine_options
from beheld.cli.serve import add_arguments, server_options
from beheld.cli.parser import Parser
from beheld.core.config import EngineConfig
from beheld.core.params import SamplingParams
from beheld.inputs.sampling.logits_processors import EngineProcessors
parser = Parser(prog="beheld serve")
add_arguments(parser)
options = engine_options(parser.parse_args(["mote", "--logits_processors", "{name}"]))
assert options == {{"logits_processors": ["{name}"]}}, options
made = EngineProcessors(options["logits_processors"], None)
assert len(made.of(SamplingParams(extra_args={{"ngram_size": 2}}))) == 1
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
