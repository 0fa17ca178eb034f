"""EngineArgs in scripts: flags in the script's own parser, and options made of what was parsed."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from beheld import LLM, EngineArgs
from beheld.compat.arguments import FlexibleArgumentParser
from beheld.compat.engine_args import ScriptEngineArgs
from beheld.core import vllm_options
from beheld.core.errors import ConfigError
from tests.compat import census


def parser() -> FlexibleArgumentParser:
    made = ScriptEngineArgs.add_cli_args(FlexibleArgumentParser(description="A script."))
    made.set_defaults(model="m")
    made.add_argument("--temperature", type=float, default=0.5)
    return made


def test_what_is_not_given_is_as_by_default() -> None:
    arguments = parser().parse_args([])
    assert vars(ScriptEngineArgs.from_cli_args(arguments)) == vars(EngineArgs("m"))
    options = vars(arguments)
    assert options.pop("temperature") == 0.5
    assert EngineArgs(**options) == EngineArgs("m")


def test_each_option_of_vllm_has_a_flag() -> None:
    known = parser()._option_string_actions
    kept = json.loads(census.NAMES.read_text(encoding="utf-8"))
    names = {name for version in kept.values() for name in version["EngineArgs"]} - {"logits_processors"}
    assert not [name for name in names if "--" + name.replace("_", "-") not in known]


def test_what_is_given_reaches_the_options() -> None:
    words = ["--max-model-len", "2k", "--enforce_eager", "--limit-mm-per-prompt", '{"image": 2}', "--moe-backend", "x"]
    found = ScriptEngineArgs.from_cli_args(parser().parse_args([*words, "--allowed-media-domains", "a", "b"]))
    assert (found.max_model_len, found.enforce_eager, found.limit_mm_per_prompt) == (2000, True, {"image": 2})
    assert found.allowed_media_domains == ["a", "b"]
    with pytest.raises(ConfigError, match="model_weights is not available here"):
        ScriptEngineArgs.from_cli_args(parser().parse_args(["--model-weights", "x"]))


def test_a_model_is_made_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {}
    monkeypatch.setattr(LLM, "__init__", lambda self, **options: given.update(options))
    monkeypatch.setattr(LLM, "close", lambda self: None)
    LLM.from_engine_args(ScriptEngineArgs("m", seed=3))
    assert given == vars(EngineArgs("m", seed=3))
    assert set(given) == {field.name for field in fields(EngineArgs)}


def test_sizes_that_are_read_before_an_engine_starts() -> None:
    """Ray Data limits by them how many requests it has under way."""
    made = ScriptEngineArgs("m", device="cpu", pipeline_parallel_size=2).create_engine_config()
    with LLM(device="cpu") as llm:
        assert made.scheduler_config.max_num_seqs == llm._config.max_num_seqs
        assert made.scheduler_config.max_num_batched_tokens == llm._config.max_num_batched_tokens
    assert (made.parallel_config.pipeline_parallel_size, made.parallel_config.tensor_parallel_size) == (2, 1)
    given = ScriptEngineArgs("m", device="cpu", max_num_seqs=3, max_num_batched_tokens=64).create_engine_config()
    assert vars(given.scheduler_config) == {"max_num_seqs": 3, "max_num_batched_tokens": 64}


def test_a_script_with_them_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from beheld.cli import main
    from beheld.compat import finder
    from tests import tiny

    script = tmp_path / "script.py"
    script.write_text(
        "from vllm import LLM, EngineArgs\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "parser = EngineArgs.add_cli_args(FlexibleArgumentParser())\n"
        "args = vars(parser.parse_args())\n"
        "llm = LLM(**args)\n"
        "print(len(llm.generate('Once', use_tqdm=False)[0].outputs))\n"
        "llm.close()\n"
    )
    try:
        assert (
            main.main(["run-vllm", str(script), "--model", str(tiny.checkpoint("qwen2")), "--max-model-len", "64"]) == 0
        )
    finally:
        finder.uninstall()
    assert capsys.readouterr().out == "1\n"


@pytest.mark.parametrize("name", ["nnodes", "node_rank", "master_addr", "data_parallel_rank", "data_parallel_address"])
def test_what_names_other_hosts_is_refused_with_the_way_to_them(name: str) -> None:
    """beheld does run on several hosts, in a Ray cluster."""
    with pytest.raises(ConfigError, match=r"_backend='ray'.*Ray cluster"):
        EngineArgs(**{name: "2"})


def test_patterns_that_are_no_list_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="ignore_patterns"):
        EngineArgs(ignore_patterns=True)


def test_guessing_ahead_changes_no_answer_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    vllm_options._logged.discard("speculative_config")
    with caplog.at_level("INFO"):
        EngineArgs(speculative_config={"method": "ngram", "num_speculative_tokens": 2})
    assert "speculative_config changes nothing: no token is guessed ahead" in caplog.text
