"""Prompts of embeddings: answers equal those of the ids that were looked up."""

from __future__ import annotations

import base64
import gc
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from beheld import LLM, SamplingParams
from beheld.core.errors import ConfigError, ParamsError, PromptError, PromptTooLongError, TemplateError
from beheld.inputs.prompt import embedded_prompt
from beheld.server.completions import Embedded
from beheld.server.schema import CompletionRequest
from tests import tiny
from tests.server.running import ENGINE, Running, request_bytes

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "disable_log_stats": True, "max_model_len": 256}
WORDS = "A small red circle stands left of a large blue square, and a dog sleeps on the chair. " * 2


def looked_up(family: str, ids: list[int]) -> torch.Tensor:
    """What the model's own layer makes of ids, (tokens, hidden)."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny.checkpoint(family), dtype=torch.float32)
    with torch.inference_mode():
        return model.get_input_embeddings()(torch.tensor(ids))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(tiny.checkpoint("llama")), enable_prompt_embeds=True, max_num_batched_tokens=32, **OPTIONS) as made:
        yield made


def answers(llm: LLM, prompts: list[Any], **params: Any) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of greedy answers."""
    wanted = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0, **params)
    found = [output.outputs[0] for output in llm.generate(prompts, wanted, use_tqdm=False)]
    chosen = [[step[token].logprob for step, token in zip(one.logprobs, one.token_ids, strict=True)] for one in found]
    return list(zip([list(one.token_ids) for one in found], chosen, strict=True))


def test_embeddings_answer_as_their_ids_do(llm: LLM) -> None:
    """In several steps, in a batch with ids, and again from the cache."""
    ids = llm.get_tokenizer().encode(WORDS)
    other = llm.get_tokenizer().encode("Where is the dog?")
    assert len(ids) > 64
    tensors = {"one": looked_up("llama", ids), "two": looked_up("llama", other)}
    asked = [{"prompt_embeds": tensors["one"]}, {"prompt_embeds": tensors["two"][None]}, ids, other]
    first = answers(llm, asked)
    again = llm.generate(asked[0], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)[0]
    for (tokens, logprobs), (wanted, theirs) in zip(first[:2], first[2:], strict=True):
        assert tokens == wanted
        assert logprobs == pytest.approx(theirs, abs=1e-4)
    assert first[0][0] != first[1][0]
    assert list(again.outputs[0].token_ids) == first[0][0]
    assert (again.prompt, len(again.prompt_token_ids)) == (None, len(ids))
    assert again.num_cached_tokens > 0
    # Nothing of the prompt counts as said before, so a penalty is about the answer alone.
    assert answers(llm, asked[:1], repetition_penalty=1.5)[0][0][0] == first[0][0][0]


def test_they_are_not_read_where_they_are_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading them may take much memory."""

    def never(*_: object) -> None:
        raise AssertionError("they were read")

    monkeypatch.setattr(embedded_prompt, "tensor_of", never)
    with LLM(str(tiny.checkpoint("llama")), **OPTIONS) as off, pytest.raises(PromptError, match="are disabled"):
        off.generate({"prompt_embeds": torch.randn(4, 64)}, SamplingParams(max_tokens=1), use_tqdm=False)


def test_what_is_refused(llm: LLM) -> None:
    tensor = torch.randn(4, 64)
    params = SamplingParams(max_tokens=1)
    for prompt in (
        {"prompt_embeds": torch.randn(4, 63)},
        {"prompt_embeds": torch.full((4, 64), float("nan"))},
        {"prompt_embeds": tensor, "prompt": "x"},
        {"prompt_embeds": tensor, "multi_modal_data": {"image": "x"}},
        {"prompt_embeds": tensor, "prompt_token_ids": torch.tensor([5, 6])},
        {"prompt_embeds": "no tensor"},
    ):
        with pytest.raises(PromptError):
            llm.generate(prompt, params, use_tqdm=False)
    with pytest.raises(PromptTooLongError):
        llm.generate({"prompt_embeds": torch.randn(300, 64)}, params, use_tqdm=False)
    with pytest.raises(ParamsError, match="prompt_logprobs"):
        llm.generate({"prompt_embeds": tensor}, SamplingParams(prompt_logprobs=1), use_tqdm=False)
    with pytest.raises(ConfigError, match="decoder of text alone"):
        LLM(str(tiny.checkpoint("qwen2_vl")), enable_prompt_embeds=True, **OPTIONS)


def test_parts_are_opened_until_they_are_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two thousand letters may be a tensor of a megabyte, and a body has room for thirty thousand of them."""
    opened = []
    real = embedded_prompt.checked

    def checked(*given: Any) -> Any:
        opened.append(given)
        return real(*given)

    monkeypatch.setattr(embedded_prompt, "checked", checked)
    with LLM(str(tiny.checkpoint("llama")), enable_prompt_embeds=True, **OPTIONS) as llm:
        most = llm._config.max_model_len
        part = {"type": "prompt_embeds", "data": looked_up("llama", [5] * (most // 4))}
        with pytest.raises(PromptTooLongError):
            llm.chat([{"role": "user", "content": [part] * 300}], use_tqdm=False)
    assert len(opened) <= 5


def test_a_client_sends_them() -> None:
    running = Running("llama", ENGINE | {"enable_prompt_embeds": True}, trust_templates=True)
    try:
        ids = running.post("/tokenize", {"prompt": WORDS}).json()["tokens"]
        buffer = io.BytesIO()
        torch.save(looked_up("llama", ids), buffer)
        embeds = base64.b64encode(buffer.getvalue()).decode()
        common: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
        made = running.post("/v1/completions", {"prompt": "", "prompt_embeds": embeds, **common}).json()
        wanted = running.post("/v1/completions", {"prompt": ids, **common}).json()
        assert made["choices"][0]["text"] == wanted["choices"][0]["text"]
        assert made["usage"]["prompt_tokens"] == len(ids)
        for nothing in ({}, {"prompt": None}):
            also = running.post("/v1/completions", {**nothing, "prompt_embeds": embeds, **common}).json()
            assert also["choices"][0]["text"] == wanted["choices"][0]["text"]
            for none in ({}, {"prompt_embeds": []}):
                error = running.post("/v1/completions", {**nothing, **none, **common}).json()["error"]
                assert error["param"] == "prompt"
                assert "Either prompt or prompt_embeds must be provided and non-empty." in error["message"]
        twice = running.post("/v1/completions", {"prompt": [], "prompt_embeds": [embeds, embeds], **common}).json()
        assert [choice["text"] for choice in twice["choices"]] == [wanted["choices"][0]["text"]] * 2
        chat = {**common, "chat_template": "{{ messages[0]['content'] }}{{ messages[-1].get('reasoning') or '' }}"}
        for messages in (
            [{"role": "user", "content": [embedded(embeds)]}],
            [{"role": "user", "content": ""}, {"role": "assistant", "content": "", "reasoning": embedded(embeds)}],
        ):
            said = running.post("/v1/chat/completions", {**chat, "messages": messages}).json()
            assert said["choices"][0]["message"]["content"] == wanted["choices"][0]["text"]
            assert said["usage"]["prompt_tokens"] == len(ids)
        for message in (
            {"role": "user", "content": [{"type": "prompt_embeds"}]},
            {"role": "assistant", "content": "", "reasoning": embedded("no base64")},
            {"role": "assistant", "content": "", "reasoning": {"type": "text", "text": "x"}},
            {"role": "assistant", "content": "", "reasoning": 7},
        ):
            refused = running.post("/v1/chat/completions", {**chat, "messages": [message]})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"].startswith("messages.0.")
        for body in ({"prompt": "x"}, {"prompt": "", "echo": True}):
            assert running.post("/v1/completions", {**body, "prompt_embeds": embeds, **common}).status_code == 400
        for given in ({"prompt": "", "prompt_embeds": embeds}, {"prompt": [ids, ids]}):
            streamed = {**given, "max_tokens": 300, "ignore_eos": True, "stream": True}
            with running.connect(30.0) as link:
                link.sendall(request_bytes("/v1/completions", streamed))
                head = b""
                while b"data: " not in head:
                    part = link.recv(4096)
                    assert part, head
                    head += part
                # While the answer goes on, nothing of its prompts is held.
                assert running.llm.num_live
                assert running.admission.held_bytes == 0
                # By type: others' proxies of what is gone raise when they are asked what they are.
                kept = [one for one in gc.get_objects() if type(one) in (CompletionRequest, Embedded)]
                assert not any(getattr(one, "prompt_embeds", None) or getattr(one, "prompt", None) for one in kept)
                assert not any(isinstance(one, Embedded) for one in kept)
            running.idle()
    finally:
        running.close()


TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m.get('reasoning') %}({{ m['reasoning'] }}){% endif %}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endif %}.{% endfor %}"
)


def embedded(data: Any) -> dict[str, Any]:
    return {"type": "prompt_embeds", "data": data}


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_parts_of_messages_answer_as_their_ids_do(llm: LLM, name: str) -> None:
    """Between texts, in one message and in another's reasoning."""
    inner = [llm.get_tokenizer().encode(text, add_special_tokens=False) for text in ("a red circle", WORDS, "think")]
    tensors = [looked_up("llama", ids) for ids in inner]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": [embedded(tensors[0])]},
        {"role": "user", "content": [{"type": "text", "text": "See "}, embedded(tensors[1]), " and tell.</s>"]},
        {"role": "assistant", "content": "", name: embedded(tensors[2])},
    ]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    made = llm.chat(messages, params, chat_template=TEMPLATE, use_tqdm=False)[0]
    ids = list(made.prompt_token_ids)
    places = [place for place, token in enumerate(ids) if token >= len(llm.get_tokenizer())]
    for place, token in zip(places, [token for one in inner for token in one], strict=True):
        ids[place] = token
    # Some tokenizers begin a text with a blank.
    joined = f"<system>a red circle.<user>See {WORDS} and tell.</s>.<assistant>(think)."
    assert llm.get_tokenizer().decode(ids).replace(" ", "") == joined.replace(" ", "")
    # What a user spells is no token.
    assert llm.get_tokenizer().eos_token_id not in ids
    wanted = answers(llm, [ids])[0]
    assert list(made.outputs[0].token_ids) == wanted[0]
    chosen = [step[token].logprob for step, token in zip(made.outputs[0].logprobs, wanted[0], strict=True)]
    assert chosen == pytest.approx(wanted[1], abs=1e-4)


def test_which_parts_of_messages_are_refused(llm: LLM) -> None:
    good = torch.randn(4, 64)
    for part, param in (
        ({"type": "prompt_embeds"}, "messages.0.content.0.data"),
        (embedded(torch.randn(4, 63)), "messages.0.content.0.data"),
        (embedded("no tensor"), "messages.0.content.0.data"),
        (embedded(good) | {"uuid": "x"}, "messages.0.content.0.uuid"),
    ):
        with pytest.raises(PromptError) as found:
            llm.chat([{"role": "user", "content": [part]}], chat_template=TEMPLATE, use_tqdm=False)
        assert found.value.param == param
    messages = [{"role": "user", "content": [embedded(good)]}]
    with pytest.raises(TemplateError, match=r"content\.0\.data 0 times"):
        llm.chat(messages, chat_template="{{ 1 }}", use_tqdm=False)
    with pytest.raises(TemplateError, match=r"content\.0\.data 2 times"):
        llm.chat(messages, chat_template=TEMPLATE + TEMPLATE, use_tqdm=False)
    with pytest.raises(ParamsError, match="prompt_logprobs"):
        llm.chat(messages, SamplingParams(prompt_logprobs=1), chat_template=TEMPLATE, use_tqdm=False)
    # As templates leave out earlier reasoning that is a text.
    thought = [{"role": "assistant", "content": "x", "reasoning": embedded(good)}]
    llm.chat(thought, SamplingParams(max_tokens=1), chat_template="{{ messages[0]['content'] }}", use_tqdm=False)
    with LLM(str(tiny.checkpoint("llama")), **OPTIONS) as off, pytest.raises(PromptError, match="are disabled"):
        off.chat(messages, chat_template=TEMPLATE, use_tqdm=False)
