"""Grammars that run away are killed, with a 400 for whoever sent them, and nobody else waits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from beheld import LLM, AsyncLLM, SamplingParams
from beheld.core.errors import BeheldError, ParamsError, WorkerError
from beheld.core.structured_outputs import Grammar, StructuredOutputs
from beheld.sandbox.sandbox import Sandbox
from beheld.structured import compile as compile_module
from beheld.structured.compile import Compiler, grammar_of
from beheld.structured.sandboxed_compile import CompilerSettings, SandboxedCompile
from tests import tiny
from tests.long import sized

# Found by trying: the library follows the remainders one by one, for many seconds.
BOMB: dict[str, Any] = {"json": {"type": "integer", "multipleOf": 999_983}}
LIMIT_S = 1.0
FREE = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def under(max_tokens: int = 40, **grammar: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, structured_outputs=StructuredOutputs(**grammar))


def settings() -> CompilerSettings:
    folder = tiny.checkpoint("qwen2_vl")
    config = json.loads((folder / "config.json").read_text())
    vocab = config.get("vocab_size") or config["text_config"]["vocab_size"]
    return CompilerSettings((folder / "tokenizer.json").read_text(), vocab, frozenset((1,)))


@pytest.fixture(scope="module")
def grammars() -> Iterator[SandboxedCompile]:
    sandbox = Sandbox()
    yield SandboxedCompile(sandbox, settings)
    sandbox.close()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch, grammars: SandboxedCompile) -> SandboxedCompile:
    grammars.check(Grammar("regex", "warm"))
    monkeypatch.setenv("BEHELD_GRAMMAR_TIMEOUT", str(LIMIT_S))
    return grammars


def pids(grammars: SandboxedCompile) -> tuple[int, ...]:
    """The numbers of the processes that compile."""
    return grammars._sandbox.pids(grammars.task_type)


def cpu_s(number: int) -> float:
    """Seconds of a core that a process has used; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_44_a_grammar_that_runs_away_is_killed_and_leaves_no_work_behind(hasty: SandboxedCompile) -> None:
    before = set(pids(hasty))
    begin = time.monotonic()
    with pytest.raises(ParamsError, match="takes more than 1 s") as refusal:
        hasty.check(grammar_of(StructuredOutputs(**BOMB)))
    assert time.monotonic() - begin < LIMIT_S + 5.0
    assert refusal.value.param == "structured_outputs"
    assert len(set(pids(hasty)) & before) < len(before), "the process that compiled it is gone"
    used = [cpu_s(number) for number in pids(hasty)]
    time.sleep(0.5)
    assert sum(cpu_s(n) for n in pids(hasty)) - sum(used) < 0.2, "and the others are idle"
    hasty.check(Grammar("regex", "after"))


REGEXES = [
    r"(a+)+b",
    r"(a|a)*c",
    r"(.*)*=",
    r"(((a{1,100}){1,100}){1,100}){1,100}",
    r"(.*a.{50}){20}",
    r"(a|b)*a(a|b){200}",
    r"(\w+\s?){1,1000}x",
    r"[a-z]{1,100000}",
    r"(\p{L}{1,500}\p{N}{1,500}){1,500}",
    r"(?i)" + "|".join(f"w{n}" * 20 for n in range(1500)),
    r"((?:a?){40}){40}a{40}",
    "(" * 500 + "a" + ")" * 500,
]


@pytest.mark.parametrize("regex", REGEXES, ids=range(len(REGEXES)))
def test_44_regexes_are_answered_in_time(hasty: SandboxedCompile, regex: str) -> None:
    begin = time.monotonic()
    with contextlib.suppress(ParamsError):
        hasty.check(Grammar("regex", regex))
    assert time.monotonic() - begin < LIMIT_S + 0.5


def exponential(depth: int) -> dict[str, Any]:
    """Each definition holds the next one twice."""
    defs: dict[str, Any] = {
        f"d{n}": {"type": "object", "properties": {k: {"$ref": f"#/$defs/d{n + 1}"} for k in "ab"}, "required": ["a"]}
        for n in range(depth)
    }
    return {"$defs": {**defs, f"d{depth}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def product(width: int) -> dict[str, Any]:
    """All combinations of `width` choices."""
    choices = [{"properties": {f"p{n}": {"const": k}}, "required": [f"p{n}"]} for n in range(width) for k in range(4)]
    return {"type": "object", "allOf": [{"anyOf": choices[4 * n : 4 * n + 4]} for n in range(width)]}


SCHEMAS: dict[str, tuple[dict[str, Any], bool]] = {
    "itself": ({"$ref": "#"}, False),
    "a circle": ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, False),
    "a tree": ({"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"}, True),
    "exponential": (exponential(30), True),
    "a product": (product(9), False),
    "far": ({"$ref": "https://127.0.0.1:1/s.json"}, False),
    "a file": ({"allOf": [{"$ref": "file:///etc/hostname"}]}, False),
    "a file, hidden in $id": ({"$id": "file:///etc/", "properties": {"x": {"$ref": "hostname"}}}, False),
    "many": ({"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(500)}}, True),
    "large counts": ({"type": "array", "items": {"type": "string", "maxLength": 10**6}, "minItems": 10**5}, True),
}


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_45_schemas_are_followed_or_refused_and_open_nothing(hasty: SandboxedCompile, name: str) -> None:
    schema, valid = SCHEMAS[name]
    begin = time.monotonic()
    refused: ParamsError | None = None
    try:
        hasty.check(grammar_of(StructuredOutputs(json=schema)))
    except ParamsError as error:
        refused = error
    assert time.monotonic() - begin < LIMIT_S + 0.5
    assert valid or refused is not None
    assert refused is None or "127.0.0.1" not in str(refused)


def test_45_nobody_is_asked_for_what_a_schema_names(hasty: SandboxedCompile, tmp_path: Path) -> None:
    """A server that nobody may ask, and a file that would block whoever opens it."""
    os.mkfifo(tmp_path / "s.json")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        far = f"http://127.0.0.1:{server.getsockname()[1]}/s.json"
        for place in (far, f"file://{tmp_path}/s.json", f"{tmp_path}/s.json", "s.json"):
            for schema in (
                {"$ref": place},
                {"$id": place, "$ref": "#/a"},
                {"$schema": place, "$ref": place},
                {"properties": {"a": {"$dynamicRef": place}}, "required": ["a"]},
                {"$defs": {"a": {"$ref": f"{place}#/b"}}, "$ref": "#/$defs/a"},
            ):
                begin = time.monotonic()
                with pytest.raises(ParamsError):
                    hasty.check(grammar_of(StructuredOutputs(json=schema)))
                assert time.monotonic() - begin < LIMIT_S + 0.5
        with pytest.raises(BlockingIOError):
            server.accept()
    with pytest.raises(OSError, match="No such device"):
        # Nobody has it open, or is waiting for its other end.
        os.open(tmp_path / "s.json", os.O_WRONLY | os.O_NONBLOCK)


def test_45_ambiguous_grammars_are_answered_in_time(hasty: SandboxedCompile) -> None:
    chain = "bcdefghijklmno"
    rules = [f"{a}: {b} {b} {b} {b}" for a, b in zip(chain, chain[1:] + "p", strict=True)]
    for text in ('start: a\na: a a | "x" |', "\n".join(["start: b", *rules, 'p: "x"?']), "start: start start |"):
        begin = time.monotonic()
        with contextlib.suppress(ParamsError):
            hasty.check(Grammar("grammar", text))
        assert time.monotonic() - begin < LIMIT_S + 0.5


def test_46_many_grammars_take_bounded_memory_and_the_hot_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 in the long form; a bound of 4 MiB instead of 256 in both, so that it is reached soon."""
    many = sized(500, 10_000)
    monkeypatch.setattr(compile_module, "_KEPT_BYTES", 4 << 20)
    given = settings()
    compiler = Compiler(lambda: given.tokenizer_json, given.vocab_size, given.eos_ids)
    hot = Grammar("json", json.dumps({"type": "boolean"}))
    sizes = []
    for number in range(many):
        compiler.matcher(Grammar("json", json.dumps({"type": "object", "properties": {f"p{number}": {}}})))
        assert compiler.is_cached(hot) or number == 0
        compiler.matcher(hot)
        sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    assert sizes[-1] - sizes[many // 5] < 24 << 20
    assert not compiler.is_cached(Grammar("json", json.dumps({"type": "object", "properties": {"p0": {}}})))


def test_66_a_compiler_that_is_killed_costs_one_request(grammars: SandboxedCompile) -> None:
    grammars.check(Grammar("regex", "first"))
    for number in pids(grammars):
        os.kill(number, signal.SIGKILL)
    time.sleep(0.05)
    grammars.check(Grammar("regex", "second"))

    async def both() -> Any:
        asking = asyncio.to_thread(grammars.check, grammar_of(StructuredOutputs(**BOMB)))
        task = asyncio.ensure_future(asking)
        await asyncio.sleep(0.3)
        for number in pids(grammars):
            os.kill(number, signal.SIGKILL)
        await task

    with pytest.raises(WorkerError, match="SIGKILL"):
        asyncio.run(both())
    grammars.check(Grammar("regex", "third"))


def test_47_a_long_compilation_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bombs that would take 8 s and more each, beside a stream: its text is the undisturbed one, and it ends first."""
    monkeypatch.setenv("BEHELD_GRAMMAR_TIMEOUT", "4")

    async def text(llm: AsyncLLM) -> str:
        last = ""
        async for output in llm.generate("canary", FREE):
            last = output.outputs[0].text
        return last

    async def bomb(llm: AsyncLLM, number: int) -> BeheldError | None:
        schema = {"type": "integer", "multipleOf": 999_983 + number}
        try:
            async for _ in llm.generate("bomb", under(json=schema)):
                pass
        except BeheldError as error:
            return error
        return None

    async def run() -> None:
        async with AsyncLLM(str(tiny.checkpoint("qwen2_vl")), dtype="float32", seed=0) as llm:
            undisturbed = await text(llm)
            bombs = [asyncio.ensure_future(bomb(llm, number)) for number in range(3)]
            await asyncio.sleep(0.5)
            for _ in range(3):
                assert await text(llm) == undisturbed
            assert not any(task.done() for task in bombs), "the canary did not wait for them"
            for error in await asyncio.gather(*bombs):
                assert isinstance(error, ParamsError)
            async for output in llm.generate("x", under(choice=["yes"])):
                answer = output.outputs[0].text
            assert answer == "yes"

    asyncio.run(run())


DEAD_ENDS: dict[str, dict[str, Any]] = {
    "nothing in a range": {"json": {"type": "integer", "minimum": 5, "maximum": 3}},
    "false": {"json": {"type": "object", "properties": {"a": False}, "required": ["a"]}},
    "no choice": {"json": {"enum": []}},
    "two constants": {"json": {"allOf": [{"const": 1}, {"const": 2}]}},
    "an empty set": {"regex": "[^\\s\\S]"},
    "a rule that never ends": {"grammar": 'start: "a" start'},
    "itself": {"json": {"$ref": "#"}},
    "a circle": {"json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
    "only the end": {"regex": ""},
    "only the end, in a rule": {"grammar": 'start: ""'},
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(tiny.checkpoint("qwen2_vl")), dtype="float32", seed=0, max_model_len=256) as made:
        yield made


@pytest.mark.parametrize("name", sorted(DEAD_ENDS))
def test_48_dead_ends_end(llm: LLM, name: str) -> None:
    (alone,) = llm.generate("beside", FREE, use_tqdm=False)
    outputs = llm.generate(["x", "beside"], [under(**DEAD_ENDS[name]), FREE], use_tqdm=False, on_error="return")
    ended, beside = outputs
    assert beside.outputs[0].text == alone.outputs[0].text
    if name.startswith("only the end"):
        assert (ended.outputs[0].text, ended.outputs[0].finish_reason) == ("", "stop")
    else:
        assert isinstance(ended.error, ParamsError)
        assert ended.error.param == "structured_outputs"
