"""Case 34: every two values of two options work together, or one of them is refused by its name."""

from __future__ import annotations

import base64
import io
import itertools
import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import torch

from beheld import LoRARequest
from beheld.server.schema import ChatRequest, CompletionRequest
from tests.lora import adapters
from tests.lora.adapters import Adapter
from tests.server.running import ENGINE, Running, data_url, talk

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
FAMILY = "qwen2_vl"
OPTIONS: dict[str, Any] = {
    "enable_lora": True,
    "max_loras": 1,
    "max_lora_rank": 4,
    "scheduling_policy": "priority",
}
YES_NO = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "look", "parameters": YES_NO}}

# Option -> its values; the first of each leaves it out, or is what most requests have.
FACTORS: dict[str, list[Any]] = {
    "temperature": [None, 0, 0.7, 100],
    "top_p": [None, 1e-9, 0.5, 1],
    "top_k": [None, -1, 1, 10**6],
    "min_p": [None, 0, 1],
    "seed": [None, 0, 2**63],
    "n": [None, 1, 3],
    "max_tokens": [4, 1],
    "min_tokens": [None, 1],
    "stop": [None, "a", ["b", "\u00e9\u00e9"]],
    "stop_token_ids": [None, [], [1, 2]],
    "include_stop_str_in_output": [None, True],
    "ignore_eos": [None, True],
    "presence_penalty": [None, -2, 2],
    "frequency_penalty": [None, 2],
    "repetition_penalty": [None, 0.5, 100],
    "repetition_detection": [None, {"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 50}],
    "logit_bias": [None, {"5": -100}, {"5": 100, "6": 1}],
    "allowed_token_ids": [None, [3, 4, 5]],
    "bad_words": [None, ["a", "bc"]],
    "skip_special_tokens": [None, False],
    "structured_outputs": [None, {"regex": "[ab]{2,3}"}, {"choice": ["a", "bb"]}],
    "response_format": [
        None,
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": YES_NO}},
    ],
    "tools": [None, "auto", "none", "required", {"type": "function", "function": {"name": "look"}}],
    "parallel_tool_calls": [None, False],
    "reasoning_effort": [None, "low"],
    "stream": [None, True],
    "logprobs": [None, 0, 20],
    "prompt_logprobs": [None, 0, 5],
    "echo": [None, True],
    "truncate_prompt_tokens": [None, 1, 3],
    "truncation_side": [None, "left", "right"],
    "priority": [None, -(2**31), 5],
    "cache_salt": [None, "s"],
    "model": [None, "tiny", "blue"],
    "user": [None, "u"],
    "stream_options": [None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}],
    "return_token_ids": [None, True],
    "return_tokens_as_token_ids": [None, True],
    "include_reasoning": [None, False],
    "add_special_tokens": [None, False, True],
    "chat_template_kwargs": [None, {"style": "short"}],
    "add_generation_prompt": [None, False],
    "enable_thinking": [None, False],
    "prompt": ["x", ["y", "z z"], [7, 8, 9], "talk", "picture", "embeds"],
}
TALKS = ("talk", "picture", "embeds")
Value = tuple[str, int]
Row = dict[str, int]


def values(name: str, first: int = 1) -> list[Value]:
    """An option's values, as a rule without that which leaves it out."""
    return [(name, number) for number in range(first, len(FACTORS[name]))]


PROMPTS = values("prompt", 0)
OF_CHAT = [value for name in ("tools", "parallel_tool_calls", "reasoning_effort", "chat_template_kwargs",
                                     "add_generation_prompt", "enable_thinking", "include_reasoning")
           for value in values(name)]  # fmt: skip
# What makes a grammar: structured_outputs goes with neither of the others.
GRAMMARS = [values("structured_outputs"), values("response_format", 2), values("tools", 3)]
# Every value of the one list is refused beside every value of the other, and no other pair is.
CLASHES: list[tuple[list[Value], list[Value]]] = [
    (GRAMMARS[0], GRAMMARS[1] + GRAMMARS[2]),
    (
        [value for made in GRAMMARS for value in made],
        values("allowed_token_ids") + values("bad_words") + values("min_tokens"),
    ),
    (OF_CHAT, PROMPTS[:3]),
    (values("stream"), values("prompt_logprobs")),
    (values("stream", 0)[:1] + values("prompt_logprobs"), values("stream_options")),
    (values("truncate_prompt_tokens"), PROMPTS[4:]),
]
CLASHING = {frozenset((one, other)) for left, right in CLASHES for one in left for other in right}
# Fields without a column: what a column says by another field, and what needs another server or a talk of its own.
NO_COLUMN = {
    *("max_completion_tokens", "top_logprobs", "tool_choice", "messages"),
    *(
        "chat_template",
        "documents",
        "mm_processor_kwargs",
        "media_io_kwargs",
        "continue_final_message",
        "use_beam_search",
        "length_penalty",
        "grounding",
        "prompt_embeds",
        "return_prompt_text",
        "thinking_token_budget",
        "logprob_token_ids",
        "vllm_xargs",
        "suffix",
    ),
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose model sees, reads calls and has an adapter."""
    folder = adapters.write(Adapter(FAMILY, 0, 2, "q_proj|v_proj"), tmp_path_factory.mktemp("lora") / "blue")
    found = Running(FAMILY, ENGINE | OPTIONS, loras=(LoRARequest("blue", 1, folder),), tool_parser="hermes")
    yield found
    found.idle()
    found.close()


def pairs_of(row: Row) -> set[frozenset[Value]]:
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def covering(rng: random.Random) -> Iterator[Row]:
    """Rows of choices (by index) in which every two choices of two options occur together, but for those that clash."""
    left = {
        frozenset(pair)
        for one, other in itertools.combinations(FACTORS, 2)
        for pair in itertools.product(values(one, 0), values(other, 0))
    } - CLASHING
    while left:
        row: Row = dict(min(sorted(pair) for pair in left))
        # What many options clash with is chosen first.
        for name in ("prompt", "stream", *rng.sample(sorted(FACTORS), len(FACTORS))):
            if name in row:
                continue
            fitting = [
                value for value in values(name, 0) if not any({value, there} in CLASHING for there in row.items())
            ]
            gains = [sum(frozenset((value, there)) in left for there in row.items()) for value in fitting]
            row[name] = fitting[gains.index(max(gains))][1]
        left -= pairs_of(row)
        yield row


def embeds() -> str:
    """A picture's embeddings as torch.save writes them."""
    made = {"image_embeds": torch.linspace(-1, 1, 4 * 64).reshape(4, 64), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    texts = {}
    for name, tensor in made.items():
        file = io.BytesIO()
        torch.save(tensor, file)
        texts[name] = base64.b64encode(file.getvalue()).decode()
    return json.dumps(texts)


EMBEDS = json.loads(embeds())
PICTURE = data_url(seed=4)


def body_of(row: Row) -> tuple[str, dict[str, Any]]:
    """A row as (path, body)."""
    body = {name: FACTORS[name][value] for name, value in row.items() if FACTORS[name][value] is not None}
    prompt = body.pop("prompt")
    if "tools" in body:
        body |= {"tools": [TOOL], "tool_choice": body["tools"]}
    if prompt not in TALKS:
        return COMPLETE, body | {"prompt": prompt}
    if "logprobs" in body:
        body["top_logprobs"] = body["logprobs"]
        body["logprobs"] = True
    messages = talk("Say.", *([PICTURE] if prompt == "picture" else []))
    if prompt == "embeds":
        messages[0]["content"].insert(0, {"type": "image_embeds", "image_embeds": EMBEDS})
    return CHAT, body | {"messages": messages}


def refusal(client: httpx.Client, row: Row) -> str | None:
    """The option that is refused; None if the request is answered, and well."""
    path, body = body_of(row)
    answer = client.post(path, json=body)
    assert answer.status_code in (200, 400), (answer.text, body)
    if answer.status_code == 400:
        error = answer.json()["error"]
        name = (error["param"] or "").split(".")[0].replace("top_logprobs", "logprobs").replace("tool_choice", "tools")
        assert row.get(name, 0) != 0, (error, body)
        return str(name)
    if body.get("stream"):
        events = [line[6:] for line in answer.text.split("\n\n") if line]
        assert events.pop() == "[DONE]"
        chunks = [json.loads(event) for event in events]
        assert not any("error" in chunk for chunk in chunks), (answer.text, body)
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
    else:
        choices = answer.json()["choices"]
        usage = answer.json()["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    texts: dict[int, str] = {}
    for choice in choices:
        said = choice["text"] if path == COMPLETE else choice.get("delta", choice.get("message")).get("content")
        texts[choice["index"]] = texts.get(choice["index"], "") + (said or "")
    given = [body["prompt"]] if path == COMPLETE and not _several(body["prompt"]) else body.get("prompt", [None])
    many = body.get("n", 1)
    assert sorted(texts) == list(range(many * len(given))), body
    if "echo" in body and "truncate_prompt_tokens" not in body and isinstance(given[0], str):
        assert all(texts[index].startswith(given[index // many]) for index in texts), (texts, body)
    assert choices[0].get("finish_reason", "") in (None, "", "stop", "length", "tool_calls"), body
    return None


def _several(prompt: Any) -> bool:
    return isinstance(prompt, list) and isinstance(prompt[0], str)


@contextmanager
def canary(running: Running) -> Iterator[list[str]]:
    """A long greedy stream after another beside what is done; each must be that of an undisturbed server."""
    body = {"messages": talk("Go on."), "max_tokens": 150, "ignore_eos": True, "temperature": 0, "stream": True}
    stop = threading.Event()

    def streamed() -> str:
        events = httpx.post(running.url + CHAT, json=body, timeout=60, trust_env=False).text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        chunks = [json.loads(event[6:]) for event in events[:-2]]
        return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])

    calm, found = streamed(), []
    assert len(calm) > 100

    def sing() -> None:
        while not stop.is_set() or len(found) < 2:
            found.append(streamed())

    thread = threading.Thread(target=sing)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()
    assert len(found) > 1
    assert set(found) == {calm}


def test_34_all_pairs_of_options_work(served: Running) -> None:
    """Rows of a covering array, each of which is answered, and well."""
    rows = 0
    with canary(served), httpx.Client(base_url=served.url, timeout=60, trust_env=False) as client:
        for row in covering(random.Random(3)):
            rows += 1
            assert refusal(client, row) is None, body_of(row)
    assert rows > 20


def test_34_what_does_not_fit_together_is_refused_by_name(served: Running) -> None:
    """The pairs that clash, with nothing else in the request."""
    with canary(served), httpx.Client(base_url=served.url, timeout=60, trust_env=False) as client:
        for pair in sorted(sorted(pair) for pair in CLASHING):
            row = dict.fromkeys(FACTORS, 0) | dict(pair)
            names = {name for name, _ in pair}
            if "prompt" not in names and names & {name for name, _ in OF_CHAT}:
                row["prompt"] = FACTORS["prompt"].index("talk")
            assert refusal(client, row) in names, body_of(row)


def test_34_every_field_has_a_column() -> None:
    fields = ChatRequest.model_fields.keys() | CompletionRequest.model_fields.keys()
    assert fields == FACTORS.keys() | NO_COLUMN
