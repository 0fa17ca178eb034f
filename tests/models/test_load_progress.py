"""The bar of a checkpoint's files: true, silent where nobody looks, and gone when loading is over."""

from __future__ import annotations

import io
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers.utils import logging as hf_logging

from beheld.checkpoint.info import read_config, read_info
from beheld.core.config import EngineArgs
from beheld.core.errors import ModelError
from beheld.engine.setup import decide
from beheld.models.load import load_model
from beheld.models.load_progress import _counted, shard_bar
from tests import tiny

LINE = re.compile(r"Loading safetensors checkpoint shards: +(\d+)% Completed \| (\d+)/(\d+) \[")


class Terminal(io.StringIO):
    """Standard error that somebody looks at."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars of transformers, whatever the environment of the tests says."""
    monkeypatch.setattr(hf_logging, "_tqdm_active", True)


def drawn(monkeypatch: pytest.MonkeyPatch, folder: Path, stream: io.StringIO, **options: bool) -> list[tuple[int, ...]]:
    """Load the checkpoint; each state of the bar: percent, files done, files."""
    monkeypatch.setattr("sys.stderr", stream)
    args = EngineArgs(model=str(folder), dtype="float32", **options)
    config = read_config(folder, args)
    info = read_info(folder, args, config)
    load_model(config, info, decide(args, info))
    assert "Loading weights:" not in stream.getvalue()
    return [tuple(map(int, found.groups())) for found in LINE.finditer(stream.getvalue())]


def test_each_file_is_counted_when_its_last_weight_is_in_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.checkpoint("llava")
    total = len(list(folder.glob("*.safetensors")))
    assert total > 2
    states = drawn(monkeypatch, folder, Terminal())
    assert list(dict.fromkeys(states)) == [(round(100 * n / total), n, total) for n in range(total + 1)]


def test_weights_that_are_joined_or_left_out_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts lie apart in the file and together in the model; what speaks is not loaded."""
    for family in ("qwen3_vl_moe", "qwen2_5_omni", "glm4v_moe_fp8"):
        if family in tiny.TINY:
            assert drawn(monkeypatch, tiny.checkpoint(family), Terminal())[-1] == (100, 1, 1), family


def test_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.checkpoint("llava")
    assert drawn(monkeypatch, folder, io.StringIO()) == []
    assert drawn(monkeypatch, folder, Terminal(), use_tqdm_on_load=False) == []
    assert hf_logging.is_progress_bar_enabled(), "other programs' bars are theirs"
    monkeypatch.setattr(hf_logging, "_tqdm_active", False)
    assert drawn(monkeypatch, folder, Terminal()) == []


def test_the_bar_of_what_fails_is_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "llava"
    shutil.copytree(tiny.checkpoint("llava"), folder)
    (folder / "model.safetensors.index.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelError):
        drawn(monkeypatch, folder, Terminal())
    assert hf_logging.set_tqdm_hook(None) is None


def test_files_of_other_names_are_done_at_once() -> None:
    made = SimpleNamespace(layer_targets={"x": {"a"}, "y": {"b", "new"}})
    heard: list[int] = []
    entries = _counted([("x", made), ("z", object())], {"a": "1", "b": "2", "old": "3"}, heard.append)
    assert [next(entries)[0], list(heard)] == ["x", [1]]
    assert [next(entries)[0], list(heard)] == ["z", [1, 2]]


def test_no_bar_without_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    with shard_bar(tmp_path, shown=True):
        pass
    assert stream.getvalue() == ""
