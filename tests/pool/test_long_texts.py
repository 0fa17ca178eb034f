"""Texts longer than an embedder reads: the vector is the mean of the parts' vectors, as often as each has tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from beheld import LLM, AsyncLLM, PoolingParams
from beheld.core.errors import ConfigError, ParamsError, PromptTooLongError
from beheld.inputs.prompt.reader import PromptReader
from tests.pool.checkpoints import encoder, modules
from tests.server.running import ENGINE, Running

SMALL: dict[str, Any] = {"dtype": "float32", "max_model_len": 16, "max_num_seqs": 4, "max_num_batched_tokens": 64}
PARTS = {"enable_chunked_processing": True, "max_embed_len": 100}
LONG, SHORT = "a small red circle stands left of it, there.", "hello."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = encoder(tmp_path_factory.mktemp("long"), "BertModel")
    return modules(made, "Pooling", "Normalize", pooling_mode_mean_tokens=True)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), override_pooler_config=PARTS, **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    made = Running(folder, ENGINE | SMALL | {"override_pooler_config": PARTS})
    yield made
    made.close()


def ids_of(llm: LLM, text: str) -> list[int]:
    return llm.get_tokenizer()(text, padding=False, truncation=False)["input_ids"]


def wanted(llm: LLM, ids: list[int], *, scaled: bool = True) -> torch.Tensor:
    """The mean of what the model makes of each part alone."""
    parts = [ids[at : at + 16] for at in range(0, len(ids), 16)]
    params = PoolingParams(normalize=scaled)
    found = llm.encode([{"prompt_token_ids": part} for part in parts], params, use_tqdm=False)
    total = sum(len(part) * each.outputs.data for part, each in zip(parts, found, strict=True)) / len(ids)
    return F.normalize(total, dim=-1) if scaled else total


@pytest.mark.parametrize("scaled", [True, False])
def test_the_vector_is_the_mean_of_the_parts(llm: LLM, scaled: bool) -> None:
    ids = ids_of(llm, LONG)
    assert len(ids) > 32, "three parts, the last one shorter"
    prompts = [SHORT, LONG, {"prompt_token_ids": ids}]
    short, *found = llm.encode(prompts, PoolingParams(normalize=scaled), use_tqdm=False)
    for output in found:
        torch.testing.assert_close(output.outputs.data, wanted(llm, ids, scaled=scaled), atol=1e-5, rtol=1e-4)
        assert output.prompt_token_ids == ids
    assert found[0].prompt == LONG
    torch.testing.assert_close(short.outputs.data, wanted(llm, ids_of(llm, SHORT), scaled=scaled))


def test_a_cut_comes_before_the_parts(llm: LLM) -> None:
    ids = ids_of(llm, LONG)
    cut = [*ids[:19], ids[-1]]
    (found,) = llm.encode([LONG], PoolingParams(truncate_prompt_tokens=20), use_tqdm=False)
    assert found.prompt_token_ids == cut
    torch.testing.assert_close(found.outputs.data, wanted(llm, cut), atol=1e-5, rtol=1e-4)


def test_what_is_too_long_for_parts_is_one_texts_error(llm: LLM) -> None:
    with pytest.raises(PromptTooLongError, match="maximum context length is 16 "):
        llm.encode([LONG], pooling_task="token_embed", use_tqdm=False)
    prompts = [SHORT, LONG * 4, LONG, {"prompt_token_ids": [1, "a"] * 20}, SHORT, "x " * 200]
    found = llm.encode(prompts, use_tqdm=False, on_error="return")
    words = ["None", "context length is 100 ", "None", "must be whole numbers", "None", "context length is 100 "]
    assert [part in str(output.error) for part, output in zip(words, found, strict=True)] == [True] * len(words)
    assert len({output.request_id for output in found}) == len(found)
    with pytest.raises(PromptTooLongError, match="context length is 100 "):
        llm.encode(prompts, use_tqdm=False)


def test_scores_of_long_texts(llm: LLM) -> None:
    """A server's are the same: it has one way to a vector."""
    found = llm.score(LONG, [SHORT, LONG, LONG * 4], use_tqdm=False, on_error="return")
    short, long = (wanted(llm, ids_of(llm, text)) for text in (SHORT, LONG))
    assert [output.outputs.score for output in found[:2]] == pytest.approx([float(short @ long), 1.0], abs=1e-5)
    assert isinstance(found[2].error, PromptTooLongError)


def test_an_abort_ends_all_parts(folder: Path) -> None:
    """Of eight parts four are in the engine at a time; when they are, and before one is read, the text is aborted."""

    async def run() -> None:
        async with AsyncLLM(str(folder), override_pooler_config=PARTS | {"max_embed_len": 200}, **SMALL) as llm:
            begun, aborted, submit = asyncio.Event(), asyncio.Event(), llm._submit
            names: list[str] = []

            async def submitting(*given: Any) -> Any:
                live = await submit(*given)
                names.extend(live.request_ids)
                if len(names) == 4:
                    begun.set()
                await aborted.wait()
                return live

            llm._submit = submitting  # type: ignore[method-assign]

            async def all_of(name: str) -> list[Any]:
                return [output async for output in llm.encode(LONG * 3, request_id=name)]

            task = asyncio.ensure_future(all_of("a"))
            await begun.wait()
            with pytest.raises(ParamsError, match="still running"):
                await all_of("a")
            await llm.abort("a")
            aborted.set()
            (output,) = await task
            assert (output.request_id, output.outputs, output.error, output.finished) == ("a", None, None, True)
            assert len(output.prompt_token_ids) == 110
            assert len(names) == 4, "the other parts were not begun"
            (again,) = await all_of("a")
            assert again.outputs.data.shape == (64,)
            assert (llm.num_live, llm._in_parts) == (0, {})

    asyncio.run(run())


def test_a_text_of_one_part_is_encoded_once(llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its length alone it may be too long."""
    encode, seen = PromptReader._encode, []

    def encoding(self: Any, text: Any, items: Any) -> Any:
        seen.append(text.text)
        return encode(self, text, items)

    async def run() -> list[Any]:
        async with AsyncLLM(str(folder), override_pooler_config=PARTS, **SMALL) as other:
            seen.clear()
            return [output async for output in other.encode(SHORT)]

    monkeypatch.setattr(PromptReader, "_encode", encoding)
    for made in (*asyncio.run(run()), *(seen.clear() or llm.encode(SHORT, use_tqdm=False))):
        assert seen == [SHORT]
        assert (made.prompt, made.prompt_token_ids) == (SHORT, ids_of(llm, SHORT))
        assert torch.equal(made.outputs.data, llm.encode(made.prompt_token_ids, use_tqdm=False)[0].outputs.data)


def test_on_a_server(running: Running, llm: LLM) -> None:
    ids = ids_of(llm, LONG)
    answer = running.post("/v1/embeddings", {"input": [SHORT, LONG]}).json()
    torch.testing.assert_close(torch.tensor(answer["data"][1]["embedding"]), wanted(llm, ids), atol=1e-5, rtol=1e-4)
    assert answer["usage"]["prompt_tokens"] == len(ids) + len(ids_of(llm, SHORT))
    cohere = running.post("/v2/embed", {"texts": [LONG]}).json()
    torch.testing.assert_close(torch.tensor(cohere["embeddings"]["float"][0]), wanted(llm, ids), atol=1e-5, rtol=1e-4)
    refused = running.post("/v1/embeddings", {"input": LONG * 4})
    assert (refused.status_code, "maximum context length is 100 " in refused.text) == (400, True)
    running.idle()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_embed_len": 100}, "needs enable_chunked_processing"),
        ({"enable_chunked_processing": True, "max_embed_len": 8}, "below max_model_len=16"),
        ({"enable_chunked_processing": True, "max_embed_len": 0}, "whole number from 1"),
        ({"enable_chunked_processing": "yes"}, "True or False"),
    ],
)
def test_options_that_contradict_are_refused(folder: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(str(folder), override_pooler_config=given, **SMALL)
