"""Functions for this CPU, compiled from LLVM IR by the package llvmlite, which brings LLVM along.

A function has the signature `void (ptr job, i64 first, i64 stop)`: it does the parts `first` to `stop` of a job, a list
of 64-bit words. Threads are those of PyTorch's own OpenMP, if it has GNU's names; otherwise one thread does all.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import threading
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from beheld.platform import code_cache
from beheld.utils import unbounded_work
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# The words of a job that tell threads what to do come last: the function, and the number of parts.
SHARED_WORDS = ("act", "count")

# How much LLVM optimizes.
_OPT = 3
_OPENMP = ("GOMP_parallel", "GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads")


@functools.cache
def available() -> bool:
    """Return whether there is a compiler, and its library can be loaded."""
    if find_spec("llvmlite") is None:
        return False
    try:
        importlib.import_module("llvmlite.binding")
    except (ImportError, OSError) as error:
        logger.warning("llvmlite cannot be loaded (%s): PyTorch computes what it would compile, slower.", error)
        return False
    return True


def sharing(words: Sequence[str]) -> str:
    """Return IR of the function `parallel`, one thread's share of a job with these words.

    OpenMP may start fewer threads than it is asked for (OMP_THREAD_LIMIT, OMP_DYNAMIC): shares are of those that run.
    """
    loads = "\n".join(
        f"  %{name}.at = getelementptr i64, ptr %job, i64 {words.index(name)}\n"
        f"  %{name} = load {'ptr' if name == 'act' else 'i64'}, ptr %{name}.at"
        for name in SHARED_WORDS
    )
    return f"""
declare i32 @omp_get_thread_num()
declare i32 @omp_get_num_threads()
define void @parallel(ptr %job) {{
{loads}
  %own = call i32 @omp_get_thread_num()
  %index = zext i32 %own to i64
  %team = call i32 @omp_get_num_threads()
  %threads = zext i32 %team to i64
  %index.next = add i64 %index, 1
  %first.all = mul i64 %index, %count
  %stop.all = mul i64 %index.next, %count
  %first = udiv i64 %first.all, %threads
  %stop = udiv i64 %stop.all, %threads
  call void %act(ptr %job, i64 %first, i64 %stop)
  ret void
}}
"""


# The words of a step of a program: the function, its job, the number of parts, and whether all threads wait after it.
STEP_WORDS = 4

_PROGRAM = """
target triple = "{triple}"
declare i32 @omp_get_thread_num()
declare i32 @omp_get_num_threads()
declare void @GOMP_barrier()
define void @program(ptr %job, i64 %unused.first, i64 %unused.stop) {{
entry:
  %threads.at = getelementptr i64, ptr %job, i64 1
  %steps.at = getelementptr i64, ptr %job, i64 2
  %steps = load i64, ptr %job
  %asked = load i64, ptr %threads.at
  %list = load ptr, ptr %steps.at
  %alone = icmp ult i64 %asked, 2
  br i1 %alone, label %begin, label %number
number:
  %own = call i32 @omp_get_thread_num()
  %own.wide = zext i32 %own to i64
  %team = call i32 @omp_get_num_threads()
  %team.wide = zext i32 %team to i64
  br label %begin
begin:
  %index = phi i64 [0, %entry], [%own.wide, %number]
  %threads = phi i64 [1, %entry], [%team.wide, %number]
  %index.next = add i64 %index, 1
  br label %step
step:
  %s = phi i64 [0, %begin], [%s.next, %end]
  %offset = mul i64 %s, 4
  %act.at = getelementptr i64, ptr %list, i64 %offset
  %own.at = getelementptr i64, ptr %act.at, i64 1
  %count.at = getelementptr i64, ptr %act.at, i64 2
  %waits.at = getelementptr i64, ptr %act.at, i64 3
  %act = load ptr, ptr %act.at
  %own.job = load ptr, ptr %own.at
  %count = load i64, ptr %count.at
  %waits = load i64, ptr %waits.at
  %first.all = mul i64 %index, %count
  %stop.all = mul i64 %index.next, %count
  %first = udiv i64 %first.all, %threads
  %stop = udiv i64 %stop.all, %threads
  %some = icmp ult i64 %first, %stop
  br i1 %some, label %does, label %done
does:
  call void %act(ptr %own.job, i64 %first, i64 %stop)
  br label %done
done:
  %none = icmp eq i64 %waits, 0
  %passes = or i1 %none, %alone
  br i1 %passes, label %end, label %wait
wait:
  call void @GOMP_barrier()
  br label %end
end:
  %s.next = add i64 %s, 1
  %more = icmp ult i64 %s.next, %steps
  br i1 %more, label %step, label %leave
leave:
  ret void
}}
define void @parallel(ptr %job) {{
  call void @program(ptr %job, i64 0, i64 0)
  ret void
}}
"""


class ProgramStep(NamedTuple):
    """A step of a Program.

    Attributes:
        act: the function's address.
        job: its words.
        parts: the number of parts; None for the number of rows.
        waits: whether all threads wait for each other after it.
        rows_word: the word of the job that gets the number of rows; None for none.
        per_row: the parts of a row, if `parts` is None.
    """

    act: int
    job: Any
    parts: int | None
    waits: bool
    rows_word: int | None = None
    per_row: int = 1


class Program:
    """Functions that run one after the other in a single call, so that threads are woken once.

    Each thread does its share of a step's parts: part p of n goes to the same thread in every step of n parts, so that
    no barrier is needed between them.
    """

    def __init__(self, steps: Sequence[ProgramStep]) -> None:
        self._steps = steps
        self._rows = 0
        self._counted = [(step.job, step.rows_word) for step in steps if step.rows_word is not None]
        words = [
            word for step in steps for word in (step.act, ctypes.addressof(step.job), step.parts or 0, int(step.waits))
        ]
        self._words = (ctypes.c_int64 * len(words))(*words)
        self._job = (ctypes.c_int64 * 3)(len(steps), 1, ctypes.addressof(self._words))

    def run(self, rows: int, threads: int) -> None:
        """Run all steps for this many rows."""
        if rows != self._rows:
            for index, step in enumerate(self._steps):
                if step.parts is None:
                    self._words[STEP_WORDS * index + 2] = rows * step.per_row
            self._rows = rows
        # Always: another program may share a job.
        for job, word in self._counted:
            job[word] = rows
        _program().run_shared("program", self._job, threads)


class CompiledModule:
    """A module's functions.

    Args:
        texts: make IR of the target's name, for newer and older versions of LLVM; the first that it accepts is taken.
        names: of the functions.
        words: of their jobs, SHARED_WORDS last.
    """

    def __init__(self, texts: Sequence[Callable[[str], str]], names: Sequence[str], words: Sequence[str]) -> None:
        import llvmlite
        import llvmlite.binding as llvm

        assert tuple(words[-len(SHARED_WORDS) :]) == SHARED_WORDS, "threads read them"
        self._first_shared = len(words) - len(SHARED_WORDS)
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        self._gomp = _openmp()
        alone = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0)
        for name in _OPENMP[1:]:
            called = alone if self._gomp is None else getattr(self._gomp, name)
            llvm.add_symbol(name, ctypes.cast(called, ctypes.c_void_p).value)
        cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
        target = llvm.Target.from_default_triple()
        machine = target.create_target_machine(cpu=cpu, features=features, opt=_OPT)
        triple = llvm.get_process_triple()
        version = f"{llvmlite.__version__} {llvm.llvm_version_info} {_OPT}"
        made = [text(triple) for text in texts]
        # The key covers all texts, because only a trial shows which of them LLVM accepts.
        engine = _engine(llvm, machine, code_cache.key_of((version, cpu, features, *made)), made)
        self._keep = alone, engine
        self._addresses = {name: engine.get_function_address(name) for name in names}
        run = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
        self._run = {name: run(address) for name, address in self._addresses.items()}
        self._parallel = ctypes.c_void_p(engine.get_function_address("parallel"))
        self._engine = engine

    def run_shared(self, name: str, job: Any, threads: int) -> None:
        """Run `parallel` on a job, whose second word gets how many threads are asked for; for one, the function."""
        threads = 1 if self._gomp is None else threads
        job[1] = threads
        if threads < 2:
            self._run[name](job, 0, 0)
        else:
            self._gomp.GOMP_parallel(self._parallel, job, ctypes.c_uint(threads), ctypes.c_uint(0))

    def address(self, name: str) -> int:
        """Return the address of a function, for a Program."""
        found: int = self._engine.get_function_address(name)
        return found

    def run(self, name: str, job: Any, count: int, threads: int) -> None:
        """Run a function on `count` parts of a job."""
        threads = min(threads, count)
        if threads < 2 or self._gomp is None:
            self._run[name](job, 0, count)
            return
        job[self._first_shared :] = self._addresses[name], count
        self._gomp.GOMP_parallel(self._parallel, job, ctypes.c_uint(threads), ctypes.c_uint(0))


def made_once(make: Callable[..., CompiledModule]) -> Callable[..., CompiledModule]:
    """Decorate a function that compiles, so that each module is compiled once, whichever thread wants it first."""
    found: dict[Any, CompiledModule] = {}
    lock = threading.Lock()

    @functools.wraps(make)
    def module(*given: Any) -> CompiledModule:
        made = found.get(given)
        if made is None:
            with unbounded_work.running(), lock:
                made = found.get(given)
                if made is None:
                    made = found[given] = make(*given)
        return made

    return module


@made_once
def _program() -> CompiledModule:
    return CompiledModule((lambda triple: _PROGRAM.format(triple=triple),), ("program",), SHARED_WORDS)


def _engine(llvm: Any, machine: Any, key: str, texts: Sequence[str]) -> Any:
    """Return an engine with the functions of the texts, from the code that is kept under a key, or compiled now."""
    code = code_cache.read(key)
    if code is not None:
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        return engine
    made: list[bytes] = []
    engine = llvm.create_mcjit_compiler(_parsed(llvm, texts), machine)
    engine.set_object_cache(notify_func=lambda module, code: made.append(bytes(code)))
    engine.finalize_object()
    if len(made) == 1:
        code_cache.write(key, made[0])
    return engine


def _parsed(llvm: Any, texts: Sequence[str]) -> Any:
    """Return the first text that this version of LLVM accepts, parsed."""
    for index, text in enumerate(texts):
        try:
            parsed = llvm.parse_assembly(text)
            parsed.verify()
            return parsed
        except RuntimeError:
            if index + 1 == len(texts):
                raise
    raise AssertionError("there is a text")


@functools.cache
def _openmp() -> Any:
    """Return the library through which PyTorch's own threads are reached, by GNU's names; None if there is none.

    Other packages (sentencepiece is one) bring an OpenMP of their own, whose idle threads keep the processors from
    PyTorch's: with two threads, a product and PyTorch's operations between took eight times as long.
    """
    import torch

    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return None
    # Names are looked for in what it was linked with.
    return library if all(hasattr(library, name) for name in _OPENMP) else None
