"""Phi-4-multimodal as the main revision of microsoft's repository has it, without its code."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from beheld import LLM, EngineArgs, LoRARequest, SamplingParams
from beheld.checkpoint.convert import converted
from beheld.checkpoint.info import read_info
from beheld.core.errors import ModelError
from beheld.engine.setup import decide
from beheld.families.phi4_multimodal.model import renamed
from tests import tiny, tiny_adapted
from tests.oracle import cases, reference
from tests.oracle.cases import Ask
from tests.oracle.test_oracle import request

FAMILY = "phi4_mm"
ASKS = (
    Ask("{i}What?", cases.ONE.images, max_tokens=8),
    Ask("{i}{i}Alike?", cases.BETWEEN.images, max_tokens=8),
    Ask("{i}What?", ((900, 420, 3),), max_tokens=8),
    Ask("What is a picture?", max_tokens=8),
    Ask("{a}What do you hear?", sounds=((0.7, 31),), max_tokens=8),
    Ask("{a}{i}{a}Alike?", cases.ONE.images, sounds=((0.5, 32), (0.5, 33)), max_tokens=8),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("Phi-4-multimodal-instruct")
    tiny_adapted.make_main_phi4_mm(path)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    """As the scripts make it, but for the type and the seed."""
    args = EngineArgs(
        model=str(folder),
        trust_remote_code=True,
        max_model_len=4096,
        max_num_seqs=2,
        enable_lora=True,
        max_lora_rank=320,
        limit_mm_per_prompt={"image": 2},
        dtype="float32",
        seed=0,
    )
    with LLM(**vars(args)) as made:
        made.llm_engine.add_lora(lora_request=LoRARequest("vision", 1, str(folder / "vision-lora")))
        yield made


def numbered(ask: Ask) -> dict[str, Any]:
    """A request as the repository's own prompts are written."""
    content = ask.content
    for number in range(1, 1 + len(ask.images)):
        content = content.replace("{i}", f"<|image_{number}|>", 1)
    for number in range(1, 1 + len(ask.sounds)):
        content = content.replace("{a}", f"<|audio_{number}|>", 1)
    return request(FAMILY, ask) | {"prompt": f"<|user|>{content}<|end|><|assistant|>"}


def test_answers_are_those_of_transformers_layout(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1) for _ in ASKS]
    outputs = llm.generate([numbered(ask) for ask in ASKS], params, use_tqdm=False)
    for ask, output in zip(ASKS, outputs, strict=True):
        expected, got = reference.answer(FAMILY, ask), output.outputs[0]
        assert tuple(output.prompt_token_ids) == expected.prompt_ids, ask
        assert tuple(got.token_ids) == expected.token_ids, ask
        said = [step[token].logprob for step, token in zip(got.logprobs, got.token_ids, strict=True)]
        assert said == pytest.approx(expected.logprobs, abs=1e-4), ask
        adapter = "vision" if ask.images else "speech" if ask.sounds else None
        assert (output.lora_request and output.lora_request.lora_name) == adapter


def test_chat_with_its_template_of_strings(llm: LLM) -> None:
    ask = ASKS[0]
    content = [{"type": "image", "image": ask.pictures()[0]}, {"type": "text", "text": "What?"}]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (said,) = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
    text = llm.llm_engine.get_tokenizer().decode(said.prompt_token_ids, skip_special_tokens=False)
    assert text.replace("<|endoftext10|>", "") == "<|user|>\nWhat?<|end|><|assistant|>"
    assert text.count("<|endoftext10|>") == reference.answer(FAMILY, ask).prompt_ids.count(
        llm.llm_engine.get_tokenizer().convert_tokens_to_ids("<|endoftext10|>")
    )


def test_chat_about_a_sound_and_a_picture(llm: LLM) -> None:
    ask = Ask("{i}{a}What?", cases.ONE.images, sounds=((0.5, 34),), max_tokens=8)
    sound = {"data": base64.b64encode(tiny.wav(ask.waves()[0])).decode(), "format": "wav"}
    parts = [{"type": "image", "image": ask.pictures()[0]}, {"type": "input_audio", "input_audio": sound}]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (said,) = llm.chat(messages, params, use_tqdm=False)
    text = llm.llm_engine.get_tokenizer().decode(said.prompt_token_ids, skip_special_tokens=False)
    bare = text.replace("<|endoftext10|>", "").replace("<|endoftext11|>", "")
    assert bare == "<|user|>\n\nWhat?<|end|><|assistant|>"
    assert [(item.modality, item.tokens) for item in said.media] == [
        (modality, reference.answer(FAMILY, ask).prompt_ids.count(token))
        for modality, token in (("image", reference.image_token(FAMILY)), ("audio", reference.sound_token(FAMILY)))
    ]
    assert said.lora_request.lora_name == "vision"


def test_the_names_are_those_of_transformers(folder: Path) -> None:
    from safetensors.torch import load_file

    native = load_file(tiny.checkpoint(FAMILY) / "model.safetensors")
    theirs = load_file(folder / "model.safetensors")
    assert not set(native) >= set(theirs)
    made = renamed(theirs, {})
    assert made.keys() == native.keys()
    assert all((made[name] == weight).all() for name, weight in native.items())


def raw(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return found


def test_the_configuration_is_that_of_transformers_layout(folder: Path) -> None:
    from transformers import AutoConfig

    known = converted(raw(folder))
    assert known is not None
    ours = AutoConfig.for_model(known[0], **known[1]).to_dict()
    theirs = AutoConfig.from_pretrained(str(tiny.checkpoint(FAMILY))).to_dict()
    assert raw(folder)["sliding_window"] == 262144
    for made in (ours, theirs):
        made.pop("_name_or_path", None)
    assert ours == theirs


def test_a_window_that_sequences_reach_is_kept(folder: Path) -> None:
    known = converted(raw(folder) | {"sliding_window": 100})
    assert known is not None
    assert known[1]["sliding_window"] == 100


def test_without_sizes_the_towers_are_those_of_the_repositorys_code(folder: Path) -> None:
    said = {name: value for name, value in raw(folder).items() if name not in ("audio_config", "vision_config")}
    from transformers import AutoConfig, Phi4MultimodalVisionConfig

    known = converted(said)
    assert known is not None
    config = AutoConfig.for_model(known[0], **known[1])
    assert config.vision_config.to_dict() == Phi4MultimodalVisionConfig().to_dict()
    assert config.audio_config.audio_token_id == 200011
    assert config.audio_config.hidden_size == 16


def test_what_would_be_computed_otherwise_is_refused(folder: Path) -> None:
    said = raw(folder)
    said["embd_layer"]["image_embd_layer"]["hd_transform_order"] = "glb_sub"
    for change, name in ((said, "glb_sub"), (raw(folder) | {"mlp_bias": True}, "mlp_bias"), ({}, "embd_layer")):
        with pytest.raises(ModelError, match=name):
            converted({"model_type": "phi4mm"} | change)


@pytest.mark.parametrize(("kind", "modality"), [("vision", "image"), ("speech", "audio")])
def test_an_adapter_that_was_not_fetched_is_missed(folder: Path, tmp_path: Path, kind: str, modality: str) -> None:
    partial = tmp_path / "partial"
    shutil.copytree(folder, partial, ignore=shutil.ignore_patterns(f"{kind}-lora"))
    with pytest.raises(ModelError, match=f"{kind}-lora"):
        LLM(model=str(partial), dtype="float32")
    args = EngineArgs(model=str(partial), limit_mm_per_prompt={modality: 0})
    config = decide(args, read_info(partial, args))
    assert len(config.media_loras) == 1, "what is switched off misses nothing"
    (partial / "model.safetensors").unlink()
    with LLM(model=str(partial), dtype="float32", load_format="dummy", max_model_len=1200) as random:
        assert random.generate("What?", SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].token_ids
