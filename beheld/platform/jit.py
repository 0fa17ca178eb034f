"""Functions for this CPU, compiled from LLVM IR by the package llvmlite, which brings LLVM along.

A function has the signature `void (ptr job, i64 first, i64 stop)`: it does the parts `first` to `stop` of a job, a list
of 64-bit words. Threads are those of PyTorch's own OpenMP, if it has GNU's names; otherwise one thread does all.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# The words of a job that tell threads what to do come last: the function, the number of threads, and of parts.
SHARED_WORDS = ("act", "threads", "count")


def available() -> bool:
    """Return whether there is a compiler."""
    return find_spec("llvmlite") is not None


def sharing(words: Sequence[str]) -> str:
    """Return IR of the function `parallel`, one thread's share of a job with these words."""
    loads = "\n".join(
        f"  %{name}.at = getelementptr i64, ptr %job, i64 {words.index(name)}\n"
        f"  %{name} = load {'ptr' if name == 'act' else 'i64'}, ptr %{name}.at"
        for name in SHARED_WORDS
    )
    return f"""
declare i32 @omp_get_thread_num()
define void @parallel(ptr %job) {{
{loads}
  %own = call i32 @omp_get_thread_num()
  %index = zext i32 %own to i64
  %index.next = add i64 %index, 1
  %first.all = mul i64 %index, %count
  %stop.all = mul i64 %index.next, %count
  %first = udiv i64 %first.all, %threads
  %stop = udiv i64 %stop.all, %threads
  call void %act(ptr %job, i64 %first, i64 %stop)
  ret void
}}
"""


class CompiledModule:
    """A module's functions.

    Args:
        texts: make IR of the target's name, for newer and older versions of LLVM; the first that it accepts is taken.
        names: of the functions.
        words: of their jobs, SHARED_WORDS last.
    """

    def __init__(self, texts: Sequence[Callable[[str], str]], names: Sequence[str], words: Sequence[str]) -> None:
        import llvmlite.binding as llvm

        assert tuple(words[-3:]) == SHARED_WORDS, "threads read them"
        self._first_shared = len(words) - len(SHARED_WORDS)
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        self._gomp = _openmp()
        alone = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0)
        number = alone if self._gomp is None else self._gomp.omp_get_thread_num
        llvm.add_symbol("omp_get_thread_num", ctypes.cast(number, ctypes.c_void_p).value)
        features = llvm.get_host_cpu_features().flatten()
        target = llvm.Target.from_default_triple()
        machine = target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=3)
        engine = llvm.create_mcjit_compiler(_parsed(llvm, texts), machine)
        engine.finalize_object()
        self._keep = alone, engine
        self._addresses = {name: engine.get_function_address(name) for name in names}
        run = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
        self._run = {name: run(address) for name, address in self._addresses.items()}
        self._parallel = ctypes.c_void_p(engine.get_function_address("parallel"))

    def run(self, name: str, job: Any, count: int, threads: int) -> None:
        """Run a function on `count` parts of a job."""
        threads = min(threads, count)
        if threads < 2 or self._gomp is None:
            self._run[name](job, 0, count)
            return
        job[self._first_shared :] = self._addresses[name], threads, count
        self._gomp.GOMP_parallel(self._parallel, job, ctypes.c_uint(threads), ctypes.c_uint(0))


def _parsed(llvm: Any, texts: Sequence[Callable[[str], str]]) -> Any:
    """Return the first text that this version of LLVM accepts, parsed."""
    triple = llvm.get_process_triple()
    for index, text in enumerate(texts):
        try:
            parsed = llvm.parse_assembly(text(triple))
            parsed.verify()
            return parsed
        except RuntimeError:
            if index + 1 == len(texts):
                raise
    raise AssertionError("there is a text")


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
    return library if hasattr(library, "GOMP_parallel") and hasattr(library, "omp_get_thread_num") else None
