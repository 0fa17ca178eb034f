"""LLM as a user meets it: options, sampling, errors of one request among others, streams."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from beheld import LLM, EngineArgs, LoRARequest, SamplingParams, mote
from beheld.checkpoint.resolve import fetch_weights, resolve
from beheld.core.errors import (
    BeheldError,
    ConfigError,
    EngineDeadError,
    EngineError,
    LoRAError,
    MediaError,
    ModelError,
    ParamsError,
    PromptError,
    PromptTooLongError,
    TemplateError,
)
from beheld.core.outputs import RequestOutput
from beheld.core.request import Request
from beheld.core.value_checks import table_of_ids
from beheld.inputs import request_checks
from beheld.inputs.pipeline import RequestOrder
from beheld.inputs.request_checks import NO_PRIORITY
from beheld.utils import log
from tests import tiny
from tests.interpreter_waits import longest_wait

FAMILY = "qwen2_vl"
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(tiny.checkpoint(FAMILY)), dtype="float32", max_model_len=512, max_num_seqs=8, seed=1) as made:
        yield made


def ask(text: str, *pictures: Any) -> dict[str, Any]:
    """A prompt of the family with these pictures."""
    return {
        "prompt": tiny.prompt(FAMILY, len(pictures), 0, text),
        "multi_modal_data": {"image": list(pictures)} if pictures else {},
    }


def ids(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


# ---- options ---------------------------------------------------------------------------------------------------------


def test_unknown_option_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"max_modle_len.*max_model_len"):
        LLM("x", max_modle_len=3)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"dtype": "int8"}, "There is no dtype 'int8'. Known: auto, float32, bfloat16, float16."),
        ({"dtype": "bflot16"}, "There is no dtype 'bflot16'. Did you mean 'bfloat16'?"),
        ({"limit_mm_per_prompt": {"image": -1}}, "limit_mm_per_prompt['image'] must be a whole number from 0, got -1."),
    ],
)
def test_a_value_that_does_not_exist_is_told_with_those_that_do(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(**options)
    assert str(caught.value) == told


def test_a_wrong_chat_template_is_told_of_at_once() -> None:
    with pytest.raises(TemplateError, match="nowhere"):
        LLM(str(tiny.checkpoint("llama")), dtype="float32", max_model_len=64, chat_template="/nowhere.jinja")


def test_engine_args_go_back_into_llm() -> None:
    args = EngineArgs(model=str(tiny.checkpoint("llama")), dtype="float32", max_model_len=128)
    args.limit_mm_per_prompt = {"image": 0} | dict(args.limit_mm_per_prompt or {})
    with LLM(**dataclasses.asdict(args) | {"seed": None}) as llm:
        assert len(llm.generate("Hello", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 8


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("tensor_parallel_size", 0),
        ("pipeline_parallel_size", 0),
        ("quantization", "fp6"),
        ("max_loras", 0),
        ("max_lora_rank", "8"),
        ("max_cpu_loras", 0),
        ("dtype", "float7"),
        ("max_model_len", 0),
        ("max_model_len", 10**9),
        ("max_num_seqs", True),
        ("limit_mm_per_prompt", {"smell": 1}),
        ("limit_mm_per_prompt", {"image": -1}),
        ("device", "abacus"),
        ("attention_backend", "none"),
        ("scheduling_policy", "random"),
        ("allowed_local_media_path", "/no/such/folder"),
        ("limit_mm_per_prompt", [1]),
        ("mm_processor_kwargs", 7),
        ("hf_overrides", 5),
        ("model", 5),
        ("seed", "a"),
        ("max_logprobs", "a"),
        ("logprobs_mode", "raw"),
        ("logprobs_mode", None),
        ("mm_encoder_budget", "x"),
        ("mm_processor_cache_gb", -1),
        ("gpu_memory_utilization", "x"),
        ("kv_cache_memory_bytes", "1G"),
        ("generation_config", "/somewhere"),
        ("override_generation_config", {"temprature": 0.5}),
        ("override_generation_config", {"top_p": 3}),
        ("override_generation_config", {"no_repeat_ngram_size": "three"}),
        ("media_io_kwargs", {"vidoe": {}}),
        ("media_io_kwargs", {"video": {"num_frame": 4}}),
        ("media_io_kwargs", {"video": {"num_frames": 0}}),
        ("media_io_kwargs", {"image": {"mode": "L"}}),
        ("media_io_kwargs", {"video": 5}),
        ("mm_processor_kwargs", {"size": {"longest_edge": 5}}),
    ],
)
def test_options_that_cannot_be_honoured_are_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(**{"model": str(tiny.checkpoint("llama")), option: value})
    assert caught.value.param == option


@pytest.mark.parametrize(
    ("family", "options", "said"),
    [
        ("llama", {"served_model_name": "other"}, ["served_model_name has no effect without a server"]),
        ("llama", {"limit_mm_per_prompt": {"image": 0}}, []),
        ("qwen2_vl", {"limit_mm_per_prompt": {"image": 1}}, []),
        ("qwen2_vl", {"limit_mm_per_prompt": {"image": 0, "audio": 0}}, ["limit_mm_per_prompt switches off image: "]),
        ("qwen2_vl", {"limit_mm_per_prompt": {"video": 0, "image": 0}}, ["switches off image, video: "]),
        ("qwen2_vl", {"language_model_only": True}, ["language_model_only switches off image, video: "]),
        ("qwen2_vl", {"language_model_only": True, "limit_mm_per_prompt": {"image": 2}}, ["off image, video: "]),
    ],
)
def test_what_changes_less_than_it_seems_is_said_once(
    family: str, options: dict[str, Any], said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), LLM(str(tiny.checkpoint(family)), **options):
        lines = [line for line in caplog.messages if "switches off" in line or "has no effect" in line]
    assert len(lines) == len(said)
    assert all(words in line for words, line in zip(said, lines, strict=True))


def test_what_is_not_a_model(tmp_path: Any) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        LLM(str(tmp_path))
    with pytest.raises(ModelError, match="no folder"):
        LLM(str(tmp_path / "nowhere"))
    source = tiny.checkpoint("llama")
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ModelError, match="no weights"):
        LLM(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError):
        LLM(str(tmp_path))
    (tmp_path / "config.json").write_text("not json")
    with pytest.raises(ModelError, match="cannot be read"):
        LLM(str(tmp_path))


def test_mote_is_the_embedded_model_unless_a_folder_is_called_so(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    args = EngineArgs(model="mote")
    assert resolve(args) == resolve(EngineArgs()) == mote.path()
    fetch_weights(args, mote.path())
    (tmp_path / "mote").mkdir()
    with pytest.raises(ModelError, match="The folder 'mote' is not a model"):
        resolve(args)


def test_dummy_weights_need_no_weight_file(tmp_path: Any) -> None:
    for file in tiny.checkpoint(FAMILY).iterdir():
        if "safetensors" not in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    before = torch.get_rng_state()
    with LLM(str(tmp_path), load_format="dummy", dtype="float32", max_model_len=256) as llm:
        assert torch.equal(torch.get_rng_state(), before)
        output = llm.generate(ask("What?", tiny.pictures(1, 0)[0]), GREEDY, use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == 8


# ---- answers ---------------------------------------------------------------------------------------------------------


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    pictures = tiny.pictures(12, 3)
    prompts = [ask("What is this?", picture) for picture in pictures]
    params = [SamplingParams(temperature=0, max_tokens=3 + 5 * (i % 3), ignore_eos=True) for i in range(12)]
    together = llm.generate(prompts, params, use_tqdm=False)
    alone = [llm.generate(p, s, use_tqdm=False)[0] for p, s in zip(prompts, params, strict=True)]
    assert ids(together) == ids(alone)
    assert [len(tokens) for tokens in ids(together)] == [s.max_tokens for s in params]
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in together)


def test_seeded_request_is_the_same_in_any_company(llm: LLM) -> None:
    picture = tiny.pictures(1, 5)[0]
    seeded = SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True)
    other = SamplingParams(temperature=1.3, max_tokens=12, ignore_eos=True)
    alone = llm.generate(ask("Why?", picture), seeded, use_tqdm=False)
    crowd = [ask("Why?", picture) if i == 3 else ask(f"How {i}?") for i in range(8)]
    mixed = llm.generate(crowd, [seeded if i == 3 else other for i in range(8)], use_tqdm=False)
    assert ids(alone)[0] == ids(mixed)[3]


def test_unseeded_equal_prompts_differ_within_a_batch(llm: LLM) -> None:
    outputs = llm.generate([ask("Tell me")] * 6, SamplingParams(temperature=1.0, max_tokens=12), use_tqdm=False)
    assert len({tuple(tokens) for tokens in ids(outputs)}) > 1


def test_n_answers(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=10, ignore_eos=True)
    (output,) = llm.generate(ask("Tell me"), params, use_tqdm=False)
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    assert len({tuple(answer.token_ids) for answer in output.outputs}) > 1
    (again,) = llm.generate(ask("Tell me"), params, use_tqdm=False)
    assert [a.token_ids for a in output.outputs] == [a.token_ids for a in again.outputs]


def test_stop_string_ends_the_sequence_in_the_engine(llm: LLM) -> None:
    (free,) = llm.generate(ask("Tell me"), GREEDY, use_tqdm=False)
    text = free.outputs[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop=[stop])
    (stopped,) = llm.generate(ask("Tell me"), params, use_tqdm=False)
    assert stopped.outputs[0].text == text[: text.index(stop)]
    assert stopped.outputs[0].finish_reason == "stop"
    assert stopped.outputs[0].stop_reason == stop
    assert llm.stats().scheduler.num_running == 0


def test_prompt_logprobs_are_those_of_transformers(llm: LLM) -> None:
    from transformers import AutoModelForImageTextToText

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    (output,) = llm.generate(ask("What is the weather like in the old town today?"), params, use_tqdm=False)
    tokens = output.prompt_token_ids
    model = AutoModelForImageTextToText.from_pretrained(tiny.checkpoint(FAMILY), dtype=torch.float32)
    with torch.inference_mode():
        logprobs = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(tokens)
    for position, entry in enumerate(output.prompt_logprobs[1:], start=1):
        assert entry[tokens[position]].logprob == pytest.approx(
            float(logprobs[position - 1, tokens[position]]), abs=1e-4
        )


def test_logits_processors_see_the_output_and_rule_the_choice(llm: LLM) -> None:
    seen: list[int] = []

    def only_count_up(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(len(output_ids))
        forced = torch.full_like(logits, float("-inf"))
        forced[30 + len(output_ids)] = 0.0
        return forced

    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logits_processors=[only_count_up])
    outputs = llm.generate([ask("One"), ask("Two")], [params, GREEDY], use_tqdm=False)
    assert ids(outputs)[0] == [30, 31, 32, 33, 34]
    assert seen == [0, 1, 2, 3, 4]
    assert ids(outputs)[1] == ids(llm.generate(ask("Two"), GREEDY, use_tqdm=False))[0]


def test_a_processor_that_raises_fails_its_request_alone(llm: LLM) -> None:
    def broken(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of ideas")

    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logits_processors=[broken])
    outputs = llm.generate([ask("One"), ask("Two")], [params, GREEDY], use_tqdm=False, on_error="return")
    assert isinstance(outputs[0].error, EngineError)
    assert "out of ideas" in str(outputs[0].error)
    assert ids(outputs[1:]) == ids(llm.generate(ask("Two"), GREEDY, use_tqdm=False))


# ---- errors of one among many ----------------------------------------------------------------------------------------


def test_bad_requests_get_their_error_and_the_others_finish(llm: LLM) -> None:
    good = ask("What?", tiny.pictures(1, 0)[0])
    bad: list[tuple[Any, type[BeheldError]]] = [
        ({"prompt": good["prompt"]}, PromptError),
        ({"prompt": "no marker", "multi_modal_data": good["multi_modal_data"]}, PromptError),
        (ask("long " * 2000), PromptTooLongError),
        ({"prompt": good["prompt"], "multi_modal_data": {"image": b"not a picture"}}, MediaError),
        ({"prompt": good["prompt"], "multi_modal_data": {"smell": 1}}, BeheldError),
        ({"promt": "x"}, PromptError),
        ("", PromptError),
        ("half a pair: \ud800", PromptError),
    ]
    prompts = [good, *(prompt for prompt, _ in bad), good]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, on_error="return")
    for output, (_, kind) in zip(outputs[1:-1], bad, strict=True):
        assert isinstance(output.error, kind), output.error
        assert output.finished
        assert output.outputs == []
    assert outputs[0].error is None
    assert ids([outputs[0]]) == ids([outputs[-1]])


def test_raise_stops_at_the_first_error_and_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(PromptTooLongError):
        llm.generate([ask("One"), ask("long " * 2000)], GREEDY, use_tqdm=False)
    stats = llm.stats().scheduler
    assert stats.num_running == stats.num_waiting == 0
    assert stats.num_free_blocks == stats.num_blocks


def test_wrong_calls(llm: LLM) -> None:
    with pytest.raises(ParamsError, match="2 sampling_params for 1"):
        llm.generate([ask("x")], [GREEDY, GREEDY], use_tqdm=False)
    with pytest.raises(ParamsError, match="on_error"):
        llm.generate([ask("x")], GREEDY, on_error="ignore")
    with pytest.raises(ParamsError, match="temperature"):
        SamplingParams(temperature=-1)
    changed = SamplingParams()
    changed.max_tokens = 0
    with pytest.raises(ParamsError, match="max_tokens"):
        llm.generate(ask("x"), changed, use_tqdm=False)
    assert llm.generate([], GREEDY) == []
    assert llm.chat([], GREEDY) == []
    for wrong in (5, None):
        with pytest.raises(PromptError):
            llm.generate(wrong, GREEDY)  # type: ignore[arg-type]
    with pytest.raises(PromptError):
        llm.chat({"role": "user", "content": "x"}, GREEDY)  # type: ignore[arg-type]
    with pytest.raises(ParamsError, match="sampling_params"):
        llm.generate(ask("x"), {"temperature": 0})  # type: ignore[arg-type]
    with pytest.raises(ParamsError, match="on_error"):
        next(llm.generate_iter([ask("x")], GREEDY, on_error="ignore"))


def test_a_priority_is_told_once_where_requests_are_taken_in_order(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(request_checks.logger, "log", lambda level, message: said.append(message))
    log._said.discard(NO_PRIORITY)
    plain = llm.generate([ask("x")], GREEDY, use_tqdm=False)
    ranked = [llm.generate([ask("x")], GREEDY, priority=[1], use_tqdm=False) for _ in range(2)]
    assert [made[0].outputs[0].token_ids for made in ranked] == [plain[0].outputs[0].token_ids] * 2
    assert said == [NO_PRIORITY]


def test_options_of_a_call_are_those_of_its_prompts(llm: LLM) -> None:
    picture, few = tiny.picture(112, 112, 1), {"max_pixels": 56 * 56}
    own = llm.generate(ask("x", picture) | {"mm_processor_kwargs": few}, GREEDY, use_tqdm=False)
    many = [ask("x", picture), ask("x", picture) | {"mm_processor_kwargs": {"max_pixels": 112 * 112}}]
    common = llm.generate(many, GREEDY, use_tqdm=False, mm_processor_kwargs=few, priority=1)
    plain = llm.generate(ask("x", picture), GREEDY, use_tqdm=False)
    lengths = [len(output.prompt_token_ids or ()) for output in (*common, *own, *plain)]
    assert lengths[0] == lengths[2] < lengths[1] == lengths[3]
    for bad in ({"padding": True}, {"truncate_prompt_tokens": 3}):
        with pytest.raises(ParamsError, match="tokenization_kwargs"):
            llm.generate(ask("x"), GREEDY, tokenization_kwargs=bad)
    talk = [{"role": "user", "content": "x"}]
    llm.chat(talk, GREEDY, use_tqdm=False, priority=[1], tokenization_kwargs={"add_special_tokens": False})
    with pytest.raises(ParamsError, match="true or false"):
        llm.chat(talk, GREEDY, tokenization_kwargs={"add_special_tokens": "yes"})
    with LLM(str(tiny.checkpoint("llama")), dtype="float32", max_model_len=64) as text:
        whole, bare = (
            text.generate("x y", GREEDY, use_tqdm=False, tokenization_kwargs={"add_special_tokens": wanted})[0]
            for wanted in (True, False)
        )
        template = "{{ messages[0].content }}"
        more, less = (
            text.chat(
                [{"role": "user", "content": "x y"}],
                GREEDY,
                use_tqdm=False,
                chat_template=template,
                tokenization_kwargs={"add_special_tokens": wanted},
            )[0]
            for wanted in (True, False)
        )
    assert list(whole.prompt_token_ids or ())[1:] == list(bare.prompt_token_ids or ())
    assert (more.prompt_token_ids, less.prompt_token_ids) == (whole.prompt_token_ids, bare.prompt_token_ids)


def test_metrics_are_filled(llm: LLM) -> None:
    (found,) = llm.generate([ask("x")], GREEDY, use_tqdm=False)
    metrics = found.metrics
    assert metrics is not None
    assert metrics.num_generation_tokens == len(found.outputs[0].token_ids) > 0
    assert metrics.queued_ts <= metrics.scheduled_ts <= metrics.first_token_ts <= metrics.last_token_ts
    assert abs(metrics.arrival_time - time.time()) < 60
    assert 0 < metrics.first_token_latency < 60


def test_what_would_change_nothing_is_refused(llm: LLM) -> None:
    with pytest.raises(LoRAError, match="enable_lora"):
        llm.generate(ask("x"), GREEDY, lora_request=LoRARequest("a", 1, "/a"), use_tqdm=False)
    with pytest.raises(ParamsError, match="priority"):
        llm.generate([ask("x")], GREEDY, priority=["a"], use_tqdm=False)  # type: ignore[list-item]


def test_whatever_goes_wrong_in_preparing_one_request_the_others_finish(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = llm._inputs.prepare

    def broken(order: RequestOrder) -> Request:
        if order.prompt == "break":
            raise ZeroDivisionError("a defect of ours")
        return honest(order)

    monkeypatch.setattr(llm._inputs, "prepare", broken)
    bad, good = llm.generate(["break", ask("x")], GREEDY, use_tqdm=False, on_error="return")
    assert isinstance(bad.error, EngineError)
    assert "a defect of ours" in str(bad.error)
    assert good.error is None
    assert len(good.outputs[0].token_ids) == 8


def test_more_log_probabilities_where_the_engine_allows_them() -> None:
    with LLM(str(tiny.checkpoint("llama")), dtype="float32", max_model_len=64, max_logprobs=30) as llm:
        (output,) = llm.generate("Hello", SamplingParams(max_tokens=1, temperature=0, logprobs=30), use_tqdm=False)
        assert output.outputs[0].logprobs is not None
        assert len(output.outputs[0].logprobs[0]) == 30
        with pytest.raises(ParamsError, match="max_logprobs"):
            llm.generate("Hello", SamplingParams(logprobs=31), use_tqdm=False)
        for name in ("logprobs", "prompt_logprobs"):
            with pytest.raises(ParamsError, match=f"{name}=-1, which is all [0-9]+ tokens of the vocabulary, exceeds"):
                llm.generate("Hello", SamplingParams(**{name: -1}), use_tqdm=False)


def test_log_probabilities_of_the_whole_vocabulary_and_of_named_tokens() -> None:
    options = {"dtype": "float32", "max_model_len": 64, "max_logprobs": -1}
    with LLM(str(tiny.checkpoint("llama")), **options) as llm:
        size = json.loads((tiny.checkpoint("llama") / "config.json").read_text())["vocab_size"]

        def ask(**more: Any) -> RequestOutput:
            params = SamplingParams(max_tokens=2, temperature=0, **more)
            (output,) = llm.generate("Hello", params, use_tqdm=False)
            return output

        whole = ask(logprobs=-1, prompt_logprobs=-1)
        assert whole.outputs[0].logprobs is not None
        assert whole.prompt_logprobs is not None
        for entry in (*whole.outputs[0].logprobs, *whole.prompt_logprobs[1:]):
            assert entry is not None
            assert sorted(entry) == list(range(size))
            assert {one.rank for one in entry.values()} == set(range(1, size + 1))
            assert sum(math.exp(one.logprob) for one in entry.values()) == pytest.approx(1, abs=1e-4)
        named = ask(logprob_token_ids=[5, 3, 5]).outputs[0]
        assert named.logprobs is not None
        assert named.cumulative_logprob is not None
        for token, entry, known in zip(named.token_ids, named.logprobs, whole.outputs[0].logprobs, strict=True):
            assert list(entry) == list(dict.fromkeys((token, 5, 3)))
            assert {k: v.logprob for k, v in entry.items()} == pytest.approx({k: known[k].logprob for k in entry})
            assert [entry[5].rank, entry[3].rank, entry[token].rank] == [None, None, 1]
        for wrong in ({"logprob_token_ids": [size]}, {"logprob_token_ids": list(range(129))}):
            with pytest.raises(ParamsError, match="logprob_token_ids"):
                ask(**wrong)
        with pytest.raises(ParamsError, match="logprob_token_ids has 2 tokens"):
            ask(logprob_token_ids=[5, 3], logprobs=1)


def named_at_each_position(count: int, start: int) -> list[list[int]]:
    """One to three tokens for each position."""
    return [[place + 1, 50 + place % 3, 7][: 1 + place % 3] for place in range(count - 1 - start)]


@pytest.mark.parametrize("steps", [{}, {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 9}])
def test_log_probabilities_of_tokens_named_at_positions_of_the_prompt(steps: dict[str, int]) -> None:
    """Also where prompts are computed in pieces, and interrupted: blocks for two of the six are there."""
    prompts = [{"prompt_token_ids": list(range(5 + n, 5 + n + 10 * n))} for n in range(1, 7)]
    lengths = [len(prompt["prompt_token_ids"]) for prompt in prompts]
    with LLM(str(tiny.checkpoint("llama")), dtype="float32", max_model_len=96, max_logprobs=-1) as llm:
        whole = llm.generate(prompts, SamplingParams(max_tokens=0, prompt_logprobs=-1), use_tqdm=False)
    options = {"dtype": "float32", "max_model_len": 96, "max_logprobs": 3, "max_num_seqs": 4, **steps}
    with LLM(str(tiny.checkpoint("llama")), **options) as llm:
        for start, likely in ((0, None), (4, None), (4, 2)):
            params = [
                SamplingParams(
                    max_tokens=30,
                    temperature=0,
                    prompt_logprobs=likely,
                    prompt_logprob_token_ids=named_at_each_position(length, start),
                    prompt_logprob_start=start,
                )
                for length in lengths
            ]
            for found, known, length in zip(llm.generate(prompts, params, use_tqdm=False), whole, lengths, strict=True):
                scores, report = found.prompt_token_id_logprobs, known.prompt_logprobs
                assert scores is not None
                assert report is not None
                assert (found.prompt_logprobs is None) == (likely is None)
                assert scores.shape == (length - 1 - start, 3)
                for place, row in enumerate(named_at_each_position(length, start)):
                    entry = report[start + place + 1]
                    assert entry is not None
                    assert scores[place, : len(row)] == pytest.approx([entry[t].logprob for t in row], abs=1e-4)
                    assert np.isneginf(scores[place, len(row) :]).all()


def test_a_table_of_named_tokens_may_be_an_array_and_is_checked(llm: LLM) -> None:
    prompt = {"prompt_token_ids": [5, 6, 7, 8]}
    rows = [[1, 2], [3, 4], [5, 6]]

    def ask(table: Any, **more: Any) -> np.ndarray:
        params = SamplingParams(max_tokens=0, prompt_logprob_token_ids=table, **more)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert output.prompt_token_id_logprobs is not None
        return output.prompt_token_id_logprobs

    known = ask(rows)
    for dtype in (">i8", "uint8", "int32"):
        assert ask(np.asfortranarray(np.array(rows, dtype=dtype))) == pytest.approx(known)
    # A prefix that is in the cache is computed again, as cached positions have no logits.
    assert ask(rows) == pytest.approx(known)
    for wrong, words in (
        (rows[:2], "2 rows, but 4 tokens have 3 scored rows"),
        ([[1], [2**40], [3]], "out-of-vocab"),
        (np.array([[2**64 - 1]] * 3, dtype=np.uint64), "out-of-vocab"),
        ([[1], [10**6], [3]], "out-of-vocab"),
        ([[-2]] * 3, "out-of-vocab"),
        ([[None]] * 3, "integer token ids"),
        ([[True]] * 3, "integer token ids"),
        ([1, 2, 3], r"shape \[num_rows, num_ids\]"),
        (np.zeros((3, 0), np.int32), "non-empty"),
        (np.ones((3, 1)), "integer array"),
        ([list(range(21))] * 3, "max_logprobs"),
    ):
        with pytest.raises(ParamsError, match=words) as refused:
            ask(wrong)
        assert refused.value.param == "prompt_logprob_token_ids"
    with pytest.raises(ParamsError, match="requires prompt_logprob_token_ids"):
        SamplingParams(prompt_logprob_start=1)


def test_a_large_table_lets_other_threads_run() -> None:
    rows = [[number % 1000] * 32 for number in range(131_072)]
    rows[-1] = [7, 2**31 - 1]
    tables: list[np.ndarray] = []
    assert longest_wait(lambda: tables.append(table_of_ids("x", rows))) < 0.045
    assert tables[0].dtype == np.int32
    assert (tables[0][:-1] == np.arange(131_071)[:, None] % 1000).all()
    assert tables[0][-1].tolist() == [7, 2**31 - 1] + [-1] * 30


@pytest.mark.parametrize("reports", [{"prompt_logprobs": 0}, {"prompt_logprob_token_ids": [[7]] * 69}])
def test_a_prompt_with_a_report_is_computed_once_for_several_answers(reports: dict[str, Any]) -> None:
    prompt = {"prompt_token_ids": list(range(5, 75))}
    options = {"dtype": "float32", "max_model_len": 96, "block_size": 16, "max_num_batched_tokens": 64}
    with LLM(str(tiny.checkpoint("llama")), **options) as llm:
        hits = llm.stats().scheduler.prefix_hits
        (several,) = llm.generate([prompt], SamplingParams(n=4, max_tokens=3, seed=1, **reports), use_tqdm=False)
        hits = llm.stats().scheduler.prefix_hits - hits
        (one,) = llm.generate([prompt], SamplingParams(max_tokens=3, seed=1, **reports), use_tqdm=False)
    assert [answer.index for answer in several.outputs] == [0, 1, 2, 3]
    assert several.outputs[0].token_ids == one.outputs[0].token_ids
    assert several.prompt_logprobs == one.prompt_logprobs
    assert str(several.prompt_token_id_logprobs) == str(one.prompt_token_id_logprobs)
    # All whole blocks of the prompt, for three of the four.
    assert hits == 3 * 64


# ---- streams ---------------------------------------------------------------------------------------------------------


def test_chat_stream_adds_up_to_the_whole_answer(llm: LLM) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hello there"}]}]
    whole = llm.chat(messages, GREEDY, use_tqdm=False)[0].outputs[0]
    pieces = list(llm.chat_stream(messages, GREEDY))
    assert "".join(piece.outputs[0].text for piece in pieces) == whole.text
    assert [t for piece in pieces for t in piece.outputs[0].token_ids] == whole.token_ids
    assert pieces[-1].finished
    assert len(pieces) > 2


def test_closed(tmp_path: Any) -> None:
    llm = LLM(str(tiny.checkpoint("llama")), dtype="float32", max_model_len=64)
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError):
        llm.generate("Hello", GREEDY)


def test_progress_bars_as_users_know_them(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([ask("One"), ask("Two")], GREEDY)
    shown = capsys.readouterr().err
    assert "Adding requests: 100%" in shown
    assert "Processed prompts: 100%" in shown
    assert "est. speed input:" in shown


def test_an_answer_without_tokens_has_what_is_said_of_the_prompt() -> None:
    with LLM(str(tiny.checkpoint("llama")), dtype="float32", seed=0, num_gpu_blocks_override=60) as llm:
        given: dict[str, Any] = {"temperature": 0, "prompt_logprobs": 2}
        whole, none = (
            llm.generate("a small red circle", SamplingParams(**given, max_tokens=count), use_tqdm=False)[0]
            for count in (3, 0)
        )
        assert none.prompt_logprobs == whole.prompt_logprobs
        (answer,) = none.outputs
        assert (answer.text, list(answer.token_ids), answer.finish_reason) == ("", [], "length")
        assert (none.usage.completion_tokens, none.finished) == (0, True)
    with pytest.raises(ParamsError, match="max_tokens"):
        SamplingParams(max_tokens=0)
