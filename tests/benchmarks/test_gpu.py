"""The workloads of docs/explanation/measurements.md on one GPU: shapes and numbers are those that the page names."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from beheld import LLM, EngineArgs, SamplingParams
from beheld.engine.setup import describe
from beheld.inputs.pipeline import InputPipeline, RequestOrder
from benchmarks import gpu
from benchmarks.causes import Profiled
from benchmarks.first_use import ADAPTED, FirstUse, write_adapter
from benchmarks.shapes import checkpoint, prompt
from tests import tiny
from tests.inputs import pipes


@pytest.mark.parametrize(
    ("name", "parameters", "tokens"),
    [
        ("3B", 3.755, {1: (282, 256), 4: (1056, 256)}),
        ("7B", 8.292, {1: (282, 256), 4: (1056, 256)}),
        ("llava", 7.063, {1: (593, 576)}),
        ("onevision", 8.03, {1: (3717, 3699)}),
    ],
)
def test_shapes_are_the_real_ones(
    name: str, parameters: float, tokens: dict[int, tuple[int, int]], tmp_path: Path
) -> None:
    """Parameters in billions; of so many pictures, the prompt's tokens and each one's embeddings."""
    args = EngineArgs(model=str(checkpoint(name, tmp_path)), load_format="dummy", media_workers=0, max_model_len=4096)
    model, config, sizes = describe(args)
    assert sizes["parameters"] / 1e9 == pytest.approx(parameters, rel=1e-3)
    pipe = InputPipeline(model, config, args)
    for count, (length, embeds) in tokens.items():
        asked = {"prompt": prompt(name, count), "multi_modal_data": {"image": gpu.pictures(count, 1)}}
        request = pipe.prepare(RequestOrder(asked, pipes.ONE_TOKEN, request_id="x"))
        assert len(request.token_ids) == length
        assert [span.item.num_embeds for span in request.spans] == [embeds] * count
        assert len({span.item.digest for span in request.spans}) == count
    if name == "3B":
        lengths = []
        for picture in gpu.pictures(len(gpu.MIXED), 1, gpu.MIXED):
            asked = {"prompt": prompt(name, 1), "multi_modal_data": {"image": [picture]}}
            lengths.append(len(pipe.prepare(RequestOrder(asked, pipes.ONE_TOKEN, request_id="x")).token_ids))
        assert sum(lengths) / len(lengths) == pytest.approx(676, abs=0.5)
        asked = {"prompt": gpu.video_prompt(name), "multi_modal_data": {"video": gpu.videos(1, 1)}}
        request = pipe.prepare(RequestOrder(asked, pipes.ONE_TOKEN, request_id="x"))
        # Eight pairs of frames of 12 x 16 embeddings.
        assert [span.item.num_embeds for span in request.spans] == [1536]
    pipe.close()


@dataclasses.dataclass
class Asked:
    """Stands for LLM: what it was asked."""

    runs: list[tuple[list[Any], SamplingParams]] = dataclasses.field(default_factory=list)

    def generate(self, prompts: list[Any], params: SamplingParams, **_: Any) -> list[Any]:
        self.runs.append((prompts, params))
        return [type("Output", (), {"prompt_token_ids": [0]}) for _ in prompts]


def asked_by_causes(bench: gpu.Bench, workload: str) -> tuple[int, int]:
    """Where the same workload's time is looked at: requests, and new tokens of each."""
    made, new, _ = Profiled(bench).workload("again" if workload == "images" else workload)
    if workload == "images":
        assert Profiled(bench).workload("new")[1] == new
        assert made(1) == made(2)
    return len(made(1)), new


@pytest.mark.parametrize(
    ("workload", "requests", "pictures", "length", "new"),
    [
        ("text", 256, 0, 512, 256),
        ("prefill", 64, 0, 1024, 1),
        ("images", 256, 1, None, 128),
        ("four", 64, 4, None, 32),
        ("mixed", 128, 1, None, 96),
        ("first_token", 1, 1, None, 1),
        ("decode", 1, 0, 512, 220),
        ("rows", 8, 0, 512, 220),
    ],
)
def test_workloads_ask_for_what_the_page_says(
    workload: str, requests: int, pictures: int, length: int | None, new: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last run is the one that is timed, or timed again; nothing in it was asked before but where that is meant."""
    monkeypatch.setattr(gpu, "pictures", lambda count, seed, *_: [(seed, number) for number in range(count)])
    llm, bench = Asked(), object.__new__(gpu.Bench)
    bench.size, bench.llm, bench._params = "3B", llm, SamplingParams  # type: ignore[assignment]
    bench._detokenize = True
    getattr(bench, workload)()
    prompts, params = llm.runs[-1]
    assert (len(prompts), params.max_tokens) == (requests, new)
    assert (params.temperature, params.ignore_eos, params.detokenize) == (0, True, True)
    if workload not in ("mixed", "rows"):
        assert asked_by_causes(bench, workload) == (requests, new)
    assert [len(each.get("prompt_token_ids", ())) for each in prompts] == [length or 0] * requests
    shown = [tuple(each.get("multi_modal_data", {}).get("image", ())) for each in prompts]
    assert {len(each) for each in shown} == {pictures}
    assert len({one for each in shown for one in each}) == requests * pictures
    before = [each for run, _ in llm.runs[:-1] for each in run]
    repeated = sum(each in before for each in prompts)
    assert repeated == (requests if workload in ("images", "decode", "rows") else 0)
    if workload == "images":
        first = llm.runs[-2][0]
        assert first == prompts
        assert not any(each in first for run, _ in llm.runs[:-2] for each in run)


def test_the_first_use_of_an_adapter_changes_what_is_answered(tmp_path: Path) -> None:
    """It fits the model, and its requests do use it."""
    path = tiny.checkpoint("qwen2_5_vl")
    folder = write_adapter(json.loads((path / "config.json").read_text(encoding="utf-8")), tmp_path / "adapter")
    seen: list[tuple[str, list[float]]] = []

    class Small(FirstUse):
        def __init__(self) -> None:
            self.llm = LLM(str(path), dtype="float32", **ADAPTED)

        def run(self, prompts: list[Any], new: int, *, asked: dict[str, Any] | None = None, **options: Any) -> float:
            params = SamplingParams(temperature=0, max_tokens=1, logprobs=1)
            for given in ({}, asked or {}):
                (output,) = self.llm.generate(prompts[:1], params, use_tqdm=False, **given)
                (logprobs,) = output.outputs[0].logprobs or []
                seen.append(("with" if given else "without", [each.logprob for each in logprobs.values()]))
            return 1.0

    bench = Small()
    with bench.llm:
        cases = bench.adapter_cases(folder)
        assert all(case(1000) for case in cases.values())
    assert [name for name, _ in seen] == ["without", "with"] * len(cases)
    assert all(plain[1] != changed[1] for plain, changed in zip(seen[::2], seen[1::2], strict=True))
