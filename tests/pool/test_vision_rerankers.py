"""Rerankers and embedders made of Qwen2-VL and Qwen3-VL: their scores and vectors equal transformers'."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from beheld import LLM, PoolingParams
from beheld.core.errors import ModelError, ParamsError
from tests import tiny
from tests.oracle import reference
from tests.pool import checkpoints
from tests.tiny_media import picture

SMALL: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 96}
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
SIZES = ((90, 60, 1), (60, 120, 2))
SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
DEFAULT = "Given a search query, retrieve relevant candidates that answer the query."


def side(text: str, *images: tuple[int, int, int]) -> dict[str, Any]:
    """A side of a pair: images, then a text."""
    parts: list[dict[str, Any]] = [{"type": "image_pil", "image_pil": picture(*image)} for image in images]
    return {"content": [*parts, *([{"type": "text", "text": text}] if text else [])]}


@torch.no_grad()
def made(family: str, text: str, images: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' last state and last logits of a prompt."""
    media = {"images": [images]} if images else {}
    inputs = reference.processor(family)(text=[text], return_tensors="pt", **media)
    found = reference.model(family)(**inputs, output_hidden_states=True)
    return found.hidden_states[-1][0, -1], found.logits[0, -1]


def judged(query: str, document: str, task: str = DEFAULT) -> str:
    """The prompt, as Qwen3-VL-Reranker's own code writes it."""
    return (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n<Instruct>: {task}<Query>:{query}\n"
        f"<Document>:{document}<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.fixture(scope="module")
def reranker() -> Iterator[LLM]:
    """As the model card starts it with vLLM."""
    overrides = {
        "architectures": ["Qwen3VLForSequenceClassification"],
        "classifier_from_token": ["n", "y"],
        "is_original_qwen3_reranker": True,
    }
    options = SMALL | {"chat_template": "template_qwen3_vl_reranker.jinja"}
    with LLM(str(tiny.checkpoint("qwen3_vl")), runner="pooling", hf_overrides=overrides, **options) as llm:
        yield llm


def share(logits: torch.Tensor) -> float:
    """The second token's probability among the two."""
    ids = reference.processor("qwen3_vl").tokenizer.convert_tokens_to_ids(["n", "y"])
    return float(logits[ids].softmax(-1)[1])


def test_qwen3_vl_reranker(reranker: LLM) -> None:
    documents = [side("a receipt", SIZES[0]), side("", SIZES[1]), "a dog on a chair", side("two", *SIZES)]
    written = [f"{IMAGE}a receipt", IMAGE, "a dog on a chair", f"{IMAGE}{IMAGE}two"]
    shown: list[list[Any]] = [[SIZES[0]], [SIZES[1]], [], [*SIZES]]
    for _ in range(2):
        outputs = reranker.score("what does it cost?", documents, use_tqdm=False)
        for output, document, images in zip(outputs, written, shown, strict=True):
            prompt = judged("what does it cost?", document)
            _, logits = made("qwen3_vl", prompt, [picture(*image) for image in images])
            assert output.outputs.score == pytest.approx(share(logits), abs=1e-5)
    # The instruction and the query come before all documents.
    assert outputs[2].num_cached_tokens >= 32


def test_a_query_with_an_image(reranker: LLM) -> None:
    (output,) = reranker.score([side("the same?", SIZES[0])], [side("", SIZES[1])], use_tqdm=False)
    _, logits = made("qwen3_vl", judged(f"{IMAGE}the same?", IMAGE), [picture(*image) for image in SIZES])
    assert output.outputs.score == pytest.approx(share(logits), abs=1e-5)


def test_a_pair_with_media_is_not_cut(reranker: LLM) -> None:
    """Also not the text of its document: an image takes more positions than its placeholder."""
    with pytest.raises(ParamsError, match="cannot cut a prompt with media"):
        reranker.score(
            [side("the same?", SIZES[0])],
            "a dog on a chair",
            pooling_params=PoolingParams(truncate_prompt_tokens=60),
            use_tqdm=False,
        )


def test_a_reranker_gives_no_vectors(reranker: LLM) -> None:
    with pytest.raises(ParamsError, match="it gives scores"):
        reranker.embed("x", use_tqdm=False)


@torch.no_grad()
def ranked(head: dict[str, torch.Tensor], text: str, images: list[Any]) -> float:
    """jina-reranker-m0's score of a prompt: its two layers at an added token 100, a bias and a sigmoid."""
    media = {"images": [images]} if images else {}
    inputs = dict(reference.processor("qwen2_vl")(text=[text], return_tensors="pt", **media))
    for name, last in (("input_ids", 100), ("attention_mask", 1), ("mm_token_type_ids", 0)):
        if name in inputs:
            inputs[name] = torch.cat([inputs[name], torch.tensor([[last]])], dim=1)
    state_H = reference.model("qwen2_vl")(**inputs, output_hidden_states=True).hidden_states[-1][0, -1]
    hidden_H = (head["score.0.weight"] @ state_H + head["score.0.bias"]).relu()
    return float((head["score.2.weight"] @ hidden_H + head["score.2.bias"] - 2.65).sigmoid())


def lay_jina(folder: Path) -> dict[str, torch.Tensor]:
    """Write a tiny jina-reranker-m0 into a new folder; returns the weights of its head."""
    checkpoints.copied("qwen2_vl", folder, architectures=["JinaVLForRanking"])
    width = reference.model("qwen2_vl").config.get_text_config().hidden_size
    noise = torch.Generator().manual_seed(4)
    shapes = {"score.0.weight": (width, width), "score.0.bias": (width,), "score.2.weight": (1, width)}
    head = {name: 0.3 * torch.randn(shape, generator=noise) for name, shape in shapes.items()}
    head["score.2.bias"] = torch.tensor([2.0])
    save_file(load_file(folder / "model.safetensors") | head, folder / "model.safetensors", {"format": "pt"})
    return head


def test_jina_reranker(tmp_path: Path) -> None:
    """Its prompts are made without a template of the user's; it was refused."""
    folder = tmp_path / "c"
    head = lay_jina(folder)
    documents = ["a dog on a chair", side("", SIZES[0]), side("a receipt", SIZES[1])]
    written = [("a dog on a chair", []), (IMAGE, [SIZES[0]]), (f"{IMAGE}a receipt", [SIZES[1]])]
    with LLM(str(folder), **SMALL) as llm:
        outputs = llm.score("what is it?", documents, use_tqdm=False)
        (shown,) = llm.score([side("", SIZES[1])], ["a red circle"], use_tqdm=False)
        (cut,) = llm.score(
            "what is it?",
            "a dog on a chair",
            pooling_params=PoolingParams(truncate_prompt_tokens=len(outputs[0].prompt_token_ids) - 2),
            use_tqdm=False,
        )
        (alone,) = llm.classify("a dog", use_tqdm=False)
        # Its last byte is the token, too.
        (ending,) = llm.classify("façade, ç", use_tqdm=False)
        ids = list(alone.prompt_token_ids)
        forms: list[Any] = [{"prompt_token_ids": form(known)} for form in (list, tuple) for known in (ids, ids[:-1])]
        same = llm.classify(forms, use_tqdm=False)
        with pytest.raises(ParamsError, match="it gives scores"):
            llm.embed("x", use_tqdm=False)
    for output, (document, images) in zip(outputs, written, strict=True):
        prompt = f"**Document**:\n{document}\n**Query**:\nwhat is it?"
        expected = ranked(head, prompt, [picture(*image) for image in images])
        assert output.outputs.score == pytest.approx(expected, abs=1e-5)
        assert 0.01 < expected < 0.99
    # The query stands behind the document, whose end is cut.
    kept, query = list(cut.prompt_token_ids), list(outputs[0].prompt_token_ids)[-12:]
    assert (len(kept), kept[-12:]) == (len(outputs[0].prompt_token_ids) - 2, query)
    prompt = f"**Document**:\na red circle\n**Query**:\n{IMAGE}"
    assert shown.outputs.score == pytest.approx(ranked(head, prompt, [picture(*SIZES[1])]), abs=1e-5)
    # The token is added to every prompt, as its own code does.
    assert float(alone.outputs.probs[0]) == pytest.approx(ranked(head, "a dog", []), abs=1e-5)
    assert float(ending.outputs.probs[0]) == pytest.approx(ranked(head, "façade, ç", []), abs=1e-5)
    assert [list(output.prompt_token_ids) for output in same] == [ids] * 4


# As their own code writes them: Qwen3-VL-Embedding, and GME, which pools the state of a last token.
FORMS = {
    "qwen3_vl": "<|im_start|>system\nRepresent the user's input.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
    "<|im_start|>assistant\n",
    "qwen2_vl": "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
    "<|im_start|>assistant\n<|endoftext|>",
}


@pytest.mark.parametrize("family", FORMS)
def test_embedders(family: str) -> None:
    """Texts, images and both in one batch; an image twice, whose text differs."""
    asked = [("a cat", []), (IMAGE, [SIZES[0]]), (f"{IMAGE}a cat", [SIZES[0]]), (f"{IMAGE}{IMAGE}", [*SIZES])]
    prompts: list[Any] = []
    wanted = []
    for content, sizes in asked:
        text, images = FORMS[family].format(content), [picture(*size) for size in sizes]
        prompts.append({"prompt": text, **({"multi_modal_data": {"image": images}} if images else {})})
        wanted.append(F.normalize(made(family, text, images)[0], dim=0))
    with LLM(str(tiny.checkpoint(family)), runner="pooling", **SMALL) as llm:
        found = torch.tensor([output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False)])
    torch.testing.assert_close(found, torch.stack(wanted), atol=2e-5, rtol=1e-4)


def test_classes_of_a_model_that_transformers_only_generates_with(tmp_path: Path) -> None:
    """Qwen2.5-VL's layer of classes, which vLLM reads beside the model's weights."""
    folder = checkpoints.copied("qwen2_5_vl", tmp_path / "classes", id2label={"0": "no", "1": "yes"})
    file = folder / "model.safetensors"
    width = reference.model("qwen2_5_vl").config.get_text_config().hidden_size
    layer = torch.randn(2, width, generator=torch.Generator().manual_seed(3))
    save_file({**load_file(file), "score.weight": layer}, file, metadata={"format": "pt"})
    with LLM(str(folder), runner="pooling", convert="classify", **SMALL) as llm:
        prompt = {"prompt": f"{IMAGE}two", "multi_modal_data": {"image": picture(*SIZES[0])}}
        (output,) = llm.classify([prompt], use_tqdm=False)
    state, _ = made("qwen2_5_vl", f"{IMAGE}two", [picture(*SIZES[0])])
    torch.testing.assert_close(torch.tensor(output.outputs.probs), (layer @ state).softmax(-1), atol=1e-5, rtol=1e-4)
    save_file({**load_file(file), "score.weight": layer[:1]}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="2 classes"):
        LLM(str(folder), runner="pooling", convert="classify", **SMALL)
