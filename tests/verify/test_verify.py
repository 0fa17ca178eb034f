"""`beheld verify`: nothing differs where nothing is wrong, and what is wrong is named at its stage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch import Tensor

from beheld.cli.main import main
from beheld.core.config import EngineArgs
from beheld.core.plan import SpanView
from beheld.models.hf import HFAdapter
from beheld.runner.encoder import EncoderStore
from beheld.verify.compare import SAME, Stage
from beheld.verify.run import made_up, verify
from beheld.verify.trace import Question
from tests import tiny

FAMILIES = ["llama", "llava", "llava_onevision", "qwen2_5_vl", "qwen3_vl", "gemma3", "idefics3", "paligemma", "glm4v"]


def run(family: str, images: list[Any]) -> tuple[dict[str, Stage], Stage | None]:
    prompt = tiny.wrap(family, tiny.markers(family, num_images=1) * len(images) + "What is it?")
    # In this process, where a test can make it go wrong.
    args = EngineArgs(model=str(tiny.checkpoint(family)), media_workers=0)
    stages, culprit = verify(args, Question(prompt, tuple(images), "plain", 6))
    return {stage.name: stage for stage in stages}, culprit


def pictures(family: str) -> list[Any]:
    if family not in tiny.IMAGE_FAMILIES:
        return []
    return made_up(1 if family in tiny.LONE_FAMILIES else 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_differs(family: str) -> None:
    stages, culprit = run(family, pictures(family))
    assert culprit is None
    for name in ("token ids", "merged embeddings", "logits", "tokens"):
        assert stages[name].verdict == SAME, name
    if family in tiny.IMAGE_FAMILIES:
        assert stages["encoder output"].verdict == SAME


def test_a_picture_that_is_not_turned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "turned.png"
    noise = np.random.default_rng(0).integers(0, 256, (84, 56, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 3
    Image.fromarray(noise).save(file, exif=exif)
    assert run("qwen2_5_vl", [file])[1] is None
    monkeypatch.setattr("PIL.ImageOps.exif_transpose", lambda image: image)
    from beheld.verify import reference

    upright = Image.fromarray(noise[::-1, ::-1].copy())
    monkeypatch.setattr(reference, "pictures", lambda question: [upright])
    _, culprit = run("qwen2_5_vl", [file])
    assert culprit is not None
    assert culprit.name == "pixel values"


def test_a_wrong_rotary_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    right = HFAdapter.positions

    def wrong(self: HFAdapter, token_ids: Any, spans: Any) -> Any:
        positions, delta = right(self, token_ids, spans)
        return positions, delta + 1

    monkeypatch.setattr(HFAdapter, "positions", wrong)
    _, culprit = run("qwen2_5_vl", made_up(1))
    assert culprit is not None
    assert culprit.name == "positions"
    assert "answered token 1" in culprit.detail


def test_swapped_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    right = EncoderStore._source

    def wrong(self: EncoderStore, span: SpanView) -> Tensor:
        others = [embeds for digest, embeds in self._embeds.items() if digest != span.digest]
        return others[0] if others else right(self, span)

    monkeypatch.setattr(EncoderStore, "_source", wrong)
    _, culprit = run("qwen2_5_vl", made_up(2))
    assert culprit is not None
    assert culprit.name == "merged embeddings"


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "mote", "examples/scene.png", "--max-tokens", "3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["first_difference"] is None
    verdicts = {stage["name"]: stage["verdict"] for stage in told["stages"]}
    assert verdicts["rendered prompt"] == verdicts["pixel values"] == verdicts["tokens"] == SAME
