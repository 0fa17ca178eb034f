"""Embeddings sent by clients: everything but a plain dense tensor of the right kind is refused (cases by number)."""

from __future__ import annotations

import base64
import io
import struct
import subprocess
import sys
import threading
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import save as safe_bytes

from tests.long import sized
from tests.memory import peak
from tests.server.running import ENGINE, Running, request_bytes, talk

CHAT = "/v1/chat/completions"
HIDDEN = 64


@pytest.fixture(scope="module")
def plain() -> Iterator[Running]:
    """A model whose embeddings need no grid."""
    found = Running("llava", ENGINE | {"limit_mm_per_prompt": {"image": 4}, "max_model_len": 512})
    yield found
    found.close()


@pytest.fixture(autouse=True)
def _undisturbed(plain: Running) -> Iterator[None]:
    """After every case the server is as before."""
    yield
    plain.idle()


def saved(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def ask(server: Running, embeds: Any) -> httpx.Response:
    def text(value: Any) -> Any:
        return base64.b64encode(value).decode() if isinstance(value, bytes) else value

    sent = {name: text(entry) for name, entry in embeds.items()} if isinstance(embeds, dict) else text(embeds)
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image_embeds", "image_embeds": sent}]
    return server.post(CHAT, {"messages": [{"role": "user", "content": parts}], "max_tokens": 2})


GOOD = torch.linspace(-1, 1, 4 * HIDDEN).reshape(1, 4, HIDDEN)


def with_value(value: float) -> torch.Tensor:
    made = GOOD.clone()
    made[0, 2, 3] = value
    return made


def rezipped(data: bytes, method: int) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w", method) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    return file.getvalue()


def pickled() -> bytes:
    """An archive of torch.save whose pickle would run a command."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(GOOD))) as old, zipfile.ZipFile(file, "w") as new:
        for entry in old.infolist():
            body = old.read(entry)
            new.writestr(
                entry.filename, b"cposix\nsystem\n(S'true'\ntR." if entry.filename.endswith("data.pkl") else body
            )
    return file.getvalue()


def sparse(index: list[list[int]], size: tuple[int, ...]) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor(index), torch.ones(len(index[0])), size, check_invariants=False)


BAD: dict[str, Callable[[], Any]] = {
    "meta": lambda: saved(torch.empty(1, 4, HIDDEN, device="meta")),
    "parameter": lambda: saved(torch.nn.Parameter(GOOD)),
    "nan": lambda: saved(with_value(float("nan"))),
    "infinity": lambda: saved(with_value(float("inf"))),
    "too large for its type": lambda: saved(GOOD.double() * 1e300),
    "no tokens": lambda: saved(torch.ones(1, 0, HIDDEN)),
    "nothing": lambda: saved(torch.ones(0)),
    "a number": lambda: saved(torch.tensor(1.0)),
    "repeated without memory": lambda: saved(torch.ones(1).expand(1, 1 << 28, HIDDEN)),
    "repeated in few bits": lambda: saved(torch.ones(1, dtype=torch.float8_e4m3fn).expand(1 << 20, HIDDEN)),
    "narrow": lambda: saved(torch.ones(1, 4, HIDDEN - 1)),
    "wide": lambda: saved(torch.ones(1, 4, HIDDEN + 1)),
    "four axes": lambda: saved(torch.ones(1, 1, 4, HIDDEN)),
    "two items": lambda: saved(torch.ones(2, 4, HIDDEN)),
    "whole numbers": lambda: saved(torch.ones(1, 4, HIDDEN, dtype=torch.int64)),
    "complex": lambda: saved(torch.ones(1, 4, HIDDEN, dtype=torch.complex64)),
    "boolean": lambda: saved(torch.ones(1, 4, HIDDEN, dtype=torch.bool)),
    "quantized": lambda: saved(torch.quantize_per_tensor(torch.ones(1, 4, HIDDEN), 0.1, 0, torch.qint8)),
    "sparse": lambda: saved(GOOD.to_sparse()),
    "sparse, outside": lambda: saved(sparse([[0], [99999], [5]], (1, 4, HIDDEN))),
    "sparse, negative": lambda: saved(sparse([[0], [-5], [5]], (1, 4, HIDDEN))),
    "compressed rows": lambda: saved(GOOD[0].to_sparse_csr()),
    "nested": lambda: saved(torch.nested.nested_tensor([torch.ones(2, HIDDEN), torch.ones(3, HIDDEN)])),
    "a list": lambda: saved([GOOD]),
    "a dictionary": lambda: saved({"image_embeds": GOOD}),
    "an array": lambda: saved(np.ones((1, 4, HIDDEN), np.float32)),
    "a module": lambda: saved(torch.nn.Linear(2, 2)),
    "the old format": lambda: saved(GOOD, _use_new_zipfile_serialization=False),
    "a command": pickled,
    "deflated": lambda: rezipped(saved(GOOD), zipfile.ZIP_DEFLATED),
    "truncated": lambda: saved(GOOD)[:-100],
    "an empty archive": lambda: b"PK\5\6" + b"\0" * 18,
    "npy": lambda: npy((1, 4, HIDDEN), 4 * HIDDEN * 4),
    "npy of an exabyte": lambda: npy((1 << 40, 1 << 20), 16),
    "npy of objects": lambda: npy_objects(),
    "safetensors, header beyond the file": lambda: struct.pack("<Q", 1 << 62) + b"{}",
    "safetensors, large header": lambda: struct.pack("<Q", 3 << 20) + b" " * (3 << 20),
    "safetensors, no header": lambda: b"\0" * 8,
    "safetensors, overlapping": lambda: header({"a": [0, 1024], "b": [512, 1536]}),
    "safetensors, negative": lambda: header({"a": [-1024, 0]}),
    "safetensors, backwards": lambda: header({"a": [1024, 0]}),
    "safetensors, outside": lambda: header({"a": [1 << 40, (1 << 40) + 1024]}),
    "safetensors, two": lambda: safe_bytes({"a": GOOD, "b": GOOD.clone()}),
    "safetensors, none": lambda: safe_bytes({}),
    "safetensors, nan": lambda: safe_bytes({"a": with_value(float("nan"))}),
    "safetensors, whole numbers": lambda: safe_bytes({"a": torch.ones(1, 4, HIDDEN, dtype=torch.int32)}),
    "bytes of nothing": lambda: b"",
    "noise": lambda: bytes(range(256)) * 8,
    "not base64": lambda: "@@@@",
    "base64 with blanks": lambda: base64.b64encode(saved(GOOD)).decode()[:64] + "\n",
}


def npy(shape: tuple[int, ...], size: int) -> bytes:
    head = repr({"descr": "<f4", "fortran_order": False, "shape": shape}).encode().ljust(117) + b"\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(head)) + head + b"\0" * size


def npy_objects() -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    return file.getvalue()


def header(offsets: dict[str, list[int]]) -> bytes:
    import json

    head = json.dumps(
        {name: {"dtype": "F32", "shape": [1, 4, HIDDEN], "data_offsets": place} for name, place in offsets.items()}
    ).encode()
    return struct.pack("<Q", len(head)) + head + b"\0" * 2048


@pytest.mark.case(13, 14, 15)
@pytest.mark.parametrize("name", sorted(BAD))
def test_13_only_a_plain_tensor_is_taken(plain: Running, name: str) -> None:
    with warnings.catch_warnings():
        # torch warns of its own rarer kinds of tensors.
        warnings.simplefilter("ignore")
        body = BAD[name]()
    begin = time.process_time()
    with peak() as above:
        answer = ask(plain, body)
    assert answer.status_code in (400, 413), answer.text
    assert time.process_time() - begin < 2.0
    # A dozen copies of what was sent, here, on the wire and in the server; the largest is 3 MiB, 4 in base64.
    assert above[0] < 48 << 20
    error = answer.json()["error"]
    assert error["message"].startswith(("image 1: ", "Part 2 of message 1: ")), error
    assert len(error["message"]) < 600


def folded(dense_mib: int) -> bytes:
    """An archive of torch.save of zeros, deflated to a thousandth: the storage is one mebibyte's blocks, repeated."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    piece, crc = bytes(1 << 20), 0
    block = packer.compress(piece) + packer.flush(zlib.Z_FULL_FLUSH)
    for _ in range(dense_mib):
        crc = zlib.crc32(piece, crc)
    storage = block * dense_mib + zlib.compressobj(9, zlib.DEFLATED, -15).flush()
    few = saved(torch.zeros(1, 4, HIDDEN))
    with zipfile.ZipFile(io.BytesIO(few)) as old:
        entries = [(entry.filename, old.read(entry)) for entry in old.infolist()]
    rows = dense_mib * (1 << 18) // HIDDEN
    packed: list[tuple[str, bytes, int, int]] = []
    for name, body in entries:
        if name.endswith("data/0"):
            packed.append((name, storage, crc, dense_mib << 20))
            continue
        if name.endswith("data.pkl"):
            # Protocol 2 writes the 4 tokens as K\4 and the 256 numbers of the storage as M\0\1: four bytes hold any.
            body = body.replace(b"M\0\1", b"J" + struct.pack("<i", rows * HIDDEN))
            body = body.replace(b"K\4", b"J" + struct.pack("<i", rows))
        raw = zlib.compressobj(9, zlib.DEFLATED, -15)
        packed.append((name, raw.compress(body) + raw.flush(), zlib.crc32(body), len(body)))
    return zipped(packed)


def zipped(entries: list[tuple[str, bytes, int, int]]) -> bytes:
    """A zip archive of (name, deflated bytes, checksum, size unfolded)."""
    data, places = b"", b""
    for name, body, crc, size in entries:
        # Version 2.0, no flags, deflated, a time and a date, and how long the name is and nothing more.
        shared = struct.pack("<HHHHHIIIHH", 20, 0, 8, 0, 33, crc, len(body), size, len(name), 0)
        places += b"PK\1\2" + struct.pack("<H", 20) + shared + struct.pack("<HHHII", 0, 0, 0, 0, len(data))
        places += name.encode()
        data += b"PK\3\4" + shared + name.encode() + body
    end = struct.pack("<HHHHIIH", 0, 0, len(entries), len(entries), len(places), len(data), 0)
    return data + places + b"PK\5\6" + end


def test_14_a_folded_archive_is_what_it_says() -> None:
    """One of a mebibyte unfolds to the tensor, so that the large one is a bomb and not a broken file."""
    with zipfile.ZipFile(io.BytesIO(folded(1))) as archive:
        unfolded = rezipped(folded(1), zipfile.ZIP_STORED)
        assert archive.testzip() is None
    tensor = torch.load(io.BytesIO(unfolded), weights_only=True)
    assert tensor.shape == (1, (1 << 18) // HIDDEN, HIDDEN)


def test_14_a_gibibyte_in_one_mebibyte_is_refused_from_its_headers(plain: Running) -> None:
    """Within 8 MiB: the most that is held meanwhile, above what was held before, in the best of some rounds (what was
    freed once is filled again, and what other threads hold comes and goes)."""
    bomb = folded(1024)
    assert len(bomb) < 2 << 20
    parts = [{"type": "image_embeds", "image_embeds": base64.b64encode(bomb).decode()}]
    sent = request_bytes(CHAT, {"messages": [{"role": "user", "content": parts}], "max_tokens": 2})
    taken: list[int] = []
    while len(taken) < 5 and (not taken or min(taken) >= 8 << 20):
        with peak() as above:
            answer = plain.raw(sent)
        taken.append(above[0])
        assert answer.startswith(b"HTTP/1.1 400"), answer[:300]
        assert b"is compressed" in answer
    assert min(taken) < 8 << 20, taken


def test_14_what_unfolds_would_be_seen() -> None:
    """By a process that has nothing freed to fill again, as the tests' own may have."""
    seen = subprocess.run([sys.executable, "-c", _UNFOLDING], capture_output=True, check=True, text=True)
    assert int(seen.stdout) > 24 << 20


_UNFOLDING = """
import zlib
from tests.memory import peak
folded = zlib.compress(bytes(32 << 20))
with peak() as above:
    zlib.decompress(folded)
print(above[0])
"""


@pytest.mark.parametrize(
    "embeds",
    [
        saved(GOOD),
        saved(GOOD[0]),
        saved(GOOD.to(torch.bfloat16)),
        saved(GOOD.double()),
        saved(torch.ones(4, 1).expand(4, HIDDEN)),
        safe_bytes({"any name": GOOD}),
        {"image_embeds": saved(GOOD)},
    ],
)
def test_13_plain_tensors_are_taken(plain: Running, embeds: Any) -> None:
    answer = ask(plain, embeds)
    assert answer.status_code == 200, answer.text
    (receipt,) = answer.json()["media"]
    assert receipt["tokens"] == 4


@pytest.mark.parametrize(
    "embeds",
    [
        {"image_embeds": saved(torch.ones(4, HIDDEN))},
        {"image_grid_thw": saved(torch.tensor([[1, 4, 4]]))},
        {"image_embeds": saved(torch.ones(4, HIDDEN)), "image_grid_thw": saved(torch.tensor([[1, 4, 5]]))},
        {"image_embeds": saved(torch.ones(4, HIDDEN)), "image_grid_thw": saved(torch.tensor([[-1, -4, 4]]))},
        {"image_embeds": saved(torch.ones(4, HIDDEN)), "image_grid_thw": saved(torch.tensor([[2**62, 2**62, 2**62]]))},
        {"image_embeds": saved(torch.ones(4, HIDDEN)), "image_grid_thw": saved(torch.ones(1 << 16, 3).long())},
        {"image_embeds": saved(torch.ones(4, HIDDEN)), "image_grid_thw": saved(torch.ones(1, 3))},
        {"image_embeds": saved(torch.ones(4, HIDDEN)), "image_grid_thw": saved(torch.ones(1, 3, device="meta"))},
        {"image_embeds": saved(torch.ones(4, HIDDEN)), "image_sizes": saved(torch.ones(1, 2))},
        {"x" * 5000: saved(torch.ones(4, HIDDEN))},
        {},
    ],
)
def test_13_grids_are_checked(running: Running, embeds: Any) -> None:
    begin = time.process_time()
    answer = ask(running, embeds)
    assert answer.status_code == 400, answer.text
    assert len(answer.json()["error"]["message"]) < 600
    assert time.process_time() - begin < 1.0
    good = {"image_embeds": saved(torch.ones(4, HIDDEN)), "image_grid_thw": saved(torch.tensor([[1, 4, 4]]))}
    assert ask(running, good).status_code == 200


def test_16_good_and_bad_from_many_threads(plain: Running) -> None:
    """torch's check of sparse tensors is a switch of the whole process; nothing here depends on it."""
    good, bad = saved(GOOD), [BAD[name]() for name in ("sparse, outside", "sparse, negative", "meta", "nan")]
    wrong: list[Any] = []

    def send(number: int) -> None:
        for round_ in range(sized(4, 1_000)):
            which = (number + round_) % 8
            status = ask(plain, good if which >= 4 else bad[which]).status_code
            if status != (200 if which >= 4 else 400):
                wrong.append((which, status))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(sized(8, 64))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


_FOUND: list[str] = []
_WATCHING = threading.Event()


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "pickle.find_class" and _WATCHING.is_set():
        _FOUND.append(repr(arguments))


def test_17_nothing_is_unpickled(plain: Running, running: Running) -> None:
    sys.addaudithook(_audit)
    _WATCHING.set()
    try:
        for name in ("a command", "a module", "a list", "parameter", "npy of objects", "the old format"):
            assert ask(plain, BAD[name]()).status_code == 400
        assert ask(plain, saved(GOOD)).status_code == 200
        assert running.post(CHAT, {"messages": talk(), "max_tokens": 2}).status_code == 200
    finally:
        _WATCHING.clear()
    assert not _FOUND
