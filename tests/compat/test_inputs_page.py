"""The offline examples of vLLM's page on multimodal inputs, written the same way, against tiny checkpoints."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from beheld.core.errors import PromptError
from tests import tiny
from tests.compat import laid
from tests.compat.stage import Stage
from tests.oracle import cases, reference
from tests.tiny_media import SOUND_MARKERS

LLAVA = "llava-hf/llava-1.5-7b-hf"
CONTENT = "USER: <image>\nWhat is the content of this image?\nASSISTANT:"


@pytest.fixture
def stage(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Stage:
    found = Stage(tmp_path_factory.mktemp("stage"))
    found.enter(monkeypatch)
    laid.pictures(found.copies, [])
    return found


def saved(folder: Path, number: int) -> Path:
    path = folder / f"{number}.png"
    tiny.picture(84, 56, number).save(path)
    return path


def test_one_picture_and_a_batch_without_parameters(stage: Stage) -> None:
    from vllm import LLM

    laid.repository(stage.hub, LLAVA)
    llm = LLM(model=LLAVA)
    image = PIL.Image.open(saved(stage.folder, 1))
    outputs = llm.generate({"prompt": CONTENT, "multi_modal_data": {"image": image}})
    assert [isinstance(o.outputs[0].text, str) for o in outputs] == [True]
    images = [PIL.Image.open(saved(stage.folder, number)) for number in (1, 2)]
    questions = ("What is the content of this image?", "What's the color of this image?")
    batch = [
        {"prompt": f"USER: <image>\n{question}\nASSISTANT:", "multi_modal_data": {"image": image}}
        for question, image in zip(questions, images, strict=True)
    ]
    outputs = llm.generate(batch)
    assert [output.prompt for output in outputs] == [entry["prompt"] for entry in batch]
    assert [output.media[0].cached for output in outputs] == [True, False]


def test_several_pictures_of_a_video_as_parts_of_a_message(stage: Stage) -> None:
    from vllm import LLM

    laid.repository(stage.hub, "Qwen/Qwen2-VL-2B-Instruct")
    llm = LLM("Qwen/Qwen2-VL-2B-Instruct", limit_mm_per_prompt={"image": 4}, max_model_len=2048)

    def encode_image(frame: np.ndarray) -> str:
        buffer = io.BytesIO()
        PIL.Image.fromarray(frame).save(buffer, "JPEG")
        return base64.b64encode(buffer.getvalue()).decode("utf-8")

    def ask(count: int) -> Any:
        message: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "Describe these frames."}]}
        for frame in tiny.frames(count):
            url = f"data:image/jpeg;base64,{encode_image(frame)}"
            message["content"].append({"type": "image_url", "image_url": {"url": url}})
        return llm.chat([message])

    (output,) = ask(4)
    assert len(output.media) == 4
    assert output.prompt.count("<|image_pad|>") == 4
    # The text came first, and stays first.
    assert output.prompt.index("Describe") < output.prompt.index("<|image_pad|>")
    with pytest.raises(ValueError, match="limit_mm_per_prompt allows 4"):
        ask(5)


def test_videos_as_arrays(stage: Stage) -> None:
    from vllm import LLM, SamplingParams

    name = "llava-hf/llava-onevision-qwen2-7b-ov-hf"
    laid.repository(stage.hub, name)
    llm = LLM(name, max_model_len=4096)
    params = SamplingParams(temperature=0, max_tokens=4)
    prompt = "<|im_start|>user <video>\nWhat moves?<|im_end|><|im_start|>assistant\n"
    alone, listed = (
        llm.generate({"prompt": prompt, "multi_modal_data": {"video": video}}, params)[0]
        for video in (tiny.frames(6), [tiny.frames(6)])
    )
    assert alone.outputs[0].token_ids == listed.outputs[0].token_ids
    two = {"prompt": prompt.replace("<video>", "<video><video>"), "multi_modal_data": {"video": [tiny.frames(4)] * 2}}
    assert len(llm.generate(two, params)[0].media) == 2


def test_sound_as_a_pair(stage: Stage) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(model=str(tiny.checkpoint("qwen2_audio")), max_model_len=1024)
    samples = np.sin(np.arange(16000, dtype=np.float32) / 20)
    prompt = tiny.wrap("qwen2_audio", SOUND_MARKERS["qwen2_audio"] + "What's in this audio?")
    (output,) = llm.generate(
        {"prompt": prompt, "multi_modal_data": {"audio": (samples, 16000)}},
        sampling_params=SamplingParams(max_tokens=4),
    )
    assert output.media[0].modality == "audio"
    assert output.media[0].given["seconds"] == 1.0


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_embeddings_in_the_place_of_pictures(stage: Stage, family: str) -> None:
    from vllm import LLM, SamplingParams

    name = {"llava": LLAVA, "qwen2_vl": "Qwen/Qwen2-VL-2B-Instruct"}[family]
    laid.repository(stage.hub, name)
    llm = LLM(model=name, dtype="float32", max_model_len=512, limit_mm_per_prompt={"image": 4})
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    ask = cases.ONE
    image_embeds = reference.image_embeds(family, ask)
    if family == "llava":
        assert image_embeds.shape == (1, 16, 64)
        mm_data: dict[str, Any] = {"image": image_embeds}
    else:
        assert set(image_embeds) == {"image_embeds", "image_grid_thw"}
        mm_data = {"image": image_embeds}
    shown = {"prompt": ask.prompt(family), "multi_modal_data": {"image": ask.pictures()}}
    given = {"prompt": ask.prompt(family), "multi_modal_data": mm_data}
    pictured, embedded = llm.generate([shown, given], params)
    assert pictured.outputs[0].token_ids == embedded.outputs[0].token_ids
    assert pictured.prompt_token_ids == embedded.prompt_token_ids
    if family == "qwen2_vl":
        with pytest.raises(ValueError, match="image_grid_thw"):
            llm.generate({"prompt": given["prompt"], "multi_modal_data": {"image": torch.ones(1, 4, 64)}})


def test_a_modality_that_is_switched_off(stage: Stage) -> None:
    from vllm import LLM

    laid.repository(stage.hub, LLAVA)
    llm = LLM(LLAVA, max_model_len=512, limit_mm_per_prompt={"image": 0, "video": 0, "audio": 0})
    with pytest.raises(ValueError, match="switched off"):
        llm.generate({"prompt": CONTENT, "multi_modal_data": {"image": tiny.picture(56, 56, 1)}})
    with pytest.raises(PromptError, match="does not accept audio"):
        llm.generate({"prompt": CONTENT, "multi_modal_data": {"audio": (np.zeros(9, np.float32), 9)}})
