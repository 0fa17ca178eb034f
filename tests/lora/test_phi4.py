"""Phi-4-multimodal: the checkpoint's own adapters for media, its numbered markers, its two rotary scales."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from beheld import LLM, EngineArgs, LoRARequest, SamplingParams
from beheld.checkpoint.info import read_info
from beheld.core.errors import ConfigError, LimitError, LoRAError, PromptError
from beheld.engine.setup import decide
from beheld.models.surgery.longrope import FAR, TwoScales
from tests import tiny
from tests.oracle import cases, reference
from tests.oracle.cases import Ask
from tests.oracle.test_oracle import check, request

FAMILY = "phi4_mm"
OPTIONS: dict[str, Any] = {"dtype": "float32", "seed": 0, "max_model_len": 4096, "max_num_seqs": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SWITCH = 1200


def make(**options: Any) -> LLM:
    return LLM(str(tiny.checkpoint(FAMILY)), **OPTIONS | options)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with make() as made:
        yield made


def ids(llm: LLM, prompt: Any, **options: Any) -> list[int]:
    return list(llm.generate(prompt, GREEDY, use_tqdm=False, **options)[0].outputs[0].token_ids)


def test_the_adapter_follows_the_media(llm: LLM) -> None:
    picture, words = llm.generate([request(FAMILY, a) for a in (cases.ONE, cases.SHORT)], GREEDY, use_tqdm=False)
    assert picture.lora_request == LoRARequest("vision", 1, str(tiny.checkpoint(FAMILY) / "vision-lora"))
    assert words.lora_request is None
    check(llm, FAMILY, [cases.ONE, cases.SHORT, cases.BETWEEN])
    plain = reference.answered(reference.model(FAMILY), reference.inputs(FAMILY, cases.ONE), 8)
    assert list(plain.token_ids) != list(picture.outputs[0].token_ids), "an adapter that changes nothing"


def test_the_adapter_of_pictures_goes_before_that_of_sounds(llm: LLM) -> None:
    sound = ((0.6, 21),)
    heard = Ask("{a}What?", sounds=sound)
    both = Ask("{a}{i}What?", ((84, 56, 22),), sounds=sound)
    outputs = llm.generate([request(FAMILY, ask) for ask in (heard, both)], GREEDY, use_tqdm=False)
    names = [output.lora_request.lora_name if output.lora_request else None for output in outputs]
    assert names == ["speech", "vision"]
    # The same sound, once with each adapter and projection, in one batch.
    check(llm, FAMILY, [heard, both, cases.SHORT, both, heard])
    plain = reference.answered(reference.model(FAMILY), reference.inputs(FAMILY, heard), 8)
    assert list(plain.token_ids) != list(outputs[0].outputs[0].token_ids), "an adapter that changes nothing"


def test_a_sound_longer_than_a_window_of_its_tower(llm: LLM) -> None:
    """Forty seconds are 500 positions; what is longer is heard in windows, the last of them filled up."""
    ask = Ask("{a}What?", sounds=((41.3, 23),), max_tokens=6)
    check(llm, FAMILY, [ask, Ask("{a}What?", sounds=((40.0, 24),), max_tokens=6)])
    (output,) = llm.generate(request(FAMILY, ask), GREEDY, use_tqdm=False)
    assert (output.media[0].tokens, output.media[0].used["seconds"], output.media[0].lost) == (516, 41.3, ())


def test_a_picture_of_many_tiles_and_one_of_extreme_shape(llm: LLM) -> None:
    check(
        llm, FAMILY, [Ask("{i}What?", ((900, 420, 3),)), Ask("{i}And?", ((460, 60, 4),)), Ask("{i}!", ((60, 500, 5),))]
    )


def test_as_the_scripts_have_it() -> None:
    """add_lora by hand, numbered markers, a rank to spare, and no adapter named with the request."""
    with make(enable_lora=True, max_lora_rank=32, limit_mm_per_prompt={"image": 2}) as llm:
        folder = str(tiny.checkpoint(FAMILY) / "vision-lora")
        llm.llm_engine.add_lora(lora_request=LoRARequest("vision", 1, folder))
        pictures = cases.BETWEEN.pictures()
        prompt = {"prompt": "<|user|><|image_1|><|image_2|>Alike?<|end|><|assistant|>"}
        ask = Ask("{i}{i}Alike?", cases.BETWEEN.images, max_tokens=8)
        expected = reference.answer(FAMILY, ask)
        media = {"multi_modal_data": {"image": pictures}}
        (output,) = llm.generate(prompt | media, GREEDY, use_tqdm=False)
        assert tuple(output.prompt_token_ids) == expected.prompt_ids
        assert tuple(output.outputs[0].token_ids) == expected.token_ids
        assert ids(llm, prompt | media, lora_request=LoRARequest("vision", 1, folder + "/.")) == list(
            expected.token_ids
        )
        # Sounds have numbers of their own. Scripts about sound call the adapter for them number 1.
        heard = Ask("{a}{i}{a}Alike?", ((84, 56, 1),), sounds=((0.4, 25), (0.4, 26)), max_tokens=8)
        data = request(FAMILY, heard)["multi_modal_data"]
        prompt["prompt"] = "<|user|><|audio_1|><|image_1|><|audio_2|>Alike?<|end|><|assistant|>"
        assert ids(llm, prompt | {"multi_modal_data": data}) == list(reference.answer(FAMILY, heard).token_ids)
        for wrong in ("<|audio_2|><|image_1|><|audio_1|>", "<|audio_1|><|image_2|><|audio_2|>"):
            with pytest.raises(PromptError, match="in order"):
                llm.generate({"prompt": wrong, "multi_modal_data": data}, GREEDY, use_tqdm=False)
        for wrong in ("<|image_2|><|image_1|>", "<|image_1|><|image_3|>", "<|image_1|><|image_1|>"):
            with pytest.raises(PromptError, match="in order"):
                llm.generate({"prompt": wrong} | media, GREEDY, use_tqdm=False)


def test_as_scripts_about_sound_have_it() -> None:
    """The adapter named with the request, as number 1; a marker with a number."""
    limits = {"image": 0, "audio": 1}
    with make(enable_lora=True, max_lora_rank=320, max_num_seqs=2, limit_mm_per_prompt=limits) as llm:
        ask = Ask("{a}What is recited?", sounds=((0.9, 27),), max_tokens=8)
        prompt = request(FAMILY, ask) | {"prompt": "<|user|><|audio_1|>What is recited?<|end|><|assistant|>"}
        folder = str(tiny.checkpoint(FAMILY) / "speech-lora")
        expected = list(reference.answer(FAMILY, ask).token_ids)
        assert ids(llm, prompt, lora_request=LoRARequest("speech", 1, folder)) == expected
        assert ids(llm, prompt) == expected
        with pytest.raises(LimitError, match="switched off"):
            ids(llm, request(FAMILY, cases.ONE))


def test_an_adapter_for_what_is_switched_off_takes_no_room() -> None:
    args = EngineArgs(**OPTIONS, model=str(tiny.checkpoint(FAMILY)), limit_mm_per_prompt={"audio": 0})
    config = decide(args, read_info(tiny.checkpoint(FAMILY), args))
    assert [modality for modality, _ in config.media_loras] == ["image"]
    assert config.max_loras == 1


def test_chat_is_the_prompt_of_the_template(llm: LLM) -> None:
    picture = cases.ONE.pictures()[0]
    content = [{"type": "image", "image": picture}, {"type": "text", "text": "What is in this picture?"}]
    (said,) = llm.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)
    assert tuple(said.prompt_token_ids) == reference.answer(FAMILY, cases.ONE).prompt_ids
    assert list(said.outputs[0].token_ids) == list(reference.answer(FAMILY, cases.ONE).token_ids)[:8]
    wave = cases.HEARD.waves()[0]
    sound = {"data": base64.b64encode(tiny.wav(wave)).decode(), "format": "wav"}
    content = [{"type": "input_audio", "input_audio": sound}, {"type": "text", "text": "What do you hear?"}]
    (said,) = llm.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)
    assert tuple(said.prompt_token_ids) == reference.answer(FAMILY, cases.HEARD).prompt_ids
    # Samples in a file are whole numbers, which is below what changes these answers.
    assert list(said.outputs[0].token_ids) == list(reference.answer(FAMILY, cases.HEARD).token_ids)[:8]


def test_another_adapter_may_be_named_and_must_fit(llm: LLM, tmp_path: Any) -> None:
    speech = LoRARequest("speech", 2, str(tiny.checkpoint(FAMILY) / "speech-lora"))
    assert ids(llm, request(FAMILY, cases.ONE), lora_request=speech) != ids(llm, request(FAMILY, cases.ONE))
    with pytest.raises(LoRAError, match="does not exist"):
        ids(llm, request(FAMILY, cases.ONE), lora_request=LoRARequest("x", 3, str(tmp_path / "x")))
    with pytest.raises(ConfigError, match="max_cpu_loras"):
        make(enable_lora=True, max_loras=2, max_cpu_loras=1)


# ---- two rotary scales -----------------------------------------------------------------------------------------------


def text_ids(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 250, count).tolist()


def expected_ids(prompt: list[int], count: int) -> list[int]:
    prepared = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt), dtype=torch.long)}
    return list(reference.answered(reference.model(FAMILY), prepared, count).token_ids)


def test_a_long_prompt_does_not_change_a_short_one_beside_it(llm: LLM) -> None:
    prompts = [text_ids(SWITCH + 30, 1), text_ids(40, 2), text_ids(SWITCH + 1, 3), text_ids(SWITCH - 8, 4)]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], GREEDY, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == expected_ids(prompt, 8)


def test_keys_of_one_scale_are_no_prefix_of_the_other(llm: LLM) -> None:
    long = text_ids(SWITCH + 30, 5)
    for prompt in (long[:1000], long, long[:1000], [*long, 7]):
        assert ids(llm, {"prompt_token_ids": prompt}) == expected_ids(prompt, 8)
    before = llm.stats().scheduler.prefix_hits
    ids(llm, {"prompt_token_ids": [*long, 9]})
    assert llm.stats().scheduler.prefix_hits - before >= SWITCH


def test_an_answer_ends_where_its_sequence_would_change_scale(llm: LLM) -> None:
    prompt = text_ids(SWITCH - 3, 6)
    (output,) = llm.generate({"prompt_token_ids": prompt}, GREEDY, use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    assert list(output.outputs[0].token_ids) == expected_ids(prompt, 4)


def test_the_rotary_embedding_is_that_of_transformers_on_either_side() -> None:
    rotary = reference.model(FAMILY).model.rotary_emb
    ours, x = TwoScales(rotary), torch.zeros(1, 1)
    for count in (50, SWITCH + 50):
        positions = torch.arange(count)[None]
        far = FAR if count > SWITCH else 0
        for made, known in zip(ours(x, positions + far), rotary(x, positions), strict=True):
            torch.testing.assert_close(made, known)
