"""Made-up requests to the routes of models that pool, over models that do what is asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from tests.long import sized
from tests.pool.checkpoints import encoder
from tests.server import fuzzing
from tests.server.running import ENGINE, Running, data_url

# What the document does not allow is refused before the model is asked: tests/server/test_fuzz.py.
EXAMPLES = sized(10, 400)
OPERATIONS = {operation.path: operation for operation in fuzzing.OPERATIONS}
OF_VECTORS = ("/v1/embeddings", "/v2/embed", "/pooling", "/score", "/rerank")


@pytest.fixture(scope="module")
def vectors() -> Iterator[Running]:
    served = Running("qwen2_vl", ENGINE | {"runner": "pooling", "hf_overrides": {"is_matryoshka": True}})
    yield served
    served.close()


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = encoder(tmp_path_factory.mktemp("fuzz") / "one", "BertForSequenceClassification", num_labels=1)
    served = Running(folder, {"dtype": "float32", "max_num_seqs": 8, "disable_log_stats": True})
    yield served
    served.close()


@pytest.mark.parametrize("path", OF_VECTORS)
def test_requests_after_the_document_to_an_embedder(vectors: Running, path: str) -> None:
    fuzzing.check(vectors.url, OPERATIONS[path], GenerationMode.POSITIVE, EXAMPLES)
    vectors.idle(20.0)


@pytest.mark.parametrize("path", ["/classify", "/score", "/rerank"])
def test_requests_after_the_document_to_a_classifier(classes: Running, path: str) -> None:
    fuzzing.check(classes.url, OPERATIONS[path], GenerationMode.POSITIVE, EXAMPLES)
    classes.idle(20.0)


# Mostly right, so that answers are made.
TEXTS = st.text(max_size=30)
IDS = st.lists(st.integers(-1, 600), min_size=1, max_size=8)
IMAGE = {"type": "image_url", "image_url": {"url": data_url(60, 60, seed=1)}}
PARTS = st.lists(st.sampled_from([IMAGE, {"type": "text", "text": "a cat"}]), min_size=1, max_size=3)
SIDE = TEXTS | st.builds(lambda parts: {"content": parts}, PARTS)
SIDES = SIDE | st.lists(SIDE, min_size=1, max_size=3)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "normalize": st.booleans(),
        "truncate_prompt_tokens": st.sampled_from([-2, -1, 0, 1, 5, 4000]),
        "cache_salt": st.sampled_from(["a", ""]),
        "priority": st.integers(-2, 2),
    },
)
INPUTS = st.fixed_dictionaries(
    {"input": TEXTS | st.lists(TEXTS, min_size=1, max_size=3) | IDS | st.lists(IDS, min_size=1, max_size=3)},
    optional={"dimensions": st.integers(0, 70), "encoding_format": st.sampled_from(["float", "base64"])},
)
BODIES = st.one_of(
    st.tuples(st.just("/v1/embeddings"), INPUTS),
    st.tuples(st.just("/pooling"), INPUTS),
    st.tuples(st.just("/score"), st.fixed_dictionaries({"queries": SIDES, "documents": SIDES})),
    st.tuples(
        st.just("/v2/rerank"),
        st.fixed_dictionaries(
            {"query": SIDE, "documents": st.lists(SIDE, min_size=1, max_size=3)}, optional={"top_n": st.integers(0, 4)}
        ),
    ),
)


def test_what_is_nearly_right_is_answered_or_named(vectors: Running) -> None:
    statuses: list[int] = []

    @seed(9)
    @settings(max_examples=sized(60, 3000), deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(BODIES, OPTIONS)
    def one(asked: tuple[str, dict[str, Any]], options: dict[str, Any]) -> None:
        path, body = asked
        answer = vectors.post(path, body | options)
        statuses.append(answer.status_code)
        assert answer.status_code in (200, 400), answer.text
        if answer.status_code == 400:
            assert answer.json()["error"]["message"]
            return
        found = answer.json()
        if path == "/v2/rerank":
            scores = [entry["relevance_score"] for entry in found["results"]]
            assert scores == sorted(scores, reverse=True)
            assert len(scores) == min(body.get("top_n") or len(body["documents"]), len(body["documents"]))
        elif path == "/score":
            assert all(-1.001 <= entry["score"] <= 1.001 for entry in found["data"])
        else:
            given = body["input"]
            many = isinstance(given, list) and not isinstance(given[0], int)
            assert [entry["index"] for entry in found["data"]] == list(range(len(given) if many else 1))

    one()
    assert statuses.count(200) > len(statuses) // 4
    vectors.idle(20.0)
