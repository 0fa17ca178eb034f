"""Families whose pictures have a place of their own: prompts as users write them become what the processors make."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from beheld.checkpoint.info import read_info
from beheld.core.config import EngineArgs
from beheld.core.errors import ModelError, PromptError
from beheld.core.request import Request
from beheld.inputs.pipeline import InputPipeline
from tests import tiny
from tests.inputs import pipes
from tests.oracle import reference

PICTURE = tiny.picture(84, 56, 1)


def prepare(family: str, prompt: str, image: Any = None) -> Request:
    """A request made of this very prompt."""
    data = {} if image is None else {"multi_modal_data": {"image": image}}
    return pipes.shared(family).prepare({"prompt": prompt, **data}, pipes.ONE_TOKEN, request_id="0")


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
    with pytest.raises(PromptError, match="at most 1 in a prompt"):
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


def test_fuyu_takes_one_picture_and_no_marker_of_it() -> None:
    with pytest.raises(PromptError, match="at most 1 in a prompt"):
        prepare("fuyu", "Are they alike?\n", [PICTURE, PICTURE])
    with pytest.raises(PromptError, match="2 of the marker"):
        prepare("fuyu", "What is |SPEAKER|?\n", PICTURE)
