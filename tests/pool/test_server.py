"""The routes of models that pool, with real clients on a real port."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from beheld import LLM
from beheld.compat.serial import MetadataItem, binary2tensor, decode_pooling_output, tensor2binary
from beheld.core.pooling import PoolerConfig
from beheld.server import pooling
from beheld.server.options import ServerOptions
from beheld.server.pooling_schema import EmbeddingRequest
from tests import tiny
from tests.pool.checkpoints import encoder
from tests.server.running import ENGINE, Running, data_url, talk

IMAGE = {"type": "image_url", "image_url": {"url": data_url(60, 60, seed=1)}}
TEXTS = ["What is in this picture?", "A small red circle stands left of a large blue square.", "Hello"]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    engine = ENGINE | {"runner": "pooling", "hf_overrides": {"is_matryoshka": True}}
    made = Running("qwen2_vl", engine, trust_templates=True)
    yield made
    made.close()


@pytest.fixture(scope="module")
def vectors() -> torch.Tensor:
    with LLM(str(tiny.checkpoint("qwen2_vl")), runner="pooling", dtype="float32", max_model_len=512) as llm:
        return torch.tensor([output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)])


@pytest.fixture
def client(running: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("path", ["/classify", "/pooling", "/v1/embeddings"])
def test_conversations_of_many_messages_are_made_in_a_thread(
    running: Running, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """As a chat's are: 24,000 parts held the event loop."""
    threads: list[str] = []
    work_of = pooling.work_of

    def seen(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return work_of(*arguments)

    monkeypatch.setattr(pooling, "work_of", seen)
    for number in (1, 900):
        running.post(path, {"messages": [{"role": "user", "content": "a"}] * number})
    assert not threads[0].startswith("beheld-read")
    assert threads[1].startswith("beheld-read")


def test_openais_client(client: openai.OpenAI, vectors: torch.Tensor) -> None:
    """It asks for base64 unless it is told otherwise."""
    for options in ({}, {"encoding_format": "float"}):
        made = client.embeddings.create(model="tiny", input=TEXTS, **options)  # type: ignore[call-overload]
        assert [entry.index for entry in made.data] == [0, 1, 2]
        found = torch.tensor([entry.embedding for entry in made.data])
        torch.testing.assert_close(found, vectors, atol=1e-5, rtol=1e-4)
        assert made.usage.prompt_tokens == made.usage.total_tokens > 10
    short = client.embeddings.create(model="tiny", input=TEXTS[0], dimensions=8)
    torch.testing.assert_close(torch.tensor(short.data[0].embedding), F.normalize(vectors[0, :8], dim=0))
    with pytest.raises(openai.BadRequestError, match="vectors of 64 numbers"):
        client.embeddings.create(model="tiny", input=TEXTS[0], dimensions=65)


def test_token_ids_and_base64(running: Running, vectors: torch.Tensor) -> None:
    ids = [running.post("/tokenize", {"prompt": text}).json()["tokens"] for text in TEXTS]
    body: dict[str, Any] = {"input": ids, "encoding_format": "base64"}
    data = running.post("/v1/embeddings", body).json()["data"]
    found = np.stack([np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in data])
    torch.testing.assert_close(torch.from_numpy(found), vectors, atol=1e-5, rtol=1e-4)
    one = running.post("/v1/embeddings", {"input": ids[0]}).json()
    torch.testing.assert_close(torch.tensor(one["data"][0]["embedding"]), vectors[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "within"), [("float32", 1e-5), ("float16", 1e-3), ("bfloat16", 1e-2), ("fp8_e4m3", 0.1)]
)
@pytest.mark.parametrize("order", ["native", "big", "little"])
def test_vectors_in_the_bytes_that_a_client_names(
    running: Running, vectors: torch.Tensor, kind: str, within: float, order: str
) -> None:
    body = {"input": TEXTS[0], "encoding_format": "base64", "embed_dtype": kind, "endianness": order}
    (entry,) = running.post("/v1/embeddings", body).json()["data"]
    data = base64.b64decode(entry["embedding"])
    found = binary2tensor(data, (-1,), kind, order)
    assert tensor2binary(found, kind, order) == data
    torch.testing.assert_close(found.float(), vectors[0], atol=within, rtol=within)
    if kind == "float32":
        plain = np.frombuffer(data, ">f4" if order == "big" else "<f4")
        torch.testing.assert_close(torch.from_numpy(plain.astype("f4")), vectors[0], atol=1e-5, rtol=1e-4)
    error = running.post("/v1/embeddings", {"input": TEXTS[0], "embed_dtype": kind})
    assert (error.status_code, error.json()["error"]["param"]) == (400, "embed_dtype")


def test_vectors_as_a_bare_body(running: Running, vectors: torch.Tensor) -> None:
    body = {"input": TEXTS, "encoding_format": "bytes", "embed_dtype": "float16", "endianness": "big"}
    answer = running.post("/v1/embeddings", body)
    told = json.loads(answer.headers["metadata"])
    places = [MetadataItem(**place) for place in reversed(told["data"])]
    found = torch.stack(decode_pooling_output(places, answer.content)).float()
    torch.testing.assert_close(found, vectors, atol=1e-3, rtol=1e-3)
    assert told["usage"] == running.post("/v1/embeddings", {"input": TEXTS}).json()["usage"]
    bare = running.post("/v1/embeddings", body | {"encoding_format": "bytes_only"})
    assert ("metadata" in bare.headers, bare.content) == (False, answer.content)
    states = running.post("/pooling", {"input": TEXTS[0], "task": "token_embed", "encoding_format": "bytes"})
    (place,) = json.loads(states.headers["metadata"])["data"]
    (found,) = decode_pooling_output([MetadataItem(**place)], states.content)
    torch.testing.assert_close(found[-1], vectors[0], atol=1e-5, rtol=1e-4)
    refused = running.post("/v1/embeddings", {"input": ["x"] * 501, "encoding_format": "bytes"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "encoding_format")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": TEXTS}),
        ("/v1/embeddings", {"messages": talk("x"), "encoding_format": "base64"}),
        ("/pooling", {"input": TEXTS[0], "task": "token_embed"}),
        ("/v2/embed", {"texts": TEXTS[:1]}),
        ("/score", {"queries": TEXTS[0], "documents": TEXTS}),
        ("/score", {"text_1": TEXTS[0], "text_2": TEXTS[1]}),
        ("/rerank", {"query": TEXTS[0], "documents": TEXTS}),
    ],
)
def test_sagemakers_route_answers_what_the_body_asks(running: Running, path: str, body: dict[str, Any]) -> None:
    # Then the prefixes of both are found, and last bits are the same.
    running.post(path, body)
    plain, found = running.post(path, body), running.post("/invocations", body)
    assert (plain.status_code, found.status_code) == (200, 200), found.text
    for answer in (one := plain.json()), (other := found.json()):
        for name in ("id", "created", "usage"):
            answer.pop(name, None)
    assert one == other


def test_sagemakers_route_names_what_a_model_of_vectors_reads(running: Running) -> None:
    refused = running.post("/invocations", {"prompt": "x"}).json()["error"]
    assert refused["remedy"] == "Send one with input or messages, both sides of pairs, or a query and documents."


def test_conversations_with_images(running: Running) -> None:
    first, second, again = (
        running.post("/v1/embeddings", {"messages": talk("What is this?", url)}).json()["data"][0]["embedding"]
        for url in (data_url(60, 60, seed=1), data_url(60, 60, seed=2), data_url(60, 60, seed=1))
    )
    assert first == pytest.approx(again, abs=1e-5)
    assert max(abs(a - b) for a, b in zip(first, second, strict=True)) > 1e-3
    begun = running.post("/v1/embeddings", {"messages": talk("x"), "add_generation_prompt": True}).json()
    plain = running.post("/v1/embeddings", {"messages": talk("x")}).json()
    assert begun["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]


def test_every_position_and_pairs_and_ranks(running: Running, vectors: torch.Tensor) -> None:
    pooled = running.post("/pooling", {"input": TEXTS[0], "task": "token_embed"}).json()
    assert pooled["data"][0]["object"] == "pooling"
    states = torch.tensor(pooled["data"][0]["data"])
    torch.testing.assert_close(states[-1], vectors[0], atol=1e-5, rtol=1e-4)
    wanted = (vectors @ vectors[0]).tolist()
    for path in ("/score", "/v1/score"):
        for names in (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents")):
            made = running.post(path, dict(zip(names, (TEXTS[0], TEXTS), strict=True))).json()
            assert [entry["score"] for entry in made["data"]] == pytest.approx(wanted, abs=1e-5)
    order = sorted(range(3), key=lambda index: -wanted[index])
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        body = {"query": TEXTS[0], "documents": [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]], "top_n": 2}
        results = running.post(path, body).json()["results"]
        assert [entry["index"] for entry in results] == order[:2]
        assert [entry["document"]["text"] for entry in results] == [TEXTS[index] for index in order[:2]]
        assert results[0]["relevance_score"] == pytest.approx(1.0, abs=1e-5)


def test_an_image_and_texts(running: Running) -> None:
    image = {"content": [{"type": "image_url", "image_url": {"url": data_url(60, 60, seed=1)}}]}
    made = running.post("/score", {"queries": image, "documents": TEXTS}).json()
    assert len({round(entry["score"], 6) for entry in made["data"]}) == 3


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": talk("x")}, "model"),
        ("/v1/completions", {"prompt": "x"}, "model"),
        ("/classify", {"input": "x"}, "task"),
        ("/pooling", {"input": "x", "task": "embedd"}, "task"),
        ("/v1/embeddings", {"input": "x", "padding": "max_length"}, "padding"),
        ("/v1/embeddings", {"input": "x", "padding": "longest"}, "padding"),
        ("/v1/embeddings", {"input": "x " * 4000}, "input"),
        ("/v1/embeddings", {"input": "x", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ("/score", {"text_1": ["x", "y"], "text_2": ["x", "y", "z"]}, None),
        ("/score", {"text_1": "x"}, "text_2"),
        ("/rerank", {"query": "x", "documents": []}, "documents"),
        ("/rerank", {"query": "x", "documents": ["y"], "top_n": -1}, "top_n"),
        ("/v1/embeddings", {"input": "x", "dimensions": 65}, "dimensions"),
        ("/v1/embeddings", {"input": "x", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "x", "dimensions": 2**40}, "dimensions"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": [[1, 2], "x"]}, "input.1"),
        ("/v1/embeddings", {"input": [1, 10**6]}, "input"),
        ("/v1/embeddings", {"input": [1, -1]}, "input.1"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": "x", "messages": talk("x")}, "input"),
        ("/v1/embeddings", {"messages": talk("x", *[data_url(30, 30)] * 5)}, None),
        ("/v1/embeddings", {"input": "<|vision_start|><|image_pad|><|vision_end|>"}, None),
        ("/v2/embed", {"texts": ["x"], "output_dimension": 65}, "output_dimension"),
        ("/v2/embed", {"texts": ["x"], "images": ["y"]}, "texts"),
        ("/v2/embed", {"images": ["x"], "truncate": "START"}, "truncate"),
        ("/v2/embed", {"texts": ["x " * 4000], "truncate": "NONE"}, "texts"),
        ("/v2/embed", {"texts": ["x"], "embedding_types": ["int8"]}, "embedding_types.0"),
        ("/v2/embed", {"input_type": "search_query"}, "texts"),
        ("/pooling", {"input": "x", "task": "classify"}, "task"),
        ("/score", {"queries": {"content": [IMAGE] * 5}, "documents": [{"content": [IMAGE, IMAGE]}]}, None),
        ("/rerank", {"query": {"content": []}, "documents": ["x"]}, None),
        ("/rerank", {"query": "x"}, "documents"),
        ("/rerank", {"query": "x", "documents": ["y"], "instruction": "z"}, "instruction"),
    ],
)
def test_what_is_wrong_is_named(running: Running, path: str, body: dict[str, Any], param: str | None) -> None:
    answer = running.post(path, body)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["remedy"]
    assert param is None or error["param"] == param, error
    assert ("out of vocabulary" in error["message"]) == (body.get("input") in ([1, 10**6], [1, -1]))
    running.idle()


@pytest.mark.parametrize("path", ["/v1/embeddings", "/score", "/v2/rerank"])
def test_a_model_that_is_not_served_is_named(running: Running, path: str) -> None:
    bodies: dict[str, dict[str, Any]] = {"/v1/embeddings": {"input": "x"}, "/score": {"text_1": "x", "text_2": "y"}}
    answer = running.post(path, bodies.get(path, {"query": "x", "documents": ["y"]}) | {"model": "other"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_a_model_that_generates_is_asked_for_vectors() -> None:
    served = Running("qwen2_vl")
    try:
        answers = [
            served.post("/v1/embeddings", {"input": "x"}),
            served.post("/pooling", {"input": "x"}),
            served.post("/classify", {"input": "x"}),
            served.post("/score", {"text_1": "x", "text_2": "y"}),
            served.post("/rerank", {"query": "x", "documents": ["y"]}),
        ]
    finally:
        served.close()
    for answer in answers:
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, "model", "not_an_embedding_model")
        assert "--runner pooling" in error["remedy"]


def test_many_texts_in_one_request(running: Running) -> None:
    texts = [f"{number} circles" for number in range(100)]
    data = running.post("/v1/embeddings", {"input": texts}).json()["data"]
    assert [entry["index"] for entry in data] == list(range(100))
    alone = running.post("/v1/embeddings", {"input": texts[77]}).json()["data"][0]["embedding"]
    assert data[77]["embedding"] == pytest.approx(alone, abs=1e-5)
    running.idle()


def test_vlm2vec_as_its_documentation_serves_it() -> None:
    """With the older option, its own template, and an image in a message."""
    family, text = "phi3_v", "Represent the given image."
    served = Running(family, ENGINE | {"task": "embed", "chat_template": "examples/template_vlm2vec.jinja"})
    try:
        url = data_url(90, 60, seed=1)
        found = served.post("/v1/embeddings", {"messages": talk(text, url), "encoding_format": "float"}).json()
    finally:
        served.close()
    image = Image.open(io.BytesIO(base64.b64decode(url.split(",")[1])))
    prompt = {"prompt": f"<|image_1|> {text}", "multi_modal_data": {"image": image}}
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "limit_mm_per_prompt": {"image": 1}}
    with LLM(str(tiny.checkpoint(family)), task="embed", **options) as llm:
        turned = llm.embed({**prompt, "prompt": f"{text} <|image_1|>"}, use_tqdm=False)[0].outputs.embedding
        straight = llm.embed(prompt, use_tqdm=False)[0].outputs.embedding
    # The template keeps the order of the message's parts.
    assert found["data"][0]["embedding"] == pytest.approx(straight, abs=1e-5)
    assert turned != pytest.approx(straight, abs=1e-3)


def ranked_by_cohere(url: str) -> list[list[int]]:
    """The two best documents by both of Cohere's clients; nothing if the package is not there."""
    if find_spec("cohere") is None:
        return []
    cohere = import_module("cohere")
    asked = {"model": "tiny", "query": TEXTS[0], "documents": TEXTS, "top_n": 2}
    clients = [kind("none", base_url=url) for kind in (cohere.ClientV2, cohere.Client)]
    return [[entry.index for entry in client.rerank(**asked).results] for client in clients]


def test_a_cross_encoder_ranks_and_a_classifier_names_its_classes(tmp_path: Path) -> None:
    folder = encoder(tmp_path / "one", "BertForSequenceClassification", num_labels=1)
    served = Running(folder, {"dtype": "float32", "max_num_seqs": 8, "disable_log_stats": True})
    try:
        body = {"query": TEXTS[0], "documents": TEXTS}
        ranked = served.post("/v2/rerank", body).json()
        pair = served.post("/score", {"text_1": TEXTS[0], "text_2": TEXTS}).json()
        refused = served.post("/v1/embeddings", {"input": "x"})
        cut = served.post("/v2/rerank", body | {"max_tokens_per_doc": 6, "max_tokens_per_query": 4}).json()
        # Each letter is a token, and blanks are none.
        pairs = {"queries": "What", "items": ["What is", "A small", "Hello"]}
        same = served.post("/score", pairs).json()
        wrong = served.post("/rerank", body | {"max_tokens_per_doc": -5}).json()["error"]
        parts = {"content": [{"type": "text", "text": "x"}]}
        uncut = served.post("/rerank", {"query": "x", "documents": [parts], "max_tokens_per_doc": 5}).json()["error"]
        by_client = ranked_by_cohere(served.url)
    finally:
        served.close()
    scores = [entry["score"] for entry in pair["data"]]
    assert [entry["relevance_score"] for entry in ranked["results"]] == pytest.approx(sorted(scores, reverse=True))
    of_cut = {entry["index"]: entry["relevance_score"] for entry in cut["results"]}
    assert [of_cut[place] for place in range(3)] == pytest.approx([entry["score"] for entry in same["data"]], abs=1e-5)
    assert {entry["document"]["text"] for entry in cut["results"]} == set(TEXTS)
    assert (wrong["param"], uncut["param"]) == ("max_tokens_per_doc", "max_tokens_per_doc")
    # Words that scripts look for.
    assert "max_tokens_per_doc must be a non-negative integer" in wrong["message"]
    order = [entry["index"] for entry in ranked["results"]]
    assert all(found == order[:2] for found in by_client)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "task")
    folder = encoder(tmp_path / "two", "BertForSequenceClassification", id2label={0: "calm", 1: "glad"})
    served = Running(folder, {"dtype": "float32", "max_num_seqs": 8, "disable_log_stats": True})
    try:
        (entry,) = served.post("/classify", {"input": TEXTS[0], "padding": "do_not_pad"}).json()["data"]
        bare = served.post("/classify", {"input": TEXTS[0], "add_special_tokens": False}).json()
        plain = served.post("/classify", {"input": TEXTS[0], "add_special_tokens": True}).json()
        ids = served.post("/tokenize", {"prompt": TEXTS[0], "add_special_tokens": False}).json()["tokens"]
        same = served.post("/classify", {"input": ids}).json()
        padded = served.post("/classify", {"input": TEXTS[0], "padding": "max_length"}).json()["error"]
    finally:
        served.close()
    assert plain["data"] == [entry]
    assert bare["data"] == same["data"]
    assert bare["usage"]["prompt_tokens"] == len(ids) == plain["usage"]["prompt_tokens"] - 2
    assert (padded["param"], padded["remedy"].startswith("Leave it out")) == ("padding", True)
    assert entry["label"] == ("calm", "glad")[entry["probs"][1] > entry["probs"][0]]
    assert (entry["num_classes"], sum(entry["probs"])) == (2, pytest.approx(1.0))


RERANKER = {
    "architectures": ["Qwen2ForSequenceClassification"],
    "classifier_from_token": ["n", "y"],
    "is_original_qwen3_reranker": True,
}


def test_a_pairs_template_has_the_requests_instruction(tmp_path: Path) -> None:
    folder = encoder(tmp_path / "one", "BertForSequenceClassification", num_labels=1)
    template = "{{ instruction }}{% for message in messages %} {{ message.content }}{% endfor %}"
    served = Running(folder, {"dtype": "float32", "max_num_seqs": 8, "chat_template": template})
    try:
        body: dict[str, Any] = {"queries": "a", "documents": ["b", "c"]}
        one = served.post("/score", body | {"instruction": "be so"}).json()
        same = served.post("/score", body | {"chat_template_kwargs": {"instruction": "be so"}}).json()
        other = served.post("/score", body | {"instruction": "be not so"}).json()
    finally:
        served.close()
    assert one["data"] == same["data"] != other["data"]
    written = tmp_path / "pair.jinja"
    written.write_text(template)
    # A file's text, and that of a template by its name, have the place; only their names were searched.
    for by_name in (str(written), "template_qwen3_reranker.jinja"):
        served = Running(
            tiny.checkpoint("qwen2"),
            {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 8, "chat_template": by_name}
            | {"hf_overrides": RERANKER},
        )
        try:
            found = [served.post("/score", body | {"instruction": text}) for text in ("be so", "be not so")]
        finally:
            served.close()
        assert [answer.status_code for answer in found] == [200, 200], found[0].text
        assert found[0].json()["data"] != found[1].json()["data"]
    without = "{% for message in messages %} {{ message.content }}{% endfor %}"
    served = Running(folder, {"dtype": "float32", "max_num_seqs": 8, "chat_template": without})
    try:
        refused = served.post("/score", body | {"instruction": "be so"})
    finally:
        served.close()
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "instruction")


def embedded(made: Any) -> Any:
    """The vectors of one of Cohere's answers."""
    return torch.tensor(made["embeddings"]["float"])


def test_vectors_in_coheres_form(running: Running, vectors: torch.Tensor) -> None:
    body: dict[str, Any] = {"input_type": "search_document", "texts": TEXTS}
    made = running.post("/v2/embed", body).json()
    torch.testing.assert_close(embedded(made), vectors, atol=1e-5, rtol=1e-4)
    assert (made["texts"], made["response_type"]) == (TEXTS, "embeddings_by_type")
    assert made["meta"]["billed_units"]["input_tokens"] == made["usage"]["prompt_tokens"]
    kinds = running.post("/v2/embed", body | {"embedding_types": ["base64", "ubinary", "binary"]}).json()["embeddings"]
    floats = np.stack([np.frombuffer(base64.b64decode(entry), "<f4") for entry in kinds["base64"]])
    torch.testing.assert_close(torch.from_numpy(floats), vectors, atol=1e-5, rtol=1e-4)
    bits = np.unpackbits(np.array(kinds["ubinary"], dtype=np.uint8), axis=-1)
    assert (bits == (floats > 0)).all()
    assert (np.array(kinds["binary"]) + 128 == np.array(kinds["ubinary"])).all()
    short = running.post("/v2/embed", body | {"output_dimension": 8}).json()
    torch.testing.assert_close(embedded(short), F.normalize(vectors[:, :8], dim=-1), atol=1e-5, rtol=1e-4)
    cut = running.post("/v2/embed", {"texts": ["x " * 4000]})
    assert cut.json()["usage"]["prompt_tokens"] == ENGINE["max_model_len"]
    count = len(running.post("/tokenize", {"prompt": TEXTS[0]}).json()["tokens"])
    for most, bound in ((count, {"max_tokens": count}), (ENGINE["max_model_len"], {})):
        end = {"texts": ["x " * 4000 + TEXTS[0], TEXTS[0]], "truncate": "START", **bound}
        kept = running.post("/v2/embed", end).json()
        assert kept["usage"]["prompt_tokens"] == most + count
        assert (embedded(kept)[0] - embedded(kept)[1]).abs().max() < 1e-5 or most > count
    url = IMAGE["image_url"]["url"]
    by_chat = running.post("/v1/embeddings", {"messages": [{"role": "user", "content": [IMAGE]}]}).json()
    wanted = torch.tensor([by_chat["data"][0]["embedding"]])
    for asked in ({"images": [url]}, {"inputs": [{"content": [IMAGE]}]}):
        torch.testing.assert_close(embedded(running.post("/v2/embed", asked).json()), wanted, atol=1e-5, rtol=1e-4)
    inputs = [{"content": [{"type": "text", "text": text}]} for text in TEXTS]
    torch.testing.assert_close(
        embedded(running.post("/v2/embed", {"inputs": inputs}).json()), vectors, atol=1e-5, rtol=1e-4
    )


def test_plain_texts_are_prompts_that_are_tokenized_together() -> None:
    def prompts(salt: str | None, **fields: Any) -> list[Any]:
        body = EmbeddingRequest.model_validate({"input": TEXTS, **fields})
        return list(pooling._prompts(body, ServerOptions(), salt))

    assert prompts(None) == TEXTS
    assert prompts("a") == [{"prompt": text, "cache_salt": "a"} for text in TEXTS]
    assert prompts(None, add_special_tokens=False)[0] == {"prompt": TEXTS[0], "add_special_tokens": False}
    for asked, adds in ((None, False), (False, False), (True, True)):
        body = EmbeddingRequest.model_validate({"messages": talk("x"), "add_special_tokens": asked})
        assert pooling._prompts(body, ServerOptions(), None)[0].add_special_tokens is adds


@pytest.mark.skipif(find_spec("cohere") is None, reason="the package cohere is not installed")
def test_coheres_client_embeds(running: Running, vectors: torch.Tensor) -> None:
    client = import_module("cohere").ClientV2("none", base_url=running.url)
    made = client.embed(model="tiny", input_type="search_query", texts=TEXTS, embedding_types=["float"])
    torch.testing.assert_close(torch.tensor(made.embeddings.float_), vectors, atol=1e-5, rtol=1e-4)
    url = IMAGE["image_url"]["url"]
    image = client.embed(model="tiny", input_type="image", images=[url], embedding_types=["float"])
    assert len(image.embeddings.float_[0]) == vectors.shape[1]


@pytest.mark.parametrize(
    ("task", "begin"),
    [
        ("classify", "Unsupported task: 'classify'. Classification API is not supported by this model"),
        ("token_classify", "Unsupported task: 'token_classify'."),
        ("plugin", "No IOProcessor plugin installed."),
        ("sing", "There is no pooling task 'sing'."),
    ],
)
def test_a_task_that_the_model_lacks_is_refused_in_vllms_words(running: Running, task: str, begin: str) -> None:
    refused = running.post("/pooling", {"input": TEXTS[0], "task": task})
    error = refused.json()["error"]
    assert (refused.status_code, error["type"], error["param"]) == (400, "BadRequestError", "task")
    assert error["message"].startswith(begin)


def test_errors_of_openais_routes_have_openais_type(running: Running) -> None:
    refused = running.post("/v1/embeddings", {"input": TEXTS[0], "dimensions": 65})
    assert refused.json()["error"]["type"] == "invalid_request_error"


def test_a_cut_behind_the_models_end_is_refused(running: Running) -> None:
    """It cut nothing, and a longer text was refused as one."""
    most = ENGINE["max_model_len"]
    assert running.post("/v1/embeddings", {"input": TEXTS[0], "truncate_prompt_tokens": most}).status_code == 200
    refused = running.post("/v1/embeddings", {"input": TEXTS[0], "truncate_prompt_tokens": most + 1})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "truncate_prompt_tokens")
    assert error["message"] == (
        "truncate_prompt_tokens value is greater than max_model_len. Please request a smaller truncation size."
    )


def test_a_type_that_coheres_clients_do_not_have_is_refused(running: Running) -> None:
    for kind, status in (("search_query", 200), ("poem", 400)):
        assert running.post("/v2/embed", {"texts": TEXTS, "input_type": kind}).status_code == status


@pytest.fixture(scope="module")
def of_tokens() -> Iterator[Running]:
    made = Running("qwen2_vl", ENGINE | {"runner": "pooling", "pooler_config": PoolerConfig(task="token_embed")})
    yield made
    made.close()


def test_vectors_of_tokens_where_the_operator_chose_them(of_tokens: Running, vectors: torch.Tensor) -> None:
    pooled = of_tokens.post("/pooling", {"input": TEXTS}).json()
    made = of_tokens.post("/v1/embeddings", {"input": TEXTS}).json()
    assert [one["embedding"] for one in made["data"]] == [one["data"] for one in pooled["data"]]
    torch.testing.assert_close(torch.tensor(made["data"][0]["embedding"][-1]), vectors[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("scaled", [None, False])
def test_late_chunks_are_means_of_tokens_with_their_places(of_tokens: Running, scaled: bool | None) -> None:
    plain = of_tokens.post("/pooling", {"input": TEXTS, "use_activation": False}).json()["data"]
    for size in (1, 4, 2**40):
        asked = {"input": TEXTS, "late_chunking_params": {"chunk_size": size}, "use_activation": scaled}
        found = of_tokens.post("/v1/embeddings", asked).json()["data"]
        for one, raw, text in zip(found, plain, TEXTS, strict=True):
            expected = torch.stack([part.mean(0) for part in torch.tensor(raw["data"]).split(size)])
            expected = expected if scaled is False else F.normalize(expected, dim=-1)
            torch.testing.assert_close(torch.tensor(one["embedding"]), expected, atol=1e-4, rtol=1e-3)
            told = one["late_chunking"]
            assert (told["chunk_size"], told["input_tokens"], len(told["chunks"])) == (
                *(size, len(raw["data"])),
                len(expected),
            )
            assert "".join(text[slice(*chunk["char_range"])] for chunk in told["chunks"]) == text
            assert [chunk["token_range"][0] for chunk in told["chunks"]] == list(range(0, len(raw["data"]), size))


@pytest.mark.parametrize(
    "body",
    [
        {"input": [5, 6, 7]},
        {"input": ""},
        {"messages": talk("x")},
        {"input": "x", "truncate_prompt_tokens": 4},
        {"input": "x", "late_chunking_params": {"chunk_size": 0}},
        {"input": "x", "late_chunking_params": {"chunk_size": 2**64}},
        # Bytes have no room for places.
        {"input": "x", "encoding_format": "bytes"},
        {"input": "x", "encoding_format": "bytes_only"},
    ],
)
def test_late_chunks_of_other_inputs_are_refused(of_tokens: Running, body: dict[str, Any]) -> None:
    refused = of_tokens.post("/v1/embeddings", {"late_chunking_params": {"chunk_size": 4}} | body)
    assert (refused.status_code, bool(refused.json()["error"]["param"])) == (400, True)


def test_late_chunks_need_vectors_of_tokens(running: Running) -> None:
    refused = running.post("/v1/embeddings", {"input": "x", "late_chunking_params": {"chunk_size": 4}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "late_chunking_params")


def test_late_chunks_of_a_tokenizer_that_fills_texts_up_and_cuts_them(tmp_path: Path) -> None:
    """The tokenizers of encoders mostly do."""
    encoder(tmp_path, "BertModel")
    file = tmp_path / "tokenizer.json"
    padding = {"strategy": {"Fixed": 12}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    cuts = {"direction": "Right", "max_length": 12, "strategy": "LongestFirst", "stride": 0}
    written = json.loads(file.read_text(encoding="utf-8"))
    written |= {"padding": padding | {"pad_type_id": 0, "pad_token": "[PAD]"}, "truncation": cuts}
    file.write_text(json.dumps(written), encoding="utf-8")
    run = Running(
        tmp_path, {"dtype": "float32", "runner": "pooling", "pooler_config": PoolerConfig(task="token_embed")}
    )
    try:
        for text in ("ab", "a small red circle stands left of a large blue square"):
            asked = {"input": text, "late_chunking_params": {"chunk_size": 4}, "request_id": "mine"}
            answer = run.post("/v1/embeddings", asked)
            found = answer.json()
            (one,) = found["data"]
            assert one["late_chunking"]["input_tokens"] == found["usage"]["prompt_tokens"]
            assert answer.headers["X-Without-Effect"] == "request_id"
    finally:
        run.close()
