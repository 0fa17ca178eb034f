"""An executor is what its protocol says: the one of this process, and one without a device, which runs an engine."""

from __future__ import annotations

import inspect
import queue
import threading
from typing import Any

import pytest

from beheld import LLM, SamplingParams
from beheld.core.config import EngineConfig
from beheld.core.errors import EngineDeadError
from beheld.core.request import LoRARequest, Request
from beheld.engine import loop, setup, thread
from beheld.engine.core import EngineCore
from beheld.engine.messages import Died, Ping, Pong, Reply, Submit
from beheld.engine.thread import EngineThread
from beheld.executor.executor import Executor
from beheld.executor.local import LocalExecutor
from beheld.executor.multi import MultiExecutor
from tests import tiny
from tests.fakes import FakeExecutor, expected_tokens, fake_capacity, fake_config, fake_info, fake_request

METHODS = [name for name, member in vars(Executor).items() if callable(member) or isinstance(member, classmethod)]
METHODS = [name for name in METHODS if not name.startswith("_")]


def parameters(kind: type, name: str) -> list[tuple[str, Any, Any]]:
    member = inspect.getattr_static(kind, name)
    function = member.__func__ if isinstance(member, classmethod) else member
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def test_the_protocol_has_what_the_engine_asks() -> None:
    assert {"start", "size", "available_bytes", "launch", "collect", "missing", "close"} <= set(METHODS)


@pytest.mark.parametrize("kind", [LocalExecutor, MultiExecutor, FakeExecutor])
@pytest.mark.parametrize("name", METHODS)
def test_every_executor_has_the_protocol_s_methods(name: str, kind: type) -> None:
    assert parameters(kind, name) == parameters(Executor, name)
    wanted, found = (isinstance(inspect.getattr_static(each, name), classmethod) for each in (Executor, kind))
    assert wanted == found


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[FakeExecutor]:
    """Every engine that starts runs on a fake executor, which is noted here."""
    made: list[FakeExecutor] = []

    class Noted(FakeExecutor):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    def noted(config: EngineConfig) -> type[Executor]:
        kind: type[Executor] = Noted
        return kind

    monkeypatch.setattr(setup, "executor_of", noted)
    return made


def test_an_engine_runs_on_an_executor_that_it_does_not_know(fake: list[FakeExecutor]) -> None:
    options: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "max_model_len": 64}
    options |= {"media_workers": 0, "enable_lora": True, "tensor_parallel_size": 2, "device": "cpu"}
    adapter = LoRARequest("other", 7, "/nowhere")
    with LLM(str(tiny.checkpoint("llama")), seed=0, **options) as llm:
        (executor,) = fake
        core, asked = llm._live().core, dict[str, Request]()
        add = core.add
        core.add = lambda request: asked.update({request.id: request}) or add(request)  # type: ignore[method-assign]
        prompts = [{"prompt_token_ids": [*range(3, 3 + length)]} for length in (5, 30, 17, 2)]
        params = SamplingParams(temperature=0, max_tokens=9, detokenize=False)
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapter)
        assert llm.list_loras() == {7}
        assert llm.pin_lora(7)
        assert llm.remove_lora(7)
        assert not llm.remove_lora(7)
    assert executor.closed
    wanted = {tuple(request.token_ids): expected_tokens(request, 64)[0] for request in asked.values()}
    assert len(wanted) == len(prompts)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == wanted[tuple(prompt["prompt_token_ids"])]


def test_an_idle_engine_dies_as_soon_as_its_executor_is_lost() -> None:
    info, config = fake_info(), fake_config()
    executor = FakeExecutor(config, info, fake_capacity(info, config))
    replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
    engine = EngineThread(EngineCore(info, executor))
    engine.start(replies.put)
    engine.send(Ping(1))
    assert isinstance(replies.get(timeout=5), Pong)
    executor.loss = EngineDeadError("The process of rank 1 is gone.")
    assert executor.tell_loss is not None
    executor.tell_loss()
    died = replies.get(timeout=5)
    assert isinstance(died, Died)
    assert "rank 1" in died.reason
    engine.close()


def test_an_engine_whose_step_stands_still_dies_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own device does not answer, so nothing brings the thread of the steps back."""
    monkeypatch.setattr(loop, "_FAILS_S", 0.1)
    monkeypatch.setattr(thread, "_CLOSE_S", 0.1)
    info, config = fake_info(), fake_config()
    executor = FakeExecutor(config, info, fake_capacity(info, config))
    in_step, ends = threading.Event(), threading.Event()

    def stands_still(plan: Any) -> Any:
        in_step.set()
        ends.wait()
        raise EngineDeadError("It goes on after all.")

    monkeypatch.setattr(executor, "launch", stands_still)
    replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
    engine = EngineThread(EngineCore(info, executor))
    engine.start(replies.put)
    engine.send(Submit((fake_request("one", 1, 2, 3),)))
    assert in_step.wait(5.0)
    executor.loss = EngineDeadError("The devices have not finished a step.")
    assert executor.tell_loss is not None
    executor.tell_loss()
    died = replies.get(timeout=5)
    assert isinstance(died, Died)
    assert "have not finished a step" in died.reason
    assert not engine.alive
    run = engine._thread
    assert run is not None
    engine.close()
    assert not executor.closed, "its memory is in use"
    ends.set()
    run.join(5.0)
    assert replies.empty(), "it died once"


def test_sizes_are_asked_of_the_executor(fake: list[FakeExecutor]) -> None:
    from beheld.core.config import EngineArgs

    _, _, sizes = setup.describe(EngineArgs(model=str(tiny.checkpoint("llama"))))
    assert (sizes["parameters"], sizes["weights_bytes"]) == (97, 8 * 97)
    assert not fake, "nothing is started for it"
