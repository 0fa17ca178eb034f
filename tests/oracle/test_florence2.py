"""Florence-2: what its encoder reads, what is shared, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from beheld import LLM, SamplingParams
from beheld.core.errors import ConfigError, MediaError, ModelError, ParamsError, PromptError, PromptTooLongError
from beheld.core.structured_outputs import StructuredOutputs
from beheld.inputs.pipeline import RequestOrder
from tests import tiny, tiny_cross
from tests.inputs import pipes
from tests.oracle import cases, reference
from tests.oracle.cases import Ask
from tests.oracle.test_oracle import check, make

FAMILY = "florence2"
GREEDY = SamplingParams(temperature=0, max_tokens=8)
PICTURE = ((84, 56, 1),)


def encoder_ids(prompt: str, images: int = 1) -> list[int]:
    """What our pipeline gives the encoder to read."""
    media = {"multi_modal_data": {"image": tiny.pictures(1)[0]}} if images else {}
    request = pipes.shared(FAMILY).prepare(RequestOrder({"prompt": prompt} | media, SamplingParams(), request_id="1"))
    assert request.token_ids == (2,)
    (span,) = request.spans
    ids: list[int] = span.item.features["input_ids"][0].tolist()
    assert span.item.num_states == len(ids)
    assert ("pixel_values" in span.item.features) == bool(images)
    return ids


@pytest.mark.parametrize(
    "prompt",
    [
        "<MORE_DETAILED_CAPTION>",
        "<OD>",
        "<OCR_WITH_REGION>",
        "<REGION_PROPOSAL>",
        "<CAPTION_TO_PHRASE_GROUNDING> a red circle ",
        "<REGION_TO_CATEGORY><loc_52><loc_332><loc_932><loc_774>",
        "<OPEN_VOCABULARY_DETECTION>star",
        "What is this?",
        "",
    ],
)
def test_the_encoder_reads_what_the_processor_writes(prompt: str) -> None:
    theirs = reference.processor(FAMILY)(text=[prompt], images=tiny.pictures(1), return_tensors="pt")
    assert encoder_ids(prompt) == theirs["input_ids"][0].tolist()


def test_every_task_is_known() -> None:
    theirs = reference.processor(FAMILY)
    for task, sentence in theirs.task_prompts_without_inputs.items():
        assert encoder_ids(task, 0) == theirs.tokenizer(sentence, add_special_tokens=False)["input_ids"]
    for task, sentence in theirs.task_prompts_with_input.items():
        whole = sentence.format(input="two {stars}")
        assert encoder_ids(task + "two {stars}", 0) == theirs.tokenizer(whole, add_special_tokens=False)["input_ids"]


def test_what_is_refused() -> None:
    pipe = pipes.shared(FAMILY)

    def ask(prompt: str, data: Any = None) -> None:
        media = {} if data is None else {"multi_modal_data": {"image": data}}
        pipe.prepare(RequestOrder({"prompt": prompt} | media, SamplingParams(), request_id="1"))

    with pytest.raises(PromptError, match="<OD> takes no text"):
        ask("<OD> please", tiny.pictures(1))
    with pytest.raises(PromptError, match="at most 1"):
        ask("What?", tiny.pictures(2))
    with pytest.raises(PromptError, match="empty"):
        ask("")
    with pytest.raises(PromptTooLongError, match="encoder reads at most 1024"):
        ask("a b c d e f g " * 200)
    with pytest.raises(MediaError, match="its layers cross-attend to media"):
        ask("What?", reference.torch.zeros(1, 50, 64))
    with pytest.raises(ParamsError, match="forces or forbids tokens"):
        pipe._sampling.resolve(SamplingParams(structured_outputs=StructuredOutputs(choice=["a", "b"])), (1,), 0)
    with pytest.raises(ConfigError, match="Beam search"):
        LLM(model=str(tiny.checkpoint(FAMILY)), override_generation_config={"num_beams": 3})


def test_equal_prompts_are_encoded_once_and_end_by_themselves() -> None:
    asks = [Ask("{i}<OD>", PICTURE), Ask("{i}<CAPTION>", PICTURE), Ask("{i}<OD>", PICTURE), Ask("{i}<OD>", PICTURE)]
    with make(FAMILY, cases.ROOMY) as llm:
        check(llm, FAMILY, asks)
        stats = llm.stats().scheduler
        assert (stats.num_encoded, stats.num_reused) == (2, 2)
        (output,) = llm.generate({"prompt": "<OD>"}, GREEDY, use_tqdm=False)
        # The checkpoint forces the end at the last place, and what it forces first is not shown.
        assert output.outputs[0].token_ids[0] == 0
        assert output.outputs[0].token_ids[-1] == 2
        assert output.outputs[0].finish_reason == "stop"
        assert "<s>" not in output.outputs[0].text
        assert output.prompt == "<OD>"


def test_habits_can_be_switched_off() -> None:
    off = {"forced_bos_token_id": None, "forced_eos_token_id": None, "no_repeat_ngram_size": 0}
    model = reference.model(FAMILY)
    with make(FAMILY, cases.ROOMY | {"override_generation_config": off}) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        (output,) = llm.generate({"prompt": "<OD>"}, params, use_tqdm=False)
    prepared = reference.processor(FAMILY)(text=["<OD>"], return_tensors="pt")
    plain = reference.GenerationConfig(do_sample=False, decoder_start_token_id=2, pad_token_id=1, eos_token_id=None)
    with reference.torch.inference_mode():
        made = model.generate(**prepared, generation_config=plain, max_new_tokens=12, **off)
    assert list(output.outputs[0].token_ids) == made[0, 1:].tolist()


def test_a_prompt_too_large_for_the_room_is_refused_and_others_run() -> None:
    with make(FAMILY, cases.ROOMY | {"mm_encoder_budget": 100}) as llm:
        long, short = llm.generate(
            [{"prompt": "a b c d e f g h " * 20}, {"prompt": "Hi!"}], GREEDY, use_tqdm=False, on_error="return"
        )
        assert "the engine keeps at most 100" in str(long.error)
        assert short.error is None
        check(llm, FAMILY, cases.crowd(FAMILY)[:3])


def test_the_checkpoint_is_described_as_it_is() -> None:
    info = pipes.info(FAMILY)
    assert [group.kind for group in info.kv_groups] == ["full", "cross"]
    assert info.num_layers == 3
    assert info.decoder_start_id == 2


@pytest.fixture(scope="module")
def microsoft(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A checkpoint as microsoft/Florence-2-large, and facebook/bart-large for its tokenizer."""
    model, tokens = tmp_path_factory.mktemp("Florence-2-large"), tmp_path_factory.mktemp("bart-large")
    tiny_cross.make_microsoft_florence2(model, tokens)
    return str(model), str(tokens)


@pytest.mark.parametrize("borrowed", [False, True])
def test_the_first_repositories_run_without_their_code(microsoft: tuple[str, str], borrowed: bool) -> None:
    model, tokens = microsoft
    options = {"tokenizer": tokens, "trust_remote_code": True} if borrowed else {}
    with LLM(model=model, dtype="float32", seed=0, **options, **cases.ROOMY) as llm:
        assert llm.llm_engine.get_tokenizer().convert_tokens_to_ids("<loc_999>") == 406 + 1 + 4 + 999
        check(llm, FAMILY, [Ask("{i}<MORE_DETAILED_CAPTION>", PICTURE, max_tokens=16), cases.SHORT])


def test_a_tower_that_is_built_otherwise_is_refused(microsoft: tuple[str, str], tmp_path: Path) -> None:
    raw = json.loads((Path(microsoft[0]) / "config.json").read_text(encoding="utf-8"))
    raw["vision_config"]["image_feature_source"] = ["last_frame"]
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(ModelError, match="last_frame"):
        LLM(model=str(tmp_path))
