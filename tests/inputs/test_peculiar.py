"""Families whose pictures have a place of their own: prompts as users write them become what the processors make."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from beheld.api.llm import LLM
from beheld.checkpoint.info import read_info
from beheld.core.config import EngineArgs
from beheld.core.errors import ModelError, ProcessError, PromptError
from beheld.core.request import Request
from beheld.inputs.pipeline import Chat, InputPipeline, RequestOrder
from tests import tiny
from tests.inputs import pipes
from tests.oracle import reference

PICTURE = tiny.picture(84, 56, 1)


def prepare(family: str, prompt: str, image: Any = None) -> Request:
    """A request made of this very prompt."""
    data = {} if image is None else {"multi_modal_data": {"image": image}}
    return pipes.shared(family).prepare(RequestOrder({"prompt": prompt, **data}, pipes.ONE_TOKEN, request_id="0"))


def theirs(family: str, prompt: str, image: Any = None) -> tuple[int, ...]:
    """The ids of transformers' processor."""
    media = {} if image is None else {"images": [image]}
    return tuple(reference.processor(family)(text=[prompt], **media)["input_ids"][0])


PROMPTS = ["Question: What is in this picture? Answer:", "", " this is a picture of", "<pad> a", "これは"]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_blip2_puts_its_picture_before_the_start_of_the_text(prompt: str) -> None:
    assert prepare("blip2", prompt, PICTURE).token_ids == theirs("blip2", prompt, PICTURE)
    if prompt:
        assert prepare("blip2", prompt).token_ids == theirs("blip2", prompt)


def test_blip2_takes_one_picture() -> None:
    with pytest.raises(PromptError, match="accepts at most 1"):
        prepare("blip2", "Question: Are they alike? Answer:", [PICTURE, PICTURE])


def test_blip2_without_a_number_of_queries_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "blip2"
    shutil.copytree(tiny.checkpoint("blip2"), folder)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Blip2Processor"}), encoding="utf-8")
    args = EngineArgs(model=str(folder))
    info = read_info(folder, args)
    pipe = InputPipeline(info, pipes.config(info), args)
    with pytest.raises(ModelError, match="num_query_tokens"):
        pipes.ask(pipe, "blip2", [PICTURE])


@pytest.mark.parametrize("prompt", ["What is in this picture?<image>", "<image>", "A <image> and text<reserved08706>"])
def test_chameleon_says_that_an_answer_follows(prompt: str) -> None:
    assert prepare("chameleon", prompt, PICTURE).token_ids == theirs("chameleon", prompt, PICTURE)
    plain = prompt.replace("<image>", "x")
    assert prepare("chameleon", plain).token_ids == theirs("chameleon", plain)


@pytest.mark.parametrize("prompt", ["What is in this picture?\n", "", " a", "A <box>1, 2, 3, 4</box>?", "これは"])
def test_fuyus_prompt_is_encoded_apart_from_its_picture(prompt: str) -> None:
    request = prepare("fuyu", prompt, PICTURE)
    assert request.token_ids == theirs("fuyu", prompt, PICTURE)
    (span,) = request.spans
    # 6 x 4 patches in rows with a mark behind each, and the start of the text.
    assert (span.start, span.stop, span.item.num_embeds) == (0, 29, 24)
    if prompt:
        ids = reference.processor("fuyu")(text=[prompt])["input_ids"][0]
        assert prepare("fuyu", prompt).token_ids == tuple(ids)


@pytest.mark.parametrize(("narrow", "wide"), [((35, 4000), (36, 4000)), ((4000, 28), (4000, 29))])
def test_fuyu_says_which_pictures_are_too_narrow(narrow: tuple[int, int], wide: tuple[int, int]) -> None:
    """What is left of them in a room of 140 x 112 is rounded down."""
    with pytest.raises(ProcessError, match=f"{narrow[0]} x {narrow[1]} pixels is so narrow") as caught:
        prepare("fuyu", "What is it?\n", tiny.picture(*narrow, 1))
    assert caught.value.item == "image 1"
    picture = tiny.picture(*wide, 1)
    assert prepare("fuyu", "What is it?\n", picture).token_ids == theirs("fuyu", "What is it?\n", picture)


def test_fuyu_takes_one_picture_and_no_marker_of_it() -> None:
    with pytest.raises(PromptError, match="accepts at most 1"):
        prepare("fuyu", "Are they alike?\n", [PICTURE, PICTURE])
    with pytest.raises(PromptError, match="2 of the placeholder"):
        prepare("fuyu", "What is |SPEAKER|?\n", PICTURE)


SEED_PROMPT = (
    "<|start_header_id|>user<|end_header_id|>\n\nWhat is in this picture?\n<image>"
    "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
)


def mantis_ids(text: str, pictures: int) -> tuple[int, ...]:
    """The ids of a text in which pictures are numbered already, each of 4 x 4 patches less the first."""
    tokenizer = pipes.shared("mantis").tokenizer
    assert text.count("<image>") == pictures
    return tuple(tokenizer(text.replace("<image>", "<image>" * 15))["input_ids"])


@pytest.mark.parametrize("overrides", [None, {"architectures": ["MantisForConditionalGeneration"]}])
def test_mantis_numbers_its_pictures(overrides: dict[str, Any] | None) -> None:
    args = EngineArgs(model=str(tiny.checkpoint("mantis")), hf_overrides=overrides)
    info = read_info(tiny.checkpoint("mantis"), args)
    pipe = InputPipeline(info, pipes.config(info), args)
    request = pipe.prepare(
        RequestOrder({"prompt": SEED_PROMPT, "multi_modal_data": {"image": PICTURE}}, pipes.ONE_TOKEN, request_id="0")
    )
    assert request.token_ids == mantis_ids(
        SEED_PROMPT.replace("<image>", "(image 1: <Image><image></Image>)"), pictures=1
    )
    several = {"prompt": "a <image> b <image><image>", "multi_modal_data": {"image": tiny.pictures(3)}}
    numbered = (
        "a (image 1: <Image><image></Image>) b (image 2: <Image><image></Image>)(image 3: <Image><image></Image>)"
    )
    request = pipe.prepare(RequestOrder(several, pipes.ONE_TOKEN, request_id="1"))
    assert request.token_ids == mantis_ids(numbered, pictures=3)


def test_mantis_by_its_name_alone(tmp_path: Path) -> None:
    """The architecture that users name is enough where no file names the processor."""
    folder = tmp_path / "mantis"
    shutil.copytree(tiny.checkpoint("mantis"), folder)
    for name in ("preprocessor_config.json", "tokenizer_config.json"):
        settings = json.loads((folder / name).read_text(encoding="utf-8"))
        (folder / name).write_text(json.dumps(settings | {"processor_class": "LlavaProcessor"}), encoding="utf-8")
    args = EngineArgs(model=str(folder), hf_overrides={"architectures": ["MantisForConditionalGeneration"]})
    info = read_info(folder, args)
    pipe = InputPipeline(info, pipes.config(info), args)
    prompt = {"prompt": "<image>?", "multi_modal_data": {"image": PICTURE}}
    request = pipe.prepare(RequestOrder(prompt, pipes.ONE_TOKEN, request_id="0"))
    assert request.token_ids == mantis_ids("(image 1: <Image><image></Image>)?", pictures=1)


def test_mantis_in_a_chat() -> None:
    content = [{"type": "image", "image": PICTURE}, {"type": "text", "text": "What is (image 1: <Image> here?"}]
    request = pipes.shared("mantis").prepare(
        RequestOrder(Chat([{"role": "user", "content": content}]), pipes.ONE_TOKEN, request_id="0")
    )
    turn = "(image 1: <Image><image></Image>)\nWhat is (image 1: <Image> here?"
    whole = SEED_PROMPT.replace("What is in this picture?\n<image>", turn)
    assert request.token_ids == mantis_ids(whole, pictures=1)
    assert len(request.spans) == 1


def test_gemma3ns_prompt_as_users_write_it() -> None:
    prompt = "<start_of_turn>user\n<image_soft_token>What is in this picture?<end_of_turn>\n<start_of_turn>model\n"
    assert prepare("gemma3n", prompt, PICTURE).token_ids == theirs("gemma3n", prompt, PICTURE)


def test_a_package_that_a_processor_lacks_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.smolvlm import processing_smolvlm

    monkeypatch.setattr(processing_smolvlm, "num2words", None)
    with pytest.raises(ModelError, match=r"cannot be loaded: .*pip install num2words") as caught:
        LLM(str(tiny.checkpoint("smolvlm")), max_model_len=512)
    assert caught.value.remedy == "Install the package that it needs."
