"""Engines that scripts step or await, counters, profiles and logits processors, with vLLM's names."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from beheld.api.llm import LLM, OF_SCRIPTS
from beheld.cli.main import main
from beheld.compat import logits, metrics
from beheld.compat.async_engine import ScriptAsyncLLM
from beheld.compat.llm import REFUSED, ScriptLLM
from beheld.core.config import EngineArgs
from beheld.core.errors import ConfigError, EngineDeadError, ParamsError
from beheld.core.params import RequestOutputKind, SamplingParams
from tests import tiny

PROMPT = "A cat sat on"


ROOT = str(Path(__file__).parents[2])


class OneToken(logits.LogitsProcessor):
    """Of requests that name a token, only this one is allowed; written for a batch."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        assert device.type == "cpu"
        self.wanted: dict[int, int] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        logits.process_dict_updates(
            self.wanted, batch_update, lambda params, prompt, output: (params.extra_args or {}).get("token")
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, token in self.wanted.items():
            kept = logits[row, token].clone()
            logits[row] = float("-inf")
            logits[row, token] = kept
        return logits


@pytest.fixture(scope="module")
def llm() -> Iterator[ScriptLLM]:
    with ScriptLLM(
        str(tiny.checkpoint("llama")), dtype="float32", max_model_len=128, logits_processors=[OneToken]
    ) as made:
        yield made


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 6, "ignore_eos": True} | options)


def test_requests_are_added_between_steps(llm: ScriptLLM) -> None:
    engine = llm.llm_engine
    (alone,) = llm.generate(PROMPT, params(), use_tqdm=False)
    engine.add_request("first", PROMPT, params())
    ended = {}
    for number in range(40):
        if number == 2:
            engine.add_request("second", PROMPT, params(n=2))
        for output in engine.step():
            assert output.request_id in ("first", "second")
            if output.finished:
                ended[output.request_id] = output
        if not engine.has_unfinished_requests():
            break
    assert set(ended) == {"first", "second"}
    answers = [*ended["first"].outputs, *ended["second"].outputs]
    assert [answer.token_ids for answer in answers] == [alone.outputs[0].token_ids] * 3
    assert engine.step() == []


def test_pieces_are_those_that_were_asked_for(llm: ScriptLLM) -> None:
    engine = llm.llm_engine
    (alone,) = llm.generate(PROMPT, params(), use_tqdm=False)
    for kind in (RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY):
        engine.add_request(kind.name, PROMPT, params(output_kind=kind))
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        assert [token for output in outputs for token in output.outputs[0].token_ids] == alone.outputs[0].token_ids
        assert (len(outputs) > 1) == (kind is RequestOutputKind.DELTA)


def test_an_aborted_request_ends(llm: ScriptLLM) -> None:
    engine = llm.llm_engine
    engine.add_request("gone", PROMPT, params(max_tokens=60))
    engine.step()
    assert engine.get_num_unfinished_requests() == 1
    engine.abort_request(["gone"])
    assert not engine.has_unfinished_requests()
    assert llm.generate(PROMPT, params(), use_tqdm=False)[0].finished


def test_a_processor_of_batches_changes_only_its_requests(llm: ScriptLLM) -> None:
    free, bound = llm.generate([PROMPT, PROMPT], [params(), params(extra_args={"token": 40})], use_tqdm=False)
    assert bound.outputs[0].token_ids == [40] * 6
    assert free.outputs[0].token_ids == llm.generate(PROMPT, params(), use_tqdm=False)[0].outputs[0].token_ids
    assert free.outputs[0].token_ids != bound.outputs[0].token_ids


def test_counters_have_vllms_names(llm: ScriptLLM) -> None:
    llm.generate([PROMPT], params(), use_tqdm=False)
    by_name = {metric.name: metric for metric in llm.get_metrics()}
    queries = by_name["vllm:prefix_cache_queries"]
    assert isinstance(queries, metrics.Counter)
    assert queries.value > 0
    assert isinstance(by_name["vllm:num_requests_running"], metrics.Gauge)
    assert by_name["vllm:num_requests_running"].value == 0


def test_enqueued_prompts_are_answered_in_order(llm: ScriptLLM) -> None:
    llm.enqueue([PROMPT, "Once"], params())
    llm.enqueue("Twice", params())
    assert [output.prompt for output in llm.wait_for_completion()] == [PROMPT, "Once", "Twice"]
    assert llm.wait_for_completion() == []


def test_a_preprocessed_conversation_is_a_prompt(llm: ScriptLLM) -> None:
    talks = [[{"role": "user", "content": text}] for text in ("hello", "a small red circle")]
    wanted = [output.outputs[0].token_ids for output in llm.chat(talks, params(), use_tqdm=False)]
    prompts = llm.preprocess_chat(talks)
    assert [output.outputs[0].token_ids for output in llm.generate(prompts, params(), use_tqdm=False)] == wanted
    (one,) = llm.preprocess_chat(talks[0])
    (output,) = llm.generate(one, params(), use_tqdm=False)
    assert (output.outputs[0].token_ids, output.encoder_prompt) == (wanted[0], None)
    assert output.num_cache_creation_tokens == len(output.prompt_token_ids or ()) - output.num_cached_tokens
    (more,) = llm.preprocess_chat(talks[0], tokenization_kwargs={"add_special_tokens": True})
    (longer,) = llm.generate(more, params(), use_tqdm=False)
    assert list(longer.prompt_token_ids or ())[1:] == list(output.prompt_token_ids or ())
    with pytest.raises(ParamsError):
        llm.preprocess_chat(talks, tokenization_kwargs={"padding": True})


def test_a_profile_is_written(llm: ScriptLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", str(tmp_path / "traces"))
    with pytest.raises(ParamsError, match="start_profile"):
        llm.stop_profile()
    llm.start_profile()
    llm.generate(PROMPT, params(max_tokens=1), use_tqdm=False)
    llm.stop_profile()
    (trace,) = (tmp_path / "traces").iterdir()
    assert "aten::" in trace.read_text(encoding="utf-8")


def test_a_script_says_where_a_profile_is_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from vllm.config import ProfilerConfig

    given = ProfilerConfig(profiler="torch", torch_profiler_dir=str(tmp_path / "here"), torch_profiler_with_flops=True)
    with ScriptLLM(str(tiny.checkpoint("llama")), dtype="float32", max_model_len=128, profiler_config=given) as llm:
        llm.start_profile()
        llm.generate(PROMPT, params(max_tokens=1), use_tqdm=False)
        llm.stop_profile()
    (trace,) = (tmp_path / "here").iterdir()
    assert "aten::" in trace.read_text(encoding="utf-8")
    assert "change nothing here: torch_profiler_with_flops." in caplog.text


def test_a_servers_profile_goes_there_too(tmp_path: Path) -> None:
    async def run() -> None:
        given = {"profiler": "torch", "torch_profiler_dir": str(tmp_path / "there")}
        engine = ScriptAsyncLLM(
            str(tiny.checkpoint("llama")), dtype="float32", max_model_len=128, profiler_config=given
        )
        try:
            await engine.start_profile()
            await engine.stop_profile()
        finally:
            engine.shutdown()

    asyncio.run(run())
    assert len(list((tmp_path / "there").iterdir())) == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"profiler": "cuda"}, "no profiler 'cuda'"),
        ({"profiler": "torch", "delay_iterations": 2}, "delay_iterations is not available"),
        ({"profiler": "torch", "capture_torch_profiler": True}, "capture_torch_profiler is not available"),
        ({"torch_profile_dir": "x"}, "torch_profiler_dir"),
        ({"torch_profiler_dir": 3}, "a folder's path"),
        ("torch", "must be a mapping or a ProfilerConfig"),
    ],
)
def test_a_wrong_profile_is_named(given: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ScriptLLM(str(tiny.checkpoint("llama")), profiler_config=given)


def test_what_reaches_into_the_engine_is_refused(llm: ScriptLLM) -> None:
    for ask in (lambda: llm.collective_rpc("check_health"), lambda: llm.llm_engine.engine_core.model_executor):
        with pytest.raises(ConfigError, match="do not reach into the engine"):
            ask()
    config = llm.llm_engine.vllm_config.model_config.hf_config
    assert llm.llm_engine.vllm_config.cache_config.enable_prefix_caching
    assert llm.model_config.get_vocab_size() == config.vocab_size
    assert config.model_type == "llama"
    assert (llm.model_config.max_model_len, llm.model_config.embedding_size) == (128, None)


def test_an_async_engine_gives_new_parts() -> None:
    async def run() -> list[str]:
        args = EngineArgs(model=str(tiny.checkpoint("llama")), dtype="float32", max_model_len=128)
        engine = ScriptAsyncLLM.from_engine_args(args, usage_context=None)
        try:
            wanted = params(output_kind=RequestOutputKind.DELTA)
            made = engine.generate(request_id="one", prompt=PROMPT, sampling_params=wanted)
            parts = [output.outputs[0].text async for output in made]
            (whole,) = [o async for o in engine.generate(PROMPT, params(output_kind=RequestOutputKind.FINAL_ONLY))]
            return [*parts, whole.outputs[0].text]
        finally:
            engine.shutdown()

    *parts, whole = asyncio.run(run())
    assert "".join(parts) == whole
    assert len(parts) > 1


def test_an_awaited_engine_says_how_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        engine = ScriptAsyncLLM(model=str(tiny.checkpoint("llama")), dtype="float32", max_model_len=128)
        await engine.check_health()
        assert (engine.is_running, engine.errored, await engine.is_tracing_enabled()) == (True, False, False)
        assert await engine.reset_prefix_cache()
        await engine.reset_mm_cache()
        await engine.do_log_stats()
        with monkeypatch.context() as patched:
            patched.setattr(ScriptAsyncLLM, "errored", True)
            with pytest.raises(EngineDeadError):
                await engine.check_health()
        engine.shutdown()
        assert (engine.is_running, engine.errored) == (False, True)
        with pytest.raises(EngineDeadError):
            await engine.check_health()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("from vllm.config import WeightTransferConfig", "Weights do not change"),
        ("import vllm.nonsense", "'vllm.nonsense' has no counterpart"),
        ("import no_such_package.part", "'no_such_package', which is not installed"),
        ("raise ModuleNotFoundError(name='zmq')", "pip install pyzmq."),
        ("import vllm.envs", "environment.md lists them"),
    ],
)
def test_a_missing_import_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, told: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import os\n{line}\n", encoding="utf-8")
    assert main(["run-vllm", str(script)]) == 1
    place, error = capsys.readouterr().err.splitlines()
    assert place == f"{script}:2: {line}"
    assert told in error


@pytest.mark.parametrize(
    ("lines", "files", "last"),
    [
        ("def broken():\n    return 1 / 0\nbroken()", ["script.py", "script.py"], "ZeroDivisionError"),
        ("import runpy\nrunpy.run_path('other.py')", ["script.py", "<frozen runpy>", "other.py"], "ValueError"),
        ("print('hi'", ["script.py"], "SyntaxError"),
    ],
)
def test_a_traceback_begins_in_the_script(tmp_path: Path, lines: str, files: list[str], last: str) -> None:
    (tmp_path / "script.py").write_text(lines, encoding="utf-8")
    (tmp_path / "other.py").write_text("raise ValueError", encoding="utf-8")
    command = [sys.executable, "-m", "beheld.cli.main", "run-vllm", "script.py"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    shown = ran.stderr.splitlines()
    found = [Path(line.split('"')[1]).name for line in shown if line.startswith("  File ")]
    assert list(dict.fromkeys(found)) == list(dict.fromkeys(files))
    assert ran.returncode == 1
    assert shown[-1].startswith(last)


def test_an_awaited_engine_ends_several_requests() -> None:
    async def run() -> list[str | None]:
        engine = ScriptAsyncLLM(model=str(tiny.checkpoint("llama")), dtype="float32", max_model_len=2048)
        begun = asyncio.Semaphore(0)

        async def reason(name: str) -> str | None:
            found = None
            long = params(max_tokens=2000, ignore_eos=True)
            async for output in engine.generate(PROMPT, long, name, data_parallel_rank=0):
                begun.release()
                found = output.outputs[0].finish_reason
            return found

        try:
            tasks = [asyncio.create_task(reason(name)) for name in "abc"]
            await asyncio.sleep(0)
            # Also while their prompts are prepared.
            assert engine.output_processor.get_num_unfinished_requests() == 3
            for _ in range(6):
                await begun.acquire()
            assert engine.output_processor.get_num_unfinished_requests() == 3
            await engine.abort(iter("ab"), internal=False)
            await asyncio.gather(*tasks[:2])
            await engine.abort("c")
            with pytest.raises(ParamsError, match="data_parallel_rank is 1"):
                engine.generate(PROMPT, params(), "d", data_parallel_rank=1)
            reasons = await asyncio.gather(*tasks)
            assert not engine.output_processor.has_unfinished_requests()
            return list(reasons)
        finally:
            engine.shutdown()

    assert asyncio.run(run()) == ["abort"] * 3


def test_the_tokenizers_options_reach_each_way_of_asking(llm: ScriptLLM) -> None:
    bare = {"add_special_tokens": False}
    (expected,) = llm.generate(PROMPT, params(), tokenization_kwargs=bare, use_tqdm=False)
    (usual,) = llm.generate(PROMPT, params(), use_tqdm=False)
    assert expected.prompt_token_ids != usual.prompt_token_ids
    engine = llm.llm_engine
    engine.add_request("bare", PROMPT, params(), tokenization_kwargs=bare, prompt_text="x", session_id="s")
    found = []
    while engine.has_unfinished_requests():
        found = engine.step() or found
    assert found[0].prompt_token_ids == expected.prompt_token_ids
    with pytest.raises(ParamsError, match="tokenization_kwargs cannot say 'padding'"):
        engine.add_request("other", PROMPT, params(), tokenization_kwargs={"padding": True})
    with pytest.raises(TypeError, match="colour"):
        engine.add_request("other", PROMPT, params(), colour=1)  # type: ignore[call-arg]

    async def run() -> list[int]:
        made = ScriptAsyncLLM(model=str(tiny.checkpoint("llama")), dtype="float32", max_model_len=128)
        try:
            asked = made.generate(PROMPT, params(), "one", tokenization_kwargs=bare, trace_headers={}, session_id="s")
            outputs = [output async for output in asked]
            return list(outputs[-1].prompt_token_ids or ())
        finally:
            made.shutdown()

    assert asyncio.run(run()) == expected.prompt_token_ids


def test_older_forms_of_generate(llm: ScriptLLM) -> None:
    ids = llm.generate(PROMPT, params(), use_tqdm=False)[0].prompt_token_ids
    expected = llm.generate([{"prompt_token_ids": ids}] * 2, params(), use_tqdm=False)
    wanted = [output.outputs[0].token_ids for output in expected]
    several = [list(ids), list(ids)]
    for found in (
        llm.generate(prompt_token_ids=several, sampling_params=params(), use_tqdm=False),
        llm.generate(None, params(), several, False),
        llm.generate([PROMPT, PROMPT], params(), False),
        llm.generate([PROMPT, PROMPT], params(), None, False),
        llm.chat([[{"role": "user", "content": PROMPT}]] * 2, params(), False) and expected,
    ):
        assert [output.outputs[0].token_ids for output in found] == wanted
    assert len(llm.generate(prompt_token_ids=list(ids), sampling_params=params(), use_tqdm=False)) == 1
    with pytest.raises(ParamsError, match="prompts or prompt_token_ids"):
        llm.generate(PROMPT, params(), prompt_token_ids=[1])
    with pytest.raises(ParamsError, match="no prompts"):
        llm.generate()
    with pytest.raises(TypeError, match="use_tqdm"):
        llm.generate(PROMPT, params(), False, use_tqdm=True)


@pytest.mark.parametrize("name", REFUSED)
def test_methods_that_are_not_built_say_what_there_is(llm: ScriptLLM, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"LLM\.{name} is not available here\. \S"):
        getattr(llm, name)({"a": 1})


def test_programs_that_a_script_starts_find_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib, subprocess\n"
        "said = subprocess.run(['vllm', '--version'], capture_output=True, text=True).stdout\n"
        f"pathlib.Path({str(tmp_path / 'said')!r}).write_text(said)\n"
    )
    before = os.environ["PATH"]
    assert main(["run-vllm", str(script)]) == 0
    assert (tmp_path / "said").read_text().startswith("beheld ")
    assert os.environ["PATH"] == before
    # One of another Python goes first; that of a vllm in this one imports beheld as others do.
    own = tmp_path / "bin"
    own.mkdir()
    monkeypatch.setenv("PATH", f"{own}{os.pathsep}{before}")
    same = f"#!{sys.executable}\nimport sys\nfrom vllm.entrypoints.cli.main import main\nsys.exit(main())\n"
    for text, said in (("#!/bin/sh\necho another\n", "another\n"), (same, "beheld ")):
        (own / "vllm").write_text(text)
        (own / "vllm").chmod(0o755)
        assert main(["run-vllm", str(script)]) == 0
        assert (tmp_path / "said").read_text().startswith(said)


def test_processes_that_a_script_starts_import_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ray's do, which run what a script gives them."""
    code = "import vllm; print(vllm.outputs.RequestOutput.__module__)"
    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib, subprocess, sys\n"
        f"said = subprocess.run([sys.argv[1], '-c', {code!r}], capture_output=True, text=True).stdout\n"
        f"pathlib.Path({str(tmp_path / 'said')!r}).write_text(said)\n"
    )
    # Only the script's processes find beheld where it is not installed.
    monkeypatch.delenv("PYTHONPATH", raising=False)
    path = list(sys.path)
    assert main(["run-vllm", str(script), sys.executable]) == 0
    assert (tmp_path / "said").read_text() == "beheld.core.outputs\n"
    assert "PYTHONPATH" not in os.environ
    assert sys.path == path
    # A program with a Python of its own has another vllm.
    venv.create(tmp_path / "own", symlinks=True)
    (site,) = (tmp_path / "own" / "lib").glob("python*/site-packages")
    (site / "vllm.py").write_text("class outputs:\n    class RequestOutput:\n        pass\n")
    assert main(["run-vllm", str(script), str(tmp_path / "own" / "bin" / "python")]) == 0
    assert (tmp_path / "said").read_text() == "vllm\n"


@pytest.mark.parametrize("before", [None, "elsewhere"])
def test_a_script_may_take_out_what_its_processes_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    """Some do, so that programs with a Python of their own find their own packages."""
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nos.environ.pop('PYTHONPATH')\nsys.path[:] = sys.path[:1]\n")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if before is not None:
        monkeypatch.setenv("PYTHONPATH", before)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["run-vllm", str(script)]) == 0
    assert os.environ.get("PYTHONPATH") == before


def test_a_line_of_the_command_itself(tmp_path: Path) -> None:
    words = [sys.executable, "-P", "-m", "beheld", "run-vllm", "vllm", "serve", "--help"]
    # As an installed command, it takes nothing from the folder that it is called in.
    (tmp_path / "torch.py").write_text("raise SystemExit('another module')")
    (tmp_path / "yaml.py").write_text("raise SystemExit('another module')")
    (tmp_path / "beheld.py").write_text("raise SystemExit('another module')")
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": ROOT})
    assert done.returncode == 0, done.stderr
    assert "--max-model-len" in done.stdout


@pytest.mark.parametrize(
    "line",
    [
        ("python", "-m", "vllm.entrypoints.openai.api_server"),
        (sys.executable, "-u", "-mvllm.entrypoints.openai.api_server"),
        ("-m", "vllm.entrypoints.launchers.api_server.entry"),
        ("-m", "vllm.entrypoints.cli.main", "serve"),
    ],
)
def test_a_line_that_runs_a_module_of_vllms(line: tuple[str, ...]) -> None:
    words = [sys.executable, "-m", "beheld", "run-vllm", *line, "--help"]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ROOT})
    assert done.returncode == 0, done.stderr
    assert "usage: beheld serve" in done.stdout


@pytest.mark.parametrize(
    ("module", "usage"),
    [
        ("vllm.entrypoints.openai.api_server", "usage: beheld serve"),
        ("vllm.entrypoints.openai.run_batch", "usage: beheld run-batch"),
    ],
)
def test_a_script_starts_a_module_of_vllms(tmp_path: Path, module: str, usage: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib, subprocess, sys\n"
        f"done = subprocess.run([sys.executable, '-m', {module!r}, '--help'], capture_output=True, text=True)\n"
        f"pathlib.Path({str(tmp_path / 'said')!r}).write_text(done.stdout + done.stderr)\n"
    )
    assert main(["run-vllm", str(script)]) == 0
    assert (tmp_path / "said").read_text().startswith(usage)


def test_a_module_runs_as_python_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "beside_the_folder.py").write_text("import sys, vllm\nprint(__name__, sys.argv[1:], vllm.__name__)\n")
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    assert main(["run-vllm", "python", "-m", "beside_the_folder", "-m", "x"]) == 0
    assert capsys.readouterr().out == "__main__ ['-m', 'x'] vllm\n"
    assert main(["run-vllm", "-mbeside_the_folder", "y"]) == 0
    assert capsys.readouterr().out == "__main__ ['y'] vllm\n"
    assert sys.path == path
    for name in ("beheld_has_no_such_module", "vllm.entrypoints.grpc_server"):
        assert main(["run-vllm", "-m", name]) == 1
        said = capsys.readouterr().err
        assert name.split(".")[-1] in said
        assert "Traceback" not in said
    for words in (["run-vllm"], ["run-vllm", "-m"], ["run-vllm", "python"]):
        assert main(words) == 1
        assert "Name a Python file, or -m and a module." in capsys.readouterr().err


def test_what_only_scripts_use_is_told_of_the_other_class() -> None:
    """A name that vLLM's class has, and `beheld.LLM` has not, says where it is."""
    public = {name for name in dir(ScriptLLM) if not name.startswith("_") and name not in REFUSED}
    assert public - set(dir(LLM)) == OF_SCRIPTS
    with LLM(device="cpu", max_model_len=256) as llm:
        with pytest.raises(AttributeError, match="`from vllm import LLM`"):
            llm.enqueue("Hello")  # type: ignore[attr-defined]
        with pytest.raises(AttributeError, match=r"'LLM' object has no attribute 'enqueu'\.$"):
            llm.enqueu("Hello")  # type: ignore[attr-defined]
        assert not hasattr(llm, "other")
