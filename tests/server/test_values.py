"""Values of requests in company: ids at the edge, large numbers of them, names of media."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.server.running import Running, data_url, received, request_bytes, talk
from tests.server.test_more_fields import chunks_of

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"


@pytest.fixture(autouse=True)
def _undisturbed(running: Running) -> Iterator[None]:
    """After every case the server is as before."""
    yield
    running.idle()


# ---------------------------------------------------------------------- ids


def beside(running: Running, disturb: Callable[[], None]) -> None:
    """Do something while a long greedy answer is streamed; the answer must be that of an undisturbed run."""
    body = {"messages": talk("Go on."), "max_tokens": 150, "ignore_eos": True, "temperature": 0}

    def whole() -> str:
        text: str = running.post(CHAT, body).json()["choices"][0]["message"]["content"]
        return text

    calm = whole()
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(whole()))
    thread.start()
    disturb()
    thread.join()
    assert found == [calm]


def test_35_ids_beyond_the_logits_are_refused_and_disturb_nobody(running: Running) -> None:
    width = running.llm.info.vocab_size
    length = len(running.llm.get_tokenizer())

    def disturb() -> None:
        for token in {width, width + 1, max(width, length) + 1, 2**31 - 1, 2**31, 2**63 - 1}:
            for fields in (
                {"stop_token_ids": [token]},
                {"allowed_token_ids": [token]},
                {"allowed_token_ids": [1, token]},
                {"logit_bias": {str(token): 1}},
                {"prompt": [1, token]},
            ):
                answer = running.post(COMPLETE, {"prompt": "x", "max_tokens": 2, **fields})
                assert answer.status_code == 400, (fields, answer.text)
            assert running.post("/detokenize", {"tokens": [token]}).status_code == 400
        for fields in ({"stop_token_ids": [width - 1]}, {"logit_bias": {str(width - 1): 5}}, {"prompt": [width - 1]}):
            assert running.post(COMPLETE, {"prompt": "x", "max_tokens": 2, **fields}).status_code == 200

    beside(running, disturb)


def test_a_token_is_biased_once(running: Running) -> None:
    answer = running.post(COMPLETE, {"prompt": "x", "logit_bias": {"5": 100, "05": -100}})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("logit_bias names the token 5 twice.")


# ---------------------------------------------------------------------- size


def test_43_large_requests_for_ids_and_log_probabilities(running: Running) -> None:
    begin = time.process_time()
    assert running.post("/detokenize", {"tokens": [1] * 1_000_000}).status_code == 400
    assert running.post("/detokenize", {"tokens": list(range(512))}).status_code == 200
    with running.connect() as link:
        with contextlib.suppress(ConnectionError):
            link.sendall(request_bytes("/detokenize", b'{"tokens":[' + b"1," * 9_999_999 + b"1]}"))
        assert received(link).startswith(b"HTTP/1.1 413")
    assert time.process_time() - begin < 5.0
    prompt = [7 + k % 200 for k in range(1900)]
    ask = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 20}
    first, second = (running.post(COMPLETE, ask).json() for _ in range(2))
    entries = [answer["choices"][0]["prompt_logprobs"] for answer in (first, second)]
    assert len(entries[0]) == len(prompt)
    assert entries[0][0] is None
    for one, other in zip(entries[0][1:], entries[1][1:], strict=True):
        assert one.keys() == other.keys()
    assert running.post(COMPLETE, ask | {"prompt_logprobs": 21}).status_code == 400
    many = {"prompt": ["x"] * 8, "n": 1, "max_tokens": 200, "logprobs": 20, "ignore_eos": True}
    choices = running.post(COMPLETE, many).json()["choices"]
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [200] * 8


# ---------------------------------------------------------------------- names of media


def test_58_a_name_given_by_a_client_is_a_name_and_no_key_to_a_cache(running: Running) -> None:
    """`uuid` stands in the receipt. A picture that is sent is known by its content, whatever had its name before; the
    name alone stands for the latest one."""

    def ask(url: str | None, name: str) -> httpx.Response:
        part: dict[str, Any] = {"type": "image_url", "uuid": name}
        part["image_url"] = None if url is None else {"url": url}
        messages = [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}]
        return running.post(CHAT, {"messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True})

    one, other = ask(data_url(seed=11), "mine").json(), ask(data_url(seed=12), "mine").json()
    again = ask(data_url(seed=12), "yours").json()
    assert one["media"][0]["given"]["uuid"] == "mine"
    assert one["media"][0]["digest"] != other["media"][0]["digest"] == again["media"][0]["digest"]
    assert other["choices"][0]["message"] == again["choices"][0]["message"]
    alone = ask(None, "mine").json()
    assert alone["media"][0]["digest"] == other["media"][0]["digest"]
    assert alone["choices"][0]["message"] == other["choices"][0]["message"]
    unknown = ask(None, "nobody's").json()["error"]
    assert unknown["param"] == "messages.0.content.0.image_url"
    assert "Cache miss for image at index 0 but data is not provided" in unknown["message"]
    assert ask(data_url(seed=11), "x" * (1 << 20)).status_code == 400


def test_an_answer_that_repeats_itself_ends(running: Running) -> None:
    ask = {"prompt": "x", "max_tokens": 20, "ignore_eos": True, "allowed_token_ids": [5]}
    rule = {"max_pattern_size": 2, "min_count": 4}
    (choice,) = running.post(COMPLETE, {**ask, "repetition_detection": rule}).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")
    told = "an answer was ended because its end repeats itself"
    del ask["prompt"]
    ask |= {"messages": talk("x", data_url()), "repetition_detection": rule}
    found = running.post(CHAT, ask).json()
    assert found["choices"][0]["finish_reason"] == "repetition"
    assert found["media"][0]["lost"][-1] == told
    healthy = running.post(CHAT, ask | {"max_tokens": 3}).json()
    assert told not in healthy["media"][0]["lost"]
    *_, last = [chunk for chunk in chunks_of(running, CHAT, ask) if chunk["choices"]]
    assert last["media"][0]["lost"][-1] == told
    ask = {"prompt": "x", "max_tokens": 20}
    answer = running.post(COMPLETE, {**ask, "repetition_detection": {**rule, "min_count": 1}})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "repetition_detection"
