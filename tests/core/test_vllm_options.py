"""vLLM's options that are no fields here: accepted and told once, or refused with what to do."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, fields
from typing import Any

import pytest

from beheld.compat.grammars import StructuredOutputsConfig
from beheld.core import vllm_options
from beheld.core.config import EngineArgs
from beheld.core.errors import ConfigError
from beheld.core.vllm_options import OPTIONS


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The log, as if no option was named in it yet."""
    logger = logging.getLogger(vllm_options.__name__)
    monkeypatch.setattr(vllm_options, "_logged", set())
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logger, "propagate", False)
    caplog.set_level(logging.INFO, logger.name)
    return caplog


def test_each_option_is_accepted_or_refused_and_is_no_field() -> None:
    assert not set(OPTIONS) & {field.name for field in fields(EngineArgs)}
    for name, option in OPTIONS.items():
        assert bool(option.why) != bool(option.remedy), name


def test_what_is_accepted_is_told_once(said: pytest.LogCaptureFixture) -> None:
    accepted: dict[str, Any] = {name: "x" for name, option in OPTIONS.items() if option.why}
    for _ in range(2):
        args = EngineArgs("m", **accepted)
        assert args == EngineArgs("m") == EngineArgs(**asdict(args))
    assert [record.getMessage().split()[0] for record in said.records] == list(accepted)


@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if not option.why])
def test_what_is_refused_names_what_to_do(name: str, said: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineArgs.from_keywords({name: "something"})
    assert (caught.value.param, caught.value.remedy) == (name, OPTIONS[name].remedy)
    for value in (None, False, {}, [], *OPTIONS[name].only):
        assert EngineArgs.from_keywords({name: value}) == EngineArgs()
    assert not said.records


def test_patterns_of_files_that_are_never_read_change_nothing() -> None:
    for value in ("original/**/*", ["original/**/*"], ["consolidated.safetensors", "consolidated*"]):
        assert EngineArgs.from_keywords({"ignore_patterns": value}) == EngineArgs()
    with pytest.raises(ConfigError, match="ignore_patterns"):
        EngineArgs.from_keywords({"ignore_patterns": ["consolidated.safetensors", "model-00002*"]})


@pytest.mark.parametrize("form", [dict, lambda **fields: json.dumps(fields), StructuredOutputsConfig])
def test_what_compiles_grammars_elsewhere_changes_nothing(form: Any) -> None:
    """Tests and scripts name a backend together with what its JSON looks like."""
    name = "structured_outputs_config"
    taken: tuple[dict[str, Any], ...] = (
        {"backend": "guidance", "disable_any_whitespace": True, "disable_additional_properties": True},
        {"backend": "auto", "disable_any_whitespace": False, "reasoning_parser": "deepseek_r1"},
    )
    for each in taken:
        assert EngineArgs.from_keywords({name: form(**each)}) == EngineArgs()
    for other in ({"backend": "none"}, {"enable_in_reasoning": True}, {"reasoning_parser_plugin": "a.py"}):
        with pytest.raises(ConfigError, match=name):
            EngineArgs.from_keywords({name: form(**other)})
    with pytest.raises(ConfigError, match=name):
        EngineArgs.from_keywords({name: "[1]"})


def test_an_unknown_option_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'max_model_len'"):
        EngineArgs.from_keywords({"max_modl_len": 1})


@pytest.mark.parametrize("length", ["auto", -1, None])
def test_the_models_own_length_has_several_forms(length: object) -> None:
    assert EngineArgs(max_model_len=length).max_model_len is None  # type: ignore[arg-type]
