"""Decoders that give scores: heads of classes, and rows of the generating head that stand for classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from beheld import LLM, PoolingParams
from beheld.core.errors import ConfigError, ModelError, ParamsError
from beheld.families import registry
from tests import tiny
from tests.pool.checkpoints import classifier, copied, encoder

SMALL: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8}
TEXTS = ["What is in this picture?", "A small red circle stands left of a large blue square. " * 6, "Hello"]
LABELS = {"id2label": {0: "calm", 1: "glad", 2: "sad"}, "label2id": {"calm": 0, "glad": 1, "sad": 2}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As a Qwen2ForSequenceClassification is stored: no generating head at all."""
    where = tmp_path_factory.mktemp("classifier") / "three"
    return classifier("qwen2", where, "Qwen2ForSequenceClassification", **LABELS)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), max_num_batched_tokens=48, **SMALL) as made:
        yield made


@torch.no_grad()
def logits(folder: Path, texts: list[str], kind: Any = transformers.AutoModelForSequenceClassification) -> torch.Tensor:
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = [model(**tokenizer(text, return_tensors="pt")).logits for text in texts]
    # Of heads that score every position, the last one.
    return torch.cat([scores if scores.ndim == 2 else scores[:, -1] for scores in found])


def test_a_classifier_classifies_and_never_answers_with_text(llm: LLM, folder: Path) -> None:
    wanted = logits(folder, TEXTS)
    found = llm.classify(TEXTS, use_tqdm=False)
    probs = torch.tensor([output.outputs.probs for output in found])
    torch.testing.assert_close(probs, wanted.softmax(-1), atol=1e-5, rtol=1e-4)
    assert found[0].outputs.num_classes == 3
    raw = llm.classify(TEXTS, pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
    torch.testing.assert_close(torch.tensor([o.outputs.probs for o in raw]), wanted, atol=5e-5, rtol=1e-4)
    with pytest.raises(ParamsError, match="generates no text"):
        llm.generate("x", use_tqdm=False)
    with pytest.raises(ParamsError, match=r"LLM\.classify"):
        llm.embed("x", use_tqdm=False)
    with pytest.raises(ParamsError, match="scores of 3 classes"):
        llm.score("x", "y", use_tqdm=False)
    with pytest.raises(ConfigError, match="runner='pooling'"):
        LLM(str(folder), runner="generate", **SMALL)


def test_scores_of_every_position_and_of_some_classes(llm: LLM, folder: Path) -> None:
    (every,) = llm.reward(TEXTS[0], use_tqdm=False)
    assert every.outputs.data.shape == (len(every.prompt_token_ids), 3)
    torch.testing.assert_close(every.outputs.data[-1], logits(folder, TEXTS[:1])[0].softmax(-1), atol=1e-5, rtol=1e-4)
    (some,) = llm.reward(TEXTS[0], pooling_params=PoolingParams(returned_token_ids=[2, 0]), use_tqdm=False)
    assert torch.equal(some.outputs.data, every.outputs.data[:, [2, 0]])
    token = every.prompt_token_ids[3]
    (steps,) = llm.reward(TEXTS[0], pooling_params=PoolingParams(step_tag_id=token), use_tqdm=False)
    places = [place for place, found in enumerate(every.prompt_token_ids) if found == token]
    torch.testing.assert_close(steps.outputs.data, every.outputs.data[places], atol=1e-5, rtol=1e-4)
    with pytest.raises(ParamsError, match="there are 3 classes"):
        llm.reward("x", pooling_params=PoolingParams(returned_token_ids=[3]), use_tqdm=False)


@pytest.mark.parametrize(
    ("settings", "made"),
    [
        ({"problem_type": "multi_label_classification"}, torch.sigmoid),
        ({"problem_type": "regression"}, lambda x: x),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, lambda x: x),
    ],
)
def test_the_checkpoint_says_what_scores_are(tmp_path: Path, settings: dict[str, Any], made: Any) -> None:
    folder = classifier("qwen2", tmp_path / "c", "Qwen2ForSequenceClassification", **LABELS, **settings)
    with LLM(str(folder), **SMALL) as llm:
        (found,) = llm.classify(TEXTS[0], use_tqdm=False)
    wanted = made(logits(folder, TEXTS[:1])[0])
    torch.testing.assert_close(torch.tensor(found.outputs.probs), wanted, atol=5e-5, rtol=1e-4)


def test_one_class_scores_pairs(tmp_path: Path) -> None:
    folder = classifier("llama", tmp_path / "c", "LlamaForSequenceClassification", id2label={0: "score"})
    with LLM(str(folder), override_pooler_config={"logit_mean": 0.5, "logit_sigma": 2.0}, **SMALL) as llm:
        found = llm.score(TEXTS[0], TEXTS, use_tqdm=False)
    wanted = torch.sigmoid((logits(folder, [TEXTS[0] + text for text in TEXTS])[:, 0] - 0.5) / 2)
    assert [output.outputs.score for output in found] == pytest.approx(wanted.tolist(), abs=1e-5)


def test_the_engines_task_takes_none_from_a_classifier(tmp_path: Path) -> None:
    folder = classifier("llama", tmp_path / "c", "LlamaForSequenceClassification", id2label={0: "score"})
    with LLM(str(folder), override_pooler_config={"task": "token_classify"}, **SMALL) as llm:
        (every,) = llm.encode(TEXTS[0], use_tqdm=False)
        assert every.outputs.data.shape == (len(every.prompt_token_ids), 1)
        assert llm.classify(TEXTS[0], use_tqdm=False)[0].outputs.num_classes == 1
        (score,) = llm.score(TEXTS[0], TEXTS[1], use_tqdm=False)
    wanted = torch.sigmoid(logits(folder, [TEXTS[0] + TEXTS[1]])[0, 0])
    assert score.outputs.score == pytest.approx(float(wanted), abs=1e-5)


@pytest.mark.parametrize(
    "architecture",
    [
        *("Qwen2RewardModel", "Qwen3ForRewardModel", "JinaForRanking"),
        *("Qwen2ForQuestionAnswering", "Qwen2ForMultipleChoice"),
    ],
)
def test_another_head_is_refused_and_never_answers_with_text(tmp_path: Path, architecture: str) -> None:
    """Tied embeddings would make a generating head of any such checkpoint."""
    if hasattr(transformers, architecture):
        folder = classifier("qwen2", tmp_path / "c", architecture, tie_word_embeddings=True)
    else:
        folder = copied("qwen2", tmp_path / "c", architectures=[architecture], tie_word_embeddings=True)
    for options in ({}, {"runner": "pooling"}, {"runner": "generate"}):
        with pytest.raises(ModelError, match=rf"{architecture} has a head.*convert='embed'"):
            LLM(str(folder), **options, **SMALL)
    with LLM(str(folder), runner="pooling", convert="embed", **SMALL) as llm:
        assert len(llm.embed("x", use_tqdm=False)[0].outputs.embedding) == 64


@torch.no_grad()
def reward_model(folder: Path, architecture: str, count: int) -> Callable[[str], torch.Tensor]:
    """Write a reward model of two layers; returns its scores of a text, as its card's formula says.

    Linear(H, H), ReLU, Linear(H, count) of the last hidden state of each position.
    """
    copied("qwen2", folder, architectures=[architecture])
    noise = torch.Generator().manual_seed(3)
    shapes = {
        "score.0.weight": (64, 64),
        "score.0.bias": (64,),
        "score.2.weight": (count, 64),
        "score.2.bias": (count,),
    }
    head = {name: 0.3 * torch.randn(shape, generator=noise) for name, shape in shapes.items()}
    save_file(load_file(folder / "model.safetensors") | head, folder / "model.safetensors", {"format": "pt"})
    body = transformers.Qwen2Model.from_pretrained(tiny.checkpoint("qwen2"), dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    @torch.no_grad()
    def scores(text: str) -> torch.Tensor:
        state_TH = body(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        hidden_TH = (state_TH @ head["score.0.weight"].T + head["score.0.bias"]).relu()
        return hidden_TH @ head["score.2.weight"].T + head["score.2.bias"]

    return scores


def test_a_reward_model_scores_every_position(tmp_path: Path) -> None:
    """Qwen2.5-Math-RM's one score, without activation; it was refused."""
    scores = reward_model(tmp_path / "c", "Qwen2ForRewardModel", 1)
    with LLM(str(tmp_path / "c"), max_num_batched_tokens=48, **SMALL) as llm:
        for text, output in zip(TEXTS, llm.reward(TEXTS, use_tqdm=False), strict=True):
            assert torch.allclose(output.outputs.data, scores(text), atol=2e-5)
        with pytest.raises(ParamsError, match="it gives scores"):
            llm.classify(TEXTS, use_tqdm=False)
    with LLM(str(tmp_path / "c"), runner="pooling", convert="embed", **SMALL) as llm:
        assert len(llm.embed("x", use_tqdm=False)[0].outputs.embedding) == 64
    with pytest.raises(ConfigError, match="generates no text"):
        LLM(str(tmp_path / "c"), runner="generate", **SMALL)


def test_a_process_reward_model_scores_the_ends_of_steps(tmp_path: Path) -> None:
    """Qwen2.5-Math-PRM's two probabilities at each `<extra_0>`; it was refused."""
    scores = reward_model(tmp_path / "c", "Qwen2ForProcessRewardModel", 2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "c")
    text = TEXTS[1]
    ids = tokenizer(text)["input_ids"]
    step = max(set(ids), key=ids.count)
    places = [place for place, token in enumerate(ids) if token == step]
    assert len(places) > 2
    with LLM(str(tmp_path / "c"), override_pooler_config={"step_tag_id": step}, **SMALL) as llm:
        (output,) = llm.reward([text], use_tqdm=False)
        assert torch.allclose(output.outputs.data, scores(text).softmax(-1)[places], atol=2e-5)
    pooler = registry.facts(registry.find("qwen2")).headed["Qwen2ForProcessRewardModel"]
    assert (pooler.token_method, pooler.step_id) == ("step", 151651)


def test_a_head_that_does_not_fit_is_named(tmp_path: Path) -> None:
    reward_model(tmp_path / "c", "Qwen2ForRewardModel", 2)
    with pytest.raises(ModelError, match=r"score\.2\.weight has the shape \(2, 64\)"):
        LLM(str(tmp_path / "c"), **SMALL)


def test_a_head_of_every_position(tmp_path: Path) -> None:
    folder = classifier("qwen2", tmp_path / "c", "Qwen2ForTokenClassification", **LABELS)
    with LLM(str(folder), **SMALL) as llm:
        (found,) = llm.encode(TEXTS[0], use_tqdm=False)
    wanted = logits(folder, TEXTS[:1], transformers.AutoModelForTokenClassification)
    torch.testing.assert_close(found.outputs.data[-1:], wanted.softmax(-1), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["Bert", "XLMRoberta"])
def test_an_encoders_head_of_every_position(tmp_path: Path, kind: str) -> None:
    folder = encoder(tmp_path / "c", f"{kind}ForTokenClassification", num_labels=5)
    with LLM(str(folder), **SMALL | {"max_model_len": 128}) as llm:
        (found,) = llm.encode(TEXTS[0], pooling_task="token_classify", use_tqdm=False)
    model = transformers.AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        wanted = model(torch.tensor([found.prompt_token_ids])).logits[0].softmax(-1)
    torch.testing.assert_close(found.outputs.data, wanted, atol=1e-5, rtol=1e-4)


# ---- rerankers by tokens ---------------------------------------------------------------------------------------------

TEMPLATE = (
    "{%- for message in messages -%}<{{ message.role }}>: {{ message.content }}\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}Answer:{%- endif -%}"
)


@pytest.fixture(scope="module")
def reranker() -> Iterator[LLM]:
    """As Qwen3-Reranker: a generating checkpoint whose tokens no and yes are the classes."""
    overrides = {
        "architectures": ["Qwen2ForSequenceClassification"],
        "classifier_from_token": ["n", "y"],
        "is_original_qwen3_reranker": True,
    }
    with LLM(str(tiny.checkpoint("qwen2")), hf_overrides=overrides, **SMALL) as made:
        yield made


def token_logits(texts: list[str], tokens: list[str]) -> torch.Tensor:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny.checkpoint("qwen2"))
    ids = tokenizer.convert_tokens_to_ids(tokens)
    return logits(tiny.checkpoint("qwen2"), texts, transformers.AutoModelForCausalLM)[:, ids]


def test_the_score_is_the_second_tokens_share(reranker: LLM) -> None:
    wanted = token_logits([TEXTS[2] + text for text in TEXTS], ["n", "y"]).softmax(-1)[:, 1]
    found = reranker.score(TEXTS[2], TEXTS, use_tqdm=False)
    assert [output.outputs.score for output in found] == pytest.approx(wanted.tolist(), abs=1e-5)


def test_a_template_makes_the_prompt_of_a_pair(reranker: LLM) -> None:
    (found,) = reranker.score("a cat", "a dog", chat_template=TEMPLATE, use_tqdm=False)
    (wanted,) = token_logits(["<query>: a cat<document>: a dogAnswer:"], ["n", "y"]).softmax(-1)[:, 1]
    assert found.outputs.score == pytest.approx(float(wanted), abs=1e-5)


def test_truncation_cuts_a_pairs_document(reranker: LLM) -> None:
    """The end of the prompt went, at which the score is read."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny.checkpoint("qwen2"))
    whole = tokenizer("<query>: a cat<document>: a dog in a red houseAnswer:")["input_ids"]
    asked: dict[str, Any] = {"chat_template": TEMPLATE, "use_tqdm": False}
    parts = {"content": [{"type": "text", "text": "a dog "}, {"type": "text", "text": "in a red house"}]}
    for keep in (len(whole), len(whole) - 3, len(whole) - 8):
        found = reranker.score(
            "a cat", "a dog in a red house", pooling_params=PoolingParams(truncate_prompt_tokens=keep), **asked
        )[0].prompt_token_ids
        assert len(found) <= keep
        text = tokenizer.decode(found)
        assert text.startswith("<query>: a cat<document>: a dog")
        assert text.endswith("Answer:")
        assert len(text) == len(tokenizer.decode(whole)) or keep < len(whole)
    with pytest.raises(ParamsError, match="query with its template"):
        reranker.score("a cat", "a dog", pooling_params=PoolingParams(truncate_prompt_tokens=12), **asked)
    cut = reranker.score("a cat", [parts], pooling_params=PoolingParams(truncate_prompt_tokens=len(whole) - 3), **asked)
    assert tokenizer.decode(cut[0].prompt_token_ids).endswith("Answer:")


@pytest.mark.parametrize(
    "document", ["dogs <|im_end|><|im_end|><|im_end|> sat", "a dog 😀", "😀😀 a", "a " * 40 + "😀"]
)
def test_a_document_is_cut_as_the_prompt_spells_it(reranker: LLM, document: str) -> None:
    """What spells a special token is letters there, and a character of several tokens goes as a whole."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny.checkpoint("qwen2"))
    asked: dict[str, Any] = {"chat_template": TEMPLATE, "use_tqdm": False}
    (whole,) = reranker.score("a cat", document, **asked)
    (empty,) = reranker.score("a cat", "", **asked)
    most, least = len(whole.prompt_token_ids), len(empty.prompt_token_ids)
    for keep in range(most - 1, least, -1):
        params = PoolingParams(truncate_prompt_tokens=keep)
        found = reranker.score("a cat", document, pooling_params=params, **asked)[0].prompt_token_ids
        # At most one character more than needed goes, and blanks next to it.
        assert keep - 6 <= len(found) <= keep
        head, _, rest = tokenizer.decode(found).partition("<document>: ")
        assert head == "<query>: a cat"
        assert rest.endswith("Answer:")
        assert document.startswith(rest.removesuffix("Answer:").rstrip("\n"))


def test_a_tokenizer_without_places_cuts_the_prompts_end(reranker: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its tokens stand is unknown, so that no document can be cut: the request was refused."""
    asked: dict[str, Any] = {"chat_template": TEMPLATE, "use_tqdm": False}
    (whole,) = reranker.score("a cat", "a dog in a red house", **asked)
    monkeypatch.setattr(type(reranker._inputs.tokenizer), "is_fast", False)
    keep = len(whole.prompt_token_ids) - 3
    cut = reranker.score(
        "a cat", "a dog in a red house", pooling_params=PoolingParams(truncate_prompt_tokens=keep), **asked
    )[0]
    assert list(cut.prompt_token_ids) == list(whole.prompt_token_ids)[:keep]


def test_qwen3_rerankers_prompt(reranker: LLM) -> None:
    """As its model card writes it."""
    text = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a '
        "web search query, retrieve relevant passages that answer the query\n<Query>: a cat\n<Document>: a dog"
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    (found,) = reranker.score("a cat", "a dog", chat_template="template_qwen3_reranker.jinja", use_tqdm=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny.checkpoint("qwen2"))
    assert found.prompt_token_ids == tokenizer(text)["input_ids"]


def test_tokens_without_post_processing() -> None:
    overrides = {
        "architectures": ["Qwen2ForSequenceClassification"],
        "classifier_from_token": ["a", "b", "c"],
        "method": "no_post_processing",
    }
    with LLM(str(tiny.checkpoint("qwen2")), hf_overrides=overrides, **SMALL) as llm:
        (found,) = llm.classify(TEXTS[0], use_tqdm=False)
    (wanted,) = token_logits(TEXTS[:1], ["a", "b", "c"]).softmax(-1)
    assert found.outputs.probs == pytest.approx(wanted.tolist(), abs=1e-5)


def test_an_image_and_texts_in_one_prompt() -> None:
    """Of a vision-language model, whose tokens are the classes."""
    overrides = {"classifier_from_token": ["n", "y"]}
    options = SMALL | {"max_model_len": 512, "limit_mm_per_prompt": {"image": 1}}
    with LLM(str(tiny.checkpoint("qwen2_vl")), hf_overrides=overrides, runner="pooling", **options) as llm:
        image = {"content": [{"type": "image", "image": tiny.picture(60, 60, 1)}]}
        found = [output.outputs.score for output in llm.score(image, TEXTS, use_tqdm=False)]
        other = {"content": [{"type": "image", "image": tiny.picture(60, 60, 2)}]}
        assert [output.outputs.score for output in llm.score(image, TEXTS, use_tqdm=False)] == pytest.approx(found)
        assert [output.outputs.score for output in llm.score(other, TEXTS, use_tqdm=False)] != pytest.approx(found)
    assert all(0 < score < 1 for score in found)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"classifier_from_token": ["no such token", "y"]}, "no token of this vocabulary"),
        ({"classifier_from_token": ["n", "y"], "method": "magic"}, "from_2_way_softmax"),
        ({"classifier_from_token": ["n"], "method": "from_2_way_softmax"}, "needs two tokens"),
        ({"classifier_from_token": "yes"}, "list of tokens"),
    ],
)
def test_wrong_tokens_are_named(overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(str(tiny.checkpoint("qwen2")), hf_overrides=overrides, **SMALL)


def test_a_generating_checkpoint_without_classes_is_refused(tmp_path: Path) -> None:
    folder = copied("qwen2", tmp_path / "c")
    with pytest.raises(Exception, match=r"lacks 1 weights, for example 'score\.weight'"):
        LLM(
            str(folder), convert="classify", hf_overrides={"architectures": ["Qwen2ForSequenceClassification"]}, **SMALL
        )
