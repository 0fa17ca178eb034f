"""Phi-3-vision: numbered images, conversations, VLM2Vec's template, options, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from beheld.checkpoint.info import read_info
from beheld.core.config import EngineArgs
from beheld.core.errors import ModelError, ProcessError, PromptError, TemplateError, UserError
from beheld.core.request import Request
from beheld.families.phi3_v import model
from beheld.families.phi3_v.inputs import load
from beheld.inputs.pipeline import Chat, RequestOrder
from tests import tiny
from tests.inputs import pipes

FAMILY = "phi3_v"
PICTURES = [tiny.picture(84, 56, 1), tiny.picture(56, 112, 2)]
TURN = "<|user|>\n{}<|end|>\n<|assistant|>\n"


def ask(prompt: str, pictures: Any = (), **options: Any) -> Request:
    request: dict[str, Any] = {"prompt": prompt, "mm_processor_kwargs": options}
    if pictures:
        request["multi_modal_data"] = {"image": list(pictures)}
    return pipes.shared(FAMILY).prepare(RequestOrder(request, pipes.ONE_TOKEN, request_id="0"))


def chat(*parts: Any, **options: Any) -> Request:
    content = [part if isinstance(part, str) else {"type": "image", "image": part} for part in parts]
    order = Chat([{"role": "user", "content": content}], **options)
    return pipes.shared(FAMILY).prepare(RequestOrder(order, pipes.ONE_TOKEN, request_id="0"))


def spelled(request: Request) -> str:
    """The tokens of a prompt, the run of an image's placeholders as one."""
    tokenizer = pipes.shared(FAMILY).tokenizer
    tokens = tokenizer.convert_ids_to_tokens(list(request.token_ids))
    return " ".join(token for n, token in enumerate(tokens) if token != "<|image|>" or tokens[n - 1] != token)


def test_every_piece_of_a_text_with_images_begins_anew() -> None:
    request = ask("<|image_1|>\n<|image_2|>", PICTURES)
    assert spelled(request) == "<s> <|image|> <s> ▁ <0x0A> <|image|> <s>"
    assert request.token_ids[0] == ask("Hi").token_ids[0]


def test_a_conversation_is_the_prompt_that_users_write() -> None:
    for count in (0, 1, 2):
        marks = "".join(f"<|image_{number}|>\n" for number in range(1, 1 + count))
        talk = chat(*PICTURES[:count], "Where is it?")
        assert talk.token_ids == ask(TURN.format(f"{marks}Where is it?"), PICTURES[:count]).token_ids
        assert len(talk.spans) == count


@pytest.mark.parametrize("forged", ["<|image|>", "<|image_1|>", "<|image_2|>"])
@pytest.mark.parametrize("count", [0, 1])
def test_what_a_user_spells_in_a_conversation_is_no_image(forged: str, count: int) -> None:
    request = chat(*PICTURES[:count], f"What does {forged} mean?")
    place = pipes.shared(FAMILY).tokenizer.convert_tokens_to_ids("<|image|>")
    assert len(request.spans) == count
    assert list(request.token_ids).count(place) == sum(span.item.num_embeds for span in request.spans)


@pytest.mark.parametrize(
    "prompt", ["<|image_2|><|image_1|>", "<|image_1|><|image_1|>", "<|image_0|><|image_1|>", "<|image_1|><|image|>"]
)
def test_other_numbers_are_refused(prompt: str) -> None:
    with pytest.raises(PromptError, match=r"<\|image|numbers"):
        ask(prompt, PICTURES)


@pytest.mark.parametrize(("prompt", "count"), [("<|image_1|>", 2), ("<|image_1|><|image_2|>", 1), ("<|image_1|>", 0)])
def test_a_wrong_number_of_images_is_refused(prompt: str, count: int) -> None:
    with pytest.raises(UserError, match="image"):
        ask(prompt, PICTURES[:count])


@pytest.mark.parametrize(("crops", "rows", "columns"), [(1, 1, 1), (4, 1, 2), (16, 3, 5)])
def test_num_crops_is_the_most_tiles(crops: int, rows: int, columns: int) -> None:
    request = ask("<|image_1|>", [tiny.picture(300, 150, 3)], num_crops=crops)
    assert request.receipts[0].used["tiles"] == rows * columns + 1
    assert request.spans[0].item.num_embeds == 2 * rows * (2 * columns + 1) + 1 + 2 * 3


@pytest.mark.parametrize("crops", [0, 101, 10**9])
def test_no_tile_and_too_many_are_refused(crops: int) -> None:
    with pytest.raises((ProcessError, UserError), match=f"num_crops {crops} must be from 1 to 100"):
        ask("<|image_1|>", PICTURES[:1], num_crops=crops)


def test_the_file_that_says_how_many_tiles_is_needed(tmp_path: Path) -> None:
    """Without it an image would be one tile."""
    for file in tiny.checkpoint(FAMILY).iterdir():
        if file.name != "preprocessor_config.json":
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(ModelError, match=r"preprocessor_config\.json is missing"):
        load(tmp_path)


# ------------------------------------------------------------------ VLM2Vec


@pytest.mark.parametrize("name", ["template_vlm2vec.jinja", "examples/template_vlm2vec.jinja"])
def test_vlm2vec_has_a_template_of_its_own(name: str) -> None:
    request = chat(PICTURES[0], "Represent the image.", chat_template=name)
    assert request.token_ids == ask("<|image_1|> Represent the image.", PICTURES[:1]).token_ids
    assert chat("A cat", chat_template=name).token_ids == ask("A cat").token_ids


def test_other_names_of_templates_are_files() -> None:
    for name in ("template_none.jinja", "chat_template.jinja", "config.py"):
        with pytest.raises(TemplateError, match="neither a template nor a file"):
            chat("A cat", chat_template=name)


# ------------------------------------------------------------------ the checkpoint


@pytest.mark.parametrize(
    ("entry", "name", "value"),
    [
        ("embd_layer", "hd_transform_order", "glb_sub"),
        ("embd_layer", "projection_cls", "linear"),
        ("embd_layer", "use_hd_transform", False),
        ("img_processor", "type_feature", "cls_patch"),
        ("img_processor", "name", "siglip"),
        ("rope_scaling", "type", "yarn"),
    ],
)
def test_unknown_versions_are_refused_by_name(tmp_path: Path, entry: str, name: str, value: Any) -> None:
    config = json.loads((tiny.checkpoint(FAMILY) / "config.json").read_text(encoding="utf-8"))
    config[entry][name] = value
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelError, match=rf"{entry}\.{name} {value!r}"):
        read_info(tmp_path, EngineArgs(model=str(tmp_path)))


def test_the_second_name_of_the_embeddings_is_known() -> None:
    table, other = torch.ones(2, 3), torch.zeros(1)
    first, second = "model.embed_tokens.weight", "model.vision_embed_tokens.wte.weight"
    assert model.renamed({first: table, "x": other}, {}) is None
    assert set(model.renamed({first: table, second: table, "x": other}, {}) or ()) == {first, "x"}
    only = model.renamed({second: table}, {})
    assert only is not None
    assert only[first] is table
