"""Runs tests of Triton's kernels in Triton's interpreter.

Triton must be told before it is first imported, and in a test's process it may have been. Run as a program, this file
is a process that was told, and forks one for each file of tests: a fresh one takes seconds for its libraries.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class _Begun:
    """A file's tests that run: where their status will be read, and what they print."""

    status: IO[bytes]
    told: IO[str]


_begun: dict[Path, _Begun] = {}
_interpreter: list[tuple[subprocess.Popen[bytes], socket.socket]] = []


def _control() -> socket.socket:
    """The connection to the process that forks; it ends when this one does."""
    if not _interpreter:
        control, theirs = socket.socketpair()
        with theirs:
            # No plugin but the timeout's: the others take longer to load than most of these tests.
            environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
            command = [sys.executable, "-m", "tests.interpreted", str(theirs.fileno())]
            process = subprocess.Popen(
                command, pass_fds=(theirs.fileno(),), env=environment, cwd=ROOT, start_new_session=True
            )
        _interpreter.append((process, control))
    return _interpreter[0][1]


def begin(cases: Path) -> None:
    """In a process of their own."""
    if cases in _begun:
        return
    told = tempfile.TemporaryFile("w+")  # noqa: SIM115 (read when the process has ended)
    read, write = os.pipe()
    try:
        socket.send_fds(_control(), [str(cases).encode()], [told.fileno(), write])
    finally:
        os.close(write)
    _begun[cases] = _Begun(os.fdopen(read, "rb"), told)


def run(cases: Path) -> None:
    """Wait for the end of a file's tests, which all must have passed."""
    begin(cases)
    begun = _begun.pop(cases)
    try:
        with begun.status as file:
            status = file.read()
    except BaseException:
        process, control = _interpreter.pop()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        control.close()
        _begun.clear()
        raise
    begun.told.seek(0)
    # Nothing is written by a process that did not reach its end.
    assert status == b"0", begun.told.read()[-5000:]


def _patch_once() -> None:
    """Let Triton's interpreter put its own functions in place of the language's once for each kernel's function.

    It does so at every launch and at every call within a kernel, which takes longer than what most calls compute. This
    process interprets all kernels, so nothing is put back.
    """
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set[Callable[..., Any]]()

    def once(function: Callable[..., Any]) -> Any:
        if function not in patched:
            patch(function)
            patched.add(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = once


def _remember_types() -> None:
    """Let Triton's interpreter look up NumPy's type of each of its own once: it makes a table of all at every value."""
    from triton.runtime import interpreter

    find, found = interpreter._get_np_dtype, dict[str, Any]()

    def known(own: Any) -> Any:
        if own.name not in found:
            found[own.name] = find(own)
        return found[own.name]

    interpreter._get_np_dtype = known


def _remember_shapes() -> None:
    """Let Triton's interpreter make the parts of a block's type once for each shape, which it makes at every value.

    Nothing changes them once they are made.
    """
    from triton.language import core

    make_type, types = core.block_type.__init__, dict[tuple[Any, ...], dict[str, Any]]()
    make_tensor, tensors = core.tensor.__init__, dict[tuple[int, ...], tuple[Any, Any]]()
    compare = core.dtype.__eq__

    def of_type(own: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(getattr(size, "value", size) for size in shape)
        if key not in types:
            make_type(own, element_ty, shape)
            types[key] = own.__dict__.copy()
        own.__dict__.update(types[key])

    def of_tensor(own: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in tensors:
            make_tensor(own, handle, type)
            tensors[key] = own.shape, own.numel
        own.handle, own.type, own.dtype = handle, type, type.scalar
        own.shape, own.numel = tensors[key]

    core.block_type.__init__ = of_type
    core.tensor.__init__ = of_tensor
    core.dtype.__eq__ = lambda own, other: own is other or compare(own, other)


def _leave_out_asserts() -> None:
    """Let Triton's interpreter not compute every integer once more in 64 bits.

    Only assertions would look at it, which are made for debugging alone.
    """
    from triton.runtime import interpreter

    options = interpreter.interpreter_builder.options
    assert not options.debug, "assertions are made"
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


def _keep_conditions() -> None:
    """Let a scalar condition stay one when it is spread over a block.

    A comparison's result says that it is of its operands' type, and a spread copy is made in that: integers, which
    Triton 3.9's loads and stores refuse as masks. What is compiled has no such step.
    """
    from triton import language
    from triton.runtime import interpreter

    splat = interpreter.InterpreterBuilder.create_splat

    def spread(builder: Any, ret_ty: Any, arg: Any) -> Any:
        if arg.data.dtype == bool:
            arg = interpreter.TensorHandle(arg.data, language.int1)
        return splat(builder, ret_ty, arg)

    interpreter.InterpreterBuilder.create_splat = spread


def _serve(descriptor: int) -> None:
    import hypothesis  # noqa: F401
    import pytest
    import torch  # noqa: F401
    import triton.language  # noqa: F401

    _patch_once()
    _remember_types()
    _remember_shapes()
    _leave_out_asserts()
    _keep_conditions()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    control = socket.socket(fileno=descriptor)
    while True:
        cases, files, _, _ = socket.recv_fds(control, 4096, 2)
        if not cases:
            return
        told, write = files
        if os.fork() == 0:
            status = b""
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                control.close()
                os.dup2(told, 1)
                os.dup2(told, 2)
                found = pytest.main(["-p", "pytest_timeout", "-p", "no:cacheprovider", cases.decode()])
                sys.stdout.flush()
                status = b"%d" % found
            finally:
                os.write(write, status)
                os._exit(0)
        os.close(told)
        os.close(write)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
