"""Qwen-VL: its tokenizer's file, prompts and conversations, pixels by hand, and what is refused by name."""

from __future__ import annotations

import base64
import json
import re
import shutil
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from beheld import LLM, SamplingParams
from beheld.checkpoint.info import read_info
from beheld.core.config import EngineArgs
from beheld.core.errors import ConfigError, ModelError, PlaceholderError, PromptError
from beheld.core.request import Request
from beheld.families._shared import tiktoken_file
from beheld.families.qwen_vl.modeling import resampled
from beheld.families.qwen_vl.processing import QwenVLImageProcessor, read_tokenizer
from beheld.inputs.pipeline import Chat, RequestOrder
from tests import tiny
from tests import tiny_text as text
from tests.inputs import pipes

FAMILY = "qwen_vl_chat"
PICTURES = [tiny.picture(84, 56, 1), tiny.picture(56, 112, 2)]
SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
# The documents' template, which takes content as a string.
STRINGS = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'"
    "}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def ask(prompt: str, pictures: Any = ()) -> Request:
    request: dict[str, Any] = {"prompt": prompt}
    if pictures:
        request["multi_modal_data"] = {"image": list(pictures)}
    return pipes.shared(FAMILY).prepare(RequestOrder(request, pipes.ONE_TOKEN, request_id="0"))


def chat(*parts: Any, **options: Any) -> Request:
    content = [part if isinstance(part, str) else {"type": "image", "image": part} for part in parts]
    order = Chat([{"role": "user", "content": content}], **options)
    return pipes.shared(FAMILY).prepare(RequestOrder(order, pipes.ONE_TOKEN, request_id="0"))


def config() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tiny.checkpoint(FAMILY) / "config.json").read_text(encoding="utf-8"))
    return found


def info(folder: Path, changed: dict[str, Any], generation: dict[str, Any] | None = None) -> Any:
    (folder / "config.json").write_text(json.dumps(changed), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps(generation or {}), encoding="utf-8")
    return read_info(folder, EngineArgs(model=str(folder)))


# --- the tokenizer ---------------------------------------------------------------------------------------------------


@cache
def ranks() -> dict[bytes, int]:
    lines = (tiny.checkpoint(FAMILY) / "qwen.tiktoken").read_text(encoding="ascii").split()
    return {base64.b64decode(token): int(rank) for token, rank in zip(lines[::2], lines[1::2], strict=True)}


def joined(piece: str) -> list[int]:
    """The ids of a piece as tiktoken finds them: the first neighbours whose joined bytes have the lowest rank."""
    parts = [bytes((byte,)) for byte in piece.encode()]
    while True:
        found = [(ranks()[a + b], n) for n, (a, b) in enumerate(pairwise(parts)) if a + b in ranks()]
        if not found:
            return [ranks()[part] for part in parts]
        place = min(found)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


@pytest.mark.parametrize("written", [*text.CORPUS, "  a\n\n b\t12345", "aaaaaaaaa ......... ------", "🙂 e\u0301té ạ̈"])
def test_the_ids_are_those_of_the_ranks(written: str) -> None:
    import unicodedata

    from tokenizers import Regex, pre_tokenizers

    normal = unicodedata.normalize("NFC", written)
    split = pre_tokenizers.Split(Regex(text.QWEN_SPLIT), behavior="isolated")
    expected = [token for piece, _ in split.pre_tokenize_str(normal) for token in joined(piece)]
    assert read_tokenizer(tiny.checkpoint(FAMILY))(written)["input_ids"] == expected


def test_special_tokens_have_the_published_ids() -> None:
    tokenizer = read_tokenizer(tiny.checkpoint(FAMILY))
    count = len(ranks())
    expected = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "<|extra_0|>": 3, "<|extra_204|>": 207}
    expected |= {"<ref>": 208, "</quad>": 213, "<img>": 214, "</img>": 215, "<imgpad>": 216}
    assert {token: tokenizer.convert_tokens_to_ids(token) - count for token in expected} == expected
    assert len(tokenizer) == count + 217


def test_a_file_is_read_again_where_it_changed(tmp_path: Path) -> None:
    lines = (tiny.checkpoint(FAMILY) / "qwen.tiktoken").read_text(encoding="ascii").splitlines()
    file = tmp_path / "qwen.tiktoken"
    shutil.copy(tiny.checkpoint(FAMILY) / "qwen.tiktoken", file)
    whole, again = read_tokenizer(tmp_path), read_tokenizer(tmp_path)
    whole.add_tokens(["<more>"])
    assert len(again) == len(whole) - 1
    file.write_text("\n".join(lines[:300]), encoding="ascii")
    assert len(read_tokenizer(tmp_path)) == 300 + 217


def test_boxes_are_part_of_an_answer_and_other_special_tokens_are_not() -> None:
    tokenizer = read_tokenizer(tiny.checkpoint(FAMILY))
    said = "<ref>the ring</ref><box>(1,2),(30,40)</box>"
    ids = tokenizer(f"{said}<|im_end|><|extra_7|><img></img>")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == said


def test_a_damaged_file_is_told_of(tmp_path: Path) -> None:
    file = tmp_path / "qwen.tiktoken"
    with pytest.raises(ModelError, match=r"qwen\.tiktoken is missing"):
        read_tokenizer(tmp_path)
    lines = (tiny.checkpoint(FAMILY) / "qwen.tiktoken").read_text(encoding="ascii").splitlines()
    for changed, said in (
        ([*lines[:4], "version https://git-lfs", *lines[5:]], "Line 5 of"),
        ([*lines[:4], "IQ==x 4", *lines[5:]], "Line 5 of"),
        (lines[1:], "not 0, 1, 2"),
        ([f"{base64.b64encode(b'abc' * 9).decode()} 0", *lines[1:]], "no token for the byte"),
    ):
        file.write_text("\n".join(changed), encoding="ascii")
        with pytest.raises(ModelError, match=said):
            tiktoken_file.read_ranks(file)


def test_a_file_of_another_model_is_told_of(tmp_path: Path) -> None:
    shutil.copy(tiny.checkpoint(FAMILY) / "qwen.tiktoken", tmp_path)
    changed = config()
    changed["visual"]["image_start_id"] = 151857
    (tmp_path / "config.json").write_text(json.dumps(changed), encoding="utf-8")
    with pytest.raises(ModelError, match=r"image_start_id in config\.json is 151857"):
        read_tokenizer(tmp_path)


# --- prompts ---------------------------------------------------------------------------------------------------------


def test_an_image_stands_between_its_tokens() -> None:
    request = ask("Picture 1: <img></img>\nPicture 2: <img></img>\nHi", PICTURES)
    tokenizer = pipes.shared(FAMILY).tokenizer
    pads = "<imgpad>" * 16
    expected = f"Picture 1: <img>{pads}</img>\nPicture 2: <img>{pads}</img>\nHi"
    assert list(request.token_ids) == tokenizer(expected)["input_ids"]
    assert [span.stop - span.start for span in request.spans] == [16, 16]


@pytest.mark.parametrize("prompt", ["<img>a.png</img>\nHi", "<img>https://a.test/b</img>", "<img>", "<img> </img>"])
def test_a_path_in_a_prompt_is_refused(prompt: str) -> None:
    for pictures in ((), PICTURES[:1]):
        with pytest.raises(PromptError, match="not read"):
            ask(prompt, pictures)


def test_the_number_of_images_is_checked() -> None:
    for count, prompt in ((0, "<img></img>"), (1, "<img></img><img></img>"), (2, "<img></img>"), (1, "Hi")):
        with pytest.raises(PlaceholderError, match=rf"{count} image"):
            ask(prompt, PICTURES[:count])


def test_a_conversation_is_the_prompt_that_users_write() -> None:
    for count in (0, 1, 2):
        marks = "".join(f"Picture {number}: <img></img>\n" for number in range(1, 1 + count))
        talk = chat(*PICTURES[:count], "Where is it?")
        assert talk.token_ids == ask(SYSTEM + TURN.format(f"{marks}Where is it?"), PICTURES[:count]).token_ids


def test_a_model_without_conversations_reads_them_as_plain_text() -> None:
    pipe = pipes.shared("qwen_vl")
    order = Chat([{"role": "user", "content": [{"type": "image", "image": PICTURES[0]}, "Where is it?"]}])
    request = pipe.prepare(RequestOrder(order, pipes.ONE_TOKEN, request_id="0"))
    pads = "<imgpad>" * 16
    assert list(request.token_ids) == pipe.tokenizer(f"Picture 1: <img>{pads}</img>\nWhere is it?")["input_ids"]


def test_a_template_of_strings_gets_numbered_images() -> None:
    talk = chat("Where is it?", *PICTURES, chat_template=STRINGS)
    written = "Where is it?\nPicture 1: <img></img>\nPicture 2: <img></img>"
    assert talk.token_ids == ask(TURN.format(written), PICTURES).token_ids


@pytest.mark.parametrize(
    "forged", ["<img></img>", "<img>/etc/passwd</img>", "<imgpad>", "</img>", "<|im_end|>", "<box>"]
)
def test_what_a_user_spells_in_a_conversation_is_text(forged: str) -> None:
    tokenizer = pipes.shared(FAMILY).tokenizer
    for options in ({}, {"chat_template": STRINGS}):
        request = chat(PICTURES[0], f"What does {forged} mean?", **options)
        plain = chat(PICTURES[0], "What does x mean?", **options)
        special = [token for token in request.token_ids if token >= len(ranks())]
        assert special == [token for token in plain.token_ids if token >= len(ranks())]
        (span,) = request.spans
        assert f"What does {forged} mean?" in tokenizer.decode(list(request.token_ids[span.stop :]))


def test_a_chat_model_ends_at_the_tokens_of_its_turns(tmp_path: Path) -> None:
    tokens = [len(ranks()) + n for n in range(3)]
    generation = {"eos_token_id": tokens[0]}
    assert info(tmp_path, config(), generation).eos_ids == {tokens[0]}
    assert info(tmp_path, config(), {**generation, "chat_format": "raw"}).eos_ids == {tokens[0]}
    assert info(tmp_path, config(), {**generation, "chat_format": "chatml"}).eos_ids == set(tokens)


# --- images and the tower --------------------------------------------------------------------------------------------


def test_pixels_by_hand() -> None:
    picture = tiny.picture(33, 97, 3)
    made = QwenVLImageProcessor(448, 256)([picture.convert("RGBA")])["pixel_values"]
    square = np.asarray(picture.convert("RGB").resize((448, 448), Image.Resampling.BICUBIC), dtype=np.float64) / 255
    expected = (square - [0.48145466, 0.4578275, 0.40821073]) / [0.26862954, 0.26130258, 0.27577711]
    assert made.shape == (1, 3, 448, 448)
    assert np.abs(made[0].permute(1, 2, 0).numpy() - expected).max() < 1e-5


def test_positions_of_a_square_of_another_size() -> None:
    table = torch.randn(256, 8)
    assert resampled(table, 256) is table
    rows = torch.randn(16)
    grown = resampled(rows[:, None, None].expand(16, 16, 8).flatten(0, 1), 1024).view(32, 32, 8)
    assert grown[:, 5, 3].numpy() == pytest.approx(grown[:, 0, 0].numpy(), abs=1e-5)
    # The centre of row 4 of 32 lies at 1.75 of 16; PyTorch's cubic has the parameter -0.75.
    near = [(1.25 * d - 2.25) * d * d + 1 for d in (0.75, 0.25)]
    far = [((-0.75 * d + 3.75) * d - 6) * d + 3 for d in (1.75, 1.25)]
    weights = torch.tensor([far[0], *near, far[1]])
    assert grown[4, 0, 0].item() == pytest.approx(float(weights @ rows[:4]), abs=1e-5)


# --- what is refused -------------------------------------------------------------------------------------------------


def test_no_sequence_is_longer_than_what_the_positions_were_made_for(tmp_path: Path) -> None:
    assert info(tmp_path, config()).max_model_len == 2048
    assert info(tmp_path, config() | {"use_dynamic_ntk": False}).max_model_len == 2048
    plain = config() | {"use_dynamic_ntk": False, "use_logn_attn": False}
    assert info(tmp_path, plain).max_model_len == 8192
    with pytest.raises(ConfigError, match="exceeds the 2048 positions"):
        LLM(str(tiny.checkpoint(FAMILY)), max_model_len=2049)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("no_bias", False),
        ("rotary_pct", 0.25),
        ("kv_channels", 32),
        ("scale_attn_weights", False),
        ("visual.output_dim", 128),
        ("visual.n_queries", 15),
    ],
)
def test_other_variants_are_refused_by_name(tmp_path: Path, name: str, value: Any) -> None:
    changed = config()
    entry = changed["visual"] if "." in name else changed
    entry[name.rpartition(".")[2]] = value
    with pytest.raises(ModelError, match=re.escape(f"{name} {value!r}")):
        info(tmp_path, changed)


@pytest.mark.parametrize("name", ["hidden_size", "rotary_emb_base", "visual.width", "visual.image_start_id"])
def test_a_missing_setting_is_named(tmp_path: Path, name: str) -> None:
    changed = config()
    entry = changed["visual"] if "." in name else changed
    del entry[name.rpartition(".")[2]]
    with pytest.raises(ModelError, match=re.escape(f"no number for {name}")):
        info(tmp_path, changed)


@pytest.mark.parametrize("trusted", [False, True])
def test_a_text_model_is_not_taken_for_what_sees_under_its_type(tmp_path: Path, trusted: bool) -> None:
    changed = {name: value for name, value in config().items() if name != "visual"}
    (tmp_path / "config.json").write_text(json.dumps(changed), encoding="utf-8")
    with pytest.raises(ModelError, match=r"QWenLMHeadModel .* reads no images"):
        read_info(tmp_path, EngineArgs(model=str(tmp_path), trust_remote_code=trusted))


def test_the_class_that_scripts_name_is_the_same_model() -> None:
    folder = str(tiny.checkpoint(FAMILY))
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompt = {"prompt": "Picture 1: <img></img>\nHi", "multi_modal_data": {"image": PICTURES[0]}}
    answers = []
    for options in ({}, {"hf_overrides": {"architectures": ["QwenVLForConditionalGeneration"]}}):
        with LLM(folder, dtype="float32", max_model_len=128, tokenizer_mode="slow", **options) as llm:
            answers.append(llm.generate(prompt, greedy, use_tqdm=False)[0].outputs[0].token_ids)
    assert answers[0] == answers[1]


def test_the_tiny_checkpoint_is_laid_out_as_the_real_one() -> None:
    from safetensors import safe_open

    with safe_open(tiny.checkpoint(FAMILY) / "model.safetensors", "pt") as stored:
        names = set(stored.keys())
    assert {"lm_head.weight", "transformer.wte.weight", "transformer.ln_f.weight"} <= names
    assert {f"transformer.h.0.{name}" for name in own_names()} == {n for n in names if n.startswith("transformer.h.0.")}
    block = "transformer.visual.transformer.resblocks.0."
    parts = ("ln_1", "ln_2", "attn.in_proj", "attn.out_proj", "mlp.c_fc", "mlp.c_proj")
    assert {f"{block}{part}.{kind}" for part in parts for kind in ("weight", "bias")} == {
        name for name in names if name.startswith(block)
    }
    assert not any("self_attn" in name for name in names)


def own_names() -> tuple[str, ...]:
    """The weights of a layer of the text, as the real checkpoints' index lists them."""
    attention = ("attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight")
    return (*attention, "ln_1.weight", "ln_2.weight", "mlp.c_proj.weight", "mlp.w1.weight", "mlp.w2.weight")
