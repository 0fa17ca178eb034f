"""Attacks on a server by one client, and how long others wait meanwhile; one JSON line for each attack.

    python -m benchmarks.serving hostile                          all attacks, with the engine in a thread
    python -m benchmarks.serving hostile --engine process --attack long_url,many_ids
    python -m benchmarks.serving hostile --together --prefix "docker run ..."      all at once, in a container

Each attack has a server of its own, unless they come together. While it goes on, a process of its own asks `/health`
and for an ordinary chat, again and again, and tells the longest waits. Bounds: `/health` 100 ms, a chat 2 s and never
refused, memory four times the bodies in work and 256 MiB more than before. Everything stays on the loopback interface.

The same process first asks while nobody attacks, and its line is `idle` within the attack's: a wait that an idle
server has too is the machine's, and `quiet` is false where the idle server exceeds a bound. Both lines tell how long
the server's main thread, which runs the event loop, computed and how long it was ready but had no core. Time without a
core goes to other processes or to the server's other threads; a wait without either is a lock or a long callback.
Attackers and canaries use the same cores as the server; attackers have the lowest priority, because real ones compute
elsewhere (`--nice 0` gives them the server's). `floor` is what a request to an idle asyncio server of its own waits
meanwhile: the share of a wait that no server on these cores avoids.

    --prefix "python -m benchmarks.memory_limit 2048"     the server in a memory cgroup of 2 GiB, if root may make one
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import http.client
import io
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

KEY = "EMPTY"
CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
MAX_HEALTH_MS = 100.0
MAX_CHAT_MS = 2000.0
_MIB = 1 << 20
# Just below --max-body-mib.
_LARGE = 60 * _MIB


@dataclass(frozen=True)
class Attack:
    """One client's attack.

    Attributes:
        payloads: makes what each of its connections sends, again and again; it is given the port of a hostile origin.
        origin: what that origin answers to every request, as often as its client reads.
        body_mib: what the bodies in work have at most.
        warm: a harmless request that starts the processes of the attack's kind of work, which count once.
        leaves: its clients send a part, or all, and reset the connection within some milliseconds.
    """

    payloads: Callable[[int], list[bytes]]
    origin: tuple[bytes, bytes] = (b"", b"")
    body_mib: int = 0
    warm: Callable[[], bytes] | None = None
    leaves: bool = False


def post(path: str, body: Any, *, key: bool = True) -> bytes:
    """A POST as it stands on the wire."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return _head(path, f"Content-Length: {len(data)}", key=key) + data


def _head(path: str, *lines: str, key: bool = True) -> bytes:
    shown = [f"Authorization: Bearer {KEY}"] if key else []
    given = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", *shown, *lines, "", ""]
    return "\r\n".join(given).encode()


def _chunked(*, key: bool) -> bytes:
    return _head(CHAT, "Transfer-Encoding: chunked", key=key) + b"1\r\n \r\n" * (12 * _MIB // 6)


def _pictures(port: int) -> bytes:
    parts = [{"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{port}/{n}.png"}} for n in range(32)]
    return post(CHAT, {"messages": [{"role": "user", "content": parts}], "max_tokens": 1})


def _named(host: str) -> bytes:
    """Thirty-two images at hosts with a number in their names."""
    urls = [f"http://{host.format(n=n % 12 + 1)}/{n}.png" for n in range(32)]
    return _said_parts([{"type": "image_url", "image_url": {"url": url}} for url in urls])


def _said(text: str, **more: Any) -> bytes:
    return post(CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": 1, **more})


def _called(arguments: str) -> bytes:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "b", "tool_call_id": "a"},
    ]
    return post(CHAT, {"messages": messages, "max_tokens": 1})


def _long_url() -> bytes:
    url = "http://127.0.0.1/" + "a" * _LARGE
    return _said_parts([{"type": "image_url", "image_url": {"url": url}}])


def _said_parts(parts: list[dict[str, Any]]) -> bytes:
    return post(CHAT, {"messages": [{"role": "user", "content": parts}], "max_tokens": 1})


def _pictured(kind: str, data: bytes) -> bytes:
    url = f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}"
    return _said_parts([{"type": f"{kind}_url", f"{kind}_url": {"url": url}}])


def many_scans(width: int, height: int, count: int) -> bytes:
    """A progressive JPEG whose last scan, of 26 bytes, comes so many times more."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    end = data.rindex(b"\xff\xd9")
    return data[:end] + data[data.rindex(b"\xff\xda") : end] * count + data[end:]


def large_png(width: int, height: int) -> bytes:
    """A flat PNG with bytes behind its end, so that its size is believed."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("1", (width, height)).save(file, "PNG")
    return file.getvalue() + bytes(width * height // 200)


def many_frames(width: int, height: int, count: int) -> bytes:
    """An MP4 file of H.264, flat: a group of a hundred frames, again and again; most frames take some 20 bytes."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=30, options={"preset": "ultrafast", "tune": "zerolatency"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        packets: list[tuple[bytes, bool]] = []
        for number in range(100):
            frame = av.VideoFrame(width, height, "yuv420p")
            for plane in frame.planes:
                plane.update(bytes([128]) * plane.buffer_size)
            frame.pts = number
            packets += [(bytes(packet), packet.is_keyframe) for packet in stream.encode(frame)]
        packets += [(bytes(packet), packet.is_keyframe) for packet in stream.encode(None)]
        for number in range(count):
            data, begins = packets[number % len(packets)]
            packet = av.Packet(data)
            packet.stream, packet.time_base, packet.is_keyframe = stream, Fraction(1, 30), begins
            packet.pts = packet.dts = number
            container.mux(packet)
    return file.getvalue()


def _form() -> bytes:
    """A form whose file nearly holds its boundary, again and again."""
    boundary = b"a" * 69 + b"b"
    body = b'--%b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' % boundary
    body += (b"\r\n--" + b"a" * 69) * (_LARGE // 73) + b"\r\n--%b--" % boundary
    head = _head("/v1/audio/transcriptions", f"Content-Length: {len(body)}")
    kind = b"multipart/form-data; boundary=" + boundary
    return head.replace(b"application/json", kind) + body


def _tools(choice: str) -> bytes:
    """Functions whose schemas have half a million values together."""
    values = {"type": "object", "properties": {"a": {"enum": [0] * 4000}}}
    tools = [{"type": "function", "function": {"name": f"f{n}", "parameters": values}} for n in range(128)]
    return _said("a", tools=tools, tool_choice=choice)


def _form_of(values: int) -> dict[str, Any]:
    return {"type": "json_schema", "name": "a", "schema": {"enum": [0] * values}}


def _asked_for(path: str) -> bytes:
    """A GET as it stands on the wire."""
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()


def _formed() -> bytes:
    """A schema of half a million values."""
    schema = {"enum": [0] * 500_000}
    return _said("a", response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})


_LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n"
ATTACKS: dict[str, Attack] = {
    "request_in_chunks": Attack(lambda port: [_chunked(key=True)] * 8),
    "request_in_chunks_without_key": Attack(lambda port: [_chunked(key=False)] * 8),
    "header_lines": Attack(lambda port: [_head(CHAT, *["a: b"] * 40_000)] * 8),
    "trailer_lines": Attack(
        lambda port: [_head(CHAT, "Transfer-Encoding: chunked") + b"0\r\n" + b"a: b\r\n" * 40_000 + b"\r\n"] * 8
    ),
    "fetched_in_chunks": Attack(
        lambda port: [_pictures(port)] * 2,
        (_ANSWER + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n" * 10_000),
    ),
    "fetched_interim_answers": Attack(lambda port: [_pictures(port)] * 2, (b"", b"HTTP/1.1 102 a\r\n\r\n" * 4_000)),
    "fetched_header_lines": Attack(lambda port: [_pictures(port)] * 2, (_ANSWER + b"a: b\r\n" * 15_000 + b"\r\n", b"")),
    "truncated_text": Attack(
        lambda port: [post(COMPLETE, {"prompt": "x y" * (_LARGE // 3), "max_tokens": 1, "truncate_prompt_tokens": 4})],
        body_mib=64,
    ),
    "truncated_chat": Attack(lambda port: [_said("x y" * (_LARGE // 3), truncate_prompt_tokens=4)], body_mib=64),
    "arguments_of_many_values": Attack(lambda port: [_called("[" + "0," * (_LARGE // 2) + "0]")], body_mib=64),
    "arguments_nested_deep": Attack(
        lambda port: [_called("[" * 900 + "]" * 900), _called("[" * 60_000 + "]" * 60_000)]
    ),
    "unknown_key": Attack(lambda port: [post(CHAT, {"messages": [], "m" * _LARGE: 1})] * 2, body_mib=128),
    "control_token_in_long_text": Attack(lambda port: [_said("<|im_end|>" + "x y" * (_LARGE // 3))], body_mib=64),
    "control_token_across_parts": Attack(
        lambda port: [
            _said_parts([{"type": "text", "text": "x y" * (_LARGE // 3) + "<|im_"}, {"type": "text", "text": "end|>"}])
        ],
        body_mib=64,
    ),
    "many_ids": Attack(
        lambda port: (
            [post(COMPLETE, {"prompt": [5] * 524_000, "max_tokens": 1})] * 4
            + [post("/detokenize", {"tokens": [5] * 524_000})]
        ),
        body_mib=8,
    ),
    "long_url": Attack(lambda port: [_long_url()] * 8, body_mib=8 * 64),
    "fetched_promises": Attack(
        lambda port: [_pictures(port)] * 4, (_ANSWER + b"Content-Length: 262144000\r\n\r\n.", b"")
    ),
    "fetched_names": Attack(lambda port: [_named(f"name-{k}-{{n}}.invalid") for k in range(3)]),
    "fetched_silence": Attack(lambda port: [_pictures(port)] * 10),
    "many_scans": Attack(lambda port: [_pictured("image", many_scans(8000, 6000, 1500))] * 4, body_mib=4),
    "large_pictures": Attack(lambda port: [_pictured("image", large_png(5000, 3200))] * 4, body_mib=4 * 64),
    # Permitted: ordinary progressive JPEGs, whose every scan goes over 48 megapixels.
    "progressive_pictures": Attack(lambda port: [_pictured("image", many_scans(8000, 6000, 0))] * 4, body_mib=4 * 192),
    # 128 megapixels are the most that an image may have; opened images take turns at a gibibyte.
    "largest_pictures": Attack(lambda port: [_pictured("image", large_png(16_000, 8000))] * 8, body_mib=1024),
    # 16 frames of 2.6 MiB: twice in the server, where they are resized, and once in the worker that decodes them.
    "many_frames": Attack(
        lambda port: [_pictured("video", many_frames(1280, 720, 6000))] * 4,
        body_mib=4,
        warm=lambda: _pictured("video", many_frames(64, 64, 4)),
    ),
    # Answers of hundreds of megabytes, and 27 MiB of columns while they are read.
    "prompt_logprobs": Attack(
        lambda port: [post(COMPLETE, {"prompt": [[5] * 8000] * 64, "max_tokens": 1, "prompt_logprobs": 5})],
        body_mib=4,
    ),
    # Bodies whose parser keeps the interpreter for long, and conversations that take long to read.
    "many_keys": Attack(
        lambda port: (
            [
                _said("a", metadata={f"k{n:05d}{'x' * 36}": "1" for n in range(40_000)}),
                _said("a", chat_template_kwargs={f"k{n:05d}{'x' * 36}": 1 for n in range(40_000)}),
            ]
            * 32
        ),
        body_mib=128,
    ),
    "many_messages": Attack(
        lambda port: [post(CHAT, {"messages": [{"role": "user", "content": "a"}] * 900, "max_tokens": 1})] * 64,
        body_mib=4,
    ),
    "many_parts": Attack(
        lambda port: (
            [
                post(
                    CHAT,
                    {
                        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 2000}] * 12,
                        "max_tokens": 1,
                    },
                )
            ]
            * 16
        ),
        body_mib=12,
    ),
    "tools_of_many_values": Attack(lambda port: [_tools("none"), _tools("required")] * 4, body_mib=16),
    "schema_of_many_values": Attack(lambda port: [_formed()] * 8, body_mib=8),
    # What a response repeats of its request.
    "echoed_metadata": Attack(
        lambda port: (
            [post("/v1/responses", {"input": "a", "max_output_tokens": 1, "metadata": {"a": "x" * (8 * _MIB)}})] * 4
            + [
                post(
                    "/v1/responses",
                    {
                        "input": "a",
                        "max_output_tokens": 1,
                        "stream": True,
                        "metadata": {f"k{n}": "1" for n in range(40_000)},
                    },
                )
            ]
            * 4
        ),
        body_mib=48,
    ),
    "echoed_schema": Attack(
        lambda port: (
            [post("/v1/responses", {"input": "a", "background": True, "text": {"format": _form_of(500_000)}})] * 4
        ),
        body_mib=4,
    ),
    "echoed_instructions": Attack(
        lambda port: (
            [post("/v1/responses", {"input": "a", "background": True, "instructions": "x y" * (5 * _MIB)})] * 4
        ),
        body_mib=60,
    ),
    # Half a million candidates, which are made and written when the last answer ends.
    "candidates_of_many_answers": Attack(
        lambda port: [_said("a", n=64, logprobs=True, top_logprobs=20, max_tokens=400, ignore_eos=True)] * 2
    ),
    "candidates_by_name": Attack(
        lambda port: (
            [_said("a", logprobs=True, logprob_token_ids=list(range(128)), max_tokens=400, ignore_eos=True)] * 16
        )
    ),
    "requests_in_a_row": Attack(lambda port: [_asked_for("/nowhere") * 400] * 300),
    "form_of_near_boundaries": Attack(lambda port: [_form()] * 2, body_mib=128),
    "long_messages": Attack(lambda port: [_said("x y" * (_LARGE // 3))] * 4, body_mib=256),
    "requests_cut_off": Attack(
        lambda port: [_said("a"), post("/v1/responses", {"input": "a", "max_output_tokens": 20})] * 12, leaves=True
    ),
    "looping_templates": Attack(
        lambda port: [_said("a", chat_template=_LOOPS)] * 4,
        warm=lambda: _said("a", chat_template="{{ messages[0].content }}"),
    ),
}


# ---------------------------------------------------------------------- attackers


@contextlib.contextmanager
def origin(first: bytes, again: bytes, nice: int = 0) -> Iterator[int]:
    """A hostile origin, at a port of its own: to every request `first`, then `again` until its client hangs up."""
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:

        def answer(link: socket.socket) -> None:
            _lower(nice)
            with contextlib.suppress(OSError), link:
                link.settimeout(20)
                link.recv(1 << 16)
                link.sendall(first)
                while again and not stop.is_set():
                    link.sendall(again)
                if not again:
                    # Silence, until the client hangs up.
                    link.recv(1)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    link, _ = listener.accept()
                    threading.Thread(target=answer, args=(link,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield listener.getsockname()[1]
        finally:
            stop.set()
            listener.shutdown(socket.SHUT_RDWR)


def leaving(port: int, payload: bytes, stop: threading.Event, statuses: dict[str, int], nice: int) -> None:
    """Send some of it, reset the connection, and again."""
    _lower(nice)
    own = random.Random(threading.get_native_id())
    while not stop.is_set():
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 60) as link:
            link.sendall(payload if own.random() < 0.5 else payload[: own.randrange(len(payload))])
            stop.wait(own.random() / 20)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            statuses["left"] = statuses.get("left", 0) + 1


def attacking(port: int, payload: bytes, stop: threading.Event, statuses: dict[str, int], nice: int) -> None:
    """Send it, read the answer, and again."""
    _lower(nice)
    while not stop.is_set():
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 60) as link:
            with contextlib.suppress(OSError):
                link.sendall(payload)
            answer = link.recv(1 << 16)
            status = answer[9:12].decode("latin-1") or "closed"
            statuses[status] = statuses.get(status, 0) + 1
        stop.wait(0.01)


def _lower(nice: int) -> None:
    """Lower the priority of this thread."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


# ---------------------------------------------------------------------- canaries


def watch(port: int, idle_port: int) -> None:
    """Ask for `/health`, for a chat, and an idle server, until standard input ends; print the waits."""
    stop = threading.Event()
    talk = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 8, "temperature": 0}
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    waits: dict[str, list[float]] = {"health": [], "chat": [], "floor": []}
    refused: dict[str, int] = {}

    def ask(name: str, method: str, path: str, body: str | None, pause_s: float) -> None:
        at = idle_port if name == "floor" else port
        while not stop.wait(pause_s):
            begin = time.perf_counter()
            status = "lost"
            with contextlib.suppress(OSError, http.client.HTTPException):
                # From another address than the attackers', which makes it another client.
                link = http.client.HTTPConnection("127.0.0.1", at, timeout=120, source_address=("127.0.0.2", 0))
                link.request(method, path, body, headers)
                status = str(_status(link))
                link.close()
            waits[name].append(1e3 * (time.perf_counter() - begin))
            if status != "200":
                refused[f"{name} {status}"] = refused.get(f"{name} {status}", 0) + 1

    asks = (
        ("health", "GET", "/health", None, 0.02),
        ("chat", "POST", CHAT, json.dumps(talk), 0.05),
        ("floor", "GET", "/", None, 0.02),
    )
    threads = [threading.Thread(target=ask, args=one) for one in asks]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    stop.set()
    for thread in threads:
        thread.join()
    report: dict[str, Any] = {"refused": refused}
    for name, found in waits.items():
        ranked = sorted(found) or [0.0]
        report[name] = {
            "asked": len(found),
            "median_ms": round(ranked[len(ranked) // 2], 1),
            "worst_ms": round(ranked[-1], 1),
        }
    print(json.dumps(report))


def answer_idly() -> None:
    """Serve an empty answer to every request, on the event loop and with nothing else to do; print the port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
        writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    asyncio.run(serve())


def _status(link: http.client.HTTPConnection) -> int:
    answer = link.getresponse()
    answer.read()
    return answer.status


# ---------------------------------------------------------------------- the whole


def hostile(
    given: argparse.Namespace, begun: Callable[..., tuple[subprocess.Popen[bytes], int]]
) -> Iterator[dict[str, Any]]:
    """Each attack, `--seconds` long; `begun` starts a server."""
    chosen = given.attack.split(",") if given.attack else list(ATTACKS)
    for names in [chosen] if given.together else [[name] for name in chosen]:
        attacks = [ATTACKS[name] for name in names]
        yield {"attack": ",".join(names), "engine": given.engine, **_outcome(attacks, given, begun)}


def _outcome(
    attacks: Sequence[Attack], given: argparse.Namespace, begun: Callable[..., tuple[subprocess.Popen[bytes], int]]
) -> dict[str, Any]:
    os.environ["BEHELD_ALLOW_PRIVATE_FETCH"] = "1"
    own = ("--limit-mm-per-prompt", '{"image": 32}', "--trust-request-chat-template")
    process, port = begun(given, "--api-key", KEY, *own)
    stop, statuses = threading.Event(), dict[str, int]()
    try:
        with contextlib.ExitStack() as origins:
            ports = [origins.enter_context(origin(*attack.origin, given.nice)) for attack in attacks]
            payloads = [
                (leaving if attack.leaves else attacking, each)
                for attack, at in zip(attacks, ports, strict=True)
                for each in attack.payloads(at)
            ]
            _ready(port, [talk() for talk in (_hello, *(attack.warm for attack in attacks)) if talk is not None])
            with watched(port, process.pid) as idle:
                time.sleep(given.seconds)
            # Behind the first chats, which read libraries' pages for the first time.
            forget_peaks(process.pid)
            calm = peak_mib(process.pid)
            with watched(port, process.pid) as report:
                time.sleep(1.0)
                each = (stop, statuses, given.nice)
                threads = [threading.Thread(target=how, args=(port, one, *each)) for how, one in payloads]
                for thread in threads:
                    thread.start()
                time.sleep(given.seconds)
                stop.set()
                for thread in threads:
                    thread.join()
            grown = peak_mib(process.pid) - calm
        alive = process.poll() is None
    finally:
        # What stands before the server's command removes what it made; it cannot when it is killed.
        process.send_signal(signal.SIGTERM if given.prefix else signal.SIGKILL)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    most = 4 * sum(attack.body_mib for attack in attacks) + 256
    return {
        "idle": idle,
        **report,
        "answers": statuses,
        "memory_mib": round(grown),
        "memory_most_mib": most,
        "alive": alive,
        "quiet": within_bounds(idle),
        "held": alive and within_bounds(report) and grown <= most,
    }


@contextlib.contextmanager
def watched(port: int, pid: int) -> Iterator[dict[str, Any]]:
    """Canaries ask while the block runs; after it, the mapping holds what they waited and what the main thread did."""
    report: dict[str, Any] = {}
    pid = _server_of(pid)
    command = [sys.executable, "-m", "benchmarks.serving_hostile"]
    idler = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert idler.stdout is not None
    idle_port = int(idler.stdout.readline())
    watcher = subprocess.Popen([*command, str(port), str(idle_port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    before = _main_thread_s(pid)
    try:
        yield report
        computed, waited = (after - begin for after, begin in zip(_main_thread_s(pid), before, strict=True))
        report |= json.loads(watcher.communicate(b"")[0])
        report["main_thread"] = {"computed_s": round(computed, 2), "without_core_s": round(waited, 2)}
    finally:
        for process in (watcher, idler):
            process.kill()
            process.wait()
        idler.stdout.close()


def within_bounds(report: Mapping[str, Any]) -> bool:
    """Whether what canaries waited is within the bounds, and none was refused."""
    fast = report["health"]["worst_ms"] <= MAX_HEALTH_MS and report["chat"]["worst_ms"] <= MAX_CHAT_MS
    return fast and not report["refused"]


def _server_of(pid: int) -> int:
    """The server among a process, such as one that limits memory, and its descendants."""
    for one, _ in _tree(pid):
        with contextlib.suppress(OSError), open(f"/proc/{one}/cmdline") as file:
            # What limits memory has the server's command behind its own.
            if "beheld.cli.main" in file.read().split("\0")[:4]:
                return one
    return pid


def _main_thread_s(pid: int) -> tuple[float, float]:
    """Seconds that a process's main thread computed, and that it was ready but had no core; zeros if it has ended."""
    try:
        with open(f"/proc/{pid}/task/{pid}/schedstat") as file:
            computed, waited, _ = file.read().split()
    except OSError:
        return 0.0, 0.0
    return int(computed) / 1e9, int(waited) / 1e9


def _hello() -> bytes:
    return post(CHAT, {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 8})


def _ready(port: int, talks: Sequence[bytes]) -> None:
    """Wait until each is answered, and a few more times, which warm what is made once."""
    for talk in [*talks] * 5:
        with socket.create_connection(("127.0.0.1", port), 120) as link:
            link.sendall(talk)
            assert link.recv(12) == b"HTTP/1.1 200"


def peak_mib(pid: int) -> float:
    """The most memory that a process and its children had.

    A forked child has its parent's command line and shares its memory: only what it has beyond counts.
    """
    total = 0.0
    seen: dict[int, tuple[str, float]] = {0: ("", 0.0)}
    for one, parent in _tree(pid):
        with contextlib.suppress(OSError):
            with open(f"/proc/{one}/cmdline") as file:
                command = file.read()
            with open(f"/proc/{one}/status") as file:
                fields = dict(line.split(":", 1) for line in file)
            # A process that has ended has no memory.
            most, now = (int(fields.get(name, "0").split()[0]) / 1024 for name in ("VmHWM", "VmRSS"))
            parents_command, parents_mib = seen.get(parent, ("", 0.0))
            total += max(0.0, most - parents_mib) if command == parents_command else most
            seen[one] = command, now
    return total


def forget_peaks(pid: int) -> None:
    """Let `peak_mib` count from now on: a start takes more for a moment than the server that it makes."""
    for one, _ in _tree(pid):
        with contextlib.suppress(OSError), open(f"/proc/{one}/clear_refs", "w") as file:
            file.write("5")


def _tree(pid: int) -> Iterator[tuple[int, int]]:
    """A process and its descendants, each with its parent; 0 is that of the first."""
    left = [(pid, 0)]
    while left:
        one, parent = left.pop()
        yield one, parent
        with contextlib.suppress(OSError):
            # Each thread has the children that it began.
            for thread in os.listdir(f"/proc/{one}/task"):
                with open(f"/proc/{one}/task/{thread}/children") as file:
                    left += [(int(word), one) for word in file.read().split()]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        watch(*map(int, sys.argv[1:]))
    else:
        answer_idly()
