"""CLIP and SigLIP: vectors of texts and images equal transformers' features."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers

from beheld import LLM
from beheld.core.errors import ParamsError, PromptError, PromptTooLongError, UserError
from tests.pool.checkpoints import drawn, write, write_letters
from tests.server.running import Running, data_url
from tests.tiny_media import picture

TEXTS = ["a small red circle", "hello", "the cat sleeps on the chair, and the dog does not", "hello", "Hi"]
IMAGES = ((90, 60, 1), (60, 120, 2), (56, 56, 3))
SMALL: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 8}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2}
TEXT = {"hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
PIXELS = {"do_normalize": True, "do_rescale": True, "do_resize": True, "image_mean": [0.5] * 3, "image_std": [0.25] * 3}
CLIP_PIXELS = PIXELS | {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 56},
    "crop_size": {"height": 56, "width": 56},
    "do_center_crop": True,
    "do_convert_rgb": True,
}


class Form(NamedTuple):
    """A family: its class, its configuration's parts, and its processor.

    Attributes:
        width: numbers in a vector; for SigLIP 2 more than a token's embedding has.
        fills: whether texts are filled up to the longest.
    """

    name: str
    text: dict[str, Any]
    vision: dict[str, Any]
    top: dict[str, Any]
    pixels: dict[str, Any]
    width: int
    fills: bool


FAMILIES = {
    "clip": Form(
        "CLIP",
        {"max_position_embeddings": 60, "projection_dim": 40, "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0},
        {"image_size": 56, "patch_size": 14, "projection_dim": 40},
        {"projection_dim": 40},
        CLIP_PIXELS,
        40,
        False,
    ),
    "siglip": Form(
        "Siglip",
        {"max_position_embeddings": 64},
        {"image_size": 56, "patch_size": 14} | {"hidden_size": 48, "num_attention_heads": 4},
        {},
        PIXELS | {"image_processor_type": "SiglipImageProcessor", "size": {"height": 56, "width": 56}},
        48,
        True,
    ),
    "siglip2": Form(
        "Siglip2",
        {"max_position_embeddings": 64, "projection_size": 64},
        {"num_patches": 16, "patch_size": 16, "hidden_size": 64},
        {},
        PIXELS | {"image_processor_type": "Siglip2ImageProcessor", "patch_size": 16, "max_num_patches": 256},
        64,
        True,
    ),
}


class Made(NamedTuple):
    """A checkpoint, and transformers' features of the texts and images, of length 1."""

    form: Form
    folder: Path
    texts: torch.Tensor
    images: torch.Tensor


def checkpoint(form: Form, folder: Path) -> Path:
    """A checkpoint as transformers writes one; its tokenizer knows letters, its weights are drawn."""
    folder.mkdir()
    tokens = write_letters(folder, False)
    kind = getattr(transformers, f"{form.name}Model")
    text = TEXT | {"vocab_size": tokens + 8} | form.text
    config = kind.config_class(
        architectures=[f"{form.name}Model"], text_config=text, vision_config=TOWER | form.vision, **form.top
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = kind._from_config(config, dtype=torch.float32)
        drawn(model)
    model.save_pretrained(folder)
    write(folder / "preprocessor_config.json", form.pixels | {"processor_class": f"{form.name}Processor"})
    return folder


@pytest.fixture(scope="module", params=FAMILIES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    form = FAMILIES[request.param]
    folder = checkpoint(form, tmp_path_factory.mktemp("contrastive") / request.param)
    processor = transformers.AutoProcessor.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    # The tiny tokenizer cuts texts unless it is told not to.
    padding = {"padding": "max_length", "max_length": 64} if form.fills else {"padding": False}
    with torch.no_grad():
        texts = [
            model.get_text_features(
                processor.tokenizer(text, truncation=False, return_tensors="pt", **padding)["input_ids"]
            )
            for text in TEXTS
        ]
        images = [
            model.get_image_features(**processor(images=[picture(*image)], return_tensors="pt")) for image in IMAGES
        ]
    vectors = [torch.cat([found.pooler_output for found in side]) for side in (texts, images)]
    assert vectors[0].shape == (len(TEXTS), form.width)
    return Made(form, folder, *(F.normalize(side, dim=-1) for side in vectors))


@pytest.fixture(scope="module")
def llm(made: Made) -> Iterator[LLM]:
    with LLM(str(made.folder), **SMALL) as llm:
        yield llm


def image(number: int, text: str = "") -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": picture(*IMAGES[number])}}


def test_vectors_of_texts_and_images_in_one_batch(made: Made, llm: LLM) -> None:
    prompts: list[Any] = [*TEXTS, *map(image, range(3)), image(0, "<image>")]
    for _ in range(2):
        found = torch.tensor([output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False)])
        wanted = torch.cat([made.texts, made.images, made.images[:1]])
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_scores_of_a_text_and_images(made: Made, llm: LLM) -> None:
    images = [{"content": [{"type": "image_pil", "image_pil": picture(*each)}]} for each in IMAGES]
    found = [output.outputs.score for output in llm.score(TEXTS[0], images, use_tqdm=False)]
    assert found == pytest.approx((made.images @ made.texts[0]).tolist(), abs=1e-5)


def test_what_is_wrong_is_named(made: Made, llm: LLM) -> None:
    with pytest.raises(PromptError, match="none of both"):
        llm.embed(image(0, "a cat"), use_tqdm=False)
    with pytest.raises(UserError, match="at most 1"):
        llm.embed({"prompt": "", "multi_modal_data": {"image": [picture(56, 56, 1)] * 2}}, use_tqdm=False)
    with pytest.raises(PromptTooLongError, match="maximum context length is 6"):
        llm.embed("a " * 100, use_tqdm=False)
    with pytest.raises(ParamsError, match="it gives vectors"):
        llm.encode("a", pooling_task="token_embed", use_tqdm=False)
    (cut,) = llm.embed("a " * 100, truncate_prompt_tokens=-1, use_tqdm=False)
    assert cut.prompt_token_ids[-1] == 3


def test_on_a_server(made: Made) -> None:
    served = Running(made.folder, {"dtype": "float32", "max_num_seqs": 8, "disable_log_stats": True})
    try:
        part = {"type": "image_url", "image_url": {"url": data_url(*IMAGES[0][:2], seed=IMAGES[0][2])}}
        shown = served.post("/v1/embeddings", {"messages": [{"role": "user", "content": [part]}]}).json()
        both = [part, {"type": "text", "text": "a cat"}]
        refused = served.post("/v1/embeddings", {"messages": [{"role": "user", "content": both}]})
        written = served.post("/v1/embeddings", {"input": TEXTS}).json()
        # vLLM's clients say of such models what is so here anyway.
        filled = served.post("/v1/embeddings", {"input": TEXTS, "padding": "max_length"})
        ranks = served.post("/rerank", {"query": {"content": [part]}, "documents": TEXTS}).json()
    finally:
        served.close()
    assert shown["data"][0]["embedding"] == pytest.approx(made.images[0].tolist(), abs=1e-5)
    if not made.form.fills:
        # Its texts are read as they are.
        assert (filled.status_code, filled.json()["error"]["param"]) == (400, "padding")
    else:
        assert filled.json()["data"] == written["data"]
    texts = torch.tensor([entry["embedding"] for entry in written["data"]])
    torch.testing.assert_close(texts, made.texts, atol=1e-5, rtol=1e-4)
    assert (refused.status_code, "none of both" in refused.json()["error"]["message"]) == (400, True)
    best = int((made.texts @ made.images[0]).argmax())
    assert ranks["results"][0]["index"] == best
