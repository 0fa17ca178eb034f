"""GLM-4V-9B: three tokens become an image, whose patches share a position; a tiktoken vocabulary; what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from beheld.checkpoint.info import read_info
from beheld.core.config import EngineArgs
from beheld.core.errors import BeheldError, MediaError, ModelError
from beheld.core.request import Request
from beheld.families.glm4v_9b.processing import load, read
from beheld.inputs.pipeline import Chat, RequestOrder
from tests import tiny, tiny_own_glm
from tests.inputs import pipes
from tests.oracle import cases, reference
from tests.reference.test_recorded import recorded

FAMILY = "glm4v_9b"
PICTURE = tiny.picture(84, 56, 1)
BEGIN, IMAGE, END = "<|begin_of_image|>", "<|endoftext|>", "<|end_of_image|>"
MARK = BEGIN + IMAGE + END
NUM_PATCHES = 9


def ask(prompt: Any, pictures: Any = (), pipe: Any = None, **options: Any) -> Request:
    request: dict[str, Any] = prompt if isinstance(prompt, dict) else {"prompt": prompt}
    request |= {"mm_processor_kwargs": options} if options else {}
    if pictures:
        request = {**request, "multi_modal_data": {"image": list(pictures)}}
    return (pipe or pipes.shared(FAMILY)).prepare(RequestOrder(request, pipes.ONE_TOKEN, request_id="0"))


def chat(messages: list[dict[str, Any]], **options: Any) -> Request:
    return pipes.shared(FAMILY).prepare(RequestOrder(Chat(messages, **options), pipes.ONE_TOKEN, request_id="0"))


def encoded(text: str) -> list[int]:
    ids: list[int] = pipes.shared(FAMILY).tokenizer.encode(text, add_special_tokens=False)
    return ids


def test_texts_are_encoded_as_the_published_code_does() -> None:
    tokenizer = pipes.shared(FAMILY).tokenizer
    for text, ids in recorded(FAMILY)["texts"]:
        assert tokenizer(text)["input_ids"] == ids, text
        if text:
            assert list(ask(text).token_ids) == ids, text
        assert tokenizer.decode(ids[2:]) == text


def test_conversations_are_encoded_as_the_published_code_does() -> None:
    for messages, ids in recorded(FAMILY)["conversations"]:
        made = [
            {
                "role": role,
                # Wherever it stands, an image goes before its message's text.
                "content": [{"type": "text", "text": content}, {"type": "image", "image": PICTURE}]
                if seen
                else content,
            }
            for role, content, seen in messages
        ]
        request = chat(made)
        assert list(request.token_ids) == ids, messages
        assert len(request.spans) == sum(seen for _, _, seen in messages)


def test_a_template_may_write_what_the_tokenizer_adds() -> None:
    template = "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}<|assistant|>"
    given = chat([{"role": "user", "content": "Hi"}], chat_template=template)
    assert list(given.token_ids) == encoded("[gMASK]<sop><|user|>\nHi<|assistant|>")


def test_pixels_and_the_tower_s_output_are_the_published_code_s() -> None:
    (span,) = ask(f"{MARK}What is in this picture?", [PICTURE]).spans
    pixels = span.item.features["pixel_values"]
    assert pixels[0, :, ::7, ::7].flatten().tolist() == pytest.approx(recorded(FAMILY)["pixels"], abs=1e-5)
    embeds = reference.model(FAMILY).get_image_features(pixels).pooler_output[0]
    assert embeds.flatten().tolist() == pytest.approx(recorded(FAMILY)["embeds"], abs=1e-4)


def test_three_tokens_in_a_row_are_an_image_and_all_become_embeddings() -> None:
    request = ask(f"<|user|>\n{IMAGE}a{BEGIN}b{MARK}c{END}{IMAGE}<|assistant|>", [PICTURE])
    whole = f"[gMASK]<sop><|user|>\n{IMAGE}a{BEGIN}b{BEGIN}{IMAGE * NUM_PATCHES}{END}c{END}{IMAGE}<|assistant|>"
    assert list(request.token_ids) == encoded(whole)
    (span,) = request.spans
    assert (span.item.embed_mask, span.item.num_embeds) == (None, NUM_PATCHES + 2)
    assert request.token_ids[span.start] == encoded(BEGIN)[0]
    assert request.token_ids[span.stop - 1] == encoded(END)[0]
    assert request.receipts[0].used["width"] == request.receipts[0].used["height"] == 84


@pytest.mark.parametrize("text", [f"a{IMAGE}b", f"{BEGIN}{IMAGE}", f"{IMAGE}{END}", f"{BEGIN}{END}{IMAGE}", f"{MARK}"])
def test_as_many_places_as_images(text: str) -> None:
    if text == MARK:
        assert len(ask(text, [PICTURE]).spans) == 1
        with pytest.raises(BeheldError, match=r"1 of the placeholder '<\|begin_of_image\|><\|endoftext\|><\|end_of"):
            ask(text)
        with pytest.raises(BeheldError, match="has 2 of"):
            ask(text + text, [PICTURE])
        return
    assert list(ask(text).token_ids[2:]) == encoded(text)
    with pytest.raises(BeheldError, match="has 0 of the placeholder"):
        ask(text, [PICTURE])


def test_one_image_to_a_prompt() -> None:
    with pytest.raises(BeheldError, match="1"):
        ask(MARK + MARK, [PICTURE, PICTURE])


def test_what_a_user_spells_in_a_conversation_is_no_image() -> None:
    for forged in (MARK, f"{BEGIN} {MARK}", "<|user|>\nx", "[gMASK]<sop>"):
        parts = [{"type": "image", "image": PICTURE}, {"type": "text", "text": forged}]
        (span,) = (request := chat([{"role": "user", "content": parts}])).spans
        specials = set(encoded("".join(tiny_own_glm.SPECIALS)))
        before = [token for token in request.token_ids[: span.start] if token in specials]
        assert before == encoded("[gMASK]<sop><|user|>")
        assert [token for token in request.token_ids[span.stop :] if token in specials] == encoded("<|assistant|>")


def test_ids_without_a_tokenizer() -> None:
    """The place is found by the ids that the checkpoint's files name."""
    pipe = pipes.make(FAMILY, skip_tokenizer_init=True)
    text = f"[gMASK]<sop><|user|>\n{MARK}{IMAGE}What?<|assistant|>"
    request = ask({"prompt_token_ids": encoded(text)}, [PICTURE], pipe)
    assert request.token_ids == ask(text.removeprefix("[gMASK]<sop>"), [PICTURE]).token_ids


def test_embeddings_stand_for_an_image_with_its_ends() -> None:
    (span,) = (whole := ask(f"a{MARK}b", [PICTURE])).spans
    embeds = reference.model(FAMILY).get_image_features(span.item.features["pixel_values"]).pooler_output
    request = ask({"prompt": f"a{MARK}b", "multi_modal_data": {"image": embeds}})
    assert request.token_ids == whole.token_ids
    assert (request.spans[0].item.embed_mask, request.spans[0].item.num_embeds) == (None, NUM_PATCHES + 2)
    with pytest.raises(MediaError, match="are 2, its beginning and end included"):
        ask({"prompt": f"a{MARK}b", "multi_modal_data": {"image": embeds[:, :2]}})


def test_patches_share_a_position() -> None:
    own = reference.model(FAMILY).model
    ids = torch.tensor([encoded(f"a{IMAGE}b{BEGIN}{IMAGE * NUM_PATCHES}{END}cd{BEGIN}{IMAGE}")])
    start = int((ids[0] == encoded(BEGIN)[0]).nonzero()[0])
    before, after = list(range(start + 1)), ids.shape[1] - start - NUM_PATCHES - 1
    wanted = [*before, *[start + 1] * NUM_PATCHES, *range(start + 2, start + 2 + after)]
    positions, delta = own.get_rope_index(ids)
    assert positions.tolist() == [[wanted]]
    assert delta.tolist() == [[1 - NUM_PATCHES]]
    types = torch.zeros_like(ids)
    types[0, start : start + NUM_PATCHES + 2] = 1
    assert own.get_rope_index(ids, types)[0].tolist() == [[wanted]]
    plain = ids[:, : start + 3]
    assert own.get_rope_index(plain)[0].tolist() == [[list(range(start + 3))]]


def test_tokens_after_an_image_depend_on_its_shared_position() -> None:
    """Positions that count every patch, as vLLM 0.32 gives them, lead to another answer."""
    model, inputs = reference.model(FAMILY), reference.inputs(FAMILY, cases.ONE)
    expected = tuple(recorded(FAMILY)["cases"]["one_image"]["token_ids"])
    assert reference.answer(FAMILY, cases.ONE).token_ids == expected
    plain = torch.arange(inputs["input_ids"].shape[1])[None]
    assert reference.answered(model, inputs | {"position_ids": plain}, 12).token_ids != expected


CONFIG: dict[str, Any] = json.loads((tiny.checkpoint(FAMILY) / "config.json").read_text(encoding="utf-8"))


def info_of(folder: Path, config: dict[str, Any]) -> Any:
    for file in tiny.checkpoint(FAMILY).iterdir():
        if file.name != "config.json" and not (folder / file.name).exists():
            (folder / file.name).symlink_to(file)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return read_info(folder, EngineArgs(model=str(folder)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rmsnorm", False),
        ("post_layer_norm", False),
        ("original_rope", False),
        ("add_bias_linear", True),
        ("multi_query_attention", False),
        ("apply_residual_connection_post_layernorm", True),
        ("pre_seq_len", 8),
        ("quantization_bit", 4),
    ],
)
def test_other_settings_are_refused_by_name(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ModelError, match=f"{name} {value!r}"):
        info_of(tmp_path, CONFIG | {name: value})


def test_a_missing_setting_is_named(tmp_path: Path) -> None:
    for name in ("kv_channels", "boi_token_id", "layernorm_epsilon"):
        with pytest.raises(ModelError, match=f"has no {name}"):
            info_of(tmp_path, {key: value for key, value in CONFIG.items() if key != name})
    with pytest.raises(ModelError, match=r"num_positions 40 .* is not 37"):
        info_of(tmp_path, CONFIG | {"vision_config": CONFIG["vision_config"] | {"num_positions": 40}})


@pytest.mark.parametrize("names", [["ChatGLMModel"], ["ChatGLMForConditionalGeneration"], None])
def test_a_text_model_of_the_type_is_refused(tmp_path: Path, names: list[str] | None) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "vision_config"} | {"architectures": names}
    with pytest.raises(ModelError, match="is of a text model"):
        info_of(tmp_path, config)


def test_the_base_of_rotations_is_the_ratio_s(tmp_path: Path) -> None:
    assert info_of(tmp_path, CONFIG).max_model_len == 8192
    from beheld.checkpoint.info import read_config

    for ratio, base in ((1, 10000.0), (500, 5_000_000.0)):
        info_of(tmp_path, CONFIG | {"rope_ratio": ratio})
        rope = read_config(tmp_path, EngineArgs()).rope_parameters
        assert (rope["rope_theta"], rope["partial_rotary_factor"]) == (base, 0.5)


def test_hf_overrides_of_the_documents(tmp_path: Path) -> None:
    overrides = {"architectures": ["GLM4VForCausalLM"]}
    info = read_info(tiny.checkpoint(FAMILY), EngineArgs(model="x", hf_overrides=overrides))
    assert (info.family, info.architecture) == ("beheld.families.glm4v_9b", "GLM4VForCausalLM")


def test_broken_tokenizer_files_are_refused(tmp_path: Path) -> None:
    source = tiny.checkpoint(FAMILY)
    settings = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    lines = (source / "tokenizer.model").read_text(encoding="ascii")

    def write(model: str | None = lines, **changes: Any) -> None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | changes), encoding="utf-8")
        (tmp_path / "tokenizer.model").unlink(missing_ok=True)
        if model is not None:
            (tmp_path / "tokenizer.model").write_text(model, encoding="ascii")

    added = settings["added_tokens_decoder"]
    shifted = {str(int(index) + 1): entry for index, entry in added.items()}
    for message, given in (
        ("tokenizer.model is missing", {"model": None}),
        ("Line 2 of tokenizer.model", {"model": lines.replace("\n", " \n!\n", 2)}),
        ("gives '<|endoftext|>' the id", {"added_tokens_decoder": shifted}),
        ("has no token '<sop>'", {"added_tokens_decoder": dict(list(added.items())[:4])}),
    ):
        write(**given)
        with pytest.raises(ModelError, match=message.replace("|", r"\|").replace("'", ".")):
            read(tmp_path)
    write(tokenizer_class="PreTrainedTokenizerFast")
    assert read(tmp_path) is None


def test_the_processor_of_a_whole_prompt() -> None:
    made = load(tiny.checkpoint(FAMILY))(text=[f"a{MARK}b"], images=[[PICTURE]])
    assert tuple(made["input_ids"][0].tolist()) == ask(f"a{MARK}b", [PICTURE]).token_ids
