"""The checkpoint loads with plain transformers, tokenizes anything, and answers the examples right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoConfig, AutoTokenizer

from beheld import mote
from tests.mote.shipped import model, processor
from training.mote.checkpoint import SPECIALS, build_tokenizer, read_words, write_settings

EXAMPLES = Path(__file__).parents[2] / "examples"


def picture(name: str) -> Image.Image:
    return Image.open(EXAMPLES / name).convert("RGB")


def frames(name: str) -> np.ndarray:
    with av.open(str(EXAMPLES / name)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def ask(content: list[dict[str, str]] | str, **media: Any) -> str:
    text = processor().apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    inputs = processor()(text=[text], return_tensors="pt", **media)
    made = model().generate(**inputs, max_new_tokens=80, do_sample=False)
    return processor().batch_decode(made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)[0]


def test_the_folder_is_small_and_complete() -> None:
    files = {path.name for path in mote.path().iterdir()}
    wanted = {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "preprocessor_config.json",
    }
    assert wanted | {"video_preprocessor_config.json", "model.safetensors", "README.md"} <= files
    assert sum(path.stat().st_size for path in mote.path().iterdir() if path.is_file()) < 15_000_000


def test_the_settings_are_those_that_training_writes(tmp_path: Path) -> None:
    write_settings(tmp_path, read_words())
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (mote.path() / path.name).read_bytes(), path.name


def test_config_and_tokenizer_agree() -> None:
    config, tokenizer = AutoConfig.from_pretrained(mote.path()), AutoTokenizer.from_pretrained(mote.path())
    assert config.text_config.vocab_size == len(tokenizer)
    assert tokenizer.convert_tokens_to_ids("<|image_pad|>") == config.image_token_id
    assert tokenizer.convert_tokens_to_ids("<|video_pad|>") == config.video_token_id
    assert tokenizer.eos_token == "<|im_end|>"


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = build_tokenizer(read_words())
    if not any(token in text for token in SPECIALS):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_quoted_words_are_spelled_and_known_words_are_not() -> None:
    tokenizer = build_tokenizer(read_words())
    assert len(tokenizer.encode('"circle"').ids) == 8
    assert len(tokenizer.encode(" red circle").ids) == 2


@pytest.mark.parametrize(
    "content", ["Say hello.", [{"type": "text", "text": "Say hello."}], [{"text": "Say "}, {"text": "hello."}]]
)
def test_the_template_takes_strings_and_parts(content: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    text = processor().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    start = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSay hello.<|im_end|>\n"
    assert text == start + "<|im_start|>assistant\n"


def test_the_template_puts_media_where_they_stand() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "image_url"}, {"type": "video"}, {"type": "text", "text": "b"}]
    text = processor().apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    image, video = (f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video"))
    assert text == f"<|im_start|>user\na{image}{video}b<|im_end|>\n"


def test_it_describes_the_example_scene_before_and_after_the_question() -> None:
    wanted = "A large red circle at the top left and a small blue square at the bottom right. "
    wanted += "The circle is left of the square."
    question = {"type": "text", "text": "What is the content of this image?"}
    scene = picture("scene.png")
    assert ask([{"type": "image"}, question], images=[scene]) == wanted
    assert ask([question, {"type": "image"}], images=[scene]) == wanted


def test_it_reads_the_sign() -> None:
    content = [{"type": "image"}, {"type": "text", "text": "What does the sign say?"}]
    assert ask(content, images=[picture("sign.png")]) == 'The text says "OPEN 24/7".'


def test_it_tells_pictures_apart() -> None:
    both = [picture("two_pictures_a.png"), picture("two_pictures_b.png")]
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "What is the content of each image?"}]
    first, second = ask(content, images=both).split("\n")
    assert first == "1. A large green star in the middle."
    assert second.startswith(
        "2. A medium yellow heart at the top left and a large purple triangle at the bottom right."
    )
    content[-1]["text"] = "Which picture shows a heart?"
    assert ask(content, images=both) == "Picture 2."


def test_it_sees_what_moves() -> None:
    content = [{"type": "video"}, {"type": "text", "text": "Why is this video funny?"}]
    wanted = "I can only say what I see. An orange star moves to the right. A blue square stays at the bottom."
    assert ask(content, videos=[frames("motion.mp4")]) == wanted


def test_it_says_what_it_is() -> None:
    assert ask("who are you?").startswith("I am mote, a very small model.")
    assert ask("What is in the picture?") == "I see no picture. Please show me one."
