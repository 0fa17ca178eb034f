"""A folder's weights are those that its index names; what is missing of them is said before anything is loaded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from beheld import LLM
from beheld.checkpoint.weights import check_weights, chosen, has_weights, lacking, weight_files
from beheld.core.errors import ModelError
from tests import tiny
from tests.tiny_text import write_json


def lay(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"")
    return folder


def test_the_order_is_that_of_transformers(tmp_path: Path) -> None:
    lay(tmp_path, "consolidated.safetensors", "training_args.bin", "adapter_model.safetensors")
    assert weight_files(tmp_path) == ()
    assert lacking(tmp_path) == ("model.safetensors",)
    assert not has_weights(tmp_path)
    lay(tmp_path, "part.bin")
    assert weight_files(tmp_path) == ("part.bin",)
    lay(tmp_path, "part.safetensors")
    assert weight_files(tmp_path) == ("part.safetensors",)
    write_json(tmp_path / "pytorch_model.bin.index.json", {"weight_map": {"a": "x.bin", "b": "y.bin", "c": "x.bin"}})
    assert weight_files(tmp_path) == ("x.bin", "y.bin")
    lay(tmp_path, "pytorch_model.bin")
    assert weight_files(tmp_path) == ("pytorch_model.bin",)
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": {"a": "x.safetensors"}})
    assert lacking(tmp_path) == ("x.safetensors",)
    lay(tmp_path, "model.safetensors")
    assert weight_files(tmp_path) == ("model.safetensors",)
    write_json(tmp_path / "config.json", {"transformers_weights": "other.safetensors"})
    assert lacking(tmp_path) == ("other.safetensors",)
    assert chosen(["model.safetensors", "other.safetensors"], tmp_path) == ("other.safetensors",)


def test_shards_whose_index_is_not_there_yet_are_told_by_name(tmp_path: Path) -> None:
    names = ["model-1-of-2.safetensors", "model-2-of-2.safetensors", "model.safetensors.index.json"]
    assert sorted(chosen([*names, "pytorch_model.bin", "consolidated.safetensors"], tmp_path)) == names


def test_an_index_of_nothing_is_refused(tmp_path: Path) -> None:
    for table in ({}, {"a": 5}, {"a": ["b"]}, None):
        write_json(tmp_path / "model.safetensors.index.json", {"weight_map": table})
        with pytest.raises(ModelError, match="names no files"):
            check_weights(tmp_path, "m")


def test_an_interrupted_folder_names_what_is_missing(tmp_path: Path) -> None:
    folder = shutil.copytree(tiny.checkpoint("llava"), tmp_path / "model")
    shards = weight_files(folder)
    assert len(shards) > 1
    (folder / shards[1]).unlink()
    with pytest.raises(ModelError) as caught:
        LLM(str(folder))
    assert f"1 are missing: {shards[1]}." in str(caught.value)
    for shard in (shards[0], *shards[2:]):
        (folder / shard).unlink()
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match="holds no weights"):
        LLM(str(folder))
