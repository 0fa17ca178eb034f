"""Repositories that bring their own code, read as the classes that transformers has for them."""

from __future__ import annotations

import base64
import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import features
from sentencepiece import SentencePieceProcessor
from transformers import Ernie4_5_VLMoeForConditionalGeneration, GenerationConfig

from beheld import LLM, SamplingParams
from beheld.checkpoint.convert import own_config
from beheld.checkpoint.files import read_json
from beheld.checkpoint.info import read_config
from beheld.core.config import EngineArgs
from beheld.core.errors import ModelError, ProcessError
from tests import tiny
from tests.oracle import cases, reference
from tests.oracle.test_oracle import check
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
    # Its tokenizer is another one.
    native |= {name: index for name, index in main_ids(folder).items() if name in native}
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


def main_ids(folder: Path) -> dict[str, int]:
    """The ids of placeholders and their marks in the main branch's own words."""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found = {name: index for name, index in raw.items() if name.endswith("_token_id")}
    return found | {"image_token_id": raw["im_patch_id"]}


def expected(folder: Path, prompt: str, media: dict[str, Any], kinds: Sequence[str], max_tokens: int) -> Any:
    """What transformers' model says to the ids that sentencepiece makes of the prompt's text, and to the pixels that
    the processor of transformers' own layout makes of the media; these stand in the order of `kinds`."""
    ids_of = main_ids(folder)
    own = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    known = reference.processor("ernie4_5_vl_moe")
    inputs: dict[str, Any] = {}
    if "images" in media:
        inputs |= known.image_processor(media["images"], return_tensors="pt")
    if "videos" in media:
        inputs |= known.video_processor(**media, return_tensors="pt")
    grids = {
        kind: iter(inputs[f"{kind}_grid_thw"].prod(-1).tolist()) for kind in ("image", "video") if kind in set(kinds)
    }
    ids, kinds_T, marked_T, rest = [], [], [], prompt
    for kind in kinds:
        before, rest = rest.split(f"<|{kind.upper()}_START|><|{kind}@placeholder|><|{kind.upper()}_END|>", 1)
        text = encode(own, before)
        count = next(grids[kind]) // (4 if kind == "image" else 8)
        number = 1 if kind == "image" else 2
        start, token, end = (ids_of[f"{kind}{part}_token_id"] for part in ("_start", "", "_end"))
        ids += [*text, start, *[token] * count, end]
        kinds_T += [*[0] * (len(text) + 1), *[number] * count, 0]
        marked_T += [*[0] * len(text), *[number] * (count + 2)]
    text = encode(own, rest)
    tensors = {
        "input_ids": ids + text,
        "mm_token_type_ids": kinds_T + [0] * len(text),
        "moe_mm_token_type_ids": marked_T + [0] * len(text),
    }
    inputs |= {name: torch.tensor([row]) for name, row in tensors.items()}
    model = Ernie4_5_VLMoeForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", **own_config(read_json(folder / "config.json"))
    ).eval()
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    return reference.answered(model, inputs, max_tokens)


def encode(own: SentencePieceProcessor, text: str) -> list[int]:
    """The ids of a text, which may begin with the token that begins every prompt."""
    begin = "<|begin_of_sentence|>"
    head = [own.piece_to_id(begin)] if text.startswith(begin) else []
    return [*head, *own.encode(text.removeprefix(begin))]


def same(folder: Path, prompt: str, data: dict[str, Any], answer: Any) -> None:
    with LLM(str(folder), dtype="float32", max_model_len=1024, trust_remote_code=True, media_workers=0) as llm:
        params = SamplingParams(temperature=0, max_tokens=len(answer.token_ids), ignore_eos=True, logprobs=1)
        (output,) = llm.generate({"prompt": prompt, "multi_modal_data": data}, params, use_tqdm=False)
    assert tuple(output.prompt_token_ids) == answer.prompt_ids
    got = output.outputs[0]
    assert tuple(got.token_ids) == answer.token_ids
    said = [step[token].logprob for step, token in zip(got.logprobs, got.token_ids, strict=True)]
    assert said == pytest.approx(answer.logprobs, abs=1e-4)


PICTURES = (
    "<|begin_of_sentence|>User: Picture 1:<|IMAGE_START|><|image@placeholder|><|IMAGE_END|>Picture 2:"
    "<|IMAGE_START|><|image@placeholder|><|IMAGE_END|>Which of the 2  shows これは?\nAssistant: "
)
VIDEO = "<|begin_of_sentence|>User: Video 1:<|VIDEO_START|><|video@placeholder|><|VIDEO_END|>What moves?\nAssistant: "
CLIP = {"total_num_frames": 6, "fps": 2.0, "duration": 3.0, "frames_indices": list(range(6))}


def test_pictures_of_the_main_branch_need_neither_its_code_nor_a_font(folder: Path) -> None:
    names = {file.name for file in folder.iterdir()}
    assert not names & {"tokenizer.json", "video_preprocessor_config.json", "processor_config.json"}
    assert not any(name.endswith(".ttf") for name in names)
    pictures = [tiny.picture(84, 56, 3), tiny.picture(56, 112, 4)]
    answer = expected(folder, PICTURES, {"images": pictures}, ("image", "image"), 6)
    same(folder, PICTURES, {"image": pictures}, answer)


def test_videos_of_the_main_branch_are_drawn_with_the_font_that_is_there(folder: Path) -> None:
    """Without one it is Pillow's, which the tiny checkpoint's font file holds too, so that both can be compared."""
    data = {"video": [(tiny.frames(6, 3), CLIP)]}
    media = {"videos": [tiny.frames(6, 3)], "video_metadata": [CLIP], "do_sample_frames": False}
    font = tiny.checkpoint("ernie4_5_vl_moe") / "Font-Regular.ttf"
    shutil.copy(font, folder / "Roboto-Regular.ttf")
    answer = expected(folder, VIDEO, media, ("video",), 6)
    same(folder, VIDEO, data, answer)
    (folder / "Roboto-Regular.ttf").unlink()
    same(folder, VIDEO, data, answer)


def test_without_any_font_videos_are_refused_unless_nothing_is_drawn(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "check", lambda name: name != "freetype2")
    data = {"video": [(tiny.frames(6, 3), CLIP)]}
    with LLM(str(folder), dtype="float32", max_model_len=1024, media_workers=0) as llm:
        prompt = {"prompt": VIDEO, "multi_modal_data": data}
        with pytest.raises(ProcessError, match=r"no font Roboto-Regular.ttf"):
            llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
        undrawn = prompt | {"mm_processor_kwargs": {"draw_on_frames": False}}
        (output,) = llm.generate(undrawn, SamplingParams(max_tokens=1), use_tqdm=False)
        assert output.outputs[0].token_ids


def test_a_conversation_of_the_main_branch(folder: Path) -> None:
    """Its template writes the placeholders of its own code."""
    assert "image@placeholder" in (folder / "tokenizer_config.json").read_text(encoding="utf-8")
    buffer = io.BytesIO()
    picture = tiny.picture(84, 56, 3)
    picture.save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    with LLM(str(folder), dtype="float32", max_model_len=1024, media_workers=0) as llm:
        messages: list[Any] = [{"role": "user", "content": parts}]
        (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    prompt = (
        "<|begin_of_sentence|>User: Picture 1:<|IMAGE_START|><|image@placeholder|><|IMAGE_END|>What is it?\nAssistant: "
    )
    answer = expected(folder, prompt, {"images": [picture]}, ("image",), 1)
    assert tuple(output.prompt_token_ids) == answer.prompt_ids


def test_transformers_layout_needs_no_font(tmp_path: Path) -> None:
    folder = tmp_path / "ernie"
    shutil.copytree(tiny.checkpoint("ernie4_5_vl_moe"), folder)
    (folder / "Font-Regular.ttf").unlink()
    with LLM(str(folder), dtype="float32", seed=0, **cases.ROOMY) as llm:
        check(llm, "ernie4_5_vl_moe", [cases.ONE])
        prompt = {"prompt": VIDEO, "multi_modal_data": {"video": [(tiny.frames(6, 3), CLIP)]}}
        (output,) = llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
        assert output.media[0].used["frames"] == 6


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("preprocessor_config.json", {"sharpen": 2}, "sharpen 2 of images and videos is not supported"),
        ("preprocessor_config.json", {"temporal_conv_size": 4}, "temporal_conv_size 4"),
        ("preprocessor_config.json", {"image_max_pixels": 9}, "image_max_pixels 9 differs from that"),
        ("config.json", {"image_end_token_id": 7}, "gives <|IMAGE_END|> the id 484, but the configuration gives it 7"),
    ],
)
def test_files_whose_form_is_not_known_are_refused(folder: Path, file: str, change: dict[str, Any], words: str) -> None:
    content = json.loads((folder / file).read_text(encoding="utf-8")) | change
    (folder / file).write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ModelError) as caught, LLM(str(folder), dtype="float32", media_workers=0) as llm:
        llm.generate({"prompt": PICTURES, "multi_modal_data": {"image": [tiny.picture(84, 56, 3)] * 2}}, use_tqdm=False)
    assert words in str(caught.value)
    assert "refs/pr/11" in str(caught.value)


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
