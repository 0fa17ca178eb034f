"""A server with three processes that speak HTTP: one of them hangs, limits are for all, and so is what routes keep."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lora import adapters
from tests.lora.adapters import Adapter
from tests.server.hostile_clients import ATTACKS
from tests.server.slowness import best, slowness
from tests.server.test_fronts import Fronted, asked, events, streamed

# The silence after which a front is ended, and a little more for a busy machine.
HANGS_S = 8.0


class ThreeFronts(Fronted):
    """Three fronts before one engine, with an adapter and a folder for profiles."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.profiles = folder / "profiles"
        adapter = adapters.write(Adapter("qwen2_vl", 0, 2, "q_proj|v_proj"), folder / "adapter")
        lora = ("--enable-lora", "--max-lora-rank", "4", "--lora-modules", f"blue={adapter}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("BEHELD_PROFILES", str(self.profiles))
            super().__init__(folder / "log", "--port", "0", "--api-server-count", "3", *lora, *flags)

    @property
    def fronts(self) -> list[int]:
        """The process ids of the fronts by their numbers: each listens at a socket of its number."""
        listening = re.findall(r"(\d+) \S*/beheld-fronts-[^/\s]+/(\d+)$", Path("/proc/net/unix").read_text(), re.M)
        number_by_inode = {f"socket:[{inode}]": int(number) for inode, number in listening}
        found: dict[int, int] = {}
        for pid in (self.process.pid, *self.processes("beheld.cli.front")):
            for name in os.listdir(f"/proc/{pid}/fd"):
                try:
                    number = number_by_inode.get(os.readlink(f"/proc/{pid}/fd/{name}"))
                except OSError:
                    continue
                if number is not None:
                    found.setdefault(number, pid)
        return [found.get(number, 0) for number in range(3)]

    def states(self, front: int | None = None) -> list[str]:
        """What /health says of the fronts, which one of them is asked."""
        status, found = self.ask("GET", "/health", front=front)
        assert status == 200, found
        return [each["state"] for each in found["fronts"]]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreeFronts]:
    made = ThreeFronts(tmp_path_factory.mktemp("server"), "--operator-routes", "--max-concurrent-requests", "7")
    yield made
    if made.process.poll() is None:
        made.process.kill()
    made.process.wait()


@pytest.mark.case(133)
def test_a_front_that_stands_still_for_a_moment_goes_on(three: ThreeFronts) -> None:
    three.until(lambda: three.states() == ["serving"] * 3, 10)
    victim = three.fronts[2]
    answer = three.begin("POST", "/v1/chat/completions", asked(1, 300, stream=True), 2)
    answer.readline()
    os.kill(victim, signal.SIGSTOP)
    try:
        three.until(lambda: three.states(0) == three.states(1) == ["serving", "serving", "silent"], 6)
    finally:
        os.kill(victim, signal.SIGCONT)
    assert not streamed(answer).endswith("error")
    three.until(lambda: three.states(2) == ["serving"] * 3, 6)
    assert three.fronts[2] == victim


@pytest.mark.case(133)
def test_a_front_that_hangs_is_ended_and_started_anew_while_the_others_serve(three: ThreeFronts) -> None:
    path, chat = "/v1/chat/completions", asked(0, 200, stream=True)
    expected = streamed(three.begin("POST", path, chat, 0))
    completions = 'beheld_requests_total{route="chat",status="200"}'
    # Each has some, so that a sum without one of them is smaller.
    for front in range(3):
        streamed(three.begin("POST", path, asked(front, 2, stream=True), front))
    victim = three.fronts[1]
    idle = three.connect(1)
    lost = three.begin("POST", path, asked(2, 1500, stream=True), 1)
    lost.readline()
    three.until(lambda: three.metric('beheld_fronts{state="answered"}') == 3, 10)
    before = three.metric(completions)
    os.kill(victim, signal.SIGSTOP)
    stopped = time.monotonic()
    three.until(lambda: three.states() == ["serving", "silent", "serving"], 6)
    # The sums have what it said last, and say that it is not new.
    assert three.metric('beheld_fronts{state="all"}') == 3
    assert three.metric('beheld_fronts{state="answered"}') == 2
    assert three.metric(completions) >= before
    waits = []
    while three.fronts[1] == victim:
        assert time.monotonic() < stopped + HANGS_S + 10, three.log.read_text()
        begun = time.monotonic()
        assert three.ask("GET", "/version")[0] == 200
        waits.append(time.monotonic() - begun)
        time.sleep(0.02)
    ended = time.monotonic() - stopped
    assert ended >= HANGS_S - 1
    assert sorted(waits)[len(waits) // 2] < 0.2 * slowness()
    assert max(waits) < 2, waits
    assert streamed(lost).endswith("error")
    assert streamed(three.begin("POST", path, chat, 0)) == expected
    assert idle.sock is not None
    idle.sock.settimeout(5)
    assert idle.sock.recv(1) == b""
    three.until(lambda: "Front 1 serves again" in three.log.read_text())
    three.until(lambda: three.states() == ["serving"] * 3, 6)
    status, found = three.ask("GET", "/health", front=1)
    assert (status, [each["restarts"] for each in found["fronts"]]) == (200, [0, 1, 0])
    assert streamed(three.begin("POST", path, chat, 1)) == expected
    three.until(lambda: three.metric('beheld_fronts{state="answered"}') == 3, 10)
    three.until(lambda: three.ask("GET", "/load")[1] == {"server_load": 0}, 10)


@pytest.mark.case(133)
def test_the_first_front_cannot_be_replaced_so_health_says_that_it_hangs(three: ThreeFronts) -> None:
    victim = three.fronts[0]
    links = {front: three.connect(front) for front in (1, 2)}
    early = three.connect(1)

    def health(front: int, path: str = "/health") -> tuple[int, str]:
        links[front].request("GET", path)
        with links[front].getresponse() as answer:
            return answer.status, answer.read().decode()

    os.kill(victim, signal.SIGSTOP)
    try:
        # Nobody knows yet that it hangs.
        early.request("GET", "/v1/responses/x")
        three.until(lambda: '"front":0,"state":"silent"' in health(1)[1], 6)
        # Its pings of the engine are lost, too, which may be noticed first.
        three.until(lambda: (health(1)[1] + health(2)[1]).count("front_hangs") == 2, HANGS_S + 8)
        early.sock.settimeout(5)
        with early.getresponse() as answer:
            assert (answer.status, b"does not answer" in answer.read()) == (503, True)
        # What it has to answer does not wait for it.
        status, found = health(1, "/v1/responses/x")
        assert (status, "does not answer" in found) == (503, True)
    finally:
        os.kill(victim, signal.SIGCONT)
    # Each of these two notices it with its own look.
    three.until(lambda: all(health(front)[1].count('"state":"serving"') == 3 for front in (1, 2)), 16)
    assert health(1)[0] == health(2)[0] == 200


def test_limits_are_for_all_fronts_together(three: ThreeFronts) -> None:
    """7 answers: shares of 3 fronts that are rounded up admit 9, and one front's share is 3."""

    def statuses(*asked_for: tuple[int, int]) -> list[int]:
        """What requests get of which each is (front, answers)."""
        # Connected before, as the first answer may end while many connections meet other fronts.
        links, found = [three.connect(front) for front, _ in asked_for], []
        for link, (_, n) in zip(links, asked_for, strict=True):
            body = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True, "n": n}
            link.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            found.append(link.getresponse().status)
        for link in links:
            link.close()
        three.until(lambda: three.ask("GET", "/load")[1] == {"server_load": 0}, 20)
        return found

    assert statuses(*((number % 3, 1) for number in range(9))) == [200] * 7 + [503] * 2
    assert statuses((1, 1), (1, 5), (2, 2), (2, 1)) == [200, 200, 503, 200]


# ---- routes that keep state -----------------------------------------------------------------------------------------

# Each is asked over more connections than there are fronts, in an order in which no two that follow meet the same.
ORDER = [0, 1, 2, 0, 2, 1, 2, 0, 1]


def test_responses_are_kept_for_all(three: ThreeFronts) -> None:
    names, last = [], None
    for front in ORDER:
        body = {"input": "go on", "max_output_tokens": 2, "temperature": 0, "previous_response_id": last}
        status, found = three.ask("POST", "/v1/responses", body, front)
        assert status == 200, found
        names.append(last := found["id"])
    for front in range(3):
        for name in names:
            assert three.ask("GET", f"/v1/responses/{name}", front=front)[0] == 200
    for front, name in zip(ORDER, names, strict=True):
        assert three.ask("DELETE", f"/v1/responses/{name}", front=front)[0] == 200
        assert three.ask("GET", f"/v1/responses/{name}", front=(front + 1) % 3)[0] == 404


def test_responses_are_cancelled_by_their_ids(three: ThreeFronts) -> None:
    body = {"input": "x", "max_output_tokens": 1900, "temperature": 0, "background": True}
    for front in ORDER:
        name = three.ask("POST", "/v1/responses", body, front)[1]["id"]
        status, found = three.ask("POST", f"/v1/responses/{name}/cancel", front=(front + 1) % 3)
        assert (status, found["status"]) == (200, "cancelled")
    three.until(lambda: three.ask("GET", "/load")[1] == {"server_load": 0}, 20)


def test_streams_are_taken_up_again(three: ThreeFronts) -> None:
    """A stream over one front, cut, and taken up over each of the others in turn."""
    chat = asked(3, 60, stream=True)
    whole = streamed(three.begin("POST", "/v1/chat/completions", chat, 0))
    for front in range(3):
        text, last, answer = "", "", three.begin("POST", "/v1/chat/completions", chat, front, x_resumable="true")
        for turn in range(4):
            for name, event in events(answer):
                last = name
                text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
                if len(text) > 4 * (turn + 1):
                    break
            answer.close()
            stream = last.split(":")[0]
            answer = three.begin("GET", f"/v1/streams/{stream}", front=(front + turn) % 3, last_event_id=last)
        assert text + streamed(answer) == whole


def test_adapters_are_models_everywhere_and_come_and_go_nowhere(three: ThreeFronts) -> None:
    texts = {}
    own = three.ask("GET", "/v1/models")[1]["data"][0]["id"]
    for name in (own, "blue"):
        body = {"model": name, "prompt": "Hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        found = [three.ask("POST", "/v1/completions", body, front) for front in ORDER]
        assert {status for status, _ in found} == {200}, found
        (texts[name],) = {answer["choices"][0]["text"] for _, answer in found}
    assert texts[own] != texts["blue"]
    for front in range(3):
        models = three.ask("GET", "/v1/models", front=front)[1]["data"]
        assert [card["id"] for card in models] == [own, "blue"]
        # Such a server is refused at its start with --allow-runtime-lora-updating.
        assert three.ask("POST", "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/x"}, front)[0] == 404


def test_sleep_and_pause_are_those_of_all(three: ThreeFronts) -> None:
    pairs = (("/sleep?level=1", "/wake_up", "is_sleeping"), ("/pause", "/resume", "is_paused"))
    for number, front in enumerate(ORDER):
        stop, go, asked_for = pairs[number % 2]
        assert three.ask("POST", stop, front=front)[0] == 200
        assert [three.ask("GET", f"/{asked_for}", front=each)[1] for each in range(3)] == [{asked_for: True}] * 3
        assert three.ask("POST", go, front=(front + 1) % 3)[0] == 200
        assert [three.ask("GET", f"/{asked_for}", front=each)[1] for each in range(3)] == [{asked_for: False}] * 3
        assert three.ask("POST", "/v1/completions", {"prompt": "x", "max_tokens": 2}, (front + 2) % 3)[0] == 200


def test_an_answer_is_ended_by_its_id_over_any_front(three: ThreeFronts) -> None:
    body = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    for front in range(3):
        answer = three.begin("POST", "/v1/completions", body, front)
        name = json.loads(answer.readline().removeprefix(b"data: "))["id"]
        path = "/inference/v1/abort_requests"
        assert three.ask("POST", path, {"request_ids": [name]}, (front + 1) % 3) == (200, "")
        reasons = [choice["finish_reason"] for _, event in events(answer) for choice in event["choices"]]
        assert reasons[-1] == "abort"


def test_a_profile_begins_and_ends_over_any_front(three: ThreeFronts) -> None:
    for number, (begin, end) in enumerate(((0, 1), (1, 2), (2, 0)), 1):
        assert three.ask("POST", "/stop_profile", front=begin)[0] == 400
        assert three.ask("POST", "/start_profile", front=begin)[0] == 200
        assert three.ask("POST", "/start_profile", front=end)[0] == 400
        assert three.ask("POST", "/v1/completions", {"prompt": "x", "max_tokens": 2}, end)[0] == 200
        assert three.ask("POST", "/stop_profile", front=end)[0] == 200
        assert len(list(three.profiles.iterdir())) == number


# ---- hostile clients ------------------------------------------------------------------------------------------------


@pytest.mark.case(135)
@pytest.mark.parametrize("attack", sorted(ATTACKS))
def test_hostile_clients_of_what_is_passed_on_keep_nobody_waiting(three: ThreeFronts, attack: str) -> None:
    links = [three.connect(front) for front in range(3)]
    pids = three.fronts
    three.until(lambda: three.ask("GET", "/load")[1] == {"server_load": 0}, 20)

    def descriptors() -> list[int]:
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]

    before = descriptors()

    def longest() -> float:
        """The longest wait for /health of any front during a second of it."""
        command = [sys.executable, "-m", "tests.server.hostile_clients", str(three.port), attack]
        waits = []
        # Lower in precedence: its own work is no one's attack.
        with subprocess.Popen(["nice", *command], stdout=subprocess.PIPE) as attacking:
            assert attacking.stdout is not None
            assert attacking.stdout.readline() == b"begin\n"
            while attacking.poll() is None:
                for link in links:
                    begun = time.monotonic()
                    link.request("GET", "/health")
                    with link.getresponse() as answer:
                        assert answer.status == 200
                        answer.read()
                    waits.append(time.monotonic() - begun)
                time.sleep(0.01)
        assert attacking.returncode == 0
        return max(waits)

    bound = 0.1 * slowness()
    assert best(longest, bound, 5) < bound
    three.until(lambda: three.ask("GET", "/load")[1] == {"server_load": 0}, 20)
    three.until(lambda: all(now <= then + 2 for now, then in zip(descriptors(), before, strict=True)), 20)
    assert three.states() == ["serving"] * 3
    for link in links:
        link.close()
