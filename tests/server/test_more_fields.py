"""Fields that change what an answer shows: token ids, the usage so far, its beginning, documents, sampling."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from beheld.core.errors import ConfigError, ParamsError
from beheld.core.params import SamplingParams
from beheld.core.structured_outputs import StructuredOutputs
from beheld.server.chat import _reasoning_before
from beheld.server.errors import HttpError
from beheld.server.options import ServerOptions
from beheld.server.sampling import structured
from beheld.server.schema import ChatRequest
from beheld.server.template_options import variables_of
from beheld.text.reasoning import THINK
from tests.server.running import ENGINE, Running, data_url
from tests.server.test_forms import TALK

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "temperature": 0}
TEXT: dict[str, Any] = {"prompt": "Hello there", "max_tokens": 6, "temperature": 0}


def chunks_of(running: Running, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    text = running.post(path, {**body, "stream": True}).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def joined(chunks: list[dict[str, Any]]) -> list[int]:
    return [one for chunk in chunks for choice in chunk["choices"] for one in choice.get("token_ids", ())]


def test_token_ids_of_prompt_and_answer(running: Running) -> None:
    asked = {"return_token_ids": True}
    found = running.post(CHAT, HI | asked).json()
    prompt = running.post("/tokenize", {"messages": HI["messages"]}).json()["tokens"]
    ids = found["choices"][0]["token_ids"]
    assert (found["prompt_token_ids"], len(ids)) == (prompt, found["usage"]["completion_tokens"])
    assert running.post("/detokenize", {"tokens": ids}).json()["prompt"] == found["choices"][0]["message"]["content"]
    chunks = chunks_of(running, CHAT, HI | asked)
    assert ([chunk.get("prompt_token_ids") for chunk in chunks], joined(chunks)) == (
        [prompt, *[None] * (len(chunks) - 1)],
        ids,
    )
    choice = running.post(COMPLETE, TEXT | asked).json()["choices"][0]
    assert choice["prompt_token_ids"] == running.post("/tokenize", {"prompt": TEXT["prompt"]}).json()["tokens"]
    chunks = chunks_of(running, COMPLETE, TEXT | asked)
    assert joined(chunks) == choice["token_ids"]
    assert chunks[0]["choices"][0]["prompt_token_ids"] == choice["prompt_token_ids"]
    plain = running.post(CHAT, HI).json()
    # Scripts read the fields of every answer.
    assert [plain["prompt_token_ids"], plain["prompt_logprobs"], plain["choices"][0]["token_ids"]] == [None] * 3
    assert "token_ids" not in chunks_of(running, CHAT, HI)[1]["choices"][0]


def test_tokens_of_log_probabilities_as_ids(running: Running) -> None:
    asked = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = running.post(CHAT, HI | asked | {"logprobs": True, "top_logprobs": 2}).json()["choices"][0]
    names = [f"token_id:{one}" for one in choice["token_ids"]]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == names
    for entry in choice["logprobs"]["content"]:
        assert [top["token"][:9] for top in entry["top_logprobs"]] == ["token_id:"] * 2
    choice = running.post(COMPLETE, TEXT | asked | {"logprobs": 1, "echo": True}).json()["choices"][0]
    ids = choice["prompt_token_ids"] + choice["token_ids"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{one}" for one in ids]
    assert [list(top) for top in choice["logprobs"]["top_logprobs"][-6:]] == [[f"token_id:{one}"] for one in ids[-6:]]


@pytest.mark.parametrize(("path", "body"), [(CHAT, HI), (COMPLETE, TEXT)])
def test_the_usage_so_far(running: Running, path: str, body: dict[str, Any]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = chunks_of(running, path, body | {"stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["usage"]]
    assert counts == sorted(counts)
    assert (counts[-1], last["usage"]["completion_tokens"], last["choices"]) == (6, 6, [])
    plain = chunks_of(running, path, body | {"stream_options": {"include_usage": True}})
    assert [chunk["usage"] for chunk in plain[:-1]] == [None] * (len(plain) - 1)
    quiet = chunks_of(running, path, body | {"stream_options": {"continuous_usage_stats": True}})
    assert not any("usage" in chunk for chunk in quiet)


def test_an_answer_that_goes_on_may_show_its_beginning(running: Running) -> None:
    talk = [*HI["messages"], {"role": "assistant", "content": "Well, "}]
    body = HI | {"messages": talk, "continue_final_message": True}
    plain = running.post(CHAT, body).json()["choices"][0]["message"]["content"]
    assert running.post(CHAT, body | {"echo": True}).json()["choices"][0]["message"]["content"] == "Well, " + plain
    alone = running.post(CHAT, HI | {"echo": True}).json()["choices"][0]["message"]["content"]
    assert alone == running.post(CHAT, HI).json()["choices"][0]["message"]["content"]


def test_documents_are_the_templates() -> None:
    body = ChatRequest.model_validate(HI | {"documents": [{"title": "a", "text": "b"}]})
    template = "{% for one in documents %}{{ one.text }}{% endfor %}"
    assert variables_of(body, template) == {"documents": [{"title": "a", "text": "b"}]}
    with pytest.raises(HttpError, match="no place for documents"):
        variables_of(body, "{{ messages }}")


@pytest.fixture(scope="module")
def own() -> Iterator[Running]:
    """A server with a template of its own, whose operator says what requests leave out."""
    options: dict[str, Any] = {"template_variables": {"mood": "calm"}, "tells_usage": True, "tokens_as_ids": True}
    options["tells_times"] = True
    found = Running("llama", ENGINE | {"chat_template": TALK + "{{ mood }}"}, **options)
    yield found
    found.idle()
    found.close()


def test_special_tokens_of_a_prompt_can_be_left_out(own: Running) -> None:
    whole, bare = (
        own.post(COMPLETE, TEXT | {"return_token_ids": True, "add_special_tokens": wanted}).json()["choices"][0]
        for wanted in (True, False)
    )
    assert whole["prompt_token_ids"][1:] == bare["prompt_token_ids"]


def test_a_conversation_gets_the_tokenizers_special_tokens_where_it_asks(own: Running) -> None:
    tokenizer = own.llm.get_tokenizer()
    (begin,) = tokenizer.encode("", add_special_tokens=True)
    plain, said_no, asked = (
        own.post(CHAT, HI | {"return_token_ids": True, **said}).json()["prompt_token_ids"]
        for said in ({}, {"add_special_tokens": False}, {"add_special_tokens": True})
    )
    assert plain == said_no
    assert asked == [begin, *plain]
    counted = own.post("/tokenize", {"messages": HI["messages"], "add_special_tokens": True}).json()
    assert counted["tokens"] == asked


def test_an_answer_has_its_times_where_the_operator_wants_that(own: Running, running: Running) -> None:
    names = {"queue_time_ms", "time_to_first_token_ms", "generation_time_ms", "mean_itl_ms", "tokens_per_second"}
    times = own.post(CHAT, HI).json()["metrics"]
    assert set(times) == names
    assert times["mean_itl_ms"] * 5 == pytest.approx(times["generation_time_ms"])
    assert times["tokens_per_second"] == pytest.approx(
        6e3 / (times["time_to_first_token_ms"] + times["generation_time_ms"])
    )
    *others, last = chunks_of(own, CHAT, HI | {"max_tokens": 1})
    assert set(last["metrics"]) == names - {"mean_itl_ms"}
    assert not any("metrics" in chunk for chunk in others)
    assert "metrics" not in own.post(CHAT, HI | {"n": 2, "temperature": 1.0}).json()
    assert "metrics" not in running.post(CHAT, HI).json()


def test_what_the_operator_says_holds_where_a_request_says_nothing(own: Running) -> None:
    def end(**more: Any) -> str:
        ids = own.post(CHAT, HI | more | {"return_token_ids": True}).json()["prompt_token_ids"]
        same = own.post("/tokenize", {"messages": HI["messages"]} | more).json()["tokens"]
        assert ids == same
        text: str = own.post("/detokenize", {"tokens": ids}).json()["prompt"]
        return text[-4:]

    assert (end(), end(chat_template_kwargs={"mood": "wild"})) == ("calm", "wild")
    counted = own.post("/v1/messages/count_tokens", {"messages": HI["messages"]}).json()["input_tokens"]
    assert counted == own.post("/tokenize", {"messages": HI["messages"]}).json()["count"]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks_of(own, CHAT, HI)]
    assert (counts[0], counts[-1], counts) == (0, 6, sorted(counts))
    asked = HI | {"stream_options": {"include_usage": False}}
    *others, last = chunks_of(own, CHAT, asked)
    assert ([chunk["usage"] for chunk in others], last["usage"]["completion_tokens"]) == ([None] * len(others), 6)
    for wanted, named in ((None, True), (False, False)):
        asked = HI | {"logprobs": True, "return_tokens_as_token_ids": wanted}
        entry = own.post(CHAT, asked).json()["choices"][0]["logprobs"]["content"][0]
        assert entry["token"].startswith("token_id:") == named


def test_the_operators_variables_are_an_object() -> None:
    with pytest.raises(ConfigError, match="no JSON object"):
        ServerOptions(template_variables=[1])  # type: ignore[arg-type]


def test_reasoning_may_be_left_out_and_its_mark_may_stand_twice() -> None:
    # The prompt ends within the reasoning, and the grammar's words repeat the mark.
    template = TALK + THINK.open
    found = Running("qwen2", ENGINE | {"chat_template": template}, reasoning_parser="think")
    try:
        body = HI | {"max_tokens": 40, "structured_outputs": {"regex": "<think>so</think>yes"}}
        message = found.post(CHAT, body).json()["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("so", "yes")
        message = found.post(CHAT, body | {"include_reasoning": False}).json()["choices"][0]["message"]
        assert (message["reasoning"], message["content"], "reasoning_content" in message) == (None, "yes", False)
        asked = {"input": "Hi", "temperature": 0, "structured_outputs": body["structured_outputs"]}
        output = found.post("/v1/responses", asked).json()["output"]
        assert [item["type"] for item in output] == ["reasoning", "message"]
        output = found.post("/v1/responses", asked | {"include_reasoning": False}).json()["output"]
        assert [item["type"] for item in output] == ["message"]
        unclosed = body | {"structured_outputs": {"regex": "so it is</think>"}}
        forced = {"chat_template_kwargs": {"force_nonempty_content": True}}
        for further, said in (({}, ("so it is", None)), (forced, (None, "so it is"))):
            message = found.post(CHAT, unclosed | further).json()["choices"][0]["message"]
            assert (message["reasoning"], message["content"] or None) == said
        found.idle()
    finally:
        found.close()


def test_responses_take_chats_sampling(running: Running) -> None:
    asked = {"input": "Hi", "max_output_tokens": 12, "seed": 3, "top_k": 20, "stop": ["e"], "logit_bias": {"5": 2}}
    asked |= {"repetition_penalty": 1.2, "cache_salt": "s"}
    found = running.post("/v1/responses", asked).json()
    same = {name: value for name, value in asked.items() if name not in ("input", "max_output_tokens")}
    chat = running.post(CHAT, {"messages": HI["messages"], "max_tokens": 12} | same).json()
    said = "".join(part["text"] for item in found["output"] for part in item["content"])
    assert said == chat["choices"][0]["message"]["content"]
    refused = running.post("/v1/responses", asked | {"top_k": -5})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "top_k")
    both = {"structured_outputs": {"regex": "a"}, "text": {"format": {"type": "json_object"}}}
    refused = running.post("/v1/responses", {"input": "Hi"} | both)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "structured_outputs")


def test_messages_take_a_salt_and_variables(running: Running, own: Running) -> None:
    body: dict[str, Any] = {"messages": HI["messages"], "max_tokens": 6, "temperature": 0}
    body["messages"] = [{"role": "user", "content": "Which colours has this? " * 4}]

    def usage(of: Running, more: dict[str, Any]) -> dict[str, Any]:
        answer = of.post("/v1/messages", body | more)
        assert answer.status_code == 200
        return dict(answer.json()["usage"])

    usage(running, {})
    assert usage(running, {})["cache_read_input_tokens"] > 0
    assert usage(running, {"cache_salt": "of this test"})["cache_read_input_tokens"] == 0

    def length(more: dict[str, Any]) -> int:
        return sum(v for k, v in usage(own, more).items() if k != "output_tokens" and isinstance(v, int))

    # The template writes the mood.
    assert length({"chat_template_kwargs": {"mood": "calm" * 9}}) > length({})
    refused = running.post("/v1/messages", body | {"chat_template_kwargs": {"messages": 1}})
    assert refused.status_code == 400


def test_what_asks_for_nothing_is_accepted(running: Running) -> None:
    nothing = {"vllm_xargs": {}, "thinking_token_budget": None, "kv_transfer_params": None, "logprob_token_ids": []}
    assert running.post(CHAT, HI | nothing).status_code == 200
    for name, value in (("thinking_token_budget", 5), ("logprob_token_ids", [1])):
        refused = running.post(CHAT, HI | {name: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
    told = running.post(CHAT, HI | {"request_id": "mine", "session_id": "s", "stream_interval": 4}).json()["warnings"]
    assert [warning["param"] for warning in told] == ["request_id", "session_id", "stream_interval"]


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ({"type": "json_object", "structures": [{"begin": "<a>"}]}, "structures"),
        ({"type": "text", "triggers": ["<a>"]}, "triggers"),
        ({"type": "json_schema", "json_schema": {"schema": {}}, "format": {"type": "triggered_tags"}}, "format"),
        ({"type": "json_object", "json_schema": {"schema": {}}}, "json_schema"),
        ({"type": "structural_tag", "triggers": ["<a>"], "json_schema": {"schema": {}}}, "json_schema"),
    ],
)
def test_a_format_has_no_fields_of_another_type(form: dict[str, Any], name: str) -> None:
    body = ChatRequest.model_validate(HI | {"response_format": form})
    with pytest.raises(HttpError, match=f"no {name}") as caught:
        structured(body.response_format, None)
    assert (caught.value.status, caught.value.param) == (400, f"response_format.{name}")


def test_a_budget_needs_reasoning_outside_the_grammar() -> None:
    for asked in (StructuredOutputs(regex="a*</think>b"), StructuredOutputs(grammar='start: "</think>"')):
        params = SamplingParams(thinking_token_budget=5, structured_outputs=asked)
        with pytest.raises(ParamsError, match="The grammar contains '</think>'") as caught:
            _reasoning_before(params, THINK)
        assert caught.value.param == "thinking_token_budget"
        for budget in (None, -1):
            params = SamplingParams(thinking_token_budget=budget, structured_outputs=asked)
            assert _reasoning_before(params, THINK) is None


def test_documents_of_the_routes_can_be_left_out() -> None:
    bare = Running("llama", hides_docs=True)
    try:
        assert [bare.get(path).status_code for path in ("/docs", "/openapi.json", "/version")] == [404, 404, 200]
    finally:
        bare.close()


def test_the_text_of_the_prompt(running: Running) -> None:
    asked = {"return_prompt_text": True}
    found = running.post(CHAT, HI | asked).json()
    ids = running.post("/tokenize", {"messages": HI["messages"]}).json()["tokens"]
    assert found["prompt_text"] == running.post("/detokenize", {"tokens": ids}).json()["prompt"]
    texts = [chunk.get("prompt_text") for chunk in chunks_of(running, CHAT, HI | asked)]
    assert texts == [found["prompt_text"], *[None] * (len(texts) - 1)]
    assert "prompt_text" not in running.post(CHAT, HI).json()


def test_a_conversation_is_tokenized_with_all_that_its_prompt_depends_on() -> None:
    running = Running(trust_templates=True, trust_processor_options=True)
    try:
        image = {"type": "image_url", "image_url": {"url": data_url(112, 112)}}
        body: dict[str, Any] = {"messages": [{"role": "user", "content": [image, {"type": "text", "text": "Hi"}]}]}
        body |= {"chat_template": "{{ messages[0]['content'][1]['text'] }}<|vision_start|><|image_pad|><|vision_end|>"}
        most = {"mm_processor_kwargs": {"max_pixels": 56 * 56}}
        counts = []
        for more in ({}, most):
            said = running.post(CHAT, {**body, **more, "max_tokens": 1}).json()
            counts.append(running.post("/tokenize", body | more).json()["count"])
            assert said["usage"]["prompt_tokens"] == counts[-1]
        assert counts[0] > counts[1]
        for name in ("chat_template", "mm_processor_kwargs", "media_io_kwargs"):
            refused = running.post("/tokenize", {"prompt": "x", name: "x" if name == "chat_template" else {}})
            assert refused.status_code == 400
    finally:
        running.close()
    running = Running()
    try:
        assert running.post("/tokenize", body).json()["error"]["param"] == "chat_template"
    finally:
        running.close()


NOTHING: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (CHAT, HI, {"return_mm_kwargs": False, "return_token_offsets": False, "routed_experts_prompt_start": 0}),
    (COMPLETE, TEXT, {"return_weight_versions": False, "mm_payload": None}),
    (
        "/v1/responses",
        {"input": "Hi", "max_output_tokens": 6, "temperature": 0},
        {
            **{"access_programs": None, "background_options": {}, "enable_response_messages": False, "image": None},
            **{"kv_transfer_params": None, "media_io_kwargs": {}, "previous_input_messages": None, "vllm_xargs": {}},
        },
    ),
    (
        "/v1/messages",
        {"messages": HI["messages"], "max_tokens": 6, "temperature": 0},
        {"ec_transfer_params": None, "return_mm_kwargs": False, "vllm_xargs": {}},
    ),
    ("/tokenize", {"messages": HI["messages"]}, {"chat_template": None, "mm_processor_kwargs": {}}),
]


@pytest.mark.parametrize("place", range(len(NOTHING)))
def test_fields_that_ask_for_nothing_change_nothing(running: Running, place: int) -> None:
    path, body, more = NOTHING[place]
    plain, found = running.post(path, body).json(), running.post(path, body | more)
    assert found.status_code == 200, found.text
    assert "warnings" not in found.json()
    for name in ("choices", "tokens", "content"):
        assert found.json().get(name) == plain.get(name)
    asked = {name: 1 for name in more if name not in ("media_io_kwargs", "vllm_xargs", "chat_template")}
    for name, value in asked.items():
        assert running.post(path, body | {name: value}).status_code == 400


@pytest.mark.parametrize("place", [2, 3])
def test_arguments_of_logits_processors_are_fields_of_each_route(running: Running, place: int) -> None:
    path, body, _ = NOTHING[place]
    found = running.post(path, body | {"vllm_xargs": {"target": 3}}).json()
    assert [warning["param"] for warning in found["warnings"]] == ["vllm_xargs"]


def test_names_of_requests_and_sessions_of_responses_have_no_effect(running: Running) -> None:
    found = running.post("/v1/responses", NOTHING[2][1] | {"request_id": "a", "session_id": "b"}).json()
    assert {warning["param"] for warning in found["warnings"]} == {"request_id", "session_id"}
