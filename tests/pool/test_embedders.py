"""Decoders that give vectors: equal to transformers' hidden states, however a prompt is cut, shared and batched."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

from beheld import LLM, AsyncLLM, PoolingParams, SamplingParams
from beheld.api.feed import JobGroup
from beheld.checkpoint.weights import chosen
from beheld.core.errors import (
    CapacityError,
    ConfigError,
    ModelError,
    ParamsError,
    PromptError,
    PromptTooLongError,
    UserError,
)
from beheld.core.outputs import EmbeddingRequestOutput, PoolingRequestOutput
from beheld.core.request import Request
from beheld.engine.messages import Submit
from beheld.inputs.pipeline import InputPipeline, RequestOrder
from beheld.inputs.prompt.tokenizer import SHORT_TEXT
from tests import tiny
from tests.oracle import reference
from tests.oracle.cases import Ask
from tests.pool.checkpoints import copied, dense, modules, without_head

FAMILY = "qwen2"
TEXTS = (
    "What is in this picture?",
    "A small red circle stands left of a large blue square. " * 6,
    "A small red circle stands left of a large blue square. " * 5 + "How many shapes are there?",
    "Hello",
)
SMALL: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    options = SMALL | {"max_num_batched_tokens": 48}
    with LLM(str(tiny.checkpoint(FAMILY)), runner="pooling", hf_overrides={"is_matryoshka": True}, **options) as made:
        yield made


@pytest.fixture(scope="module")
def states() -> list[torch.Tensor]:
    """transformers' last hidden states (N, H) of each text."""
    return hidden(tiny.checkpoint(FAMILY), TEXTS)


@torch.no_grad()
def hidden(folder: Path, texts: Any) -> list[torch.Tensor]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    return [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0] for text in texts]


def vectors(outputs: Any) -> torch.Tensor:
    return torch.tensor([output.outputs.embedding for output in outputs])


def assert_equal(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)


# ---- against transformers --------------------------------------------------------------------------------------------


def test_the_last_state_in_chunks_in_batches_and_after_prefix_hits(llm: LLM, states: list[torch.Tensor]) -> None:
    wanted = F.normalize(torch.stack([state[-1] for state in states]), dim=-1)
    assert_equal(vectors(llm.embed(TEXTS, use_tqdm=False)), wanted)
    again = llm.embed(TEXTS, use_tqdm=False)
    assert_equal(vectors(again), wanted)
    assert again[1].num_cached_tokens >= 128
    assert again[1].usage.prompt_tokens == len(again[1].prompt_token_ids) == len(states[1])


@pytest.mark.parametrize(("method", "pick"), [("MEAN", lambda s: s.mean(0)), ("CLS", lambda s: s[0])])
def test_other_methods_read_every_position(method: str, pick: Any, states: list[torch.Tensor]) -> None:
    options = SMALL | {"max_num_batched_tokens": 48, "override_pooler_config": {"pooling_type": method}}
    with LLM(str(tiny.checkpoint(FAMILY)), task="embed", **options) as llm:
        for _ in range(2):
            outputs = llm.embed(TEXTS, use_tqdm=False, pooling_params=PoolingParams(normalize=False))
            assert_equal(vectors(outputs), torch.stack([pick(state) for state in states]))
            assert [output.num_cached_tokens for output in outputs] == [0] * len(TEXTS)


def test_the_task_of_an_engine_is_that_of_its_requests(states: list[torch.Tensor]) -> None:
    options = SMALL | {"override_pooler_config": {"task": "token_embed", "normalize": False}}
    with LLM(str(tiny.checkpoint(FAMILY)), runner="pooling", **options) as llm:
        for output, state in zip(llm.encode(TEXTS, use_tqdm=False), states, strict=True):
            assert_equal(output.outputs.data, state)
        assert len(llm.embed(TEXTS[0], use_tqdm=False)[0].outputs.embedding) == states[0].shape[-1]
        (score,) = llm.score(TEXTS[0], TEXTS[1], use_tqdm=False)
        assert score.outputs.score == pytest.approx(float((states[0] @ states[1].T).amax(1).sum()), rel=1e-4)


def test_vectors_of_all_positions_leave_scores_as_they_are(states: list[torch.Tensor]) -> None:
    options = SMALL | {"override_pooler_config": {"pooling_type": "ALL"}}
    with LLM(str(tiny.checkpoint(FAMILY)), runner="pooling", **options) as llm:
        (score,) = llm.score(TEXTS[0], TEXTS[1], use_tqdm=False)
    wanted = torch.cosine_similarity(states[0][-1], states[1][-1], dim=0)
    assert score.outputs.score == pytest.approx(float(wanted), abs=1e-5)


def test_all_positions_give_a_vector_each(llm: LLM, states: list[torch.Tensor]) -> None:
    params = PoolingParams(use_activation=False)
    for output, state in zip(
        llm.encode(TEXTS, params, pooling_task="token_embed", use_tqdm=False), states, strict=True
    ):
        assert_equal(output.outputs.data, state)


def test_vectors_may_be_truncated(llm: LLM, states: list[torch.Tensor]) -> None:
    params = [PoolingParams(dimensions=8), PoolingParams(dimensions=64), PoolingParams(dimensions=8, normalize=False)]
    outputs = llm.embed([TEXTS[0]] * 3, pooling_params=params, use_tqdm=False)
    last = states[0][-1]
    for output, wanted in zip(outputs, (F.normalize(last[:8], dim=0), F.normalize(last, dim=0), last[:8]), strict=True):
        assert_equal(torch.tensor(output.outputs.embedding), wanted)


def test_ids_texts_and_scores(llm: LLM, states: list[torch.Tensor]) -> None:
    ids = transformers.AutoTokenizer.from_pretrained(tiny.checkpoint(FAMILY))(TEXTS[0])["input_ids"]
    first, second = llm.embed([{"prompt_token_ids": ids}, TEXTS[0]], use_tqdm=False)
    assert first.outputs == second.outputs
    wanted = [float(F.cosine_similarity(states[0][-1], state[-1], dim=0)) for state in states]
    scores = llm.score(TEXTS[0], list(TEXTS), use_tqdm=False)
    assert [score.outputs.score for score in scores] == pytest.approx(wanted, abs=1e-5)
    pairs = llm.score(list(TEXTS), list(TEXTS), use_tqdm=False)
    assert [score.outputs.score for score in pairs] == pytest.approx([1.0] * len(TEXTS), abs=1e-5)


def test_texts_that_are_read_ahead_give_the_same_requests(llm: LLM) -> None:
    """All but when they arrived; a wrong text is told as it is alone, and a text is only read ahead once."""
    inputs = llm._inputs
    texts = ["Hello", "Hello", "Zwei Wörter", "", "<|im_end|> is a token", "x " * 900, "a\ud800b", "a longer text " * 9]

    def prepared(text: str) -> Any:
        order = RequestOrder(text, PoolingParams(dimensions=8), "7", priority=2, client="me")
        try:
            return vars(inputs.prepare(order))
        except UserError as error:
            return str(error)

    alone = [prepared(text) for text in texts]
    inputs.reader.read_ahead(texts, first=True)
    known = dict(inputs.reader._tokenizer._ahead)
    assert set(known) == set(texts) - {"a\ud800b"}
    assert [prepared(text) for text in texts] == alone
    assert not inputs.reader._tokenizer._ahead
    made = inputs.plain_group(texts, PoolingParams(dimensions=8), ["7"] * len(texts), [2] * len(texts), 0.0)
    assert [None if one is None else vars(one) | {"client": "me"} for one in made] == [
        None if isinstance(one, str) else one for one in alone
    ]
    assert sum(isinstance(made, str) for made in alone) == 3
    assert alone[0]["token_ids"] == tuple(known["Hello"])


@pytest.mark.parametrize("media", [False, True])
def test_plain_texts_are_prepared_in_runs(llm: LLM, media: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads prepare a long text, which would hold up the steps of all, and those of models that see."""
    brief, long, large = [f"text {number}" for number in range(3)], "y" * (SHORT_TEXT + 1), "z" * SHORT_TEXT
    texts = [brief[0], *(f"{number:02}{large[2:]}" for number in range(20)), long, *brief[1:]]
    if media:
        monkeypatch.setattr(llm._inputs, "_info", dataclasses.replace(llm._info, modalities=("image",)))
        monkeypatch.setattr(llm._jobs, "_pools_texts", False)
    found = [
        len(job) if isinstance(job, JobGroup) else job.light
        for job in llm._jobs.jobs(texts, PoolingParams(), None, None).each
    ]
    assert found == ([False] * len(texts) if media else [4, 4, 4, 4, 4, 1, False, 2])


WRONG: tuple[Any, ...] = (
    "",
    [5, 10**9],
    "x " * 900,
    "a\ud800b",
    {"prompt": [1]},
    {"prompt_token_ids": "ab"},
    [1, True],
)


def test_a_wrong_prompt_of_a_run_fails_alone(llm: LLM) -> None:
    right: list[Any] = [TEXTS[0], [1, 2, 3], {"prompt": TEXTS[1]}, {"prompt_token_ids": [4, 5]}, TEXTS[3]]
    mixed = [prompt for pair in zip(right, WRONG, strict=False) for prompt in pair] + list(WRONG[len(right) :])
    (run,) = llm._jobs.jobs(mixed[:8], PoolingParams(), None, None).each
    assert isinstance(run, JobGroup)
    outputs = llm.embed(mixed, on_error="return", use_tqdm=False)
    for prompt, output in zip(mixed, outputs, strict=True):
        if prompt in right:
            (alone,) = llm.embed(prompt, use_tqdm=False)
            assert_equal(torch.tensor(output.outputs.embedding), torch.tensor(alone.outputs.embedding))
            assert output.prompt_token_ids == alone.prompt_token_ids
            continue
        with pytest.raises(UserError) as found:
            llm.embed([prompt] if isinstance(prompt, list) else prompt, use_tqdm=False)
        assert str(output.error) == str(found.value)
        assert output.outputs is None
    with pytest.raises(UserError, match="empty"):
        llm.embed(mixed, use_tqdm=False)
    assert [output.error for output in llm.embed(right, use_tqdm=False)] == [None] * len(right)


def test_outputs_of_a_run_are_of_their_call_and_keep_no_others_alive(llm: LLM) -> None:
    mixed = [TEXTS[0], "a\ud800b", TEXTS[3]]
    found = llm.embed(mixed, on_error="return", use_tqdm=False)
    pooled = llm.encode(mixed, on_error="return", use_tqdm=False)
    assert {type(output) for output in found} == {EmbeddingRequestOutput}
    assert {type(output) for output in pooled} == {PoolingRequestOutput}
    for one, other in zip(found[::2], pooled[::2], strict=True):
        assert one.outputs.embedding == other.outputs.data.tolist()
        assert one.prompt == other.prompt is not None
        assert other.outputs.data.untyped_storage().nbytes() == 4 * one.outputs.hidden_size
    with pytest.raises(TypeError, match="pooling_task"):
        llm.embed(mixed, pooling_task="classify", use_tqdm=False)


def test_a_run_starts_few_collections_of_garbage(llm: LLM) -> None:
    """Each tenth goes through what the last ones left, each hundredth through all objects of the process."""
    begun: list[int] = []

    def collected(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            begun.append(info["generation"])

    prompts = [[1, 2 + number % 7] for number in range(2000)]
    llm.embed(prompts, use_tqdm=False)
    gc.callbacks.append(collected)
    try:
        start = time.monotonic()
        llm.embed(prompts, use_tqdm=False)
        seconds = time.monotonic() - start
    finally:
        gc.callbacks.remove(collected)
    # Without the pauses some fifty begin.
    assert len(begun) <= 3 + seconds / 0.25
    assert gc.isenabled()


class PanicException(BaseException):
    """What the tokenizers' library raises where its code panics."""


def test_a_text_at_which_the_library_panics_fails_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = llm._inputs.reader._tokenizer
    own = tokenizer._own

    class Backend:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            def call(given: Any, *rest: Any, **options: Any) -> Any:
                if "panic" in given:
                    raise PanicException("index out of bounds")
                return getattr(self.inner, name)(given, *rest, **options)

            return call

    monkeypatch.setattr(tokenizer, "_shared", True)
    monkeypatch.setattr(tokenizer, "_own", lambda backend: Backend(own(backend)))
    for texts in (["one", "panic", "two"], ["panic"]):
        for options in ({}, {"truncate_prompt_tokens": 4}):
            found = llm.embed(texts, on_error="return", use_tqdm=False, **options)
            assert [type(output.error) for output in found] == [
                PromptError if text == "panic" else type(None) for text in texts
            ]


def test_each_priority_of_a_run_is_checked(llm: LLM) -> None:
    wrong: list[Any] = [1, True, 1.0]
    outputs = llm.encode(["one", "two", "three"], priority=wrong, use_tqdm=False, on_error="return")
    assert [type(output.error) for output in outputs] == [type(None), ParamsError, ParamsError]


def test_a_prompt_that_the_engine_refuses_fails_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was queued with it is gone when it raises."""
    run = llm._live()
    scheduler = run.core.scheduler
    add = scheduler.add

    def refusing(request: Request) -> None:
        if len(request.token_ids) == 2:
            raise CapacityError("No room.")
        add(request)

    monkeypatch.setattr(scheduler, "add", refusing)
    outputs = llm.embed([[1], [1, 2], [1, 2, 3]], on_error="return", use_tqdm=False)
    assert [str(output.error)[:8] for output in outputs] == ["None", "No room.", "None"]
    with pytest.raises(CapacityError):
        llm.embed([[1], [1, 2], [1, 2, 3]], use_tqdm=False)
    assert not run._prompts
    assert not scheduler.has_work


def interrupting(*given: Any) -> Any:
    raise KeyboardInterrupt


def test_a_run_that_is_interrupted_leaves_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    run = llm._live()
    texts = [f"text {number}" for number in range(30)]
    wanted = vectors(llm.embed(texts, use_tqdm=False))
    for owner, name, number in ((run.engine, "step", 2), (run.engine, "add_many", 1), (llm._inputs, "plain_group", 1)):
        real, calls = getattr(owner, name), 0

        def failing(*given: Any, real: Any = real, number: int = number) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                raise KeyboardInterrupt
            return real(*given)

        with monkeypatch.context() as patched:
            patched.setattr(owner, name, failing)
            with pytest.raises(KeyboardInterrupt):
                llm.embed(texts, use_tqdm=False)
        assert not run._prompts
        assert not run.engine.has_work
        assert_equal(vectors(llm.embed(texts, use_tqdm=False)), wanted)
    tokenizer = llm._inputs.reader._tokenizer
    with monkeypatch.context() as patched:
        patched.setattr(llm._inputs, "prepare", interrupting)
        with pytest.raises(KeyboardInterrupt):
            llm.embed(texts, truncate_prompt_tokens=4, use_tqdm=False)
    assert set(tokenizer._ahead) == set(texts)
    llm.embed(["other", "texts"], use_tqdm=False)
    assert not tokenizer._ahead, "ids of a tokenizer that may have changed since"


def test_bars_count_the_prompts_of_runs(llm: LLM) -> None:
    counts = {"Adding requests": 0, "Processed prompts": 0}

    class Bar:
        postfix = ""

        def __init__(self, total: int, desc: str, **_: Any) -> None:
            assert total == 300
            self.name = desc

        def update(self, count: int) -> None:
            counts[self.name] += count

        def close(self) -> None: ...

    llm.embed([[1, 2 + number] for number in range(300)], use_tqdm=Bar)
    assert counts == {"Adding requests": 300, "Processed prompts": 300}


def test_a_longer_text_keeps_its_start(llm: LLM) -> None:
    long = " ".join(TEXTS[:2]) * 4
    with pytest.raises(PromptTooLongError, match="maximum context length is 256"):
        llm.embed(long, use_tqdm=False)
    (cut,) = llm.embed(long, truncate_prompt_tokens=-1, use_tqdm=False)
    short, brief = llm.embed([long, TEXTS[3]], truncate_prompt_tokens=5, use_tqdm=False)
    assert brief.prompt_token_ids == llm.embed(TEXTS[3], use_tqdm=False)[0].prompt_token_ids
    assert not llm._inputs.reader._tokenizer._ahead
    whole = transformers.AutoTokenizer.from_pretrained(tiny.checkpoint(FAMILY))(long)["input_ids"]
    assert (cut.prompt_token_ids, short.prompt_token_ids) == (whole[:256], whole[:5])


ASKS = (
    Ask("{i}Represent the image.", images=((90, 60, 1),)),
    Ask("{i}Represent the image.", images=((60, 120, 2),)),
    Ask("A red circle"),
)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "phi3_v"])
def test_images_become_vectors(family: str) -> None:
    """Also VLM2Vec, whose checkpoint is Phi-3-vision's."""
    asked = [{"prompt": ask.prompt(family), "multi_modal_data": {"image": ask.pictures()}} for ask in ASKS]
    options = SMALL | {"max_model_len": 1024, "max_num_batched_tokens": 96}
    with LLM(str(tiny.checkpoint(family)), runner="pooling", limit_mm_per_prompt={"image": 1}, **options) as llm:
        found = vectors(llm.embed(asked, use_tqdm=False))
        assert_equal(vectors(llm.embed(asked, use_tqdm=False)), found)
    for vector, ask in zip(found, ASKS, strict=True):
        with torch.no_grad():
            made = reference.model(family)(**reference.inputs(family, ask), output_hidden_states=True)
        assert_equal(vector, F.normalize(made.hidden_states[-1][0, -1], dim=0))


# ---- sentence-transformers' settings ---------------------------------------------------------------------------------


def test_an_embedder_without_a_head_and_with_modules(tmp_path: Path) -> None:
    """As Qwen3-Embedding is stored: weights of the bare model, and modules that say how it pools."""
    folder = without_head(copied("llama", tmp_path / "embedder"))
    modules(folder, "Pooling", "Dense", "Normalize", pooling_mode_mean_tokens=True, pooling_mode_cls_token=False)
    weight = dense(folder, 2, 64, 12)
    with LLM(str(folder), **SMALL) as llm:
        found = vectors(llm.embed(TEXTS, use_tqdm=False))
    wanted = torch.stack([state.mean(0) for state in hidden(folder, TEXTS)])
    assert_equal(found, F.normalize(torch.tanh(wanted @ weight.T), dim=-1))


def test_layers_after_pooling_are_fetched_with_the_weights(tmp_path: Path) -> None:
    names = ["config.json", "model.safetensors", "1_Pooling/config.json", "2_Dense/model.safetensors", "onnx/x.onnx"]
    assert chosen(names, tmp_path) == ("model.safetensors", "2_Dense/model.safetensors")


def test_without_the_module_vectors_keep_their_length_and_the_length_of_texts_is_theirs(tmp_path: Path) -> None:
    folder = modules(copied(FAMILY, tmp_path / "embedder"), "Pooling", pooling_mode="lasttoken")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 12, "do_lower_case": true}')
    with LLM(str(folder), dtype="float32") as llm:
        (found,) = llm.embed("HELLO there", use_tqdm=False)
        with pytest.raises(PromptTooLongError, match="maximum context length is 12"):
            llm.embed(TEXTS[1], use_tqdm=False)
    (state,) = hidden(folder, ["hello there"])
    assert_equal(torch.tensor(found.outputs.embedding), state[-1])


@pytest.mark.parametrize(
    ("names", "mode", "words"),
    [
        (("Pooling",), {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        (("Pooling",), {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "not available"),
        (("Pooling", "LSTM"), {"pooling_mode_mean_tokens": True}, "LSTM"),
        (("Pooling", "Dense"), {"pooling_mode_mean_tokens": True}, "2_Dense/config.json"),
    ],
)
def test_settings_that_are_not_honoured_are_refused(
    tmp_path: Path, names: tuple[str, ...], mode: dict[str, Any], words: str
) -> None:
    folder = modules(copied(FAMILY, tmp_path / "embedder"), *names, **mode)
    with pytest.raises(ModelError, match=words):
        LLM(str(folder), dtype="float32")


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_what_a_model_does_not_do_is_refused_with_the_option_to_pass(llm: LLM) -> None:
    with pytest.raises(ParamsError, match=r"generates no text.*runner='generate'"):
        llm.generate("x", SamplingParams(), use_tqdm=False)
    with pytest.raises(ParamsError, match=r"LLM\.embed"):
        llm.classify("x", use_tqdm=False)
    with LLM(str(tiny.checkpoint(FAMILY)), **SMALL) as generating:
        for call in (generating.embed, generating.encode, generating.classify, generating.reward):
            with pytest.raises(ParamsError, match="runner='pooling'"):
                call("x", use_tqdm=False)
        with pytest.raises(ParamsError, match="runner='pooling'"):
            generating.score("x", "y", use_tqdm=False)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"dimensions": 65}, "vectors of 64 numbers"),
        ({"dimensions": 0}, "dimensions must be at least 1"),
        ({"task": "embd"}, "Did you mean 'embed'"),
        ({"returned_token_ids": [1]}, "need a model with classes"),
        ({"normalise": True}, "normalize"),
    ],
)
def test_wrong_parameters_are_named(llm: LLM, params: dict[str, Any], words: str) -> None:
    with pytest.raises(ParamsError, match=words):
        llm.encode("x", PoolingParams(**params), use_tqdm=False)


def test_dimensions_need_a_model_that_was_trained_for_them(tmp_path: Path) -> None:
    with (
        LLM(str(tiny.checkpoint(FAMILY)), runner="pooling", **SMALL) as llm,
        pytest.raises(ParamsError, match="is_matryoshka"),
    ):
        llm.embed("x", pooling_params=PoolingParams(dimensions=8), use_tqdm=False)
    folder = copied(FAMILY, tmp_path / "embedder", matryoshka_dimensions=[16, 32])
    with LLM(str(folder), runner="pooling", **SMALL) as llm:
        assert (
            len(llm.embed("x", pooling_params=PoolingParams(dimensions=16), use_tqdm=False)[0].outputs.embedding) == 16
        )
        with pytest.raises(ParamsError, match="16, 32"):
            llm.embed("x", pooling_params=PoolingParams(dimensions=8), use_tqdm=False)


def test_the_engines_dimensions_need_such_a_model_too(tmp_path: Path) -> None:
    """They were taken for every model."""
    plain, known = str(tiny.checkpoint(FAMILY)), str(copied(FAMILY, tmp_path / "embedder", matryoshka_dimensions=[16]))

    def widths(path: str, dimensions: int, **more: Any) -> list[int]:
        options = {"override_pooler_config": {"dimensions": dimensions}, **more, **SMALL}
        with LLM(path, runner="pooling", **options) as llm:
            return [len(output.outputs.embedding) for output in llm.embed(["x"], use_tqdm=False)]

    with pytest.raises(ConfigError, match=r"override_pooler_config: .* may be truncated.*is_matryoshka"):
        widths(plain, 8)
    with pytest.raises(ConfigError, match=r"override_pooler_config: dimensions=8 .* 16"):
        widths(known, 8)
    assert widths(plain, 64) == [64]
    assert widths(known, 16) == [16]
    assert widths(plain, 8, hf_overrides={"is_matryoshka": True}) == [8]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"runner": "poling"}, "Did you mean 'pooling'"),
        ({"task": "embedd"}, "Did you mean 'embed"),
        ({"runner": "generate", "convert": "embed"}, "runner='pooling'"),
        ({"task": "generate", "runner": "pooling"}, "contradict"),
        ({"override_pooler_config": {"pooling_type": "MAX"}}, "'LAST'"),
        ({"override_pooler_config": {"poling_type": "LAST"}}, "pooling_type"),
        ({"override_pooler_config": {"pooling_type": "STEP"}, "runner": "pooling"}, "step_tag_id"),
        ({"override_pooler_config": {"pooling_type": "MEAN"}}, "no effect"),
        ({"override_pooler_config": {"task": "token_embedd"}, "runner": "pooling"}, "Did you mean 'token_embed'"),
        ({"override_pooler_config": {"task": "classify"}, "runner": "pooling"}, "Known: 'embed', 'token_embed'"),
        ({"convert": "reward"}, "no head"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(str(tiny.checkpoint(FAMILY)), **SMALL, **options)


def test_ids_that_were_read_ahead_are_not_kept_for_a_request_that_failed_before(llm: LLM) -> None:
    orders = [
        RequestOrder(text, PoolingParams(), str(number), priority=2**70) for number, text in enumerate(("a b", "b c"))
    ]
    found = llm._inputs.prepare_group(orders)
    assert all(isinstance(each, ParamsError) for each in found)
    assert not any(llm._inputs.reader.read_before(str(order.prompt)) for order in orders)


# ---- a server's form -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_many_at_once(engine: str, states: list[torch.Tensor]) -> None:
    async def run() -> list[Any]:
        async with AsyncLLM(str(tiny.checkpoint(FAMILY)), engine=engine, runner="pooling", **SMALL) as llm:

            async def one(text: str) -> Any:
                return [output async for output in llm.encode(text)]

            return await asyncio.gather(*map(one, TEXTS))

    for (output,), state in zip(asyncio.run(run()), states, strict=True):
        assert output.finished
        assert_equal(output.outputs.data, F.normalize(state[-1], dim=0))


def test_texts_of_one_turn_are_prepared_and_submitted_together_and_fail_alone(
    monkeypatch: pytest.MonkeyPatch, states: list[torch.Tensor]
) -> None:
    runs: list[int] = []
    submitted: list[list[str]] = []
    plain = InputPipeline.prepare_group

    def noted(self: InputPipeline, orders: Any) -> Any:
        runs.append(len(orders))
        return plain(self, orders)

    monkeypatch.setattr(InputPipeline, "prepare_group", noted)

    async def run() -> list[Any]:
        async with AsyncLLM(str(tiny.checkpoint(FAMILY)), runner="pooling", **SMALL) as llm:
            send = llm._engine.send

            def seen(message: Any) -> None:
                if isinstance(message, Submit):
                    submitted.append([request.id for request in message.requests])
                send(message)

            monkeypatch.setattr(llm._engine, "send", seen)

            async def one(number: int, text: str, client: str = "a") -> Any:
                return [output async for output in llm.encode(text, request_id=str(number), client=client)]

            bad = ["\ud800", "cat " * 400]
            found = await asyncio.gather(
                *(one(number, text) for number, text in enumerate([*TEXTS, *bad])),
                one(99, TEXTS[0], "b"),
                return_exceptions=True,
            )
            assert llm.num_live == 0
            return found

    *found, other = asyncio.run(run())
    good = [str(number) for number in range(len(TEXTS))]
    assert sorted(runs) == [1, len(TEXTS) + 2]
    assert sorted(name for names in submitted for name in names) == sorted([*good, "99"])
    assert good in [[name for name in names if name != "99"] for names in submitted]
    assert isinstance(found[-2], PromptError)
    assert isinstance(found[-1], PromptTooLongError)
    assert_equal(other[0].outputs.data, F.normalize(states[0][-1], dim=0))
    for (output,), state in zip(found, states, strict=False):
        assert_equal(output.outputs.data, F.normalize(state[-1], dim=0))


def test_a_text_that_nobody_waits_for_any_more_leaves_the_others_of_its_turn(states: list[torch.Tensor]) -> None:
    async def run() -> Any:
        async with AsyncLLM(str(tiny.checkpoint(FAMILY)), runner="pooling", **SMALL) as llm:

            async def one(text: str) -> Any:
                return [output async for output in llm.encode(text)]

            gone, stays = asyncio.create_task(one(TEXTS[1])), asyncio.create_task(one(TEXTS[0]))
            # Both wait for their preparation now.
            await asyncio.sleep(0)
            gone.cancel()
            (output,) = await stays
            with pytest.raises(asyncio.CancelledError):
                await gone
            assert llm.num_live == 0
            return output

    assert_equal(asyncio.run(run()).outputs.data, F.normalize(states[0][-1], dim=0))
