"""The host's processor time for a request: what a GPU may wait for. The device's arithmetic is left out.

    python -m benchmarks.host texts [--count 4096] [--ids]
    python -m benchmarks.host images [--count 256] [--width 448 --height 448]

texts: microseconds for a text to be embedded, from LLM.embed to the numbers of its vector, with a tokenizer of few
words and vectors of 384 numbers; rows and steps are as large as on a GPU. Collections of garbage are part of it, so the
mean of the runs counts besides the best one.

images: microseconds for a prompt whose image was seen before: preparing it, queueing it, and planning its first step.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

_WIDTH = 384


def timed(run: Callable[[], object], runs: int) -> tuple[float, float, float]:
    """Return seconds of processor time of a run, the least and the mean, and the mean's part of collecting garbage."""
    spent, began, collecting = [], 0.0, 0.0

    def collected(phase: str, _: dict[str, int]) -> None:
        nonlocal began, collecting
        if phase == "start":
            began = time.process_time()
        else:
            collecting += time.process_time() - began

    run()
    gc.callbacks.append(collected)
    try:
        for _ in range(runs):
            start = time.process_time()
            run()
            spent.append(time.process_time() - start)
    finally:
        gc.callbacks.remove(collected)
    return min(spent), sum(spent) / runs, collecting / runs


def texts(count: int, runs: int, *, ids: bool) -> None:
    """Embed texts by an encoder whose pass and pooling give ready tensors."""
    from beheld import LLM
    from beheld.pool import methods
    from benchmarks import embedders
    from benchmarks.embeddings import texts_of

    with tempfile.TemporaryDirectory() as place:
        folder = embedders.make("host", Path(place) / "model")
        llm = LLM(str(folder), dtype="float32", max_num_seqs=1024, max_num_batched_tokens=32_768, async_scheduling=True)
    assert llm._run is not None
    executor: Any = llm._run.core.executor
    adapter = executor.runner.adapter
    blank_T1, vectors_PD = torch.zeros(40_000, 1), torch.randn(1024, _WIDTH)

    class Ready(methods.MeanMethod):
        def together(self, hidden_SH: Any, starts_P: Any, stops_P: Any) -> torch.Tensor:
            return vectors_PD[: len(starts_P)]

    adapter.embed = lambda ids_T: blank_T1[: len(ids_T)]
    adapter.hidden = lambda embeds_TH, positions_XT: embeds_TH
    adapter.pool = lambda hidden_MH: hidden_MH
    given: list[Any] = texts_of(count)
    if ids:
        given = [llm._inputs.tokenizer(text)["input_ids"] for text in given]
    with patch.dict(methods.ONE_STATE, {"mean": Ready()}):
        least, mean, collecting = timed(
            lambda: [output.outputs.embedding for output in llm.embed(given, use_tqdm=False)], runs
        )
    figures = " ".join(f"{1e6 * each / count:.1f}" for each in (least, mean, collecting))
    print(f"us a {'prompt of ids' if ids else 'text'}, least, mean, of which garbage: {figures}")
    llm.close()


def images(count: int, runs: int, width: int, height: int) -> None:
    """Prepare, queue and plan prompts of mote with known images, stage by stage."""
    import numpy as np

    from beheld import LLM, SamplingParams
    from beheld.api.collectors import collector_of

    llm = LLM(max_num_seqs=256, max_num_batched_tokens=8192, use_tqdm_on_load=False, num_gpu_blocks_override=24_000)
    assert llm._run is not None
    core, params = llm._run.core, SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
    rng = np.random.default_rng(0)
    asked = "<|vision_start|><|image_pad|><|vision_end|>What is in this picture? Answer in one word."
    prompts: list[Any] = [
        {"prompt": asked, "multi_modal_data": {"image": rng.integers(0, 256, (height, width, 3), dtype=np.uint8)}}
        for _ in range(count)
    ]
    stages: dict[str, list[float]] = {"prepare": [], "queue": [], "plan": []}
    for _ in range(runs + 1):
        marks = [time.process_time()]
        jobs: list[Any] = list(llm._jobs.jobs(prompts, params, None, None).each)
        made = [job.requests() for job in jobs]
        marks.append(time.process_time())
        for job, requests in zip(jobs, made, strict=True):
            collector_of(job.id, params, requests, job.tokenizer)
            core.add(replace(requests[0], restartable=True))
        marks.append(time.process_time())
        while core.scheduler.num_waiting and core.scheduler.schedule() is not None:
            pass
        marks.append(time.process_time())
        # What was planned is not computed.
        core.scheduler.abandon(())
        for requests in made:
            core.scheduler.abort(requests[0].id)
        for name, start, stop in zip(stages, marks, marks[1:], strict=False):
            stages[name].append(1e6 * (stop - start) / count)
    tokens = len(made[0][0].token_ids)
    for name, spent in stages.items():
        # The first run saw new images.
        known = spent[1:]
        print(f"{name}, {tokens} tokens: {min(known):.1f} us at least, {sum(known) / len(known):.1f} in the mean")
    llm.close()


def main() -> None:
    """Measure one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("texts", "images"))
    parser.add_argument("--count", type=int, help="requests of a run: 4096 texts, 256 images")
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--ids", action="store_true", help="texts as token ids")
    parser.add_argument("--width", type=int, default=448)
    parser.add_argument("--height", type=int, default=448)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.what == "texts":
        texts(arguments.count or 4096, arguments.runs, ids=arguments.ids)
    else:
        images(arguments.count or 256, arguments.runs, arguments.width, arguments.height)


if __name__ == "__main__":
    main()
