"""Images that layers attend to by cross-attention: what a prefix may share, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from beheld import LLM, SamplingParams
from beheld.core.errors import ConfigError, MediaError
from beheld.families import registry
from beheld.models.cross import CrossAttention, crosses
from beheld.models.surgery.joined import FirstOfFused, fuse_linears
from beheld.models.surgery.operation import Changes
from beheld.models.surgery.parts import text_model
from tests import tiny
from tests.oracle import cases, reference
from tests.oracle.cases import Ask
from tests.oracle.test_oracle import check, make

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
AFTER = Ask("{t}{i}What is it?".replace("{t}", cases.LONG_TEXT), ((84, 56, 1),))


def hits(llm: LLM) -> int:
    return llm.stats().scheduler.prefix_hits


def test_text_before_a_picture_is_shared_only_with_the_same_pictures() -> None:
    other = replace(AFTER, images=((84, 56, 2),))
    more = Ask(AFTER.content + " {i}", (*AFTER.images, (70, 70, 3)))
    bare = Ask(AFTER.content.replace("{i}", ""))
    with make("mllama", cases.ROOMY | {"block_size": 8}) as llm:
        for ask in (AFTER, other, more, bare):
            check(llm, "mllama", [ask])
            assert hits(llm) == 0
        check(llm, "mllama", [replace(AFTER, content=AFTER.content + " Say it.")])
        assert hits(llm) > 8


def first_picture_first(images: tuple[tuple[int, int, int], ...], texts: tuple[str, ...]) -> dict[str, Any]:
    """transformers' inputs of a prompt that nothing stands before: pictures and texts in turn, as they are."""
    text = "".join("<|image|>" + part for part in texts)
    if "<|begin_of_text|>" not in text:
        text = text.replace("<|image|>", "<|image|><|begin_of_text|>", 1)
    pictures = [tiny.picture(*image) for image in images]
    made = reference.processor("mllama")(text=[text], images=[pictures], add_special_tokens=False, return_tensors="pt")
    return dict(made)


def test_behind_the_first_picture_a_conversation_is_shared_whatever_follows() -> None:
    one = ((84, 56, 1),)
    turns = [
        (one, (cases.LONG_TEXT,)),
        ((*one, (70, 70, 2)), (cases.LONG_TEXT, "And this?")),
        ((*one, (112, 56, 3)), (cases.LONG_TEXT, "And that?")),
    ]
    found = []
    with make("mllama", cases.ROOMY | {"block_size": 8}) as llm:
        for images, texts in turns:
            prepared = first_picture_first(images, texts)
            with torch.inference_mode():
                made = reference.model("mllama").generate(**prepared, max_new_tokens=12)
            ids = prepared["input_ids"][0].tolist()
            assert ids[0] == 512
            before = hits(llm)
            data = {"image": [tiny.picture(*image) for image in images]}
            (output,) = llm.generate({"prompt_token_ids": ids, "multi_modal_data": data}, GREEDY, use_tqdm=False)
            assert list(output.outputs[0].token_ids) == made[0, len(ids) :].tolist()
            found.append(hits(llm) - before)
    assert found[0] == 0
    assert min(found[1:]) >= 40


def test_ids_that_the_head_does_not_know_have_no_chance_and_no_penalty() -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=1, repetition_penalty=1.3)
    asked = {"prompt": cases.BETWEEN.prompt("mllama"), "multi_modal_data": {"image": cases.BETWEEN.pictures()}}
    expected = reference.answer("mllama", cases.BETWEEN).prompt_ids
    with torch.inference_mode():
        logits = reference.model("mllama")(**reference.inputs("mllama", cases.BETWEEN)).logits[0].log_softmax(-1)
    with make("mllama", cases.ROOMY) as llm:
        (output,) = llm.generate(asked, params, use_tqdm=False)
    assert tuple(output.prompt_token_ids) == expected
    assert len(output.outputs[0].token_ids) == 4
    for position in range(1, len(expected)):
        told = output.prompt_logprobs[position][expected[position]].logprob
        if expected[position] < 512:
            assert told == pytest.approx(logits[position - 1, expected[position]].item(), abs=1e-4)
        else:
            assert told == float("-inf")


def test_embeddings_in_place_of_pictures_are_refused_with_the_reason() -> None:
    with make("mllama", cases.ROOMY) as llm:
        asked = {"prompt": "<|image|>What?", "multi_modal_data": {"image": torch.zeros(1, 4, 64)}}
        with pytest.raises(MediaError, match="its layers cross-attend to media"):
            llm.generate(asked, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("family", ["mllama", "florence2"])
def test_adapters_are_refused_with_the_reason(family: str) -> None:
    with pytest.raises(ConfigError, match="its keys and values of media are"):
        make(family, cases.ROOMY | {"enable_lora": True})


@pytest.mark.parametrize(("family", "compiled"), [("mllama", 3), ("florence2", 0)])
def test_layers_that_attend_to_text_alone_can_be_compiled_and_no_others(family: str, compiled: int) -> None:
    kind = type(reference.model(family))
    model = kind.from_pretrained(tiny.checkpoint(family), dtype=torch.float32)
    adapt = registry.model(f"beheld.families.{family}").adapt
    assert adapt is not None
    adapt(model, Changes())
    text = text_model(model)
    assert len([layer for layer in text.layers if not crosses(layer)]) == compiled
    assert crosses(text)
    before = {name: module for name, module in model.named_modules() if isinstance(module, CrossAttention)}
    fuse_linears(model, Changes())
    for module in before.values():
        # Queries are made of other states than keys and values: they must not become one product.
        assert all(type(part) is not FirstOfFused for part in module.children())


def test_more_pictures_than_fit_at_once_are_refused_and_others_run() -> None:
    room = {"mm_encoder_budget": 2 * 68}
    with make("mllama", cases.ROOMY | room) as llm:
        pictures = [tiny.picture(56, 56, n) for n in range(3)]
        asked = {"prompt": "<|image|>" * 3 + "What?", "multi_modal_data": {"image": pictures}}
        failed, fine = llm.generate([asked, {"prompt": "Hi!"}], GREEDY, use_tqdm=False, on_error="return")
        assert failed.error is not None
        assert "204 states" in str(failed.error)
        assert fine.error is None
        check(llm, "mllama", cases.mixed("mllama")[:2] + cases.crowd("mllama"))
        assert llm.stats().scheduler.max_embeds == 2 * 68
