"""ColBERT: the vectors of each token of texts and their scores equal transformers' encoder and a layer after it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

from beheld import LLM, EngineArgs
from beheld.checkpoint.info import read_info
from beheld.core.errors import ModelError, ParamsError
from tests.pool.checkpoints import encoder, write
from tests.server.running import ENGINE, Running

QUERY = "where does the cat sleep?"
DOCUMENTS = ["on the mat.", "a small red circle stands left of a large square.", "dogs sleep, too."]
WIDTH = 12
SMALL: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 128}


class Made(NamedTuple):
    """A checkpoint, and what transformers makes of the texts: (N, D) of each."""

    folder: Path
    vectors: list[torch.Tensor]


def colbert(folder: Path) -> torch.Tensor:
    """Turn a bare BERT into ColBERT's own layout: the class, and the layer among the weights; returns the layer."""
    kept = {f"bert.{name}": value for name, value in load_file(folder / "model.safetensors").items()}
    layer = torch.randn(WIDTH, 64, generator=torch.Generator().manual_seed(3))
    save_file(kept | {"linear.weight": layer}, folder / "model.safetensors", metadata={"format": "pt"})
    return layer


def pylate(folder: Path) -> torch.Tensor:
    """Write PyLate's modules: the layer follows each token's state, and nothing is pooled."""
    layer = torch.randn(WIDTH, 64, generator=torch.Generator().manual_seed(4))
    kinds = ("sentence_transformers.models.Transformer", "pylate.models.Dense.Dense")
    names = ("", "1_Dense")
    entries = zip(names, kinds, strict=True)
    write(
        folder / "modules.json", [{"idx": n, "name": f"{n}", "path": p, "type": k} for n, (p, k) in enumerate(entries)]
    )
    stated = {"in_features": 64, "out_features": WIDTH, "bias": False}
    write(folder / "1_Dense" / "config.json", stated | {"activation_function": "torch.nn.modules.linear.Identity"})
    save_file({"linear.weight": layer}, folder / "1_Dense" / "model.safetensors")
    marks = {"query_prefix": "[Q] ", "document_prefix": "[D] "}
    write(folder / "config_sentence_transformers.json", marks)
    return layer


# Layout -> the encoder's class, the architecture that config.json names, and what writes the rest.
LAYOUTS: dict[str, Any] = {
    "colbert": ("BertModel", "HF_ColBERT", colbert),
    "pylate": ("ModernBertModel", "ModernBertModel", pylate),
}


@pytest.fixture(scope="module", params=LAYOUTS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    architecture, named, write_rest = LAYOUTS[request.param]
    folder = encoder(tmp_path_factory.mktemp("colbert") / request.param, architecture)
    model = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32).eval()
    layer = write_rest(folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    config.architectures = [named]
    config.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        ids = [tokenizer(text, return_tensors="pt", padding=False, truncation=False) for text in (QUERY, *DOCUMENTS)]
        states = [model(input_ids=each["input_ids"]).last_hidden_state[0] for each in ids]
    return Made(folder, [F.normalize(each @ layer.T, dim=-1) for each in states])


@pytest.fixture(scope="module")
def llm(made: Made) -> Iterator[LLM]:
    with LLM(str(made.folder), **SMALL) as llm:
        yield llm


def scores(made: Made) -> list[float]:
    query, *documents = made.vectors
    return [float((query @ each.T).amax(1).sum()) for each in documents]


def test_every_token_has_a_vector(made: Made, llm: LLM) -> None:
    outputs = llm.encode([QUERY, *DOCUMENTS], use_tqdm=False)
    for output, wanted in zip(outputs, made.vectors, strict=True):
        torch.testing.assert_close(output.outputs.data, wanted, atol=2e-5, rtol=1e-4)
    with pytest.raises(ParamsError, match="token_embed"):
        llm.embed(QUERY, use_tqdm=False)


def test_scores_are_those_of_late_interaction(made: Made, llm: LLM) -> None:
    found = [output.outputs.score for output in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
    assert found == pytest.approx(scores(made), abs=1e-3)


def test_on_a_server(made: Made) -> None:
    served = Running(made.folder, ENGINE | {"max_model_len": 128})
    try:
        pairs = served.post("/score", {"queries": QUERY, "documents": DOCUMENTS}).json()["data"]
        assert [entry["score"] for entry in pairs] == pytest.approx(scores(made), abs=1e-2)
        ranked = served.post("/rerank", {"query": QUERY, "documents": DOCUMENTS}).json()["results"]
        assert [entry["index"] for entry in ranked] == sorted(range(3), key=lambda n: -scores(made)[n])
        each = served.post("/pooling", {"input": QUERY, "task": "token_embed"}).json()["data"][0]["data"]
        assert len(each[0]) == WIDTH
    finally:
        served.close()


def test_vllms_name_of_the_class_is_known_and_what_was_trained_before_texts_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A bare ModernBERT with PyLate's modules, which vLLM needs to be named."""
    encoder(tmp_path, "ModernBertModel")
    pylate(tmp_path)
    args = EngineArgs(model=str(tmp_path), hf_overrides={"architectures": ["ColBERTModernBertModel"]})
    with caplog.at_level(logging.WARNING, logger="beheld"):
        info = read_info(tmp_path, args)
    assert (info.architecture, info.pooler and info.pooler.late) == ("ModernBertModel", True)
    assert "'[Q] ' before queries and '[D] ' before documents" in caplog.text


def test_the_width_of_a_layer_is_read_where_it_stands(tmp_path: Path) -> None:
    """In the configuration, the file of ColBERT's own code, or the weights' header; else the error says what to do."""
    encoder(tmp_path, "BertModel")
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config.architectures = ["HF_ColBERT"]
    config.save_pretrained(tmp_path)

    def width(**overrides: Any) -> int:
        pooler = read_info(tmp_path, EngineArgs(model=str(tmp_path), hf_overrides=overrides)).pooler
        assert pooler is not None
        return pooler.width

    with pytest.raises(ModelError, match="colbert_dim"):
        width()
    assert width(colbert_dim=8) == 8
    colbert(tmp_path)
    assert width() == WIDTH
    write(tmp_path / "artifact.metadata", {"dim": 6})
    assert width() == 6
