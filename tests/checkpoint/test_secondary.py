"""A model of several checkpoints: each is found, fetched, counted and read; what is missing is named at start."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from beheld import LLM, SamplingParams
from beheld.checkpoint.info import read_config, read_info
from beheld.checkpoint.resolve import fetch_weights, resolve
from beheld.core.config import EngineArgs
from beheld.core.errors import ModelError
from beheld.models.load import converted_weights
from beheld.tools.plan import plan
from tests import tiny
from tests.checkpoint.hubs import Hub
from tests.tiny_own_ultravox import EAR, TEXT

NAME = "fixie-ai/ultravox-v0_5-llama-3_2-1b"
PROMPT = {"prompt": tiny.wrap("ultravox", "Hi!")}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.setattr("beheld.utils.log._said", set())
    hub = Hub(tmp_path / "hub")
    hub.enter(monkeypatch)
    return hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint without those that it names."""
    found = tmp_path / "models" / "ultravox"
    shutil.copytree(tiny.checkpoint("ultravox"), found, ignore=shutil.ignore_patterns("meta-llama", "openai"))
    return found


def files(path: Path) -> Mapping[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}


def beside(folder: Path) -> Path:
    """Put those that the checkpoint names beside it; returns the language model's folder."""
    for name in (TEXT, EAR):
        shutil.copytree(tiny.checkpoint("ultravox") / name, folder.parent / name.split("/")[1])
    return folder.parent / TEXT.split("/")[1]


def change(folder: Path, **entries: Any) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | entries
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def answer(model: Path | str, **options: Any) -> list[int]:
    with LLM(str(model), dtype="float32", max_model_len=128, **options) as llm:
        (output,) = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    return list(output.outputs[0].token_ids)


def test_from_the_hub_all_are_fetched_and_one_that_is_missing_is_named(hub: Hub) -> None:
    whole = tiny.checkpoint("ultravox")
    hub.publish(NAME, files(whole))
    hub.publish(EAR, files(whole / EAR))
    with pytest.raises(ModelError, match=rf"text_model_id '{TEXT}', and it was not found.*hf download {TEXT}"):
        LLM(NAME)
    assert "model.safetensors" not in hub.cached(NAME), "weights were fetched for a model that cannot start"
    hub.publish(TEXT, files(whole / TEXT))
    args = EngineArgs(NAME)
    path = resolve(args)
    info = read_info(path, args)
    assert [part.path for part in info.secondary] == [str(hub.folder(TEXT)), str(hub.folder(EAR))]
    fetch_weights(args, path)
    assert all("model.safetensors" in hub.cached(name) for name in (NAME, TEXT, EAR))
    hub.online = False
    assert answer(NAME) == answer(whole)
    (hub.folder(TEXT) / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=f"lacks weights of the model '{TEXT}'"):
        LLM(NAME)


def test_a_local_checkpoint_finds_folders_beside_it_or_that_the_user_names(hub: Hub, folder: Path) -> None:
    hub.online = False
    whole = tiny.checkpoint("ultravox")
    with pytest.raises(ModelError, match="put its folder next to the checkpoint's, or name a folder: hf_overrides"):
        LLM(str(folder))
    shutil.copytree(whole / TEXT, folder.parent / TEXT.split("/")[1])
    with pytest.raises(ModelError, match=f"audio_model_id '{EAR}'"):
        LLM(str(folder))
    shutil.copytree(whole / EAR, folder.parent / EAR.split("/")[1])
    assert answer(folder) == answer(whole)
    other = folder.parent / "other"
    shutil.copytree(whole / TEXT, other)
    weights = load_file(other / "model.safetensors")
    save_file({name: -weight for name, weight in weights.items()}, other / "model.safetensors")
    assert answer(folder, hf_overrides={"text_model_id": str(other)}) != answer(whole)
    with pytest.raises(ModelError, match=r"text_model_id '/nowhere', and there is no such folder"):
        LLM(str(folder), hf_overrides={"text_model_id": "/nowhere"})


def test_quantized_weights_of_a_second_checkpoint_are_refused(folder: Path) -> None:
    text = beside(folder)
    change(text, quantization_config={"quant_method": "compressed-tensors"})
    with pytest.raises(ModelError, match=f"The weights of '{TEXT}'.* are quantized"):
        LLM(str(folder))


def test_sizes_count_all_checkpoints() -> None:
    whole = tiny.checkpoint("ultravox")
    numbers = {folder: load_file(whole / folder / "model.safetensors") for folder in (".", TEXT, EAR)}
    del numbers[EAR]["model.decoder.layer_norm.weight"]
    count = sum(weight.numel() for weights in numbers.values() for weight in weights.values())
    sizes = plan(EngineArgs(str(whole), dtype="float32"), [])["model"]
    assert (sizes["parameters"], sizes["weights_bytes"]) == (count, 4 * count)


def test_far_too_few_weights_in_all_of_them_are_refused(folder: Path) -> None:
    change(beside(folder), num_hidden_layers=40)
    with pytest.raises(ModelError, match=r"describes a model of .* numbers, and the files of its weights hold"):
        plan(EngineArgs(str(folder)), [])


def test_its_own_weights_go_before_those_of_a_second_checkpoint(folder: Path) -> None:
    own = load_file(folder / "model.safetensors") | {"audio_tower.conv1.bias": torch.full((32,), 7.0)}
    save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
    beside(folder)
    args = EngineArgs(str(folder))
    config = read_config(folder, args)
    _, weights, words = converted_weights(config, read_info(folder, args, config))
    assert weights is not None
    assert weights["audio_tower.conv1.bias"][...].tolist() == [7.0] * 32
    assert "audio_tower.conv2.bias" in weights
    assert not any("decoder" in name for name in weights)
    assert words == f"weights of {TEXT} and {EAR} joined with its own"
