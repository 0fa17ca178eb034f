"""A kind of cache group that the engine does not know runs from scheduler to runner: one file for each half."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from beheld.attention.torch_ref import TorchBackend
from beheld.core.config import EngineConfig, ModelInfo
from beheld.core.request import Request
from beheld.engine.core import EngineCore, InFlight
from beheld.runner import capacity
from beheld.runner.runner import ModelRunner
from tests.fakes import fake_config, fake_info, fake_request
from tests.toy_recurrent import RECURRENT
from tests.toy_recurrent_device import ToyAdapter, following


def expected(request: Request, vocab_size: int) -> list[int]:
    state, made = 0.0, []
    for token in request.token_ids:
        state = following(state, token)
    for _ in range(request.params.max_tokens):
        made.append(int(state) % vocab_size)
        state = following(state, made[-1])
    return made


def engine(info: ModelInfo, config: EngineConfig, available: int = 4 * 40) -> EngineCore:
    found = capacity.measure(info, config, available)
    runner: Any = ModelRunner(ToyAdapter(info), TorchBackend(), info, config, found)
    runner.self_test()
    return EngineCore(info, runner)


def run(core: EngineCore, *requests: Request) -> dict[str, list[int]]:
    for request in requests:
        core.add(request)
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    in_flight: InFlight | None = None
    while core.scheduler.has_work or in_flight is not None:
        in_flight, events = core.step(in_flight)
        core.scheduler.check()
        for event in events:
            assert event.error is None
            tokens[event.request_id] += event.token_ids
    return tokens


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("budget", "available"), [(64, 4 * 40), (5, 4 * 40), (9, 4 * 4)])
def test_cut_prompts_mates_hits_and_preemption_change_nothing(overlap: bool, budget: int, available: int) -> None:
    info = fake_info(RECURRENT)
    core = engine(info, fake_config(overlap=overlap, max_num_batched_tokens=budget), available)
    number = itertools.count()
    for _ in range(2):
        requests = [
            fake_request(str(next(number)), range(10, 10 + length), own, max_tokens=14)
            for length, own in ((30, 1), (30, 2), (7, 3), (22, 4), (1, 5))
        ]
        found = run(core, *requests)
        assert found == {request.id: expected(request, info.vocab_size) for request in requests}
    stats, tight = core.scheduler.stats(), available == 4 * 4
    assert stats.prefix_hits > 0 or tight, "with three blocks there may be no room for checkpoints"
    assert (stats.num_preemptions > 0) == tight
    assert stats.num_free_blocks == stats.num_blocks


def test_its_memory_is_counted_in_states() -> None:
    """Two blocks and the null block, four bytes each, suffice for one sequence of any length."""
    info, config = fake_info(RECURRENT), fake_config(max_model_len=4096)
    assert capacity.measure(info, config, 12).num_blocks == (3,)
    assert capacity.measure(info, config, 10**6).num_blocks == (2 * 8 * 2 + 1,)
