"""Requests that pool: nothing is sampled, and their prompts give vectors, whatever shares the steps."""

from __future__ import annotations

import pytest

from beheld.core.errors import PromptTooLongError, StepError
from beheld.core.pooling_params import Pooling
from beheld.core.request import FinishReason, Request
from tests.fakes import FULL, expected_tokens, expected_vector, fake_config, fake_info, fake_item, fake_request, sliding
from tests.scheduler.drive import Bench

METHODS = ["last", "cls", "mean", "all"]
CAT = fake_item("cat", 9)


def pooling(request_id: str, *parts: object, method: str = "last") -> Request:
    return fake_request(request_id, *parts, params=Pooling(method=method))  # type: ignore[arg-type]


def assert_vector(bench: Bench, request: Request) -> None:
    (event,) = bench.events[request.id]
    assert (event.finish, event.token_ids, event.error) == (FinishReason.STOP, (), None)
    assert event.pooled is not None
    assert event.pooled.tolist() == expected_vector(request)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_prompt_gives_its_vector_in_pieces_beside_answers(method: str, overlap: bool) -> None:
    bench = Bench(fake_config(overlap=overlap, max_num_batched_tokens=10), fake_info(FULL, sliding(6)))
    request = pooling("vector", range(12), CAT, range(20), method=method)
    mate = fake_request("answer", range(5), max_tokens=12)
    bench.run(mate, request)
    assert_vector(bench, request)
    assert bench.tokens("answer") == expected_tokens(mate, 256)[0]
    own = [piece for plan in bench.plans for piece in plan.slices if piece.row == 1]
    assert len(own) > 3
    assert own[-1].stop == 41, "every position is computed, the last too"
    reads = [piece.stop - piece.start for piece in own] if method != "last" else [0] * (len(own) - 1) + [1]
    assert [piece.wanted for piece in own] == reads


@pytest.mark.parametrize("method", METHODS)
def test_a_cached_prefix_serves_only_what_reads_the_last_position(method: str) -> None:
    bench = Bench(fake_config(), fake_info())
    first = fake_request("answer", range(12), max_tokens=2)
    bench.run(first)
    request = pooling("vector", range(12), 5, method=method)
    bench.run(request)
    assert_vector(bench, request)
    assert bench.events["vector"][0].num_cached == (12 if method == "last" else 0)
    longer = fake_request("longer", range(12), 5, 6, max_tokens=2)
    bench.run(longer)
    assert bench.tokens("longer") == expected_tokens(longer, 256)[0]
    assert bench.events["longer"][0].num_cached == 12


def test_a_preempted_pool_starts_anew() -> None:
    bench = Bench(fake_config(max_num_batched_tokens=6, max_num_seqs=2, prefix_caching=False), fake_info(), 9)
    mate = fake_request("answer", range(6), max_tokens=20)
    request = pooling("vector", range(20, 40), method="mean")
    bench.run(mate, request)
    assert_vector(bench, request)
    assert bench.tokens("answer") == expected_tokens(mate, 256)[0]


def test_a_prompt_may_be_as_long_as_the_model_reads() -> None:
    bench = Bench(fake_config(max_model_len=16), fake_info())
    request = pooling("full", range(16))
    bench.run(request)
    assert_vector(bench, request)
    with pytest.raises(PromptTooLongError, match="allows 16"):
        bench.add(pooling("longer", range(17)))
    with pytest.raises(PromptTooLongError, match="allows 15"):
        bench.add(fake_request("answer", range(16)))


def test_a_broken_prompt_gives_an_error_and_no_vector() -> None:
    bench = Bench(fake_config(), fake_info())
    bench.runner.broken_tokens = {77}
    bench.run(pooling("bad", range(5), 77, 3), pooling("good", range(6)))
    (event,) = bench.events["bad"]
    assert event.pooled is None
    assert isinstance(event.error, StepError)
    assert bench.events["good"][0].pooled is not None
