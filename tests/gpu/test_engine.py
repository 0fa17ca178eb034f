"""The engine on a GPU beside what it does on any device: its own process, grammars, faults within graphs, aborts."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from beheld.inputs.pipeline import RequestOrder

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from transformers.models.aria import modeling_aria as aria

from beheld import LLM, AsyncLLM, CompletionOutput, SamplingParams
from beheld.core.errors import StepError
from beheld.core.plan import EncodeItem
from beheld.core.structured_outputs import StructuredOutputs
from beheld.runner.encoder_cache import EncoderCache
from tests import tiny
from tests.engine import test_crowd

LONG = bool(os.environ.get("BEHELD_LONG"))
FAMILY = "qwen2_5_vl"
OPTIONS: dict[str, Any] = {"dtype": "float32", "seed": 0, "max_model_len": 256, "max_num_seqs": 8}
# Of engines that take no share of the GPU's memory, so that several tests may run at once.
ROOM: dict[str, Any] = {"kv_cache_memory_bytes": 2**28}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM(str(tiny.checkpoint(FAMILY)), **OPTIONS, **ROOM) as made:
        yield made


def runner_of(llm: LLM) -> Any:
    assert llm._run is not None
    return llm._run.core.executor.runner  # type: ignore[attr-defined]


def picture(seed: int) -> dict[str, Any]:
    return {"prompt": tiny.prompt(FAMILY, 1, 0, "Hi?"), "multi_modal_data": {"image": tiny.picture(56, 56, seed)}}


def text(*tokens: int) -> dict[str, Any]:
    return {"prompt_token_ids": list(tokens)}


def tokens_of(llm: LLM, prompts: list[Any]) -> list[tuple[int, ...]]:
    return [tuple(o.outputs[0].token_ids) for o in llm.generate(prompts, GREEDY, use_tqdm=False)]


PROMPTS = [picture(1), text(5, 6, 7), picture(2), text(*range(20, 90))]


def test_a_process_of_its_own_says_the_same(llm: LLM) -> None:
    async def run() -> list[tuple[int, ...]]:
        async with AsyncLLM(str(tiny.checkpoint(FAMILY)), engine="process", **OPTIONS, **ROOM) as other:

            async def one(prompt: Any) -> tuple[int, ...]:
                async for output in other.generate(prompt, GREEDY):
                    last = output
                return tuple(last.outputs[0].token_ids)

            return list(await asyncio.gather(*(one(prompt) for prompt in PROMPTS)))

    assert asyncio.run(run()) == tokens_of(llm, PROMPTS)


def test_keys_and_values_in_float8_are_those_of_a_cpu() -> None:
    """Kernels, graphs and prefixes on one side, and attention in torch on the other."""
    options: dict[str, Any] = OPTIONS | ROOM | {"kv_cache_dtype": "fp8"}
    with LLM(str(tiny.checkpoint(FAMILY)), device="cpu", **options) as other:
        meant = tokens_of(other, PROMPTS)
    with LLM(str(tiny.checkpoint(FAMILY)), **options) as made:
        assert tokens_of(made, PROMPTS) == meant
        assert tokens_of(made, PROMPTS) == meant, "prefixes"


def test_a_grammar_beside_others_in_one_batch(llm: LLM) -> None:
    regex = SamplingParams(temperature=0.0, max_tokens=16, structured_outputs=StructuredOutputs(regex="[ab]{5}"))
    free = tokens_of(llm, PROMPTS[1:2])[0]
    bound, mate = llm.generate([text(5, 6, 7, 8), text(5, 6, 7)], [regex, GREEDY], use_tqdm=False)
    assert re.fullmatch("[ab]{5}", bound.outputs[0].text)
    assert tuple(mate.outputs[0].token_ids) == free


def test_nan_before_a_graph_fails_one_row(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tower's embeddings are NaN; the step that takes them is a replay, as those of its mates."""
    adapter = runner_of(llm)._adapter
    encode = adapter.encode
    digest = llm._inputs.prepare(RequestOrder(picture(22), GREEDY, request_id="x")).spans[0].item.digest
    clean = tokens_of(llm, [PROMPTS[1], PROMPTS[3]])

    def broken(items: Any) -> Any:
        found = zip(items, encode(items), strict=True)
        return [made.fill_(float("nan")) if item.digest == digest else made for item, made in found]

    with monkeypatch.context() as patch:
        patch.setattr(adapter, "encode", broken)
        prompts = [picture(22), PROMPTS[1], PROMPTS[3]]
        bad, *others = llm.generate(prompts, GREEDY, use_tqdm=False, on_error="return")
    assert isinstance(bad.error, StepError)
    assert [tuple(o.outputs[0].token_ids) for o in others] == clean


def test_nan_within_a_graph_fails_one_row(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two replays of a decode step, the newest key of one of three rows becomes NaN."""
    runner = runner_of(llm)
    graphs, size = runner._graphs, runner.config.block_size
    replay, steps = graphs.replay, itertools.count(1)
    prompts = [text(*range(first, first + 3)) for first in (60, 70, 80)]
    llm.reset_prefix_cache()
    clean = tokens_of(llm, prompts)
    llm.reset_prefix_cache()

    def poisoned(slices: Any) -> Any:
        if len(slices) == 3 and next(steps) == 4:
            before = slices[1].start - 1
            for layer in runner.kv.values():
                block = int(runner.rows.tables_GRN[layer.group, slices[1].row, before // size])
                layer.keys[block, before % size] = float("nan")
        return replay(slices)

    with monkeypatch.context() as patch:
        patch.setattr(graphs, "replay", poisoned)
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False, on_error="return")
    assert [output.error is not None for output in outputs] == [False, True, False]
    assert "NaN" in str(outputs[1].error)
    assert [tuple(outputs[n].outputs[0].token_ids) for n in (0, 2)] == [clean[0], clean[2]]
    llm.reset_prefix_cache()
    assert tokens_of(llm, prompts) == clean, "blocks that held it are given out again"


def test_a_step_that_raises_behind_its_replay_is_run_one_by_one(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the device was given to do is done twice, which changes no answer."""
    graphs = runner_of(llm)._graphs
    replay, steps = graphs.replay, itertools.count(1)
    prompts = [text(*range(first, first + 3)) for first in (60, 70, 80)]
    clean = tokens_of(llm, prompts)

    def failing(slices: Any) -> Any:
        made = replay(slices)
        if len(slices) == 3 and next(steps) == 4:
            raise RuntimeError("no such kernel")
        return made

    retried = llm.stats().retried
    with monkeypatch.context() as patch:
        patch.setattr(graphs, "replay", failing)
        assert tokens_of(llm, prompts) == clean
    assert llm.stats().retried > retried


def test_a_tower_without_memory_fails_its_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real lack of memory: the tower asks for more than the device has."""
    adapter = runner_of(llm)._adapter
    encode = adapter.encode
    digest = llm._inputs.prepare(RequestOrder(picture(32), GREEDY, request_id="x")).spans[0].item.digest

    def greedy(items: Any) -> Any:
        if any(item.digest == digest for item in items):
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        return encode(items)

    with monkeypatch.context() as patch:
        patch.setattr(adapter, "encode", greedy)
        prompts = [picture(31), picture(32), text(5, 6, 7)]
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False, on_error="return")
    assert "out of memory" in str(outputs[1].error)
    assert outputs[0].error is None
    assert outputs[2].error is None
    assert tokens_of(llm, [picture(31)])[0] == tuple(outputs[0].outputs[0].token_ids)


@triton.jit
def _beyond(out) -> None:
    tl.store(out, 1.0)


def more_programs_than_a_grid_may_have() -> None:
    _beyond[(1, 1 << 16, 1)](torch.zeros(1, device="cuda"))


def as_pytorch_tells_of_it() -> None:
    raise RuntimeError("CUDA error: invalid configuration argument\nCUDA kernel errors might be reported later")


@pytest.mark.parametrize("refuse", [more_programs_than_a_grid_may_have, as_pytorch_tells_of_it])
def test_a_launch_that_the_device_refuses_fails_one_request(
    llm: LLM, refuse: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(llm)
    launch, prompts = runner.launch, [text(*range(first, first + 3)) for first in (110, 120, 130)]
    clean = tokens_of(llm, prompts)

    def refused(plan: Any) -> Any:
        if any(121 in admission.token_ids for admission in plan.admitted):
            refuse()
        return launch(plan)

    llm.reset_prefix_cache()
    with monkeypatch.context() as patch:
        patch.setattr(runner, "launch", refused)
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False, on_error="return")
    assert [output.error is not None for output in outputs] == [False, True, False]
    assert [tuple(outputs[n].outputs[0].token_ids) for n in (0, 2)] == [clean[0], clean[2]]
    assert tokens_of(llm, prompts) == clean


LOST = """
import os, sys
import torch
from beheld import LLM, SamplingParams
from beheld.core.errors import EngineDeadError
from tests.gpu import test_engine as own

llm = LLM(str(own.tiny.checkpoint(own.FAMILY)), **own.OPTIONS, gpu_memory_utilization=0.2)
adapter = own.runner_of(llm)._adapter
encode = adapter.encode


def broken(items):
    if items:
        # A kernel finds an index that is not there, some time after it was launched.
        torch.zeros(2, device="cuda")[torch.tensor([5], device="cuda")]
    return encode(items)


assert len(own.tokens_of(llm, own.PROMPTS)) == 4
adapter.encode = broken
outputs = llm.generate([own.text(5, 6, 7), own.picture(77)], own.GREEDY, use_tqdm=False, on_error="return")
assert isinstance(outputs[1].error, EngineDeadError), outputs[1].error
assert "device-side assert" in str(outputs[1].error), outputs[1].error
assert outputs[0].error is None or isinstance(outputs[0].error, EngineDeadError), outputs[0].error
adapter.encode = encode
try:
    own.tokens_of(llm, [own.text(5, 6, 7)])
except EngineDeadError as error:
    print("dead:", error, flush=True)
# The device of this process is lost, and with it an orderly end.
os._exit(0)
"""


def test_74_a_device_that_is_lost_ends_the_engine_and_takes_no_more() -> None:
    """In a process of its own: nothing on a GPU works for one that has lost it."""
    done = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "dead: The device has failed" in done.stdout


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "glm4v_moe", "aria", "ernie4_5_vl_moe", "llama4"])
def test_experts_in_bfloat16_are_grouped_within_graphs(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expert by expert, the host would have to know how many rows each has, and no graph could hold it."""
    if family == "aria" and not hasattr(aria, "AriaTextTopKRouter"):
        pytest.skip("This version of transformers asks on the host how many rows each of Aria's experts has.")
    grouped, calls = torch.nn.functional.grouped_mm, itertools.count()

    def counted(*inputs: Any, **options: Any) -> torch.Tensor:
        next(calls)
        return grouped(*inputs, **options)

    # Before any layer is compiled: what is compiled calls what stood there.
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", counted)
    monkeypatch.setenv("BEHELD_COMPILE", "0")
    options = {**OPTIONS, "dtype": "bfloat16"}
    with LLM(str(tiny.checkpoint(family)), **options, gpu_memory_utilization=0.2) as llm:
        assert runner_of(llm)._graphs is not None
        before = next(calls)
        assert before > 0
        (answer,) = tokens_of(llm, [text(*range(20, 40))])
        assert len(answer) == 12
        # One prefill at most was no replay: two products for each of its layers.
        assert next(calls) - before - 1 <= 2 * runner_of(llm)._info.num_layers


def test_items_that_do_not_fit_together_are_encoded_one_by_one() -> None:
    """Each takes most of what is free: alone it fits only if nothing of the failed attempt is held any more."""
    torch.cuda.empty_cache()
    share = int(0.6 * torch.cuda.mem_get_info()[0])
    calls: list[int] = []

    class Heavy:
        device = torch.device("cuda")

        def encode(self, items: Any) -> list[torch.Tensor]:
            calls.append(len(items))
            activations = [torch.empty(share, dtype=torch.uint8, device="cuda") for _ in items]
            return [chunk[:4].view(4, 1).float() for chunk in activations]

    items = [EncodeItem(bytes([n]), "image", {}, 4) for n in range(3)]
    assert EncoderCache(Heavy()).encode(items) == ()  # type: ignore[arg-type]
    assert calls == [3, 1, 1, 1]
    torch.cuda.empty_cache()


def test_random_aborts_leave_no_memory_behind(llm: LLM) -> None:
    """10,000 requests in the long form, 300 in the short, a third of them with one of forty pictures."""
    many, chance = 10_000 if LONG else 300, random.Random(5)
    assert llm._run is not None
    core = llm._run.core
    pool = [picture(n) for n in range(40)]

    def rush(count: int) -> None:
        live: set[str] = set()
        in_flight = None
        number = 0
        while number < count or core.scheduler.has_work or in_flight is not None:
            while number < count and len(live) < 16:
                prompt = chance.choice(pool) if chance.random() < 0.3 else text(*chance.choices(range(5, 90), k=30))
                params = SamplingParams(temperature=0.0, max_tokens=chance.randrange(1, 9), ignore_eos=True)
                request = llm._inputs.prepare(RequestOrder(prompt, params, request_id=f"r{number}"))
                core.add(request)
                live.add(request.id)
                number += 1
            for name in [n for n in sorted(live) if chance.random() < 0.05]:
                core.scheduler.abort(name)
                live.discard(name)
            in_flight, events = core.step(in_flight)
            live -= {event.request_id for event in events if event.finish is not None}

    rush(200)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    retried = core.stats().retried
    rush(many)
    assert core.stats().retried == retried
    core.scheduler.check()
    stats = core.scheduler.stats()
    assert stats.num_free_blocks == stats.num_blocks
    torch.cuda.synchronize()
    # What is kept of pictures may differ in number.
    assert torch.cuda.memory_allocated() - before < 4 << 20


def test_a_crowd_in_graphs_says_what_it_says_without() -> None:
    """Prompts of many lengths join others that decode: steps of all kinds, each padded in a graph of its own."""
    chance = random.Random(11)
    prompts = [
        picture(n) if n % 3 == 0 else text(*chance.choices(range(5, 90), k=chance.randrange(3, 200)))
        for n in range(120)
    ]
    wanted = [{"temperature": 0.0, "max_tokens": 4 + 3 * (n % 12), "ignore_eos": True} for n in range(120)]
    options = {**OPTIONS, "max_num_seqs": 64, "max_num_batched_tokens": 1024}

    def answers(logprobs: int | None, **more: Any) -> tuple[list[CompletionOutput], set[Any]]:
        params = [SamplingParams(**each, logprobs=logprobs) for each in wanted]
        taken: set[Any] = set()
        with LLM(str(tiny.checkpoint(FAMILY)), **options, **more) as made:
            graphs = runner_of(made)._mixed_graphs
            if graphs is not None:
                replay = graphs.replay

                def counted(laid: Any) -> Any:
                    if (size := graphs._size_of(laid)) is not None:
                        taken.add(size)
                    return replay(laid)

                graphs.replay = counted
            outputs = made.generate(prompts, params, use_tqdm=False)
            assert made.stats().retried == 0
        return [output.outputs[0] for output in outputs], taken

    told, taken = answers(None)
    assert {bool(size.decodes) for size in taken} == {True, False}
    plain, _ = answers(2, enforce_eager=True)
    ties = 0
    for ours, other in zip(told, plain, strict=True):
        count = sure(other)
        ties += count < len(other.token_ids)
        assert ours.token_ids[:count] == other.token_ids[:count]
    assert ties < 5, "rounding decides next to nothing"


def sure(answer: CompletionOutput) -> int:
    """Tokens before the first that rounding decides: in float32, two were as good as each other."""
    assert answer.logprobs is not None
    for place, entries in enumerate(answer.logprobs):
        first, second = sorted((each.logprob for each in entries.values()), reverse=True)[:2]
        if first - second < 1e-5:
            return place
    return len(answer.token_ids)


def test_a_crowd_that_draws_is_answered_as_each_alone() -> None:
    """Of all kinds of requests, in graphs and in steps that overlap."""
    prompts, params = test_crowd.crowd(4 * len(test_crowd.KINDS))
    path, options = str(tiny.checkpoint(FAMILY)), {**OPTIONS, "gpu_memory_utilization": 0.2}
    with LLM(path, **{**options, "max_num_seqs": 1, "async_scheduling": False}) as made:
        alone = test_crowd.told(made.generate(prompts, params, use_tqdm=False))
    with LLM(path, **{**options, "max_num_seqs": 16, "max_num_batched_tokens": 256}) as made:
        together = test_crowd.told(made.generate(prompts, params, use_tqdm=False))
        assert made.stats().retried == 0
    assert together == alone


def test_a_device_that_lags_behind_reads_every_step_s_own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that only prefill choose nothing, and nobody waits for them: the host is several ahead."""
    options = {**OPTIONS, "max_model_len": 1024, "max_num_batched_tokens": 64, "gpu_memory_utilization": 0.3}
    prompts = [text(*(10 + (7 * n + first) % 50 for n in range(900))) for first in range(2)]
    with LLM(str(tiny.checkpoint(FAMILY)), **options) as made:
        want = tokens_of(made, prompts)
        made.reset_prefix_cache()
        runner = runner_of(made)
        launch = runner.launch

        def late(plan: Any) -> Any:
            torch.cuda._sleep(40_000_000)
            return launch(plan)

        monkeypatch.setattr(runner, "launch", late)
        assert tokens_of(made, prompts) == want


def test_what_pytorch_holds_stays_flat_within_the_share() -> None:
    """Crowds of all kinds of requests; the first takes all that any will: pictures, prompts' reports, draws."""
    share = 0.2
    options = {**OPTIONS, "gpu_memory_utilization": share, "max_num_seqs": 64, "max_num_batched_tokens": 1024}
    gc.collect()
    torch.cuda.empty_cache()
    held, limit = torch.cuda.memory_reserved(), int(share * torch.cuda.mem_get_info()[1])
    torch.cuda.reset_peak_memory_stats()
    with LLM(str(tiny.checkpoint(FAMILY)), **options) as made:
        made.generate(*test_crowd.crowd(300), use_tqdm=False)
        first = torch.cuda.memory_reserved()
        for count in (300, 77, 300):
            made.generate(*test_crowd.crowd(count), use_tqdm=False)
        assert made.stats().retried == 0
        # The allocator takes memory by 20 MiB where it is asked for less.
        assert torch.cuda.memory_reserved() - first <= 40 << 20
        assert torch.cuda.max_memory_reserved() - held <= limit
