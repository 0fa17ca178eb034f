"""`beheld verify`: nothing differs where nothing is wrong, and what is wrong is named at its stage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from beheld.cli.main import main
from beheld.core.config import EngineArgs
from beheld.core.plan import SpanView
from beheld.models.hf import HFAdapter
from beheld.runner.encoder import EncoderStore
from beheld.verify.compare import DIFFERENT, NOT_COMPARED, SAME, Stage, compare
from beheld.verify.run import made_up, verify
from beheld.verify.trace import Question, Trace
from tests import tiny, tiny_adapted, tiny_cross, tiny_quantized
from tests.checkpoint.test_convert import main_branch

FAMILIES = ["llama", "llava", "llava_onevision", "qwen2_5_vl", "qwen3_vl", "gemma3", "idefics3", "paligemma", "glm4v"]
# Families of which transformers must be asked in another way: other markers, positions, classes, merging.
PECULIAR = ["chameleon", "florence2", "fuyu", "gemma4", "hunyuan_vl", "llama4", "mantis", "molmo2", "qwen2_5_omni"]


def prompt_of(family: str, count: int) -> str:
    return tiny.wrap(family, tiny.markers(family, num_images=1) * count + "What is it?")


def run(family: str, images: list[Any]) -> tuple[dict[str, Stage], Stage | None]:
    return ask(tiny.checkpoint(family), prompt_of(family, len(images)), images)


def ask(folder: Path, prompt: str, images: list[Any]) -> tuple[dict[str, Stage], Stage | None]:
    # In this process, where a test can make it go wrong.
    args = EngineArgs(model=str(folder), media_workers=0)
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


@pytest.mark.parametrize("family", PECULIAR)
def test_nothing_differs_in_peculiar_families(family: str) -> None:
    if family not in tiny.TINY:
        pytest.skip("this version of transformers has no such family")
    stages, culprit = run(family, pictures(family)[:1])
    assert culprit is None
    # An encoder's prompt enters no decoder.
    compared = ("tokens", "logits", "processor's input_ids" if family == "florence2" else "merged embeddings")
    assert [stages[name].verdict for name in compared] == [SAME] * 3
    assert "layout" not in stages


def main_phi(folder: Path) -> str:
    tiny_adapted.make_main_phi4_mm(folder)
    return "<|user|><|image_1|><|image_2|>What?<|end|><|assistant|>"


def microsoft_florence(folder: Path) -> str:
    tokens = folder.with_name("bart")
    tokens.mkdir()
    tiny_cross.make_microsoft_florence2(folder, tokens)
    return "<MORE_DETAILED_CAPTION>"


def main_ernie(folder: Path) -> str:
    shutil.copytree(tiny.checkpoint("ernie4_5_vl_moe"), folder, dirs_exist_ok=True)
    config = folder / "config.json"
    config.write_text(json.dumps(main_branch(json.loads(config.read_text(encoding="utf-8")))), encoding="utf-8")
    return prompt_of("ernie4_5_vl_moe", 2)


def fp8(folder: Path) -> str:
    tiny_quantized.quantize(tiny.checkpoint("glm4v_moe"), folder, "bfloat16")
    return prompt_of("glm4v_moe", 2)


LAYOUTS: dict[str, tuple[Callable[[Path], str], int, str]] = {
    "phi4mm": (main_phi, 2, "configuration and weights of the layout 'phi4mm' converted"),
    "florence2": (microsoft_florence, 1, "configuration and weights of the layout 'florence2' converted"),
    "ernie4_5_moe_vl": (main_ernie, 2, "the configuration of the layout 'ernie4_5_moe_vl' converted"),
    "fp8": (fp8, 2, "its FP8 weights dequantized"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_that_transformers_cannot_read(layout: str, tmp_path: Path) -> None:
    make, count, words = LAYOUTS[layout]
    folder = tmp_path / "model"
    folder.mkdir()
    prompt = make(folder)
    stages, culprit = ask(folder, prompt, made_up(count))
    assert culprit is None
    assert stages["layout"].verdict == NOT_COMPARED
    assert words in stages["layout"].detail
    assert stages["logits"].verdict == stages["tokens"].verdict == SAME
    assert stages["processor's input_ids" if layout == "florence2" else "merged embeddings"].verdict == SAME


def test_what_goes_wrong_in_a_converted_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from beheld.lora.slots import LoRASlots

    prompt = main_phi(tmp_path)
    # The adapter for pictures is forgotten.
    monkeypatch.setattr(LoRASlots, "runs", lambda self, slots_T, device: None)
    _, culprit = ask(tmp_path, prompt, made_up(2))
    assert culprit is not None
    assert culprit.name == "logits"


def test_sides_of_different_lengths_are_compared() -> None:
    theirs, mine = (Trace(positions=[torch.arange(count)[None]]) for count in (5, 3))
    (stage,) = [stage for stage in compare(theirs, mine) if stage.name == "positions"]
    assert (stage.verdict, stage.detail) == (DIFFERENT, "5 there, 3 here")


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
