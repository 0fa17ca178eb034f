"""Slots: layers add what the adapters say, whoever comes and goes; nothing is left behind."""

from __future__ import annotations

import dataclasses
import gc
import random
import shutil
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from beheld import LLM, LoRARequest, SamplingParams
from beheld.api.feed import Job
from beheld.attention.context import ForwardContext, forward_context
from beheld.core.errors import LoRAError, ParamsError, StepError
from beheld.lora.layers import LoRALinear, Switch
from beheld.lora.slots import LoRASlots
from beheld.lora.step import LoRAStep, Slots, runs_of
from tests import tiny
from tests.lora import adapters
from tests.lora.adapters import Adapter
from tests.oracle import cases
from tests.oracle.test_oracle import request

CPU = torch.device("cpu")
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def layer_of(kind: str = "plain") -> LoRALinear:
    """A layer of two parts with three slots, of which two are filled, with ranks of their own."""
    torch.manual_seed(3)
    layer = LoRALinear(
        nn.Linear(8, 12), ["q", "k"], [7, 5], max_loras=3, max_rank=4, dtype=torch.float32, device=CPU, switch=Switch()
    )
    layer.fill(1, 0, torch.randn(4, 8), torch.randn(7, 4))
    layer.fill(1, 1, torch.randn(2, 8), torch.randn(5, 2))
    layer.fill(3, 1, torch.randn(3, 8), torch.randn(5, 3))
    return layer.requires_grad_(False)


def by_hand(layer: LoRALinear, x_TI: torch.Tensor, slots: list[int]) -> torch.Tensor:
    """Token by token."""
    y_TO = layer.base(x_TI).clone()
    for token, slot in enumerate(slots):
        low = 0
        for part, size in enumerate(layer.sizes):
            if slot:
                down, up = layer.down_SPRI[slot - 1, part], layer.up_OSR[low : low + size, slot - 1]
                y_TO[token, low : low + size] += up @ (down @ x_TI[token])
            low += size
    return y_TO


def run(layer: LoRALinear, x: torch.Tensor, step: LoRAStep | None) -> torch.Tensor:
    layer.switch.on = step is not None
    with forward_context(ForwardContext(None, None, {}, step)):  # type: ignore[arg-type]
        return layer(x)


MIXES = [[1, 0, 3, 3, 0, 1], [1] * 6, [0, 0, 1, 1, 1, 0], [2, 3, 2, 3, 1, 0], [3, 0, 0, 0, 0, 3], [0] * 6]


@pytest.mark.parametrize("slots", MIXES)
def test_both_kinds_of_step_compute_the_same(slots: list[int]) -> None:
    layer, x = layer_of(), torch.randn(1, 6, 8)
    expected = by_hand(layer, x[0], slots)
    runs = runs_of(np.array(slots), CPU)
    assert (runs is None) == (not any(slots))
    torch.testing.assert_close(run(layer, x, runs)[0], expected)
    torch.testing.assert_close(run(layer, x, Slots(torch.tensor(slots)))[0], expected)


def test_a_layer_that_sees_other_rows_is_no_place_for_an_adapter() -> None:
    with pytest.raises(StepError, match="5 rows for 6 tokens"):
        run(layer_of(), torch.randn(5, 8), runs_of(np.array([1] * 6), CPU))


def test_an_emptied_slot_adds_nothing() -> None:
    layer, x = layer_of(), torch.randn(4, 8)
    layer.empty(1)
    torch.testing.assert_close(run(layer, x, Slots(torch.tensor([1, 1, 2, 0]))), layer.base(x))
    torch.testing.assert_close(run(layer, x, runs_of(np.array([1, 1, 2, 0]), CPU)), layer.base(x))


def test_compiled_layers_follow_the_step_and_share_their_code() -> None:
    """One graph without adapters and one with; other adapters, other slots and other layers make no more."""
    seen: list[int] = []

    def count(graph: torch.fx.GraphModule, _: object) -> object:
        seen.append(1)
        return graph.forward

    torch._dynamo.reset()
    layers = [layer_of(), layer_of()]
    switch = layers[0].switch
    for layer in layers:
        layer.switch = switch
        layer.forward = torch.compile(layer.forward, dynamic=True, fullgraph=True, backend=count)  # type: ignore
    for tokens in (6, 9, 4):
        x = torch.randn(tokens, 8)
        for slots in ([0] * tokens, [1, 3] + [1] * (tokens - 2), [3, 0] + [0] * (tokens - 2)):
            for layer in layers:
                got = run(layer, x, runs_of(np.array(slots), CPU))
                torch.testing.assert_close(got, by_hand(layer, x, slots))
    assert len(seen) == 2
    torch._dynamo.reset()


# ---- rows, slots and the host's memory -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Four adapters of llama."""
    root = tmp_path_factory.mktemp("lora")
    return [adapters.write(Adapter("llama", seed, 2, "q_proj|v_proj"), root / str(seed)) for seed in range(4)]


def make(**options: object) -> LLM:
    given = cases.ROOMY | {"enable_lora": True, "max_loras": 2, "max_lora_rank": 4} | options
    return LLM(str(tiny.checkpoint("llama")), dtype="float32", seed=0, **given)


def slots_of(llm: LLM) -> LoRASlots:
    return llm._live().core.executor.runner._adapter.lora  # type: ignore[attr-defined]


def tokens(llm: LLM, text: str, *loras: LoRARequest | None) -> list[list[int]]:
    made = llm.generate([text] * len(loras), PARAMS, use_tqdm=False, lora_request=list(loras))
    return [list(output.outputs[0].token_ids) for output in made]


def test_iterators_and_streams_take_an_adapter(saved: list[str]) -> None:
    lora = LoRARequest("a", 1, saved[0])
    messages = [{"role": "user", "content": "Hello"}]
    with make() as llm:
        want = tokens(llm, "Hello", None, lora)
        assert want[0] != want[1]
        got = dict(llm.generate_iter(iter(["Hello"] * 3), PARAMS, lora_request=lora))
        assert [list(got[index].outputs[0].token_ids) for index in range(3)] == [want[1]] * 3
        assert got[0].lora_request == lora
        base, adapted = (llm.chat(messages, PARAMS, use_tqdm=False, lora_request=each)[0] for each in (None, lora))
        pieces = list(llm.chat_stream(messages, PARAMS, lora_request=lora))
        told = [token for piece in pieces for token in piece.outputs[0].token_ids]
        assert told == list(adapted.outputs[0].token_ids) != list(base.outputs[0].token_ids)
        assert pieces[-1].lora_request == lora
        for ask in (llm.generate_iter, llm.chat_stream):
            with pytest.raises(ParamsError, match="one LoRARequest here, not a list"):
                next(ask(messages, PARAMS, lora_request=[lora]))  # type: ignore[operator]


def test_55_500_cycles_of_loading_and_unloading_leave_nothing(saved: list[str]) -> None:
    chance = random.Random(0)
    loras = [LoRARequest(f"a{n}", n + 1, folder) for n, folder in enumerate(saved)]
    with make(max_loras=1, max_cpu_loras=2) as llm:
        slots = slots_of(llm)
        alone = [tokens(llm, "Hello", lora)[0] for lora in (None, *loras)]
        assert len({tuple(answer) for answer in alone}) == 5, "adapters that change nothing prove nothing"
        gc.collect()
        alive = sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())
        for cycle in range(500):
            number = chance.randrange(4)
            llm.llm_engine.add_lora(loras[number])
            if cycle % 25 == 0:
                picked = [0, number + 1, chance.randrange(5)]
                found = tokens(llm, "Hello", *([None, *loras][n] for n in picked))
                assert found == [alone[n] for n in picked]
            llm.llm_engine.remove_lora(number + 1)
            slots.check()
        gc.collect()
        left = sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())
        assert left <= alive
        for lora in loras:
            llm.llm_engine.remove_lora(lora.lora_int_id)
        assert llm.llm_engine.list_loras() == set()
        # The next step tells the device which rows are free.
        tokens(llm, "Hello", None)
        for layer in slots._layers:
            assert not layer.ranks_SP.any()
            assert not layer.down_SPRI.any()
            assert not layer.up_OSR.any()


def test_55_storm_of_loads_during_traffic(saved: list[str]) -> None:
    """Adapters are removed, and others read under their numbers, while requests with them run."""
    chance = random.Random(1)
    loras = [LoRARequest(f"a{n}", n + 1, folder) for n, folder in enumerate(saved)]
    asks = [cases.SHORT, cases.LONG_ELSE]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with make(max_num_seqs=3, max_cpu_loras=2) as llm:
        alone = {
            (ask, lora): list(
                llm.generate(request("llama", ask), params, use_tqdm=False, lora_request=lora)[0].outputs[0].token_ids
            )
            for ask in asks
            for lora in (None, *loras)
        }
        jobs = [(chance.choice(asks), chance.choice([None, *loras])) for _ in range(40)]
        core, run = llm._live().core, llm._live()
        prompts = (request("llama", ask) for ask, _ in jobs)
        made = llm._jobs.jobs(list(prompts), params, [lora for _, lora in jobs], None)
        found = {}
        for index, output in run.results(made, "raise"):
            found[index] = list(output.outputs[0].token_ids)
            core.executor.remove_lora(chance.randrange(1, 5))
            slots_of(llm).check()
            core.scheduler.check()
        assert [found[n] for n in range(len(jobs))] == [alone[job] for job in jobs]


def test_55_an_adapter_deleted_while_it_runs_goes_on(saved: list[str], tmp_path: Path) -> None:
    folder = shutil.copytree(saved[0], tmp_path / "mine")
    lora, other = LoRARequest("mine", 1, str(folder)), LoRARequest("other", 2, saved[1])
    with make(max_loras=1, max_cpu_loras=1) as llm:
        before = tokens(llm, "Hello", lora, None)
        shutil.rmtree(folder)
        assert tokens(llm, "Hello", lora, None) == before
        # Another takes its place; then it would have to be read again.
        tokens(llm, "Hello", other)
        with pytest.raises(LoRAError, match="does not exist"):
            tokens(llm, "Hello", lora)
        assert tokens(llm, "Hello", None) == before[1:]
        # While it waits for its slot, the other pushes it out of the host's memory: that request fails, no other.
        shutil.copytree(saved[0], folder)
        core = llm._live().core
        core.executor.add_lora(lora)
        pinned = core.executor.pin_lora
        assert pinned(1)
        assert not pinned(7)
        with pytest.raises(LoRAError, match="pinned"):
            tokens(llm, "Hello", other)
        assert llm.llm_engine.remove_lora(1)
        assert not llm.llm_engine.remove_lora(1)


def test_an_adapter_that_is_gone_when_its_turn_comes_fails_alone(saved: list[str], tmp_path: Path) -> None:
    folder = shutil.copytree(saved[0], tmp_path / "mine")
    mine, other = LoRARequest("mine", 1, str(folder)), LoRARequest("other", 2, saved[1])
    with make(max_loras=1, max_cpu_loras=1, max_num_seqs=4) as llm:
        expected = tokens(llm, "Hello", other, None)
        llm.llm_engine.remove_lora(2)
        prompts, loras = ["Hello"] * 3, [mine, other, None]
        run = llm._live()
        made = llm._jobs.jobs(prompts, PARAMS, loras, None)

        def deleting() -> Generator[Job, None, None]:
            yield next(made.each)
            yield next(made.each)
            shutil.rmtree(folder)
            yield next(made.each)

        outputs = dict(run.results(dataclasses.replace(made, each=deleting()), "return"))
        assert [list(outputs[n].outputs[0].token_ids) for n in (1, 2)] == expected
        assert outputs[0].error is not None
        assert "does not exist" in str(outputs[0].error)
        slots_of(llm).check()


def test_a_number_that_was_removed_may_stand_for_another_adapter(saved: list[str]) -> None:
    first, second = LoRARequest("a", 1, saved[0]), LoRARequest("b", 1, saved[1])
    with make() as llm:
        text = "A prompt of more than one block, so that a prefix of it can be found again."
        (one,) = tokens(llm, text, first)
        # As vLLM's example of quantization names one folder.
        assert tokens(llm, text, LoRARequest("the same, renamed", 1, saved[0])) == [one]
        with pytest.raises(LoRAError, match="lora_int_id 1 belongs to the adapter 'a'"):
            tokens(llm, text, second)
        assert llm.llm_engine.remove_lora(1)
        (two,) = tokens(llm, text, second)
        assert llm.llm_engine.remove_lora(1)
        assert tokens(llm, text, first) == [one]
        assert one != two


def test_without_adapters_the_layers_add_nothing(saved: list[str]) -> None:
    with make() as llm:
        switch = slots_of(llm).switch
        tokens(llm, "Hello", None)
        assert not switch.on
        tokens(llm, "Hello", LoRARequest("a", 1, saved[0]))
        assert switch.on
        tokens(llm, "Hello", None)
        assert not switch.on
