"""A rank that ends, hangs or fails alone ends the engine with one error, and leaves no process behind."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import re
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from beheld import LLM, SamplingParams
from beheld.cluster import remote
from beheld.cluster.remote import RemoteProcess
from beheld.core.errors import ConfigError, EngineDeadError, ModelError, StepError
from beheld.core.plan import Admission, EncodeItem, SeqSlice, StepPlan
from beheld.core.sampling import LogprobsMode, PromptIds, Sampling
from beheld.engine import ranks as engine_ranks
from beheld.executor import hangs, multi, ray, watchdog
from beheld.executor import rank as rank_module
from beheld.executor.hangs import Patience
from beheld.executor.multi import MultiExecutor
from beheld.executor.progress import StepClock
from beheld.executor.rank import Rank, config_of, config_text
from beheld.executor.ray import RayExecutor
from beheld.executor.watchdog import RankProcess, Watchdog
from beheld.executor.wire import CODEC, Beat, Missing, RankFailed, Step, StepFailed, packed, unpacked
from beheld.models.rank_towers import RankTowers
from beheld.runner import device_wait
from beheld.wire.link import Link, pair
from tests import ranks, tiny
from tests.inputs import pipes
from tests.oracle import cases
from tests.oracle.test_oracle import check, make, request

RANKS: dict[str, Any] = {"device": "cpu", "distributed_executor_backend": "mp", "tensor_parallel_size": 2}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def forked() -> Iterator[None]:
    """All ranks of this module start quickly, but where a test wants a fresh process."""
    with ranks.forked():
        yield


def start(family: str = "llama", more: dict[str, Any] | None = None) -> LLM:
    return make(family, cases.ROOMY | RANKS | (more or {}))


def executor_of(llm: LLM) -> MultiExecutor:
    found = llm._live().core.executor
    assert isinstance(found, MultiExecutor)
    return found


@pytest.mark.parametrize("failing", [{0, 1}, {1}], ids=["both", "one"])
def test_an_error_within_towers_cut_by_weights(failing: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks agree on it long after they have found each other: it fails the request, or names the rank that has it."""
    monkeypatch.setattr(ranks, "TOWERS_FAILING", failing)
    monkeypatch.setattr(RankTowers, "encode", RankTowers.encode)
    if 0 in failing:
        ranks.fail_in_towers(os.getpid())
    ask = next(ask for ask in cases.mixed("qwen2_5_vl") if ask.images)
    fails = ranks.towers_fail(os.getpid())
    try:
        with start("qwen2_5_vl", {"mm_encoder_tp_mode": "weights"}) as llm:
            fails.touch()
            begin = time.monotonic()
            if failing == {1}:
                with pytest.raises(EngineDeadError, match="on rank 1 alone"):
                    llm.generate(request("qwen2_5_vl", ask), GREEDY, use_tqdm=False)
                assert time.monotonic() - begin < 10
                return
            with pytest.raises(StepError, match="a tower fails"):
                llm.generate(request("qwen2_5_vl", ask), GREEDY, use_tqdm=False)
            assert time.monotonic() - begin < 5
            fails.unlink()
            (answered,) = llm.generate(request("qwen2_5_vl", ask), GREEDY, use_tqdm=False)
            assert answered.outputs[0].finish_reason == "length"
    finally:
        fails.unlink(missing_ok=True)


def test_a_plan_arrives_as_it_was_sent() -> None:
    admission = Admission(0, (5, 6, 7), 3, (), Sampling(seed=9, prompt_logprobs=1), None, 0, ((1,), (2,)))
    slices = (
        SeqSlice(0, 0, 3, ((), ()), 1),
        SeqSlice(3, 40, 44, ((7, 8), ()), 4, (1, 2, 3, 4)),
    )
    plan = StepPlan(11, slices, (admission,), released=(2,), forget=(b"x" * 32,), masks={0: (b"1",)})

    def plan_of(given: StepPlan) -> StepPlan:
        body = b"".join(CODEC.encode(packed(given)))
        return unpacked(CODEC.decode(bytearray(body)), 2)

    found = plan_of(plan)
    assert (found.id, found.slices, found.released, found.forget) == (11, slices, (2,), (b"x" * 32,))
    assert found.admitted[0].token_ids == (5, 6, 7)
    # What only the rank that samples needs stays there.
    assert found.admitted[0].params == Sampling(prompt_logprobs=1)
    assert not found.masks
    named = PromptIds(1, np.array([[4, -1]], np.int32))
    asked = plan_of(dataclasses.replace(plan, admitted=(admission._replace(params=Sampling(prompt_ids=named)),)))
    params = asked.admitted[0].params
    assert isinstance(params, Sampling)
    assert (params.reports_from, params.prompt_ids and params.prompt_ids.ids_TN.shape) == (1, (1, 0))


@pytest.mark.parametrize("mode", ["data", "weights"])
@pytest.mark.parametrize("stages", [1, 2])
def test_features_go_to_the_ranks_that_need_them(mode: str, stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each item's to the rank that encodes it, or to all ranks of the stage that has the towers; pixels to no other."""
    sent: dict[int, dict[bytes, int]] = {}
    tell = multi._tell

    def counted(rank: RankProcess, message: Any, watchdog: Watchdog) -> None:
        if isinstance(message, Step):
            for item in message.encode:
                size = sum(value.nbytes for value in item.features.values() if isinstance(value, torch.Tensor))
                own = sent.setdefault(rank.rank, {})
                own[item.digest] = own.get(item.digest, 0) + size
        tell(rank, message, watchdog)

    monkeypatch.setattr(multi, "_tell", counted)
    family = "qwen2_5_vl"
    asks = [ask for ask in cases.mixed(family) if len(ask.images) > 1][:2]
    with start(family, {"mm_encoder_tp_mode": mode, "pipeline_parallel_size": stages}) as llm:
        check(llm, family, asks)
    digests = set().union(*sent.values())
    assert len(digests) > 2
    towers = {1} if stages == 1 else {2, 3}
    assert sent.keys() == set(range(1, 2 * stages))
    got = {digest: [rank for rank, own in sent.items() if own[digest]] for digest in digests}
    if mode == "weights":
        assert all(set(ranks_) == towers for ranks_ in got.values())
    elif stages == 2:
        assert all(len(ranks_) == 1 and set(ranks_) < towers for ranks_ in got.values())
        assert {rank for ranks_ in got.values() for rank in ranks_} == towers
    else:
        # The first rank, in this process, has the others.
        assert 0 < sum(map(len, got.values())) < len(digests)


class Fails:
    """A logits processor that fails at the third token."""

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output_ids) == 2:
            raise RuntimeError("it fails")
        return logits


STAGES: dict[str, Any] = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}


@pytest.mark.parametrize(
    ("family", "more"), [("llama", {}), ("qwen3_next", {}), ("llama", STAGES), ("qwen3_next", STAGES)]
)
def test_a_step_that_fails_in_sampling_is_launched_again_on_all_ranks(family: str, more: dict[str, Any]) -> None:
    """States of recurrent layers must not be changed twice on the ranks that do not sample, either."""
    # Two of them in each step of stages, while another step is in flight.
    prompts = [tiny.wrap(family, word) for word in ("one", "two", "three", "four")]
    with start(family, more) as llm:
        wanted = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
        failing = SamplingParams(temperature=0, max_tokens=8, logits_processors=[Fails()], ignore_eos=True)
        found = llm.generate(prompts, [failing, GREEDY, GREEDY, GREEDY], use_tqdm=False, on_error="return")
        assert isinstance(found[0].error, StepError)
        assert [output.outputs[0].token_ids for output in found[1:]] == wanted[1:]
        assert llm.stats().retried > 0
        again = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
        assert again == wanted


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_what_fails_in_the_last_stage_alone_gives_no_one_another_s_answer(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stage before has sent its hidden states already, and counts on tokens."""
    monkeypatch.setattr(hangs, "COMPILING_S", 5.0)
    prompts = [tiny.wrap(family, word) for word in ("one", "two", "three", "four")]
    with start(family, STAGES) as llm:
        wanted = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
        runner = executor_of(llm)._local.runner
        admit, hidden, passes = runner.sampler.admit, runner._adapter.hidden, itertools.count(1)

        def no_place(row: int, params: Sampling, *given: Any) -> None:
            if params.seed == 77:
                raise RuntimeError("no place for it")
            admit(row, params, *given)

        def no_memory(*given: Any) -> Any:
            if next(passes) == 3:
                raise RuntimeError("no memory for it")
            return hidden(*given)

        with monkeypatch.context() as patch:
            patch.setattr(runner.sampler, "admit", no_place)
            first = SamplingParams(temperature=0, max_tokens=8, seed=77, ignore_eos=True)
            found = llm.generate(prompts, [first, GREEDY, GREEDY, GREEDY], use_tqdm=False, on_error="return")
        assert isinstance(found[0].error, StepError)
        assert [output.outputs[0].token_ids for output in found[1:]] == wanted[1:]
        with monkeypatch.context() as patch:
            patch.setattr(runner._adapter, "hidden", no_memory)
            again = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert next(passes) > 3
        assert [output.outputs[0].token_ids for output in again] == wanted


@pytest.mark.parametrize(("family", "stages"), [("llama", 3), ("qwen3_next", 2)])
def test_a_stage_before_the_last_that_fails_once_costs_nothing_but_time(
    family: str, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hangs, "COMPILING_S", 5.0)
    # Rank 1 is of the stage before the last one.
    monkeypatch.setattr(ranks, "FAILING", {1})
    prompts = [tiny.wrap(family, word) for word in ("one", "two", "three", "four")]
    with start(family, STAGES | {"pipeline_parallel_size": stages}) as llm:
        found = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
        assert llm.stats().retried == 1
        assert found == [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


def quiet_watchdog() -> Any:
    """A watchdog that watches nothing."""
    group = SimpleNamespace(entered=0, waits_since=None)
    return SimpleNamespace(
        not_begun=(),
        cause=None,
        clock=StepClock(group),
        leave=lambda: None,
        failed=lambda step: None,
        hangs=SimpleNamespace(launched=lambda step, *size: None),
    )


def of_stages(launch: Any, ranks: list[Any], rank_watch: Any) -> MultiExecutor:
    """An executor of stages of two ranks on CPUs."""
    config = SimpleNamespace(
        device="cpu", tensor_parallel_size=2, pipeline_parallel_size=2, mm_encoder_tp_mode="weights"
    )
    local = SimpleNamespace(config=config, capacity=None, launch=launch)
    group = SimpleNamespace(lockstep=False, broken=False)
    placed = multi.Placed(ranks, lambda: Path(), lambda: None)  # type: ignore[arg-type, return-value]
    return MultiExecutor(pipes.info("llama"), local, group, placed, rank_watch)  # type: ignore[arg-type]


def test_a_step_that_the_first_rank_is_in_has_begun() -> None:
    """Another rank that fails in it fails alone."""
    watch = quiet_watchdog()
    begun = list[bool]()

    def launch(plan: StepPlan) -> Any:
        begun.append(plan.id not in watch.not_begun)
        raise MemoryError

    executor = of_stages(launch, [], watch)
    executor.launch(StepPlan(7, ()))
    assert 7 in watch.not_begun
    executor._begin_all()
    assert begun == [True]


def test_features_go_to_the_stage_with_towers_alone() -> None:
    sent: dict[int, Any] = {}

    def rank(number: int) -> RankProcess:
        link: Any = SimpleNamespace(send=lambda message: sent.__setitem__(number, message))
        return RankProcess(number, SimpleNamespace(), link)  # type: ignore[arg-type]

    watch = quiet_watchdog()
    executor = of_stages(None, [rank(number) for number in (1, 2, 3)], watch)
    item = EncodeItem(b"a" * 32, "image", {"pixel_values": torch.ones(4)}, 2)
    executor.launch(StepPlan(7, (), encode=(item,)))
    assert [list(sent[number].encode[0].features) for number in (1, 2, 3)] == [[], ["pixel_values"], ["pixel_values"]]
    assert {sent[number].encode[0].digest for number in (1, 2, 3)} == {item.digest}


def test_a_plan_is_serialized_once_for_all_ranks() -> None:
    sent = list[Any]()

    def rank(number: int) -> RankProcess:
        return RankProcess(number, SimpleNamespace(), SimpleNamespace(send=sent.append))  # type: ignore[arg-type]

    executor = of_stages(None, [rank(number) for number in (1, 2, 3)], quiet_watchdog())
    executor.launch(StepPlan(7, (SeqSlice(0, 0, 3, ((5,),), 1),)))
    assert len(sent) == 3
    assert sent[0] is sent[1] is sent[2]
    read = CODEC.decode(bytearray(b"".join(CODEC.encode(sent[0]))))
    assert unpacked(read, 1).slices == (SeqSlice(0, 0, 3, ((5,),), 1),)


def test_the_first_stage_says_which_embeddings_are_missing() -> None:
    known = b"a" * 32
    first: Any = RankProcess(1, SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    runner = SimpleNamespace(
        rows=SimpleNamespace(tables_GRN=()), missing=lambda digests: tuple(each for each in digests if each != known)
    )
    rank = Rank(runner, None, SimpleNamespace(send=first.answers.put), 1)  # type: ignore[arg-type]
    first.link.send = lambda message: rank.take(CODEC.decode(bytearray(b"".join(CODEC.encode(message)))))
    executor = of_stages(None, [first], quiet_watchdog())
    # A late answer to what an interrupted step asked.
    first.answers.put(Missing(0, (known,)))
    assert executor.missing([known, b"b" * 32]) == (b"b" * 32,)
    assert executor.missing([]) == ()


def test_the_log_of_a_rank_says_why_a_step_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank may know no more than that another one has failed."""

    def fails(plan: StepPlan) -> Any:
        raise StepError("The image gave 3 embeddings for 4 places.")

    said, sent = list[str](), list[Any]()
    monkeypatch.setattr(rank_module.logger, "error", lambda text, *given: said.append(text % given))
    config = SimpleNamespace(device="cpu")
    runner = SimpleNamespace(rows=SimpleNamespace(tables_GRN=()), config=config, launch=fails)
    Rank(runner, None, SimpleNamespace(send=sent.append), 3).take(packed(StepPlan(7, ())))  # type: ignore[arg-type]
    assert said == ["A step has failed on rank 3: The image gave 3 embeddings for 4 places"]
    assert sent == [StepFailed(7, "The image gave 3 embeddings for 4 places")]


def test_other_ranks_do_not_repeat_what_the_first_one_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BEHELD_LOG_LEVEL", "TRANSFORMERS_VERBOSITY"):
        monkeypatch.delenv(name, raising=False)
    found = multi._environment(1, "cpu")
    assert (found["BEHELD_LOG_LEVEL"], found["TRANSFORMERS_VERBOSITY"]) == ("ERROR", "error")
    monkeypatch.setenv("BEHELD_LOG_LEVEL", "DEBUG")
    assert multi._environment(1, "cpu")["BEHELD_LOG_LEVEL"] == "DEBUG"


def test_a_configuration_s_infinity_arrives() -> None:
    from transformers import NemotronHConfig

    place, text = config_text(NemotronHConfig(time_step_limit=(0.0, math.inf)))
    assert list(config_of(place, text).time_step_limit) == [0.0, math.inf]


def test_each_stage_has_a_step_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with start(more=STAGES) as llm:
        executor = executor_of(llm)
        launch, counts = executor.launch, list[int]()

        def noted(plan: StepPlan) -> Any:
            handle = launch(plan)
            counts.append(len(executor._later))
            return handle

        monkeypatch.setattr(executor, "launch", noted)
        llm.generate([tiny.wrap("llama", f"{n}") for n in range(4)], GREEDY, use_tqdm=False)
        assert max(counts) == 2
        assert counts.count(2) > len(counts) // 2


def test_a_step_that_fails_on_the_first_rank_alone_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multi, "_SYNC_S", 0.5)
    with start() as llm:
        executor = executor_of(llm)
        pid = executor._ranks[0].process.pid

        def fails(*given: Any) -> Any:
            raise MemoryError("no memory here")

        # The other rank waits for this one's sums.
        monkeypatch.setattr(executor._local.runner._adapter, "hidden", fails)
        with pytest.raises(EngineDeadError, match=r"on rank 0 alone \(no memory here\)"):
            llm.generate(tiny.wrap("llama", "one"), GREEDY, use_tqdm=False)
        assert gone(pid)


@pytest.mark.parametrize("more", [{}, STAGES], ids=["part", "stage"])
def test_a_rank_that_gets_no_more_memory(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The system refuses it. A stage tells the others, and requests fail; a part of layers is waited for in a sum."""
    monkeypatch.setattr(ranks, "FULL", {1})
    prompts = [tiny.wrap("llama", "one two three")] * 8
    with start(more=more) as llm:
        pid = executor_of(llm)._ranks[0].process.pid
        begun = time.monotonic()
        found = llm.generate(prompts, GREEDY, use_tqdm=False, on_error="return")
        assert time.monotonic() - begun < 10.0
        kind, said = (StepError, "earlier stage") if more else (EngineDeadError, "rank 1 alone .*can't allocate memory")
        assert all(isinstance(output.error, kind) for output in found)
        assert all(re.search(said, str(output.error)) for output in found), found[0].error
        assert more or gone(pid)


def test_a_rank_that_cannot_read_a_plan_has_failed() -> None:
    """It cannot say so to the stage that waits for it."""
    config = SimpleNamespace(device="cpu")
    runner = SimpleNamespace(rows=SimpleNamespace(tables_GRN=()), config=config)
    sent = list[Any]()
    rank = Rank(runner, None, SimpleNamespace(send=sent.append), 3)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        rank.take(dataclasses.replace(packed(StepPlan(7, ())), slices=None))  # type: ignore[arg-type]
    assert not sent


@pytest.mark.parametrize("more", [{}, STAGES], ids=["part", "stage"])
def test_ranks_report_in_the_engines_mode(more: dict[str, Any]) -> None:
    asked = SamplingParams(
        temperature=0.7, top_k=3, repetition_penalty=1.2, seed=5, max_tokens=4, logprobs=4, prompt_logprobs=1
    )
    mode, prompt, found = {"logprobs_mode": "processed_logits"}, tiny.wrap("llama", "one"), []
    for llm in (make("llama", cases.ROOMY | mode), start(more=mode | more)):
        with llm:
            (output,) = llm.generate(prompt, asked, use_tqdm=False)
        (answer,) = output.outputs
        steps = [*(output.prompt_logprobs or ())[1:], *(answer.logprobs or ())]
        numbers = [entry.logprob for step in steps for entry in step.values()]
        assert max(numbers) > 0
        assert min(numbers) == -math.inf
        found.append((answer.token_ids, [max(number, -99.0) for number in numbers]))
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-3)


HOSTS: dict[str, Any] = {"distributed_executor_backend": "ray"}


@pytest.mark.parametrize("more", [{}, STAGES], ids=["part", "stage"])
def test_ranks_of_other_hosts_give_the_same_tokens(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_ranks, "need_ray", lambda asking, param: None)
    prompts = [tiny.wrap("llama", "one"), tiny.wrap("llama", "two")]
    with make("llama", cases.ROOMY) as llm:
        wanted = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    with start(more=HOSTS | more) as llm:
        assert isinstance(executor_of(llm), RayExecutor)
        found = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    assert found == wanted


def test_a_rank_of_another_host_that_ends_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_ranks, "need_ray", lambda asking, param: None)
    with start(more=HOSTS) as llm:
        process = executor_of(llm)._ranks[0].process
        assert isinstance(process, RemoteProcess)
        process._actor.kill()
        began = time.monotonic()
        with pytest.raises(EngineDeadError, match=r"rank 1 on 127\.0\.0\.1 is gone"):
            llm.generate(tiny.wrap("llama", "one"), GREEDY, use_tqdm=False)
        assert time.monotonic() - began < 10.0


def test_the_end_of_a_script_that_closes_nothing_is_no_fault_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks are Ray's, it ends them before this process has closed their connections."""
    monkeypatch.setattr(engine_ranks, "need_ray", lambda asking, param: None)
    with start(more=HOSTS) as llm:
        executor = executor_of(llm)
        process = executor._ranks[0].process
        assert isinstance(process, RemoteProcess)
        # As the interpreter does at its end.
        executor._at_exit._run()
        process._actor.kill()
        executor._watchdog._thread.join(5.0)
        assert not executor._watchdog._thread.is_alive()
        assert executor._watchdog.cause is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_a_rank_that_ends_or_hangs_ends_the_engine(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "SILENT_S", 2.5)
    with start() as llm:
        process = executor_of(llm)._ranks[0].process
        hit: list[float] = []

        def strike() -> None:
            time.sleep(0.2)
            os.kill(process.pid, number)
            hit.append(time.monotonic())

        thread = threading.Thread(target=strike)
        thread.start()
        prompts = [tiny.wrap("llama", "one two three")] * 8
        with pytest.raises(EngineDeadError, match="rank 1"):
            llm.generate(prompts * 32, SamplingParams(max_tokens=400, ignore_eos=True), use_tqdm=False)
        assert time.monotonic() - hit[0] < 10.0
        thread.join()
        with pytest.raises(EngineDeadError, match="rank 1"):
            llm.generate(prompts, GREEDY, use_tqdm=False)
        assert gone(process.pid)


@pytest.mark.parametrize("more", [{}, STAGES], ids=["part", "stage"])
def test_a_rank_that_loops_in_a_step_ends_the_engine(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process says that it lives, and begins no layer and no sum."""
    monkeypatch.setattr(ranks, "LOOPING", {1})
    with start(more=more) as llm:
        pid = executor_of(llm)._ranks[0].process.pid
        begun = time.monotonic()
        with pytest.raises(EngineDeadError, match="Rank 1 is stuck in a step"):
            llm.generate([tiny.wrap("llama", "one two three")] * 8, GREEDY, use_tqdm=False)
        # Steps before the third one, eight positions, and a busy machine.
        assert time.monotonic() - begun < 10.0 + 2.0
        assert gone(pid)


@pytest.mark.parametrize("more", [{}, STAGES], ids=["part", "stage"])
def test_a_first_rank_that_loops_in_a_step_ends_the_other(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing calls it back from there, but the engine is told at once, and the other rank ends."""
    with start(more=more) as llm:
        executor = executor_of(llm)
        told, process = threading.Event(), executor._ranks[0].process
        launch = executor._local.runner.launch

        def loops(plan: StepPlan) -> Any:
            while not told.is_set():
                pass
            return launch(plan)

        executor.on_loss(told.set)
        monkeypatch.setattr(executor._local.runner, "launch", loops)
        begun = time.monotonic()
        with pytest.raises(EngineDeadError, match="Rank 0 is stuck in a step"):
            llm.generate(tiny.wrap("llama", "one two three"), GREEDY, use_tqdm=False)
        assert time.monotonic() - begun < 10.0 + 2.0
        assert gone(process.pid)


@pytest.mark.parametrize("more", [{}, STAGES], ids=["part", "stage"])
def test_a_rank_that_is_slow_in_each_layer_is_not_stuck(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass takes longer than any rank may take for nothing."""
    monkeypatch.setattr(hangs, "STUCK_S", 2.0)
    monkeypatch.setattr(hangs, "COMPILING_S", 2.0)
    monkeypatch.setattr(hangs, "LAYER_POSITION_S", 0.0)
    monkeypatch.setattr(hangs, "HOST_POSITION_S", 1.0)
    with start(more=more) as llm:
        executor = executor_of(llm)
        layers = executor._local.runner.adapter.layers()
        assert len(layers) >= 2
        slow = [layer.register_forward_hook(lambda *given: time.sleep(1.3)) for layer in layers]
        begun = time.monotonic()
        once = SamplingParams(temperature=0, max_tokens=1)
        (found,) = llm.generate(tiny.wrap("llama", "one two three"), once, use_tqdm=False)
        assert time.monotonic() - begun > 2.5
        for each in slow:
            each.remove()
        (again,) = llm.generate(tiny.wrap("llama", "one two three"), once, use_tqdm=False)
        assert found.outputs[0].token_ids == again.outputs[0].token_ids


def test_a_device_that_stands_still_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank waits for it, and no rank has anything left to launch."""
    monkeypatch.setattr(hangs, "DEVICE_S", 1.0)
    monkeypatch.setattr(hangs, "HOST_POSITION_S", 0.01)
    with start() as llm:
        executor = executor_of(llm)
        pid = executor._ranks[0].process.pid

        def stands_still(handle: Any) -> Any:
            with device_wait.waiting():
                assert told.wait(20.0)
            raise RuntimeError("the communicator was aborted")

        told = threading.Event()
        executor.on_loss(told.set)
        monkeypatch.setattr(executor._local, "collect", stands_still)
        begun = time.monotonic()
        with pytest.raises(EngineDeadError, match="devices have not finished a step"):
            llm.generate(tiny.wrap("llama", "one"), GREEDY, use_tqdm=False)
        assert time.monotonic() - begun < 8.0
        assert gone(pid)


def test_a_stage_that_ends_ends_the_engine() -> None:
    with start(more=STAGES) as llm:
        process = executor_of(llm)._ranks[0].process
        thread = threading.Timer(0.2, process.kill)
        thread.start()
        begun = time.monotonic()
        with pytest.raises(EngineDeadError, match="rank 1"):
            llm.generate(["one two three"] * 256, SamplingParams(max_tokens=400, ignore_eos=True), use_tqdm=False)
        assert time.monotonic() - begun < 10.2
        assert gone(process.pid)


def test_a_rank_that_ends_while_nothing_runs_is_noticed() -> None:
    with start() as llm:
        executor = executor_of(llm)
        executor.check()
        told = threading.Event()
        executor.on_loss(told.set)
        executor._ranks[0].process.kill()
        assert told.wait(5.0)
        with pytest.raises(EngineDeadError, match="rank 1"):
            executor.check()


def test_a_rank_that_cannot_load_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    text = config_text

    def other(hf_config: Any) -> tuple[str, str]:
        place, made = text(hf_config)
        # The first rank does not see this.
        monkeypatch.setattr(multi, "config_of", lambda *given: hf_config)
        return place.replace("LlamaConfig", "NoConfig"), made

    monkeypatch.setattr(multi, "config_text", other)
    with pytest.raises(EngineDeadError, match=r"Rank 1: AttributeError: .*NoConfig"):
        start()


def test_a_rank_s_process_ends_with_the_first_rank_s_end_of_the_sockets() -> None:
    config = SimpleNamespace(device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multi, "_spawn", ranks.SPAWN)
        rank = multi._spawn(1, config)  # type: ignore[arg-type]
    rank.link.close()
    assert rank.process.wait(30.0) == 0


class Begun:
    """A rank's process and its link, in one."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def kill(self) -> None:
        self.calls.append("kill")

    def close(self) -> None:
        self.calls.append("close")

    def wait(self, timeout: float | None = None) -> int:
        self.calls.append("wait")
        return -9


def begun_rank(rank: int, made: list[Begun]) -> RankProcess:
    made.append(Begun())
    return RankProcess(rank, made[-1], made[-1])  # type: ignore[arg-type]


def test_a_rank_that_cannot_be_started_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = list[Begun]()

    def spawn(rank: int, config: Any) -> RankProcess:
        if rank == 2:
            raise OSError("no memory for another process")
        return begun_rank(rank, made)

    monkeypatch.setattr(multi, "_spawn", spawn)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(OSError, match="no memory"):
        multi.MultiExecutor.place(SimpleNamespace(num_ranks=3))  # type: ignore[arg-type]
    assert [each.calls for each in made] == [["kill", "close", "wait"]]
    assert not list(tmp_path.iterdir())


def test_ranks_that_find_no_place_to_meet_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """So are those of other hosts, and what Ray reserved for them is free again."""
    made, ended = list[Begun](), list[str]()

    def nowhere() -> Any:
        raise OSError("no such address")

    placed = multi.Placed([begun_rank(1, made)], nowhere, lambda: ended.append("ended"))
    monkeypatch.setattr(multi.MultiExecutor, "place", classmethod(lambda cls, config: placed))
    monkeypatch.setattr(multi, "config_text", lambda hf_config: ("", ""))
    monkeypatch.setattr(multi, "config_of", lambda *given: None)
    monkeypatch.setattr(multi, "replace", lambda config, **changes: config)
    monkeypatch.setattr(multi, "cuts", lambda *given: [])
    config, info = SimpleNamespace(device="cpu", pipeline_parallel_size=1), SimpleNamespace(num_layers=2)
    with pytest.raises(OSError, match="no such address"):
        multi.MultiExecutor.start(None, info, config, shrink=False)  # type: ignore[arg-type]
    assert made[0].calls == ["kill", "close", "wait"]
    assert ended == ["ended"]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Watchdog, RankProcess, Link, Any]]:
    """A watchdog of one rank, the other end of its link, and the group."""
    monkeypatch.setattr(watchdog, "_SAME_S", 0.3)
    monkeypatch.setattr(watchdog, "_POLL_S", 0.05)
    ours, theirs = pair()
    process = SimpleNamespace(poll=lambda: None, kill=lambda: None, wait=lambda timeout=None: -9)
    rank = RankProcess(1, process, Link(ours, CODEC))  # type: ignore[arg-type]
    rank.started = True
    group = SimpleNamespace(waits_since=None, entered=0, lockstep=True, abort=lambda: None)
    made = Watchdog([rank], group, Patience(0.5, 0.01, alike=True))  # type: ignore[arg-type]
    other = Link(theirs, CODEC)
    yield made, rank, other, group
    made.close(0.1)
    other.close()


def cause_of(made: Watchdog, within_s: float) -> str:
    until = time.monotonic() + within_s
    while made.cause is None and time.monotonic() < until:
        time.sleep(0.02)
    return str(made.cause)


def test_a_step_that_fails_on_another_rank_alone_is_no_step_that_fails_on_all(watched: Any) -> None:
    made, _, other, _ = watched
    made.failed(3)
    other.send(StepFailed(3, "too long"))
    assert cause_of(made, 0.8) == "None"
    other.send(StepFailed(4, "no memory"))
    assert "failed on rank 1 alone (no memory)" in cause_of(made, 3.0)


def test_a_rank_that_does_not_reach_a_collective_is_stuck(watched: Any) -> None:
    made, _, other, group = watched
    group.waits_since, group.entered = time.monotonic(), 7
    # It is slow, but goes on.
    for entered in range(4):
        other.send(Beat(entered, 1, None, None, works=True))
        time.sleep(0.2)
    assert made.cause is None
    for _ in range(10):
        other.send(Beat(3, 1, None, None, works=True))
        time.sleep(0.1)
    assert "stuck" in cause_of(made, 3.0)


def test_a_factor_lengthens_how_long_a_process_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that swaps, say."""
    monkeypatch.setattr(watchdog, "SILENT_S", 0.3)
    monkeypatch.setattr(watchdog, "_POLL_S", 0.05)
    group = SimpleNamespace(waits_since=None, entered=0, lockstep=True, abort=lambda: None)
    for factor, within in ((1.0, True), (20.0, False)):
        ours, theirs = pair()
        process = SimpleNamespace(poll=lambda: None, kill=lambda: None, wait=lambda timeout=None: -9)
        rank = RankProcess(1, process, Link(ours, CODEC))  # type: ignore[arg-type]
        rank.started = True
        made = Watchdog([rank], group, Patience(60.0, 0.01, alike=True, factor=factor))  # type: ignore[arg-type]
        assert ("does not answer" in cause_of(made, 1.5)) == within
        made.close(0.1)
        Link(theirs, CODEC).close()


def test_the_factor_is_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEHELD_HANG_FACTOR", "2.5")
    with start() as llm:
        assert executor_of(llm)._watchdog.hangs._patience.factor == 2.5


@pytest.mark.parametrize("value", ["0.5", "nan", "2,5"])
def test_a_factor_that_is_none_starts_nothing(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEHELD_HANG_FACTOR", value)
    monkeypatch.setattr(MultiExecutor, "place", lambda config: pytest.fail("processes start"))
    with pytest.raises(ConfigError, match="BEHELD_HANG_FACTOR"):
        start()


def test_an_error_of_another_rank_keeps_its_type(watched: Any) -> None:
    made, _, other, _ = watched
    other.send(RankFailed(ModelError("It lacks weights.", "Fetch it again.")))
    assert cause_of(made, 3.0).startswith("Rank 1: It lacks weights.")
    assert isinstance(made.cause, ModelError)
    assert isinstance(made.error(), EngineDeadError)


def gone(pid: int) -> bool:
    until = time.monotonic() + 3.0
    while time.monotonic() < until:
        if ranks.Forked(pid).poll() is not None:
            return True
        time.sleep(0.02)
    return False


def test_many_rows_are_sent_in_few_bytes() -> None:
    slices = tuple(SeqSlice(row, 100 + row, 101 + row, ((),), 1) for row in range(256))
    body = b"".join(CODEC.encode(packed(StepPlan(1, slices))))
    assert len(body) < 5000
    assert unpacked(CODEC.decode(bytearray(body)), 1).slices == slices


def test_the_meeting_point_of_hosts_listens_on_the_loopback_interface_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.distributed's store checks no token, so it listens on loopback only, and the tunnel to it asks for one."""
    led: list[tuple[str, bytes, int]] = []
    listening: list[tuple[str, int]] = []
    create_server = socket.create_server

    def entrance(address: str, token: bytes, port: int) -> Any:
        led.append((address, token, port))
        return SimpleNamespace(port=5, close=lambda: led.clear())

    def create(address: tuple[str, int], **options: Any) -> socket.socket:
        made = create_server(address, **options)
        listening.append(made.getsockname()[:2])
        return made

    group = remote.Group([], [], "192.0.2.1", b"token", lambda: None)
    monkeypatch.setattr(ray, "start", lambda wanted: group)
    monkeypatch.setattr(ray, "TunnelDoor", entrance)
    monkeypatch.setattr(socket, "create_server", create)
    placed = RayExecutor.place(SimpleNamespace(num_ranks=1, device="cpu"))  # type: ignore[arg-type]
    meeting = placed.meet()
    assert (meeting.address, str(meeting)) == ("192.0.2.1", "5")
    ((host, port),) = listening
    assert host == "127.0.0.1"
    assert led == [("192.0.2.1", b"token", port)]
    meeting.part("stage-0").store(2).set("key", "value")
    assert meeting.part("stage-0").store(2).get("key") == b"value"
    placed.ended()
    assert not led


def test_a_rank_gets_the_configuration_of_the_first() -> None:
    """Numbers, texts and enumerations: what a GPU's memory profile asks of `logprobs_mode` is a method."""
    config = pipes.config(pipes.info("llama"), logprobs_mode=LogprobsMode.PROCESSED_LOGITS)
    got = CODEC.decode(b"".join(CODEC.encode(config)))
    assert got == config
    assert {f.name: type(getattr(got, f.name)) for f in dataclasses.fields(got)} == {
        f.name: type(getattr(config, f.name)) for f in dataclasses.fields(config)
    }
    asked = Sampling(prompt_logprobs=2, logprobs_mode=LogprobsMode.RAW_LOGITS)
    assert CODEC.decode(b"".join(CODEC.encode(asked))).logprobs_mode is LogprobsMode.RAW_LOGITS
