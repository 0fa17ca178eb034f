"""Clients beside each other: long prompts of one, a short one of another (cases 96, 97)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest
from starlette.types import Scope

from beheld.core.errors import ConfigError
from beheld.engine.core import EngineCore
from beheld.server.clients import MAX_CULPRITS, WINDOW_S, Clients
from beheld.server.errors import HttpError
from beheld.server.options import ServerOptions
from beheld.utils import log
from tests.server.conftest import kept
from tests.server.running import ENGINE, Running, talk

STEP_TOKENS, LONG, MANY = 128, 1500, 8


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    """A server with two keys, whose steps are small."""
    engine = ENGINE | {"max_num_batched_tokens": STEP_TOKENS, "max_num_seqs": 16, "num_gpu_blocks_override": 2000}
    found = Running("llama", engine, api_keys=("key-one", "key-two"))
    yield found
    found.close()


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


def steps(running: Running) -> int:
    loop = running.server._loop
    assert loop is not None
    return asyncio.run_coroutine_threadsafe(running.llm.ping(), loop).result(20).steps


@pytest.mark.case(96)
def test_96_a_short_chat_beside_eight_long_prompts(shared: Running) -> None:
    """The long prompts take some hundred steps; the other client's first token takes a few of them."""
    done: list[int] = []

    def ask(number: int) -> None:
        prompt = [3 + (number * 7 + place) % 50 for place in range(LONG)]
        answer = shared.post("/v1/completions", {"prompt": prompt, "max_tokens": 1}, headers=key("key-one"))
        done.append(answer.status_code)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(MANY)]
    begin = steps(shared)
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 20
    while steps(shared) < begin + 5:
        assert time.monotonic() < deadline, done
        time.sleep(0.005)
    before, clock = steps(shared), time.monotonic()
    answer = shared.post("/v1/chat/completions", {"messages": talk("Hi"), "max_tokens": 1}, headers=key("key-two"))
    waited_s, after, ended = time.monotonic() - clock, steps(shared), list(done)
    for thread in threads:
        thread.join(60)
    assert answer.status_code == 200, answer.text
    assert done == [200] * MANY
    whole = steps(shared) - begin
    assert whole > MANY * LONG // STEP_TOKENS // 2
    # Steps go on while the request is read and the answer is written.
    assert len(ended) < MANY // 2, f"{len(ended)} long prompts were done first, in {after - before} of {whole} steps"
    assert waited_s < 2.0


def scope(address: str, client: str | None = None) -> Scope:
    return {"type": "http", "client": (address, 5000), "state": {} if client is None else {"client": client}}


@pytest.mark.case(96)
def test_who_is_a_client() -> None:
    clients = Clients(ServerOptions())
    assert clients.of(scope("10.0.0.1")) == clients.of(scope("10.0.0.1")) != clients.of(scope("10.0.0.2"))
    assert clients.of(scope("2001:db8::1")) == clients.of(scope("2001:db8::2")) != clients.of(scope("2001:db8:1::1"))
    assert clients.of(scope("::ffff:10.0.0.1")) == clients.of(scope("10.0.0.1"))
    assert "10.0" not in clients.of(scope("10.0.0.1"))
    assert Clients(ServerOptions()).of(scope("10.0.0.1")) != clients.of(scope("10.0.0.1"))
    one = Clients(ServerOptions(api_keys=("a",)))
    assert one.of(scope("10.0.0.1", "a")) != one.of(scope("10.0.0.2", "a"))
    two = Clients(ServerOptions(api_keys=("a", "b")))
    assert two.of(scope("10.0.0.1", "a")) == two.of(scope("10.0.0.2", "a")) != two.of(scope("10.0.0.1", "b"))
    assert Clients(ServerOptions(fair_shares=False)).of(scope("10.0.0.1")) == ""


@pytest.mark.case(96)
def test_96_clients_behind_a_proxy_are_told_apart(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only if the proxy is one that the operator names: else anybody could claim to be others."""
    # What was said once in this process.
    monkeypatch.setattr(log, "_said", set())

    def names(trusted: tuple[str, ...], *claims: str) -> list[str]:
        with kept(Running("llama", ENGINE, forwarded_allow_ips=trusted)) as running:
            found: list[str] = []
            hold = running.admission.hold
            running.admission.hold = lambda client: (found.append(client), hold(client))[1]  # type: ignore[method-assign]
            for claim in claims:
                headers = {"X-Forwarded-For": claim} if claim else {}
                assert running.get("/v1/models", headers=headers).status_code == 200
        return found

    one, other, same, own = names(("127.0.0.0/8",), "10.0.0.1", "10.0.0.2", "10.0.0.7, 10.0.0.1, 127.0.0.1", "")
    assert len({one, other, own}) == 3
    assert same == one
    assert "came through a proxy" not in caplog.text
    one, other, own = names(("10.0.0.0/8",), "10.0.0.1", "10.0.0.2", "")
    assert one == other == own
    assert len(set(names((), "10.0.0.1", "10.0.0.2", ""))) == 1
    assert caplog.text.count("came through a proxy") == 1


def test_proxies_are_addresses() -> None:
    for address in ("example.org", "", "10.0.0.1/33"):
        with pytest.raises(ConfigError, match="forwarded-allow-ips"):
            ServerOptions(forwarded_allow_ips=(address,))
    ServerOptions(forwarded_allow_ips=("10.0.0.1", "10.0.0.0/8", "::1", "*"))


@pytest.mark.case(97)
def test_97_failures_count_for_a_while_and_for_one_client() -> None:
    now = [100.0]
    clients = Clients(ServerOptions(), lambda: now[0])
    for _ in range(MAX_CULPRITS):
        clients.check("a")
        clients.blame("a")
    with pytest.raises(HttpError) as refused:
        clients.check("a")
    assert refused.value.status == 429
    assert 0 < int(refused.value.headers["Retry-After"]) <= WINDOW_S + 1
    clients.check("b")
    now[0] += WINDOW_S + 0.1
    clients.check("a")


@pytest.mark.case(97)
def test_97_repeated_culprits_cost_their_own_client(shared: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests whose step fails are told so, then refused; another key is served throughout."""
    core: EngineCore = shared.llm._engine._core  # type: ignore[attr-defined]
    launch = core.executor.launch
    bad = 7

    def failing(plan):  # type: ignore[no-untyped-def]
        if any(admission.token_ids[:4] == (bad,) * 4 for admission in plan.admitted):
            raise RuntimeError("no")
        return launch(plan)

    monkeypatch.setattr(core.executor, "launch", failing)
    body = {"prompt": [bad] * 6, "max_tokens": 1}
    found = [shared.post("/v1/completions", body, headers=key("key-one")) for _ in range(MAX_CULPRITS + 2)]
    assert [answer.status_code for answer in found] == [500] * MAX_CULPRITS + [429] * 2
    assert found[-1].json()["error"]["code"] == "too_many_failures"
    good = shared.post("/v1/completions", {"prompt": [9] * 6, "max_tokens": 1}, headers=key("key-two"))
    assert good.status_code == 200
