"""Items made by workers are those made here, and a worker that is lost takes one item with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from beheld import LLM, SamplingParams
from beheld.core.config import MediaLimits, MediaWork
from beheld.core.errors import DecodeError, LimitError, MediaError, ParamsError, TemplateError, WorkerError
from beheld.core.request import ForeignTemplate, Request
from beheld.core.structured_outputs import StructuredOutputs
from beheld.inputs.media import workers
from beheld.inputs.media.memory_gate import MemoryGate
from beheld.inputs.media.open_media import Source
from beheld.inputs.media.processor import ItemProcessor, ProcessorInput
from beheld.inputs.media.tasks import DecodeTask, decode_type
from beheld.inputs.pipeline import Chat, InputPipeline, RequestOrder
from beheld.sandbox.sandbox import Sandbox
from tests import tiny
from tests.inputs import pipes
from tests.sandbox.test_sandbox import gone
from tests.server.slowness import slowness

FAMILY = "qwen2_5_vl"
WORKS = {"decode": MediaWork.DECODE, "process": MediaWork.PROCESS}


@pytest.fixture(scope="module", params=sorted(WORKS))
def pipe(request: pytest.FixtureRequest) -> Iterator[InputPipeline]:
    """A pipeline with two workers of either kind; starting those that process too is what these tests wait for."""
    changes = {"media_workers": 2, "media_work": WORKS[request.param]}
    made = pipes.make(FAMILY, changes)
    yield made
    made.close()


def same(first: Request, second: Request) -> None:
    assert first.token_ids == second.token_ids
    for one, two in zip(first.spans, second.spans, strict=True):
        assert one.item.digest == two.item.digest
        assert one.item.layout == two.item.layout
        assert one.item.features.keys() == two.item.features.keys()
        for name, tensor in one.item.features.items():
            assert tensor.dtype == two.item.features[name].dtype
            assert torch.equal(tensor, two.item.features[name])
    for mine, theirs in zip(first.receipts, second.receipts, strict=True):
        assert (mine.given, mine.used, mine.lost, mine.tokens) == (
            theirs.given,
            theirs.used,
            theirs.lost,
            theirs.tokens,
        )


def pictures() -> list[Any]:
    rgb = tiny.picture(70, 84, 1)
    turned = rgb.getexif()
    turned[0x0112] = 6
    return [
        pipes.encoded(rgb),
        pipes.encoded(rgb, "JPEG", exif=turned),
        pipes.encoded(rgb.convert("RGBA")),
        pipes.encoded(rgb.convert("P"), "GIF"),
        rgb,
        np.asarray(rgb),
        rgb.convert("L"),
    ]


def test_pictures_are_those_made_here(pipe: InputPipeline) -> None:
    same(pipes.ask(pipe, FAMILY, pictures()), pipes.ask(pipes.shared(FAMILY), FAMILY, pictures()))
    options = {"mm_processor_kwargs": {"max_pixels": 28 * 28 * 4}}
    (picture, *_) = pictures()
    same(pipes.ask(pipe, FAMILY, picture, **options), pipes.ask(pipes.shared(FAMILY), FAMILY, picture, **options))


def test_videos_are_those_made_here(pipe: InputPipeline, tmp_path: Any) -> None:
    frames = np.random.default_rng(0).integers(0, 255, (9, 56, 56, 3), dtype=np.uint8)
    data = pipes.write_video(tmp_path / "v.mp4", frames).read_bytes()
    for video in (data, frames[:4], (frames[:4], {"fps": 2.0})):
        same(pipes.ask(pipe, FAMILY, videos=[video]), pipes.ask(pipes.shared(FAMILY), FAMILY, videos=[video]))


def test_errors_are_those_raised_here_and_name_their_item(pipe: InputPipeline) -> None:
    good = pictures()[0]
    for bad, kind in ((b"bad", DecodeError), (good[:200], DecodeError)):
        messages = []
        for where in (pipe, pipes.shared(FAMILY)):
            with pytest.raises(kind) as caught:
                pipes.ask(where, FAMILY, [good, bad])
            assert caught.value.item == "image 2"
            messages.append(str(caught.value))
        assert messages[0] == messages[1]
    with pytest.raises(ParamsError, match="min_pixel"):
        pipes.ask(pipe, FAMILY, good, mm_processor_kwargs={"min_pixel": 3})


def test_what_a_worker_made_is_found_again(pipe: InputPipeline) -> None:
    rgb = tiny.picture(84, 56, 2)
    first = pipes.ask(pipe, FAMILY, pipes.encoded(rgb))
    assert not first.receipts[0].cached
    assert {"decode", "process"} <= set(first.receipts[0].milliseconds)
    assert pipes.ask(pipe, FAMILY, pipes.encoded(rgb)).receipts[0].cached
    other = pipes.ask(pipe, FAMILY, pipes.encoded(rgb, "BMP"))
    assert other.spans[0].item is first.spans[0].item, "another file of the same pixels"


def test_31_a_worker_killed_at_work_costs_one_item(pipe: InputPipeline) -> None:
    """A large picture keeps a worker busy long enough to be shot; its neighbours are made as ever."""
    slow = pipes.encoded(tiny.picture(64, 64, 3).resize((5000, 5000)), "PNG", compress_level=1)
    small = pipes.encoded(tiny.picture(70, 84, 1))
    pipe.cache.clear()
    pipes.ask(pipe, FAMILY, small)
    pipe.cache.clear()
    errors: list[Exception] = []

    def ask() -> None:
        try:
            pipes.ask(pipe, FAMILY, slow)
        except Exception as error:
            errors.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.15)
    shot = list(pipe.workers.pids)
    for worker in shot:
        os.kill(worker, signal.SIGKILL)
    asking.join()
    # On a busy machine one that had nothing to do may still be about to die, and would be asked.
    assert gone(shot, 10.0)
    begin = time.monotonic()
    same(pipes.ask(pipe, FAMILY, small), pipes.ask(pipes.shared(FAMILY), FAMILY, small))
    assert time.monotonic() - begin < 1.0 * slowness(), "the pool is whole again"
    (error,) = errors
    assert isinstance(error, WorkerError)
    assert error.item == "image 1"
    assert "SIGKILL" in error.reason


def test_31_72_time_and_memory_are_bounded() -> None:
    noise = tiny.picture(64, 64, 3).resize((5000, 5000))
    source = Source("bytes", b"\0" * 32, pipes.encoded(noise, "PNG", compress_level=1))
    small = Source("bytes", b"\0" * 32, pipes.encoded(tiny.picture(70, 84, 1)))
    hasty = MediaLimits(work_timeout_s={"image": 0.05})
    tight = MediaLimits(max_work_bytes=48 << 20)
    for limits, said in ((hasty, "more than 0.0325 s"), (tight, "more memory")):
        sandbox, kind = Sandbox(), decode_type(limits, 1)
        with pytest.raises(LimitError, match=said) as caught:
            sandbox.run(kind, DecodeTask("image", source))
        assert isinstance(caught.value, MediaError)
        if limits is tight:
            opened = sandbox.run(kind, DecodeTask("image", small)).opened
            assert (opened.width, opened.height) == (70, 84)
        sandbox.close()


@pytest.mark.case(21, 27)
def test_processing_that_runs_away_costs_one_item() -> None:
    """What a request's options make of a small picture ends at a worker's bounds, and not with this process."""
    limits = {"max_work_bytes": 256 << 20}
    pipe = pipes.make(FAMILY, {"media_workers": 1, "media_work": MediaWork.PROCESS}, media_limits=limits)
    data = pipes.encoded(tiny.picture(64, 64, 1))
    with pytest.raises(LimitError, match="more memory") as caught:
        pipes.ask(pipe, FAMILY, data, mm_processor_kwargs={"min_pixels": 10**9})
    assert caught.value.item == "image 1"
    same(pipes.ask(pipe, FAMILY, data), pipes.ask(pipes.shared(FAMILY), FAMILY, data))
    pipe.close()


def test_132_large_images_are_processed_where_they_hold_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is held while an image's memory is freed: of 512 MiB some 40 ms of a core."""
    monkeypatch.setattr(workers, "_MOST_HERE_BYTES", 4 * 84 * 84)
    here: list[tuple[int, int]] = []
    opened: list[int] = []
    process, within = ItemProcessor.process, MemoryGate.within

    def counted(self: MemoryGate, num_bytes: int, *rest: Any) -> Any:
        opened.append(num_bytes)
        return within(self, num_bytes, *rest)

    def seen(self: ItemProcessor, job: ProcessorInput) -> Any:
        here.append(job.content.size)
        return process(self, job)

    small, large = (pipes.encoded(tiny.picture(*size, 5)) for size in ((84, 84), (112, 84)))
    expected = pipes.ask(pipes.shared(FAMILY), FAMILY, [small, large])
    monkeypatch.setattr(ItemProcessor, "process", seen)
    monkeypatch.setattr(MemoryGate, "within", counted)
    pipe = pipes.make(FAMILY, {"media_workers": 1})
    same(pipes.ask(pipe, FAMILY, [small, large]), expected)
    assert here == [(84, 84)]
    # Wherever images are opened, the limit for all at once holds.
    assert opened == [4 * 84 * 84, 4 * 112 * 84]
    assert pipes.ask(pipe, FAMILY, large).receipts[0].cached
    pipe.close()
    # Who asks for workers that only decode gets these.
    pipe = pipes.make(FAMILY, {"media_workers": 1}, media_work="decode")
    same(pipes.ask(pipe, FAMILY, [small, large]), expected)
    assert sorted(here) == [(84, 84), (84, 84), (112, 84)]
    pipe.close()


def test_without_workers_the_other_guards_stay() -> None:
    """Templates and grammars of strangers run in processes of their own, whoever decodes media."""
    pipe = pipes.make("qwen2", {"media_workers": 0})
    talk = [{"role": "user", "content": "Hi"}]
    bomb = ForeignTemplate("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")
    with pytest.raises(TemplateError, match="takes more than"):
        pipe.prepare(RequestOrder(Chat(talk, chat_template=bomb), pipes.ONE_TOKEN, request_id="0"))
    params = SamplingParams(max_tokens=1, structured_outputs=StructuredOutputs(choice=["yes"]))
    assert pipe.prepare(RequestOrder("Hi", params, request_id="1")).params.grammar is not None
    assert pipe._sandbox.pids(pipe._sampling._grammars.task_type)
    assert not pipe.workers.pids
    pipe.close()


def test_the_engine_uses_one_and_closing_ends_it() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4)
    data = pipes.encoded(tiny.picture(70, 84, 1))
    prompt = {"prompt": tiny.prompt(FAMILY, 1, 0, "Hi?"), "multi_modal_data": {"image": data}}
    texts = []
    for count in (None, 0):
        with LLM(str(tiny.checkpoint(FAMILY)), dtype="float32", media_workers=count, max_model_len=512) as llm:
            texts.append(llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids)
            numbers = llm._inputs.workers.pids
            assert len(numbers) == (1 if count is None else 0)
        end = time.monotonic() + 10
        while any(os.path.exists(f"/proc/{n}") for n in numbers) and time.monotonic() < end:
            time.sleep(0.01)
        assert not any(os.path.exists(f"/proc/{n}") for n in numbers)
    assert texts[0] == texts[1]


LIGHT = """
import sys
import beheld.inputs.media.tasks as tasks
from beheld.core.config import MediaLimits
from beheld.inputs.media.open_media import Source
work = tasks.load_decoder(MediaLimits())
work(tasks.DecodeTask("image", Source("bytes", bytes(32), open(sys.argv[1], "rb").read())))
assert not {"torch", "transformers", "torchvision", "av"} & set(sys.modules)
"""


def test_a_worker_that_only_decodes_loads_no_torch(tmp_path: Any) -> None:
    path = tmp_path / "p.png"
    path.write_bytes(pipes.encoded(tiny.picture(70, 84, 1)))
    done = subprocess.run([sys.executable, "-c", LIGHT, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
