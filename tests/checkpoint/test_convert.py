"""Repositories that bring their own code, read as the classes that transformers has for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from beheld.checkpoint.info import read_config
from beheld.core.config import EngineArgs
from beheld.core.errors import ModelError
from tests import tiny
from tests.oracle import cases
from tests.oracle.test_oracle import check, make
from tests.tiny_layouts import make_main_ernie


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The tiny ERNIE under the main branch's configuration."""
    target = tmp_path / "ernie"
    target.mkdir()
    make_main_ernie(target)
    return target


def test_the_main_branch_of_ernie_is_the_class_that_transformers_has(folder: Path) -> None:
    native = read_config(tiny.checkpoint("ernie4_5_vl_moe"), EngineArgs()).to_dict()
    args = EngineArgs(trust_remote_code=True, hf_overrides={"image_end_token_id": 7})
    found = read_config(folder, args).to_dict()
    assert found.pop("image_end_token_id") == 7
    del native["image_end_token_id"]
    for config in (native, found):
        config.pop("_name_or_path", None)
        # What a part says of itself beside its own settings.
        for name in ("architectures", "dtype"):
            config["text_config"].pop(name)
    assert found == native


def test_a_checkpoint_of_the_main_branch_answers_as_ever(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "checkpoint", lambda family: folder)
    with make("ernie4_5_vl_moe", cases.ROOMY) as llm:
        monkeypatch.undo()
        check(llm, "ernie4_5_vl_moe", cases.fit("ernie4_5_vl_moe", cases.FOUR, cases.VIDEO, cases.SHORT))


@pytest.mark.parametrize(
    ("change", "words"),
    [({"moe_num_experts": [4, 8]}, "differ"), ({"vision_config": None}, "cannot be read"), ({}, "im_patch_id")],
)
def test_a_broken_configuration_is_named(folder: Path, change: dict[str, Any], words: str) -> None:
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8")) | change
    if not change:
        del raw["im_patch_id"]
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(ModelError) as caught:
        read_config(folder, EngineArgs())
    assert words in str(caught.value)
