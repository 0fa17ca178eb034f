"""The list of families says what is tested, and nothing else."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from beheld.checkpoint.info import read_info
from beheld.cli.main import main
from beheld.core.config import EngineArgs
from beheld.core.errors import ModelError
from beheld.families import page, registry
from beheld.families.family import TOLERANCE, KnownCheckpoint
from tests import tiny, tiny_new
from tests.census import RECIPES
from tests.oracle.cases import cases
from tests.oracle.test_oracle import LOGPROB_TOLERANCE

PAGE = Path(__file__).parent.parent / "docs" / "models.md"


def test_the_page_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--markdown"]) == 0
    assert PAGE.read_text(encoding="utf-8") == capsys.readouterr().out


def test_the_list_is_that_of_the_tests() -> None:
    variants = {"gemma4_dense"}
    full = {row.name for row in page.tested() if not row.by_census}
    assert full == set(tiny.TINY) - variants | set(tiny_new.ABSENT_FAMILIES) | set(tiny.APART)
    rows = [row for row in page.tested() if row.by_census]
    assert {row.name for row in rows} == set(RECIPES)
    images = {"one image": 1, "several images": 2}
    for row in rows:
        words = page.checked(row).split(", ")
        assert {"images": [images[word] for word in words if word in images], "audio": "audio" in words} == {
            "images": [RECIPES[row.name].most] if RECIPES[row.name].image else [],
            "audio": bool(RECIPES[row.name].audio),
        }, row.name
    assert {row.name for row in rows if "video" in row.modalities} == {n for n, each in RECIPES.items() if each.video}


def test_what_is_said_to_be_checked_is_what_the_tests_do() -> None:
    rows = {row.name: row for row in page.tested() if not row.by_census}
    assert set(tiny.LONE_FAMILIES) == {name for name, row in rows.items() if row.one_image}
    assert set(tiny.UNSHARED_FAMILIES) == {name for name, row in rows.items() if row.whole_prompts}
    tolerances = {name: row.tolerance for name, row in rows.items() if row.tolerance != TOLERANCE}
    assert {name: value for name, value in LOGPROB_TOLERANCE.items() if name in rows} == tolerances
    assert set(gpu_families()) == {name for name, row in rows.items() if row.on_gpu}
    for kind, families in (
        ("image", tiny.IMAGE_FAMILIES), ("video", tiny.VIDEO_FAMILIES), ("audio", tiny.SOUND_FAMILIES)
    ):  # fmt: skip
        told = {name for name, row in rows.items() if kind in row.modalities and name in tiny.TINY}
        assert told == set(families) & set(rows)


def gpu_families() -> tuple[str, ...]:
    """Those that the GPU oracle lists; without a GPU its module cannot be imported."""
    source = (Path(__file__).parent / "gpu" / "test_oracle.py").read_text(encoding="utf-8")
    tables = [
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FAMILIES"
    ]
    (names,) = tables
    return tuple(str(node.value) for node in ast.walk(names) if isinstance(node, ast.Constant))


HERE = [row for row in page.tested() if row.name in tiny.TINY | tiny.APART]


@pytest.mark.parametrize("row", HERE, ids=lambda row: row.name)
def test_a_row_says_what_the_checkpoint_says(row: KnownCheckpoint) -> None:
    info = read_info(tiny.checkpoint(row.name), EngineArgs())
    assert info.architecture == row.architecture
    assert info.modalities == row.modalities


@pytest.mark.parametrize("model_type", page.refused())
def test_what_is_refused_says_why(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
    with pytest.raises(ModelError) as caught:
        read_info(tmp_path, EngineArgs())
    assert page.refused()[model_type] in str(caught.value) or "not one this version" in str(caught.value)


def test_the_page_names_what_shares_a_class_with_another_use() -> None:
    (row,) = (line for line in PAGE.read_text(encoding="utf-8").splitlines() if "TIGER-Lab/VLM2Vec-Full" in line)
    assert row.startswith("| phi3_v | Phi3VForCausalLM |")


def test_the_command_lists_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert "Qwen/Qwen2-VL-7B-Instruct" in out
    assert all(reason in out for reason in page.refused().values())


def test_families_whose_kinds_are_joined_by_hand_say_so() -> None:
    joined = {row.name for row in page.tested() if row.joined}
    assert set(tiny.JOINED_FAMILIES) == joined
    told = {row.name: page.checked(row) for row in page.tested()}
    assert {name for name, words in told.items() if "images with a video (joined)" in words} == joined
    compared = {family for family in tiny.VIDEO_FAMILIES if "video_and_picture" in (c.name for c in cases(family))}
    assert {name for name in tiny.TINY if "images with a video" in told.get(name, "")} == compared & set(told)


def test_short_names() -> None:
    layouts = {row.name for row in page.tested()}
    found = registry.short_names()
    assert len(found) == sum(len(family.short_names) for family in registry.families().values()), "one name, one model"
    for short in found.values():
        assert short.name == short.name.lower(), short
        assert short.repository.count("/") == 1, short
        assert short.layout in layouts, short
        assert "/" not in short.name, short
        assert short.name != "mote", short
        assert 0 < short.billions < 1000, short
