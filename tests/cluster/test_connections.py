"""Connections between hosts: only with the token, frames whole or not at all, and an end that both sides notice."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from typing import Any

import numpy as np
import pytest

from beheld.cluster import handshake, remote
from beheld.cluster.handshake import Door, connect, new_token
from beheld.cluster.remote import Secrets, environment
from beheld.cluster.tunnel import TunnelDoor, TunnelEnd
from beheld.core.errors import EngineDeadError
from beheld.executor.wire import CODEC, Sync
from beheld.wire import stream_link
from beheld.wire.link import FrameError
from beheld.wire.stream_link import StreamLink
from tests.ranks import _connected


def meet(token: bytes, others: bytes) -> tuple[Any, list[Any]]:
    """What the door gives, and the other side's connection or error."""
    door, made = Door("127.0.0.1", token), list[Any]()

    def come() -> None:
        try:
            made.append(connect("127.0.0.1", door.port, 7, others, 5.0))
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=come)
    thread.start()
    found = door.accept(5.0 if token == others else 1.0)
    thread.join()
    door.close()
    return found, made


def test_both_sides_know_the_token() -> None:
    token = new_token()
    (number, ours), (theirs,) = meet(token, token)
    assert number == 7
    ours.sendall(b"x")
    assert theirs.recv(1) == b"x"
    ours.close()
    theirs.close()


def test_a_wrong_token_is_refused_on_both_sides() -> None:
    found, (error,) = meet(new_token(), new_token())
    assert found is None
    assert isinstance(error, ConnectionError)


def test_the_token_itself_is_never_sent() -> None:
    token, seen = new_token(), bytearray()
    door = Door("127.0.0.1", token)
    with socket.create_server(("127.0.0.1", 0)) as between:

        def carry(source: socket.socket, to: socket.socket) -> None:
            while data := source.recv(4096):
                seen.extend(data)
                to.sendall(data)

        def relay() -> None:
            left, _ = between.accept()
            right = socket.create_connection(("127.0.0.1", door.port))
            threading.Thread(target=carry, args=(right, left), daemon=True).start()
            carry(left, right)

        threading.Thread(target=relay, daemon=True).start()
        ends = list[socket.socket]()
        port = between.getsockname()[1]
        thread = threading.Thread(target=lambda: ends.append(connect("127.0.0.1", port, 1, token)))
        thread.start()
        found = door.accept(5.0)
        thread.join()
    assert found is not None
    assert len(seen) > 64
    assert token not in seen
    door.close()
    ends[0].close()
    found[1].close()


def test_whoever_only_connects_keeps_nobody_waiting() -> None:
    """Neither do many; who comes next is proved at once."""
    door = Door("127.0.0.1", token := new_token())
    silent = [socket.create_connection(("127.0.0.1", door.port)) for _ in range(8)]
    ends = list[socket.socket]()
    thread = threading.Thread(target=lambda: ends.append(connect("127.0.0.1", door.port, 3, token)))
    thread.start()
    began = time.monotonic()
    found = door.accept(30.0)
    assert time.monotonic() - began < handshake._PROVED_S
    assert found is not None
    assert found[0] == 3
    thread.join()
    door.close()
    for each in (*silent, *ends, found[1]):
        each.close()


def test_more_connections_than_prove_themselves_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is closed; who comes next is proved."""
    monkeypatch.setattr(handshake, "_MAX_ARRIVALS", 4)
    door = Door("127.0.0.1", token := new_token())
    silent = [socket.create_connection(("127.0.0.1", door.port), 5.0) for _ in range(6)]
    ends = list[socket.socket]()
    thread = threading.Thread(target=lambda: ends.append(connect("127.0.0.1", door.port, 3, token)))
    thread.start()
    found = door.accept(30.0)
    assert found is not None
    assert silent[0].recv(1) == b""
    assert len(door._arrivals) < 4
    thread.join()
    door.close()
    for each in (*silent, *ends, found[1]):
        each.close()


def test_a_connection_that_says_nothing_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_PROVED_S", 0.05)
    door = Door("127.0.0.1", new_token())
    with socket.create_connection(("127.0.0.1", door.port), 5.0) as end:
        assert door.accept(0.5) is None
        assert end.recv(1) == b""
    door.close()


def test_whoever_speaks_slowly_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_PROVED_S", 0.5)
    door, left = Door("127.0.0.1", new_token()), threading.Event()
    with socket.create_connection(("127.0.0.1", door.port), 5.0) as end:

        def drip() -> None:
            for _ in range(handshake._HELLO.size - 1):
                try:
                    end.sendall(b"b")
                except OSError:
                    return
                if left.wait(0.2):
                    return

        thread = threading.Thread(target=drip)
        thread.start()
        # All of it takes more than four seconds.
        assert door.accept(2.0) is None
        assert not door._arrivals
        left.set()
        thread.join()
    door.close()


def test_secrets_are_not_among_the_variables_that_ray_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = {"HF_TOKEN": "secret-1", "BEHELD_API_KEY": "secret-2", "BEHELD_ENCODER_TOKEN": "secret-3"}
    given = {**hidden, "AWS_KEY": "other", "HF_HOME": "/models", "BEHELD_FUSE": "0"}
    shown, secrets = environment(given, ["/here"]), Secrets.of(given)
    assert shown == {"HF_HOME": "/models", "BEHELD_FUSE": "0", "BEHELD_LOG_LEVEL": "WARNING", "PYTHONPATH": "/here"}
    assert secrets.values == hidden
    assert "secret-" not in repr(secrets)
    for name in hidden:
        monkeypatch.setenv(name, "before")
    secrets.set()
    assert {name: os.environ[name] for name in hidden} == hidden


def links() -> tuple[StreamLink, StreamLink]:
    ours, theirs = _connected()
    return StreamLink(ours, CODEC), StreamLink(theirs, CODEC)


def test_values_of_all_sizes_arrive_in_order() -> None:
    ours, theirs = links()
    large = np.arange(1 << 20, dtype=np.int32)
    thread = threading.Thread(target=lambda: [ours.send(each) for each in (Sync(1), (large, large), Sync(2))])
    thread.start()
    assert theirs.receive() == Sync(1)
    first, second = theirs.receive()
    assert (first == large).all()
    assert (second == large).all()
    assert theirs.receive(1.0) == Sync(2)
    thread.join()
    ours.close()
    with pytest.raises(EOFError):
        theirs.receive()
    theirs.close()


def test_silence_is_told_from_an_end() -> None:
    ours, theirs = links()
    with pytest.raises(TimeoutError):
        theirs.receive(0.01)
    ours.send(Sync(3))
    assert theirs.receive(1.0) == Sync(3)
    ours.close()
    theirs.close()


def test_a_frame_that_stops_in_the_middle_is_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that loses its power says nothing more; nobody may wait for it without end."""
    monkeypatch.setattr(stream_link, "_STALL_S", 0.05)
    ours, theirs = _connected()
    link = StreamLink(theirs, CODEC)
    ours.sendall(b"bhls\0\0")
    with pytest.raises(EOFError):
        link.receive()
    ours.close()
    link.close()


def test_a_reader_that_is_stuck_stops_the_sender() -> None:
    ours, theirs = links()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        ours.send(np.zeros(1 << 24, dtype=np.uint8), 0.1)
    assert time.monotonic() - began < 5.0
    # A part of the frame has left, so nothing may follow it.
    with pytest.raises(OSError):
        ours.send(Sync(1))
    ours.close()
    theirs.close()


def test_a_cut_wakes_who_waits() -> None:
    ours, theirs = links()
    threading.Timer(0.05, ours.cut).start()
    with pytest.raises(EOFError):
        ours.receive()
    ours.close()
    theirs.close()


def test_an_end_that_was_closed_here_is_an_end() -> None:
    """A front end closes the link of an engine while a thread reads it."""
    ours, theirs = links()
    ours.close()
    with pytest.raises(EOFError):
        ours.receive()
    theirs.close()


@pytest.mark.parametrize("head", [b"none", b"bhls" + b"\xff" * 12])
def test_what_is_no_frame_ends_the_connection(head: bytes) -> None:
    ours, theirs = _connected()
    link = StreamLink(theirs, CODEC)
    ours.sendall(head.ljust(16, b"\0"))
    with pytest.raises(EOFError):
        link.receive()
    ours.close()
    link.close()


def test_a_body_that_cannot_be_read_harms_no_other_frame() -> None:
    ours, theirs = _connected()
    link = StreamLink(theirs, CODEC)
    ours.sendall(stream_link._HEAD.pack(b"bhls", 2, 3) + b"ab" + b"???")
    with pytest.raises(FrameError) as caught:
        link.receive()
    assert caught.value.label == b"ab"
    assert link.num_unread == 1
    StreamLink(ours, CODEC).send(Sync(5))
    assert link.receive() == Sync(5)
    ours.close()
    link.close()


class BusyRay:
    """The calls of Ray that RemoteProcess makes, on hosts that take long to start processes."""

    def __init__(self) -> None:
        self.done = set[str]()

    def wait(self, asked: list[str], timeout: float) -> tuple[list[str], list[str]]:
        """Those of which something has come, and those of which nothing has."""
        done = [each for each in asked if each in self.done]
        return done, [each for each in asked if each not in self.done]

    def get(self, asked: str, timeout: float) -> None:
        """Say how it ended: well."""


def test_a_process_has_its_time_to_connect_once_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long Ray takes to start one on a busy host says nothing about the network."""
    monkeypatch.setattr(remote, "_CONNECT_S", 0.2)
    busy, door = BusyRay(), Door("127.0.0.1", token := new_token())
    accept = door.accept
    monkeypatch.setattr(door, "accept", lambda timeout_s: accept(0.01))
    process = remote.RemoteProcess(busy, "actor", "ready", "running", 1)

    def run() -> None:
        time.sleep(0.6)
        busy.done.add("ready")
        ends.append(connect("127.0.0.1", door.port, 1, token))

    ends = list[socket.socket]()
    thread = threading.Thread(target=run)
    thread.start()
    (ours,) = remote._connections(door, [process])
    thread.join()
    assert process.host == "127.0.0.1"
    for each in (ours, *ends):
        each.close()
    # It runs, but nothing of it arrives; or it never runs; or it has ended.
    with pytest.raises(EngineDeadError, match=r"Process 1 .* runs, but did not connect within 0\.2 s"):
        remote._connections(door, [process])
    busy.done.clear()
    monkeypatch.setattr(remote, "_START_S", 0.1)
    with pytest.raises(EngineDeadError, match=r"was not started within 0\.1 s"):
        remote._connections(door, [process])
    busy.done.add("running")
    with pytest.raises(EngineDeadError, match="Process 1 in the Ray cluster has ended"):
        remote._connections(door, [process])
    door.close()


def test_a_server_of_one_host_is_reached_with_the_token_alone() -> None:
    """As if it were at a port of each host; as many connections as are asked for."""
    token = new_token()
    with socket.create_server(("127.0.0.1", 0)) as server:
        entrance = TunnelDoor("127.0.0.1", token, server.getsockname()[1])
        way = TunnelEnd("127.0.0.1", entrance.port, token)
        lost = TunnelEnd("127.0.0.1", entrance.port, new_token())
        sent = os.urandom(3 << 20)
        for _ in range(3):
            client = socket.create_connection(("127.0.0.1", way.port))
            end, _ = server.accept()
            sending = threading.Thread(target=client.sendall, args=(sent,))
            sending.start()
            assert _whole(end, len(sent)) == sent
            sending.join()
            end.sendall(b"answer")
            assert _whole(client, 6) == b"answer"
            end.close()
            # The end of one side is the other's, too.
            assert client.recv(1) == b""
            client.close()
        server.settimeout(0.5)
        for port in (lost.port, entrance.port):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(b"x" * 200)
                stranger.settimeout(10.0)
                with pytest.raises(TimeoutError):
                    server.accept()
                with contextlib.suppress(ConnectionError):
                    assert stranger.recv(1) == b""
        for each in (way, lost, entrance):
            each.close()
        with pytest.raises(ConnectionError):
            socket.create_connection(("127.0.0.1", way.port))


def _whole(end: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        piece = end.recv(size)
        assert piece
        found += piece
    return found
