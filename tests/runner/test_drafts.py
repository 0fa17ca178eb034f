"""Draft tokens on a real model: whatever is expected to follow, right or wrong, the answer is the same."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import pytest

from beheld import LLM, SamplingParams
from beheld.core.outputs import RequestOutput
from beheld.core.plan import StepPlan, StepResult
from beheld.core.structured_outputs import StructuredOutputs
from beheld.runner import graphs
from beheld.runner.runner import Handle, ModelRunner
from tests import tiny
from tests.runner.test_graphs import capture, equip

OPTIONS: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": 8, "num_gpu_blocks_override": 60, "block_size": 4}
OPTIONS |= {"dtype": "float32", "seed": 0, "media_workers": 0}
MOST = 5


class Proposer:
    """Expects answers that are known already, with a mistake now and then; takes the place of a runner's methods."""

    def __init__(self, runner: ModelRunner, answers: dict[tuple[int, ...], list[int]]) -> None:
        self._launch, self._collect = runner.launch, runner.collect
        self._answers = answers
        self._chance = random.Random(0)
        self._rows: dict[int, tuple[list[int], list[int]]] = {}
        self.num_drafts = 0
        self.num_accepted = 0
        self._checked: list[dict[int, int]] = []

    def launch(self, plan: StepPlan) -> Handle:
        for admission in plan.admitted:
            prompt = admission.token_ids[: admission.num_prompt]
            answer = self._answers[prompt]
            self._rows[admission.row] = (answer, list(admission.token_ids[admission.num_prompt :]))
        self._checked.append({piece.row: piece.wanted - 1 for piece in plan.slices if piece.wanted})
        return self._launch(plan)

    def collect(self, handle: Handle) -> StepResult:
        result = self._collect(handle)
        for row, drafts in self._checked.pop(0).items():
            self.num_drafts += drafts
            self.num_accepted += len(result.tokens[row]) - 1
        found: dict[int, tuple[int, ...]] = {}
        for row, given in result.tokens.items():
            answer, known = self._rows[row]
            known += given
            expected = answer[len(known) : len(known) + self._chance.randrange(MOST + 2)]
            found[row] = tuple(token if self._chance.random() < 0.8 else (token + 1) % 50 for token in expected)
        return dataclasses.replace(result, draft_ids=found)


@pytest.fixture(scope="module", params=["in step", "overlap", "graphs"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """Engines that launch in different ways."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "capture", capture)
        path = str(tiny.checkpoint("qwen2_vl"))
        with LLM(path, async_scheduling=request.param != "in step", **OPTIONS) as made:
            if request.param == "graphs":
                equip(made)
            yield made


def speculating(llm: LLM, patch: pytest.MonkeyPatch, outputs: list[RequestOutput]) -> Proposer:
    """From now on the engine checks drafts of these answers."""
    core: Any = llm._run.core  # type: ignore[union-attr]
    answers = {tuple(output.prompt_token_ids or ()): output.outputs[0].token_ids for output in outputs}
    proposer = Proposer(core.executor.runner, answers)
    patch.setattr(core.executor.runner, "launch", proposer.launch)
    patch.setattr(core.executor.runner, "collect", proposer.collect)
    patch.setattr(core.scheduler, "_config", dataclasses.replace(core.scheduler._config, num_draft_tokens=MOST))
    return proposer


LENGTH = {"max_tokens": 24, "ignore_eos": True}
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, logprobs=3, **LENGTH),
    "seeded": SamplingParams(temperature=1.2, top_p=0.9, seed=5, logprobs=0, **LENGTH),
    "penalties": SamplingParams(temperature=0.7, seed=1, repetition_penalty=1.4, frequency_penalty=0.5, **LENGTH),
    "minimum": SamplingParams(temperature=0.9, seed=2, min_tokens=20, max_tokens=24),
    "repetition": SamplingParams(temperature=0.0, **LENGTH),
    "words": SamplingParams(temperature=0.5, seed=8, bad_words=["a b", "the red", "circle one"], **LENGTH),
    "grammar": SamplingParams(
        temperature=2.0,
        seed=4,
        max_tokens=60,
        structured_outputs=StructuredOutputs(regex=r"[a-c]{3}-\d\d( [a-z]{2,9}){2,3}"),
    ),
    "stop": SamplingParams(temperature=0.9, seed=3, stop=["e"], max_tokens=24),
    "processor": SamplingParams(temperature=0.0, logits_processors=[lambda ids, logits: logits], **LENGTH),
}


def told(output: RequestOutput) -> Any:
    assert output.error is None, output.error
    answer = output.outputs[0]
    said = [{k: pytest.approx(v.logprob, abs=1e-4) for k, v in entry.items()} for entry in answer.logprobs or ()]
    return answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason, said


def idle(llm: LLM) -> None:
    assert llm._run is not None
    scheduler = llm._run.core.scheduler
    scheduler.check()
    assert scheduler.stats().num_free_blocks == scheduler.stats().num_blocks


@pytest.mark.parametrize("name", PARAMS)
def test_drafts_change_no_answer(llm: LLM, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    params = PARAMS[name]
    if name == "repetition":
        resolver: Any = llm._inputs._sampling
        monkeypatch.setattr(resolver, "_habits", dataclasses.replace(resolver._habits, no_repeat_ngram=2))
    prompts = [{"prompt_token_ids": list(range(10, 10 + count))} for count in (8, 6, 7, 13)]
    clean = llm.generate(prompts, params, use_tqdm=False)
    llm.reset_prefix_cache()
    proposer = speculating(llm, monkeypatch, clean)
    found = llm.generate(prompts, params, use_tqdm=False)
    assert [told(output) for output in found] == [told(output) for output in clean]
    idle(llm)
    if name == "processor":
        assert proposer.num_drafts == 0
    else:
        assert 0 < proposer.num_accepted < proposer.num_drafts


def test_answers_of_many_kinds_share_steps_and_later_prompts_share_their_blocks(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = list(PARAMS.values())
    prompts = [{"prompt_token_ids": [*range(10, 14), 20 + count, 30]} for count in range(len(params))]
    clean = llm.generate(prompts, params, use_tqdm=False)
    longer = [
        {"prompt_token_ids": [*(output.prompt_token_ids or ()), *output.outputs[0].token_ids[:9], 12]}
        for output in clean
    ]
    follow = llm.generate(longer, PARAMS["greedy"], use_tqdm=False)
    llm.reset_prefix_cache()
    with monkeypatch.context() as patch:
        speculating(llm, patch, [*clean, *follow])
        found = llm.generate(prompts, params, use_tqdm=False)
        # What they computed with wrong drafts is in none of the blocks that these find.
        after = llm.generate(longer, PARAMS["greedy"], use_tqdm=False)
    assert [told(output) for output in found] == [told(output) for output in clean]
    assert [told(output) for output in after] == [told(output) for output in follow]
    assert sum(output.num_cached_tokens or 0 for output in after) > 0
    idle(llm)
