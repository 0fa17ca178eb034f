"""An engine and the processes beside it begin together, and end together when the start fails."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from beheld import LLM, AsyncLLM, SamplingParams
from beheld.api import start
from beheld.core.config import EngineArgs, MediaWork, ModelInfo
from beheld.core.errors import CapacityError, ConfigError, ModelError, TemplateError, WorkerError
from beheld.inputs.media import workers
from beheld.inputs.media.open_media import Source
from beheld.inputs.media.processor import ItemProcessor
from beheld.inputs.media.tasks import PROCESSOR_LIBRARIES, ProcessTask
from beheld.inputs.media.workers import EarlyWorkers, MediaWorkers
from beheld.inputs.pipeline import InputPipeline
from tests import tiny
from tests.inputs import pipes


def test_workers_begin_before_the_weights_and_end_with_a_start_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[MediaWorkers] = []

    def make(*given: Any) -> MediaWorkers:
        begun.append(MediaWorkers(*given))
        return begun[-1]

    def fails(*given: Any) -> Any:
        assert len(begun) == 1, "they load what they need meanwhile"
        raise CapacityError("Not enough memory.")

    monkeypatch.setattr(workers, "MediaWorkers", make)
    monkeypatch.setattr(start, "start", fails)
    with pytest.raises(CapacityError):
        LLM(str(tiny.checkpoint("qwen2_vl")), media_work="process", media_workers=1, max_model_len=128)
    (one,) = begun
    assert one.process_too
    with pytest.raises(WorkerError, match="closed"):
        one.process(ProcessTask("image", Source("bytes", b"", b""), {}, "", b""), lambda: 0)


def test_a_process_that_loads_weights_lets_workers_load_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    decided: list[ModelInfo] = []
    made: list[MediaWorkers] = []
    piped: list[MediaWorkers | None] = []
    right = InputPipeline.__init__

    def make(*given: Any) -> MediaWorkers:
        decided.append(given[0])
        made.append(MediaWorkers(*given))
        return made[-1]

    def pipe(self: InputPipeline, info: ModelInfo, config: Any, args: Any, given: Any = None, *more: Any) -> None:
        piped.append(given)
        right(self, info, config, args, given, *more)

    monkeypatch.setattr(workers, "MediaWorkers", make)
    monkeypatch.setattr(InputPipeline, "__init__", pipe)
    options: dict[str, Any] = {"media_work": "process", "media_workers": 1, "max_model_len": 128}
    remote = start.start_processes(EngineArgs.from_keywords({"model": str(tiny.checkpoint("qwen2_vl")), **options}))
    try:
        assert decided == [remote.info]
        assert piped == made
        assert made[0].pids, "an item for the engine's own test was processed"
    finally:
        remote.inputs.close()
        remote.engine.close()


@pytest.mark.parametrize(("family", "work"), [("qwen2_vl", "auto"), ("qwen2_vl", "process"), ("llama", "auto")])
def test_what_processors_need_is_imported_while_the_engine_loads_where_media_are_processed_here(
    monkeypatch: pytest.MonkeyPatch, family: str, work: str
) -> None:
    model = pipes.info(family)
    imported: list[str] = []
    done = MediaWork.PROCESS if work == "process" else MediaWork.DECODE
    config = pipes.config(model, media_workers=1, media_work=done)

    def fails(args: EngineArgs, spawned: Any, on_decided: Any) -> Any:
        on_decided(model, config)
        assert tuple(imported) == (PROCESSOR_LIBRARIES if model.modalities and work == "auto" else ())
        raise CapacityError("Not enough memory.")

    monkeypatch.setattr(workers, "import_module", imported.append)
    monkeypatch.setattr(start, "EngineProcess", fails)
    with pytest.raises(CapacityError):
        start.start_processes(EngineArgs(model=model.path, media_work=work))


def test_before_a_fork_all_libraries_of_a_model_and_its_processor_are_imported() -> None:
    code = """
import sys
from beheld.api import start
start.fork_or_spawn = lambda: set(sys.modules)
before = start.fork_engine()
from transformers import Qwen2VLForConditionalGeneration, Qwen2VLProcessor
print(sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "['transformers']\n"


def test_a_model_of_text_leaves_no_process_that_loads_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    early: list[EarlyWorkers] = []

    def begin(args: EngineArgs, *, accelerated: bool) -> EarlyWorkers:
        early.append(EarlyWorkers(args, accelerated=accelerated))
        assert early[0]._sandbox._begun
        return early[0]

    monkeypatch.setattr(start, "EarlyWorkers", begin)
    with LLM(str(tiny.checkpoint("llama")), media_work="process", media_workers=1, max_model_len=128):
        assert not early[0]._sandbox._begun


@pytest.fixture
def weightless(tmp_path: Path) -> str:
    """A checkpoint without its weights: whoever reads them fails otherwise."""
    for file in tiny.checkpoint("qwen2_vl").iterdir():
        if "safetensors" not in file.name:
            shutil.copy(file, tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize("told", [{"max_pixles": 3136}, {"max_pixels": "many"}], ids=["name", "value"])
def test_wrong_processor_options_are_told_of_before_the_weights_are_read(weightless: str, told: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(told))):
        LLM(weightless, mm_processor_kwargs=told)
    with pytest.raises(ConfigError, match=next(iter(told))):
        AsyncLLM(weightless, mm_processor_kwargs=told, engine="process")
    with pytest.raises(ModelError, match="no weights"):
        LLM(weightless, mm_processor_kwargs={"max_pixels": 3136})


@pytest.mark.parametrize("content", [None, b"\xff{{ messages }}"], ids=["none", "no text"])
def test_a_wrong_template_is_told_of_before_the_weights_are_read(
    weightless: str, tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "talk.jinja"
    if content is not None:
        file.write_bytes(content)
    for make in (LLM, AsyncLLM, partial(AsyncLLM, engine="process")):
        with pytest.raises(TemplateError, match=r"talk\.jinja"):
            make(weightless, chat_template=str(file))
    with pytest.raises(ModelError, match="no weights"):
        LLM(weightless, chat_template="{{ messages }}")


def test_a_processor_that_was_loaded_for_its_options_is_not_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Any] = []
    right = ItemProcessor._load

    def counted(self: ItemProcessor) -> Any:
        loaded.append(right(self))
        return loaded[-1]

    monkeypatch.setattr(ItemProcessor, "_load", counted)
    options = {"mm_processor_kwargs": {"max_pixels": 3136}, "media_workers": 0}
    with LLM(str(tiny.checkpoint("qwen2_vl")), dtype="float32", max_model_len=128, **options) as llm:  # type: ignore[arg-type]
        prompt = {"prompt": tiny.wrap("qwen2_vl", tiny.markers("qwen2_vl", num_images=1))}
        media = {"multi_modal_data": {"image": tiny.pictures(1)[0]}}
        (output,) = llm.generate(prompt | media, SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.media[0].tokens <= 4
    assert len(loaded) == 1
