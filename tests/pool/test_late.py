"""Late interaction: the vectors of each token of queries and pages, and their scores, equal transformers'."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from beheld import LLM, PoolingParams
from beheld.core.errors import ConfigError, ParamsError, PromptError, UserError
from tests import tiny
from tests.pool.checkpoints import drawn, write
from tests.server.running import ENGINE, Running, data_url, talk
from tests.tiny_media import picture

QUERIES = ["Where does the cat sleep?", "how many shapes", "A small red circle stands left of a large blue square."]
PAGES = ((90, 60, 1), (60, 120, 2), (56, 56, 3))
# Family -> the tiny checkpoint that it is made around, and the class of transformers.
FAMILIES = {"colpali": ("paligemma", "ColPali"), "colqwen2": ("qwen2_vl", "ColQwen2")}
SMALL: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 128}


class Made(NamedTuple):
    """A checkpoint, and what transformers makes of the queries and pages: (N, D) of each."""

    family: str
    folder: Path
    queries: list[torch.Tensor]
    pages: list[torch.Tensor]
    scores: torch.Tensor


def checkpoint(family: str, folder: Path) -> Path:
    """A checkpoint as vidore publishes it in transformers' layout, around the tiny one of its language model."""
    inner, name = FAMILIES[family]
    shutil.copytree(tiny.checkpoint(inner), folder)
    for old in (*folder.glob("*.safetensors*"), folder / "generation_config.json"):
        old.unlink(missing_ok=True)
    vlm = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    architecture = f"{name}ForRetrieval"
    write(
        folder / "config.json",
        {"architectures": [architecture], "embedding_dim": 24, "model_type": family, "vlm_config": vlm},
    )
    for file in ("preprocessor_config.json", "tokenizer_config.json"):
        stated = json.loads((folder / file).read_text(encoding="utf-8"))
        write(folder / file, stated | {"processor_class": f"{name}Processor"})
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        model = getattr(transformers, architecture)._from_config(config, dtype=torch.float32)
        drawn(model)
    model.save_pretrained(folder)
    return folder


def placed(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs with positions of three axes, where the model has them.

    transformers' ColQwen2ForRetrieval hides the ids from the model that would make positions of them, and takes plain
    ones. The model was trained with three axes: its own code (colpali-engine) prepares its inputs as Qwen2-VL does.
    """
    find = getattr(model.vlm, "get_rope_index", None)
    if find is None:
        return inputs
    ids, grid = inputs["input_ids"], inputs["image_grid_thw"]
    types = (ids == model.config.vlm_config.image_token_id).int()
    return dict(inputs) | {"position_ids": find(ids, image_grid_thw=grid, mm_token_type_ids=types)[0]}


@pytest.fixture(scope="module", params=FAMILIES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = checkpoint(request.param, tmp_path_factory.mktemp("late") / request.param)
    processor = transformers.AutoProcessor.from_pretrained(folder)
    name = FAMILIES[request.param][1]
    assert type(processor).__name__ == f"{name}Processor"
    model = getattr(transformers, f"{name}ForRetrieval").from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        queries = [model(**processor.process_queries([text])).embeddings[0] for text in QUERIES]
        pages = [model(**placed(model, processor.process_images([picture(*page)]))).embeddings[0] for page in PAGES]
    return Made(request.param, folder, queries, pages, processor.score_retrieval(queries, pages))


@pytest.fixture(scope="module")
def llm(made: Made) -> Iterator[LLM]:
    with LLM(str(made.folder), **SMALL) as llm:
        yield llm


def asked(page: Any, prompt: str = "") -> dict[str, Any]:
    return {"prompt": prompt, "multi_modal_data": {"image": picture(*page)}}


def test_every_token_has_a_vector(made: Made, llm: LLM) -> None:
    prompts: list[Any] = [*QUERIES, *map(asked, PAGES)]
    outputs = llm.encode(prompts, use_tqdm=False)
    for output, wanted in zip(outputs, [*made.queries, *made.pages], strict=True):
        torch.testing.assert_close(output.outputs.data, wanted, atol=2e-5, rtol=1e-4)
    (raw,) = llm.encode(QUERIES[0], PoolingParams(normalize=False), use_tqdm=False)
    assert float((raw.outputs.data.norm(dim=-1) - 1).abs().max()) > 0.01


def test_scores_of_queries_and_pages(made: Made, llm: LLM) -> None:
    pages = [{"content": [{"type": "image_pil", "image_pil": picture(*page)}]} for page in PAGES]
    for query, wanted in zip(QUERIES, made.scores, strict=True):
        found = [output.outputs.score for output in llm.score(query, pages, use_tqdm=False)]
        assert found == pytest.approx(wanted.tolist(), abs=1e-3)


def test_on_a_server(made: Made) -> None:
    served = Running(made.folder, ENGINE)
    try:
        parts = [{"type": "image_url", "image_url": {"url": data_url(*page[:2], seed=page[2])}} for page in PAGES]
        documents = [{"content": [part]} for part in parts]
        scores = served.post("/score", {"queries": QUERIES[0], "documents": documents}).json()
        ranks = served.post("/rerank", {"query": QUERIES[0], "documents": documents}).json()
        pooled = served.post("/pooling", {"input": QUERIES[0]}).json()
        query = served.post("/pooling", {"messages": [{"role": "user", "content": QUERIES[0]}]}).json()
        words = [{"type": "text", "text": text} for text in ("Describe the image.", "What is the total?")]
        page, other = (
            served.post("/pooling", {"messages": [{"role": "user", "content": [parts[0], each]}]}) for each in words
        )
        refused = [served.post("/v1/embeddings", {"input": "x"}), served.post("/classify", {"input": "x"})]
        chatted = served.post("/v1/chat/completions", {"messages": talk("x")})
    finally:
        served.close()
    wanted = made.scores[0].tolist()
    assert [entry["score"] for entry in scores["data"]] == pytest.approx(wanted, abs=1e-3)
    assert [entry["index"] for entry in ranks["results"]] == sorted(range(3), key=lambda index: -wanted[index])
    torch.testing.assert_close(torch.tensor(pooled["data"][0]["data"]), made.queries[0], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(torch.tensor(query["data"][0]["data"]), made.queries[0], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(torch.tensor(page.json()["data"][0]["data"]), made.pages[0], atol=2e-5, rtol=1e-4)
    assert other.status_code == 400
    assert "words of its own" in other.json()["error"]["message"], "a text beside an image is not dropped"
    assert [(answer.status_code, answer.json()["error"]["param"]) for answer in refused] == [(400, "task")] * 2
    assert chatted.status_code == 400


def test_what_is_wrong_is_named(made: Made, llm: LLM) -> None:
    with pytest.raises(ParamsError, match=r"LLM\.encode"):
        llm.embed("x", use_tqdm=False)
    with pytest.raises(PromptError, match="words of its own"):
        llm.encode(asked(PAGES[0], "What is the total?"), use_tqdm=False)
    page = {"type": "image_pil", "image_pil": picture(*PAGES[0])}
    with pytest.raises(PromptError, match="words of its own"):
        llm.score("x", [{"content": [page, {"type": "text", "text": "What is the total?"}]}], use_tqdm=False)
    with pytest.raises(UserError, match="at most 1"):
        llm.encode({"prompt": "", "multi_modal_data": {"image": [picture(*page) for page in PAGES]}}, use_tqdm=False)
    with pytest.raises(ConfigError, match="no scores"):
        LLM(str(made.folder), convert="classify", **SMALL)
    with pytest.raises(ConfigError, match="generates no text"):
        LLM(str(made.folder), runner="generate", **SMALL)
