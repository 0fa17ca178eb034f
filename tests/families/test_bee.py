"""Bee: every image is cut, also among others; settings of other layouts are refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from beheld import LLM, SamplingParams
from beheld.core.errors import ModelError
from tests import tiny

FAMILY = "bee"
PROMPT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n{}What is it?<|im_end|><|im_start|>assistant\n<think>\n"
)


def engine(path: Path, **options: Any) -> LLM:
    return LLM(model=str(path), dtype="float32", max_model_len=1024, trust_remote_code=True, **options)


def test_an_image_among_others_has_the_embeddings_of_a_lone_one() -> None:
    one, two = Image.new("RGB", (84, 42), (200, 30, 30)), Image.new("RGB", (42, 126), (30, 200, 30))
    with engine(tiny.checkpoint(FAMILY), limit_mm_per_prompt={"image": 2}) as llm:
        image = llm.get_tokenizer().convert_tokens_to_ids("<image>")

        def embeddings(*images: Image.Image) -> int:
            request: dict[str, Any] = {"prompt": PROMPT.format("<image>\n" * len(images))}
            request["multi_modal_data"] = {"image": list(images)}
            (output,) = llm.generate([request], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
            return list(output.prompt_token_ids).count(image)

        lone = embeddings(one)
        # An overview of 3 x 3 patches, then 3 rows of 6 patches and a newline.
        assert lone == 9 + 3 * 7
        assert embeddings(one, two) == lone + embeddings(two)


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("vision_aspect_ratio", "pad"),
        ("vision_feature_select_strategy", "default"),
        ("vision_feature_layer", [-1, -2]),
        ("multimodal_projector_bias", False),
    ],
)
def test_another_layout_is_refused_by_name(tmp_path: Path, entry: str, value: Any) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(tiny.checkpoint(FAMILY), folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {entry: value}), encoding="utf-8")
    with pytest.raises(ModelError, match=entry):
        engine(folder)


def test_another_language_model_is_refused_by_name(tmp_path: Path) -> None:
    """transformers' class would make it, and leave Qwen3's norms out."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(tiny.checkpoint(FAMILY), folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["text_config"]["model_type"] = "llama"
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelError, match="text_config of the model type 'llama'"):
        engine(folder)
