"""What a checkpoint's generation_config.json does to every answer, as transformers' generate does it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from beheld import LLM, SamplingParams
from beheld.core.config import EngineArgs
from beheld.core.errors import ConfigError
from beheld.inputs.sampling.resolve_sampling import habits
from tests import tiny
from tests.inputs import pipes

PROMPT = [5, 6, 7]


def theirs(folder: Path) -> list[int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    out = model.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=8, pad_token_id=0)
    return out[0, len(PROMPT) :].tolist()


def ours(folder: Path) -> list[int]:
    with LLM(str(folder), dtype="float32", max_model_len=64, max_num_seqs=2) as llm:
        (answer,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    return list(answer.outputs[0].token_ids)


def test_forbidden_tokens_and_the_least_length_are_those_of_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    shutil.copytree(tiny.checkpoint("llama"), folder)
    file = folder / "generation_config.json"
    stated = json.loads(file.read_text(encoding="utf-8"))
    plain = theirs(folder)
    settings: list[dict[str, Any]] = [
        {"suppress_tokens": [plain[0]]},
        {"bad_words_ids": [plain[1:3], [plain[3]]]},
        {"begin_suppress_tokens": [plain[0], plain[2]]},
        {"min_new_tokens": 4, "eos_token_id": plain[1]},
    ]
    for changes in settings:
        file.write_text(json.dumps(stated | changes), encoding="utf-8")
        expected = theirs(folder)
        assert expected != plain
        assert ours(folder) == expected, changes


def test_what_is_not_built_is_refused_or_said(caplog: pytest.LogCaptureFixture) -> None:
    info = pipes.info("llama")
    name, value = "sequence_bias", [[[1], -5.0]]
    with pytest.raises(ConfigError, match=name):
        habits({}, EngineArgs(override_generation_config={name: value}), info)
    habits({name: value}, EngineArgs(), info)
    assert name in caplog.text
    with pytest.raises(ConfigError, match="forbids"):
        habits({"suppress_tokens": [10**6]}, EngineArgs(), info)
