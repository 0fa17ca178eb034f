"""Whisper's answers equal transformers' own: with each kind of prompt, in batches, cut, shared, preempted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from beheld import LLM, SamplingParams
from beheld.checkpoint.checks.generation import check_generation
from beheld.checkpoint.info import read_info
from beheld.core.config import EngineArgs
from beheld.core.errors import ConfigError, MediaLossError, ModelError, ParamsError, PlaceholderError, PromptError
from beheld.core.structured_outputs import StructuredOutputs
from beheld.inputs.prompt.parse import parse
from tests import tiny
from tests.inputs import pipes
from tests.oracle import whisper_reference as reference
from tests.oracle.cases import ROOMY

START = "<|startoftranscript|>"
ENGLISH = f"{START}<|en|><|transcribe|><|notimestamps|>"
TIMED = f"{START}<|de|><|translate|>"
AFTER = f"<|startofprev|> The small red circle stands left of a large blue square.{ENGLISH}"


@dataclass(frozen=True)
class Said:
    """A sound as (seconds, seed), a prompt, and the rules that bind its answer; see whisper_reference.answer."""

    sound: tuple[float, int]
    prompt: str = ENGLISH
    rules: str = "text"
    max_tokens: int = 24


ALL = (
    Said((1.3, 0)),
    Said((1.3, 0), TIMED, "timestamps", 40),
    Said((0.4, 1), TIMED, "timestamps", 32),
    Said((2.0, 2), START, "none"),
    Said((1.1, 3), AFTER),
    Said((1.3, 4), f"{START}<|fr|><|transcribe|>", "timestamps", 40),
    Said((0.7, 5), f"{START}<|en|>", "none", 12),
    Said((1.9, 11), AFTER.removesuffix("<|notimestamps|>"), "timestamps", 16),
)


def request(said: Said) -> dict[str, Any]:
    """`said` as the public API takes it."""
    return {"prompt": said.prompt, "multi_modal_data": {"audio": (tiny.sound(*said.sound), tiny.SOUND_RATE)}}


def check(llm: LLM, *asked: Said) -> None:
    """Put all in one call and compare each answer with transformers'."""
    params = [SamplingParams(temperature=0, max_tokens=one.max_tokens, logprobs=1) for one in asked]
    outputs = llm.generate([request(one) for one in asked], params, use_tqdm=False)
    for said, output in zip(asked, outputs, strict=True):
        expected, got = reference.answer(said.sound, said.prompt, said.max_tokens, rules=said.rules), output.outputs[0]
        assert tuple(output.prompt_token_ids) == expected.prompt_ids, said
        assert tuple(got.token_ids) == expected.token_ids, said
        logprobs = [step[token].logprob for step, token in zip(got.logprobs, got.token_ids, strict=True)]
        assert logprobs == pytest.approx(expected.logprobs, abs=1e-4), said


def make(**options: Any) -> LLM:
    """An engine on the tiny checkpoint, in float32."""
    folder = str(tiny.checkpoint("whisper"))
    return LLM(
        model=folder, dtype="float32", seed=0, disable_log_stats=True, **(ROOMY | {"max_model_len": 96} | options)
    )


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """An engine with room for everything."""
    with make() as made:
        yield made


def test_the_checkpoint_is_fit_to_be_an_oracle() -> None:
    answers = [reference.answer(one.sound, one.prompt, one.max_tokens, rules=one.rules) for one in ALL]
    assert min(min(answer.gaps) for answer in answers) > 1e-3
    assert len({answer.token_ids[:4] for answer in answers}) > len(ALL) - 2
    first = reference.ids("<|0.00|>")[0]
    timed = [answer for answer, said in zip(answers, ALL, strict=True) if said.rules == "timestamps"]
    assert all(sum(token >= first for token in answer.token_ids) > 2 for answer in timed)


def test_every_kind_of_prompt_alone_and_together(llm: LLM) -> None:
    for said in ALL[1:5]:
        check(llm, said)
    check(llm, *ALL)
    check(llm, *ALL[::-1])


@pytest.mark.parametrize("overlap", [False, True], ids=["in_step", "overlap"])
def test_cut_prompts(overlap: bool) -> None:
    with make(max_num_seqs=5, max_num_batched_tokens=7, block_size=8, async_scheduling=overlap) as llm:
        check(llm, *ALL)


def test_preempted_sequences_resume() -> None:
    asked = [Said((0.5, 20 + n), TIMED if n % 2 else ENGLISH, "timestamps" if n % 2 else "text", 36) for n in range(6)]
    with make(max_model_len=64, max_num_seqs=8, block_size=8, num_gpu_blocks_override=18) as llm:
        check(llm, *asked)
        assert llm.stats().scheduler.num_preemptions > 0


def test_a_prefix_is_shared_with_the_same_audio_only() -> None:
    here, other = Said((1.1, 3), AFTER), Said((1.1, 7), AFTER)
    with make(block_size=8) as llm:
        hits = []
        for said in (here, here, other, Said(here.sound, AFTER.replace("<|en|>", "<|es|>"))):
            before = llm.stats().scheduler.prefix_hits
            check(llm, said)
            hits.append(llm.stats().scheduler.prefix_hits - before)
        length = len(reference.ids(AFTER))
        assert hits == [0, (length - 1) // 8 * 8, 0, (length - 3) // 8 * 8]
        # The states are computed once per audio.
        assert llm.stats().scheduler.num_encoded == 2


def test_equals_whispers_own_generate(llm: LLM) -> None:
    """transformers' method for Whisper, which finds the language and writes the prompt by itself."""
    sound = (1.3, 8)
    for options, prompt in (
        ({"language": "en", "task": "transcribe"}, ENGLISH),
        ({"language": "de", "task": "translate"}, f"{START}<|de|><|translate|><|notimestamps|>"),
    ):
        made = reference.model().generate(reference.features(*sound), **options)[0].tolist()
        params = SamplingParams(temperature=0, max_tokens=90)
        (output,) = llm.generate(request(Said(sound, prompt)), params, use_tqdm=False)
        ours = list(output.outputs[0].token_ids)
        # It gives no end, and counts only new tokens to the longest answer.
        ours = ours[:-1] if output.outputs[0].finish_reason == "stop" else ours
        assert made[: len(ours)] == ours
        assert len(ours) > 12


def test_the_forms_of_a_prompt(llm: LLM) -> None:
    said = ALL[0]
    params = SamplingParams(temperature=0, max_tokens=8)
    data = {"multi_modal_data": request(said)["multi_modal_data"]}
    forms: list[Any] = [
        request(said),
        {"prompt_token_ids": reference.ids(ENGLISH), **data},
        {"encoder_prompt": {"prompt": "", **data}, "decoder_prompt": ENGLISH},
        {"encoder_prompt": {"prompt_token_ids": [], **data}, "decoder_prompt": {"prompt": ENGLISH}},
        {"encoder_prompt": data, "decoder_prompt": {"prompt_token_ids": reference.ids(ENGLISH)}},
    ]
    outputs = llm.generate(forms, params, use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    bare = llm.generate(
        [{"encoder_prompt": data, "decoder_prompt": None}, {"prompt": "", **data}, {"prompt": START, **data}],
        params,
        use_tqdm=False,
    )
    assert len({tuple(output.outputs[0].token_ids) for output in bare}) == 1
    assert tuple(bare[0].prompt_token_ids) == tuple(reference.ids(START))


def test_what_is_refused(llm: LLM) -> None:
    sound = request(ALL[0])["multi_modal_data"]["audio"]

    def ask(prompt: Any, **params: Any) -> None:
        llm.generate(prompt, SamplingParams(max_tokens=2, **params), use_tqdm=False)

    with pytest.raises(PlaceholderError, match="0 audio items"):
        ask({"prompt": START})
    with pytest.raises(PromptError, match="reads one audio per prompt"):
        ask({"prompt_token_ids": [5, 6]})
    with pytest.raises(PromptError, match="at most 1"):
        ask({"prompt": START, "multi_modal_data": {"audio": [sound, sound]}})
    with pytest.raises(PromptError, match="no text"):
        ask({"encoder_prompt": {"prompt": "Hi", "multi_modal_data": {"audio": sound}}, "decoder_prompt": START})
    with pytest.raises(PromptError, match="belongs to encoder_prompt"):
        ask({"encoder_prompt": None, "decoder_prompt": {"prompt": START, "multi_modal_data": {"audio": sound}}})
    with pytest.raises(ParamsError, match="forces or forbids tokens"):
        ask(request(ALL[1]), structured_outputs=StructuredOutputs(choice=["a", "b"]))
    with pytest.raises(ConfigError, match="begin_suppress_tokens"):
        make(override_generation_config={"begin_suppress_tokens": [10**6]})
    with pytest.raises(PromptError, match="has no encoder"):
        parse({"encoder_prompt": "a", "decoder_prompt": "b"}, pipes.info("llama"), 1)


def test_what_is_not_heard_is_told(llm: LLM) -> None:
    long = {"prompt": ENGLISH, "multi_modal_data": {"audio": (tiny.sound(3.0, 9), tiny.SOUND_RATE)}}
    (output,) = llm.generate(long, SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    (receipt,) = output.media
    assert receipt.lost == ("only the first 2 of 3 s are heard",)
    with make(strict_media=True) as strict, pytest.raises(MediaLossError, match="first 2 of 3 s"):
        strict.generate(long, SamplingParams(max_tokens=2), use_tqdm=False)


def test_the_checkpoint_is_described_as_it_is() -> None:
    info = read_info(tiny.checkpoint("whisper"), EngineArgs())
    assert [(group.kind, group.num_states, len(group.layers)) for group in info.kv_groups] == [
        ("full", 0, 2),
        ("cross", 100, 2),
    ]
    assert (info.max_model_len, info.encoder_reads, info.modalities) == (96, "audio", ("audio",))
    assert info.decoder_start_id == reference.model().generation_config.decoder_start_token_id


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("begin_suppress_tokens", 3),
        ("task_to_id", [1]),
        ("lang_to_id", {"<|en|>": "x"}),
        ("max_initial_timestamp_index", "late"),
    ],
)
def test_damaged_rules_are_refused(name: str, value: Any) -> None:
    stated = {"eos_token_id": 1, "task_to_id": {"transcribe": 2}, "lang_to_id": {"<|en|>": 3}}
    check_generation(stated)
    with pytest.raises(ModelError, match=name):
        check_generation(stated | {name: value})
