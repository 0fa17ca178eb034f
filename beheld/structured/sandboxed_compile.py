"""Compiles grammars in the sandbox first; the engine's process compiles only grammars that passed there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from beheld.core.errors import ParamsError, WorkerError
from beheld.core.structured_outputs import Grammar, ReasoningFormat
from beheld.sandbox.sandbox import Sandbox
from beheld.sandbox.task_type import Fault, TaskType, WorkerFault
from beheld.structured.compile import Compiler
from beheld.utils import env
from beheld.utils.cancellation import CancelToken
from beheld.utils.lru import LRU
from beheld.wire.codec import Codec

_MAX_BYTES = 1 << 30
# If one worker is killed, the other serves requests that arrive meanwhile.
_MAX_WORKERS = 2
# Size of the cache of grammars that passed: each counts its text and a fixed amount.
_PASSED_BYTES = 16 << 20
_ENTRY_BYTES = 256


@dataclass(frozen=True)
class CompilerSettings:
    """The tokenizer, as Compiler takes it."""

    tokenizer_json: str | None
    vocab_size: int
    eos_ids: frozenset[int]


CODEC = Codec((CompilerSettings, Grammar, ReasoningFormat))


def load_compiler(settings: CompilerSettings) -> Callable[[Grammar], None]:
    """Load the tokenizer and return the function that compiles a grammar.

    Raises:
        ParamsError: this tokenizer does not support grammars.
    """
    compiler = Compiler(lambda: settings.tokenizer_json, settings.vocab_size, settings.eos_ids)
    compiler.prepare()

    def check(grammar: Grammar) -> None:
        # Without a cache, a worker's memory grows only through large grammars.
        compiler.compile(grammar)

    return check


class SandboxedCompile:
    """Compiles grammars in the sandbox and remembers which passed. Thread-safe.

    Args:
        sandbox: the sandbox.
        settings: returns the tokenizer; called once.
    """

    def __init__(self, sandbox: Sandbox, settings: Callable[[], CompilerSettings]) -> None:
        self._sandbox = sandbox
        self.task_type: TaskType[Grammar, None] = TaskType(
            load=load_compiler,
            settings=settings,
            answer=type(None),
            timeout_s=lambda grammar: env.GRAMMAR_TIMEOUT(),
            memory_bytes=_MAX_BYTES,
            max_workers=_MAX_WORKERS,
            error=_error,
        )
        self._passed: LRU[Grammar, bool] = LRU(_PASSED_BYTES)

    def warm(self) -> None:
        """Let a worker load the tokenizer now, in the background: it takes a second or more."""
        self._sandbox.warm(self.task_type)

    def check(self, grammar: Grammar, cancel: CancelToken | None = None) -> None:
        """Compile the grammar in the sandbox, unless it has passed before.

        Raises:
            ParamsError: the grammar is invalid, or compiling it takes too much time or memory.
            WorkerError: the process ended.
            Cancelled: the request was cancelled; the process that compiled it is killed.
        """
        if self._passed.get(grammar):
            return
        self._sandbox.run(self.task_type, grammar, cancel)
        self._passed.put(grammar, True, _ENTRY_BYTES + len(grammar.text))


def _error(grammar: Grammar, fault: WorkerFault) -> Exception:
    if fault.fault is Fault.TIME:
        return _refusal(f"compiling it takes more than {env.GRAMMAR_TIMEOUT():g} s")
    # The library aborts its process if it gets no memory.
    if fault.fault is Fault.MEMORY or "SIGABRT" in fault.how:
        return _refusal("compiling it takes too much memory")
    return WorkerError(f"The process that compiled the grammar ended ({fault.how}).", "Send it again.")


def _refusal(reason: str) -> ParamsError:
    return ParamsError(
        f"The grammar cannot be used: {reason}.", "Make it simpler or smaller.", param="structured_outputs"
    )
