"""/v1/systemone and /v1/decisions: the probabilities are those that a chat of one token tells of the labels."""

from __future__ import annotations

import asyncio
import base64
import math
import threading
import time
from collections.abc import AsyncGenerator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from beheld.server import decisions
from beheld.server.decisions_schema import DecisionsRequest, SystemOneRequest
from beheld.server.errors import HttpError
from beheld.server.options import ServerOptions
from beheld.server.read import checked
from tests.server.conftest import kept
from tests.server.running import ENGINE, Running, data_url

SYSTEM, DECISIONS = "/v1/systemone", "/v1/decisions"
COLOR = {"type": "choice", "instructions": "Which color?", "criteria": {"red": "as blood", "blue": None}}
WET = {"type": "noul", "instructions": "Is it wet?", "criteria": {"true": "it drips"}}
TONE = {"type": "score", "instructions": "How loud?", "criteria": ["low", "middle", "high"]}
IMAGE = data_url()
COLOR_TEXT = "Question: Which color?\nA: red - as blood\nB: blue\nAnswer with the letter of one option only."
WET_TEXT = "Question: Is it wet?\nyes: it drips\nno\nAnswer with yes or no only."
TONE_TEXT = "Question: How loud?\n0: low\n1: middle\n2: high\nAnswer with the number of one level only."


def ids_of(running: Running, labels: tuple[str, ...]) -> list[int]:
    tokens = [
        running.post("/tokenize", {"prompt": label, "add_special_tokens": False}).json()["tokens"] for label in labels
    ]
    # The tokenizer has no token of its own for "yes".
    return [one[0] for one in tokens]


def likely(running: Running, content: Any, labels: tuple[str, ...]) -> list[float]:
    """The probabilities of labels among all tokens, as a chat tells them."""
    ids = ids_of(running, labels)
    body = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 1,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": True,
        "logprob_token_ids": ids,
        "return_tokens_as_token_ids": True,
    }
    found = running.post("/v1/chat/completions", body).json()
    top = {one["token"]: one["logprob"] for one in found["choices"][0]["logprobs"]["content"][0]["top_logprobs"]}
    return [math.exp(top[f"token_id:{one}"]) for one in ids]


def test_each_answers_probability_is_its_labels(running: Running) -> None:
    questions = {"color": COLOR, "wet": WET, "tone": TONE}
    found = running.post(SYSTEM, {"state": {"ticket": "Ü"}, "questions": questions, "instructions": "Be strict."})
    assert found.status_code == 200, found.text
    body = found.json()
    assert (body["object"], body["id"][:9], body["model"]) == ("structured_decision", "decision-", "tiny")
    answers = body["answers"]
    assert list(answers) == list(body["diagnostics"]) == ["color", "wet", "tone"]
    for name, text, labels in (
        ("color", COLOR_TEXT, ("A", "B")),
        ("wet", WET_TEXT, ("yes", "no")),
        ("tone", TONE_TEXT, ("0", "1", "2")),
    ):
        expected = likely(running, f'Be strict.\n\n{{"ticket": "Ü"}}\n\n{text}', labels)
        told = list(answers[name]["probabilities"].values())
        assert told == pytest.approx([one / sum(expected) for one in expected], rel=1e-3)
        assert body["diagnostics"][name]["label_mass"] == pytest.approx(sum(expected), rel=1e-3)
        assert answers[name]["confidence"] == pytest.approx(max(expected), rel=1e-3)
    assert answers["color"]["choice"] == max(
        answers["color"]["probabilities"], key=answers["color"]["probabilities"].get
    )
    assert list(answers["color"]["probabilities"]) == ["red", "blue"]
    assert answers["wet"]["noul"] == answers["wet"]["probabilities"]["yes"]
    assert answers["tone"]["legend"] == {"0": "low", "1": "middle", "2": "high"}
    assert answers["tone"]["score"] == pytest.approx(
        sum(int(level) * one for level, one in answers["tone"]["probabilities"].items())
    )
    assert body["usage"]["output_tokens"] == 3


def test_questions_are_about_images_too(running: Running) -> None:
    found = running.post(SYSTEM, {"state": "", "images": [IMAGE], "questions": {"color": COLOR}})
    assert found.status_code == 200, found.text
    content = [{"type": "image_url", "image_url": {"url": IMAGE}}, {"type": "text", "text": f"\n\n{COLOR_TEXT}"}]
    expected = likely(running, content, ("A", "B"))
    told = list(found.json()["answers"]["color"]["probabilities"].values())
    assert told == pytest.approx([one / sum(expected) for one in expected], rel=1e-3)
    assert len(found.json()["media"]) == 1


def test_the_form_of_openais_decisions(running: Running) -> None:
    questions = [
        {"type": "predicate", "instructions": "Is it wet?", "name": "wet"},
        {"type": "choice", "instructions": "Which color?", "choices": [{"value": "red"}, {"value": True}]},
        {
            "type": "score",
            "instructions": "How loud?",
            "levels": [{"label": "low", "description": "a whisper"}, {"label": "high"}],
        },
    ]
    text = [{"type": "input_text", "text": "It rains."}]
    found = running.post(DECISIONS, {"model": "tiny", "input": "It rains.", "questions": questions})
    assert found.status_code == 200, found.text
    body = found.json()
    parts = running.post(DECISIONS, {"input": [{"role": "user", "content": text}], "questions": questions}).json()
    # The second request finds the first one in the prefix cache, and adds up in another order.
    for one, other in zip(parts["answers"], body["answers"], strict=True):
        assert other.get("probability", 0.0) == pytest.approx(one.get("probability", 0.0), abs=1e-4)
        assert other.get("choice") == one.get("choice")
    wet, color, tone = body["answers"]
    lines = "A: false\nB: true\nAnswer with the letter of one option only."
    no, yes = likely(running, f"It rains.\n\nQuestion: Is it wet?\n{lines}", ("A", "B"))
    assert wet == {"type": "predicate", "name": "wet", "probability": pytest.approx(yes / (yes + no), rel=1e-3)}
    assert [one["value"] for one in color["probabilities"]] == ["red", True]
    assert color["choice"] in ("red", True)
    assert [one["label"] for one in tone["probabilities"]] == ["low", "high"]
    assert tone["score"] == pytest.approx(tone["probabilities"][1]["probability"])
    usage = body["usage"]
    assert usage["output_tokens"] == 3
    assert usage["total_tokens"] == usage["input_tokens"] + 3


def test_what_the_questions_share_is_cached(running: Running) -> None:
    text = "The stone lies by the river. " * 30
    questions = [{"type": "predicate", "instructions": f"Is it {word}?"} for word in ("wet", "old", "red")]
    body = running.post(DECISIONS, {"input": text, "questions": questions, "cache_salt": "once"}).json()
    usage = body["usage"]
    # Two of three questions find the text.
    assert usage["input_tokens_details"]["cached_tokens"] > 0.5 * usage["input_tokens"]


def test_chats_share_the_parts_and_texts_in_a_row_are_one() -> None:
    letters = [{"type": "text", "text": "x"}] * 4090
    image = {"type": "image_url", "image_url": {"url": IMAGE}}
    questions = [{"type": "predicate", "instructions": f"Is it {n}?"} for n in range(64)]
    given = {"input": [{"role": "user", "content": [*letters, image]}], "questions": questions}
    ask = decisions.asked_decisions(checked(given, DecisionsRequest), ServerOptions())
    assert [part.type for part in ask.parts] == ["text", "image_url"]
    assert ask.names.placed("messages.0.content.1") == "input.0.content.4090"
    shared, labels = decisions.shared_chat(ask, None), {"A": 1, "B": 2}
    for question in ask.questions:
        content = decisions.chat_of(ask, shared, question, labels).messages[0].content
        assert isinstance(content, list)
        assert content[0] is ask.parts[0]
        assert content[1] is ask.parts[1]
        assert content[2].text == f"\n\n{question.text}"


def test_chats_are_made_one_by_one_and_in_a_thread(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    unspied = decisions.chat_of

    def spied(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return unspied(*arguments)

    monkeypatch.setattr(decisions, "chat_of", spied)
    questions = [{"type": "predicate", "instructions": f"Is it {n}?"} for n in range(8)]
    for text, made in (("word " * 10_000, 1), ("It rains.", 8)):
        # So many objects are checked in a thread.
        parts = [{"type": "text", "text": text}, *[{"type": "text", "text": "x"}] * 300]
        answer = running.post(DECISIONS, {"input": [{"role": "user", "content": parts}], "questions": questions})
        assert answer.status_code == (400 if made == 1 else 200), answer.text
        assert len(threads) == made
        assert all(name.startswith("beheld-read") for name in threads)
        threads.clear()


def test_one_question_at_a_time_fetches(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEHELD_ALLOW_PRIVATE_FETCH", "1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    data = base64.b64decode(IMAGE.partition(",")[2])
    at_once: list[int] = []
    open_now: list[None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            open_now.append(None)
            at_once.append(len(open_now))
            time.sleep(0.05)
            open_now.pop()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/x.png"
        questions = {f"q{number}": COLOR for number in range(6)}
        answer = running.post(SYSTEM, {"state": "", "images": [url], "questions": questions})
        assert answer.status_code == 200, answer.text
        assert at_once == [1] * 6
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_only_small_texts_are_prepared_at_once() -> None:
    def at_once(given: Any) -> int:
        questions = [{"type": "predicate", "instructions": f"Is it {n}?"} for n in range(8)]
        asked = {"input": given, "questions": questions}
        return decisions.asked_decisions(checked(asked, DecisionsRequest), ServerOptions()).num_at_once

    image = {"type": "image_url", "image_url": {"url": IMAGE}}
    assert (at_once("x"), at_once("x" * 40_000), at_once([{"role": "user", "content": [image]}])) == (8, 1, 1)


def wide(count: int) -> dict[str, None]:
    return {f"option {number}": None for number in range(count)}


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"questions": {}}, "questions", "at least one"),
        ({"questions": {f"q{n}": COLOR for n in range(9)}}, "questions", "at most 8"),
        ({"questions": {"": COLOR}}, "questions", "empty name"),
        ({"questions": {"q": COLOR | {"depends_on": ["x"]}}}, "questions.q.depends_on", "unknown field(s)"),
        ({"questions": {"q": COLOR | {"criteria": wide(27)}}}, "questions.q", "at most 26 options"),
        ({"questions": {"q": COLOR | {"criteria": []}}}, "questions.q", "must be an object"),
        ({"questions": {"q": WET | {"criteria": ["yes", "no"]}}}, "questions.q", "must be an object"),
        ({"questions": {"q": TONE | {"criteria": ["calm"]}}}, "questions.q", "ordered list of levels"),
        ({"questions": {"q": TONE | {"criteria": [*map(str, range(11))]}}}, "questions.q", "at most 10"),
        ({"questions": {"q": TONE | {"criteria": ["a", "a"]}}}, "questions.q", "twice"),
        ({"questions": {"q": TONE | {"criteria": [{}, []]}}}, "questions.q", "texts"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking", "must be off"),
        ({"joint": True}, "joint", "by itself"),
        ({"images": ["data:image/png;base64,AAAA"]}, "images.0", "image"),
        ({"state": "word " * 5000}, "state", "maximum context length"),
        ({"model": "other"}, "model", "no model"),
    ],
)
def test_refusals_name_the_field(running: Running, more: dict[str, Any], param: str, words: str) -> None:
    answer = running.post(SYSTEM, {"state": "x", "questions": {"q": COLOR}} | more)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) in ((400, "BadRequestError"), (404, "NotFoundError"))
    assert error["param"] == param
    assert words in error["message"]


def test_the_operators_variables_hold_below_the_requests() -> None:
    def made(usual: dict[str, Any], given: dict[str, Any]) -> Any:
        asked = {"state": "x", "questions": {"q": COLOR}, "chat_template_kwargs": given}
        ask = decisions.asked_systemone(checked(asked, SystemOneRequest), ServerOptions())
        return decisions.variables_of(ask, "{{ enable_thinking }}", usual)

    usual = {"mood": "calm", "enable_thinking": True}
    assert made(usual, {}) == {"mood": "calm", "enable_thinking": False}
    assert made(usual, {"mood": "wild"}) == {"mood": "wild", "enable_thinking": False}


def test_the_operators_variables_reach_the_prompt() -> None:
    template = "{{ mood }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    engine = ENGINE | {"chat_template": template}
    asked = {"input": "x", "questions": [{"type": "predicate", "instructions": "y"}]}
    with kept(Running("llama", engine, template_variables={"mood": "calm " * 20})) as own:
        found = own.post(DECISIONS, asked).json()["usage"]["input_tokens"]
        content = "x\n\nQuestion: y\nA: false\nB: true\nAnswer with the letter of one option only."
        chat = own.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], "max_tokens": 1})
        assert found == chat.json()["usage"]["prompt_tokens"]


def test_an_aborted_question_is_to_be_sent_again() -> None:
    questions = [decisions.LabelQuestion("q", "x", ("A", "B"), lambda read: {})]

    async def start(number: int) -> AsyncGenerator[dict[str, Any], None]:
        yield {"choices": [{"logprobs": None, "finish_reason": "abort"}]}
        yield {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 0}}

    async def read() -> None:
        async for _ in decisions.reads(start, questions, {"A": 1, "B": 2}):
            pass

    with pytest.raises(HttpError, match="aborted") as error:
        asyncio.run(read())
    assert (error.value.status, error.value.remedy) == (503, "Send it again.")


IMAGE_PART = {"type": "image_url", "image_url": {"url": "http://localhost/x.png"}}


@pytest.mark.parametrize(
    ("route", "given", "param"),
    [
        (SYSTEM, {"state": "x", "images": ["http://localhost/x.png"] * 4096, "questions": {"q": COLOR}}, "images.4095"),
        (SYSTEM, {"state": [0] * (1 << 15), "questions": {"q": COLOR}}, "state"),
        (SYSTEM, {"state": {"a": "x" * (1 << 20)}, "questions": {"q": COLOR}}, "state"),
        (
            DECISIONS,
            {
                "input": [{"role": "user", "content": [IMAGE_PART] * 4096}],
                "questions": [{"type": "predicate", "instructions": "x"}],
            },
            "input.0.content.4095",
        ),
    ],
)
def test_what_is_too_large_is_refused_by_its_name(
    running: Running, route: str, given: dict[str, Any], param: str
) -> None:
    answer = running.post(route, given)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text[:300]


def test_the_servers_own_variable_needs_no_place(running: Running) -> None:
    given = {f"v{number}": 0 for number in range(128)}
    asked = {"state": "x", "questions": {"q": COLOR}, "chat_template_kwargs": given}
    ask = decisions.asked_systemone(checked(asked, SystemOneRequest), ServerOptions())
    variables = decisions.variables_of(ask, "{{ enable_thinking }}", {})
    assert decisions.shared_chat(ask, variables).chat_template_kwargs == {"enable_thinking": False, **given}


@pytest.mark.parametrize(
    ("question", "param"),
    [
        ({"type": "choice", "instructions": "x", "choices": [{"value": "a"}]}, "questions.0.choices"),
        ({"type": "choice", "instructions": "x", "choices": [{"value": "a"}] * 2}, "questions.0.choices"),
        ({"type": "score", "instructions": "x", "levels": []}, "questions.0.levels"),
        ({"type": "predicate"}, "questions.0.instructions"),
    ],
)
def test_refusals_of_decisions_are_openais(running: Running, question: dict[str, Any], param: str) -> None:
    answer = running.post(DECISIONS, {"input": "x", "questions": [question]})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == param
