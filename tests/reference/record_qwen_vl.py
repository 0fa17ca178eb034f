"""Records the greedy answers of Qwen-VL's published code to a folder of tests.reference.prepare.

    python record_qwen_vl.py FOLDER CODE OUTPUTS.json

CODE holds the repository's configuration_qwen.py, modeling_qwen.py, qwen_generation_utils.py, tokenization_qwen.py and
visual.py; they run in an environment of their own with transformers 4.48, tiktoken, einops and matplotlib. The code
reads images from paths, which the prompt spells between `<img>` and `</img>`; OUTPUTS.json has `<imgpad>` there. Each
answer is computed without a cache, in float32. A font must lie in the current
folder as SimSun.ttf: the code loads one to draw boxes with.
"""

from __future__ import annotations

import json
import os
import types
from pathlib import Path
from typing import Any

import published


def load(code: Path, num_queries: int) -> dict[str, types.ModuleType]:
    """Import the code's modules; an image has as many tokens as there are queries."""

    def edited(name: str, source: str) -> str:
        if name == "tokenization":
            assert "IMG_TOKEN_SPAN = 256" in source
            source = source.replace("IMG_TOKEN_SPAN = 256", f"IMG_TOKEN_SPAN = {num_queries}")
        return source

    return published.load_code(code, "qwen", ("configuration", "tokenization", "modeling"), edited)


def answers(folder: Path, code: Path) -> published.Answer:
    """Return what answers one case; see published.record."""
    import torch

    checkpoint = folder / "checkpoint"
    raw = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    modules = load(code, raw["visual"]["n_queries"])
    config = modules["configuration"].QWenConfig(**published.settings(raw) | {"bf16": False, "fp32": True})
    model = modules["modeling"].QWenLMHeadModel(config).eval()
    model.load_state_dict(published.read_weights(folder))
    tokenizer = modules["tokenization"].QWenTokenizer(str(checkpoint / "qwen.tiktoken"))
    given: list[Any] = []
    model.transformer.visual.register_forward_hook(lambda part, pixels, made: given.append((*pixels, made)))
    # Paths are short: they must fit into the tokens of an image.
    os.chdir(folder)

    def answer(case: dict[str, Any]) -> dict[str, Any]:
        prompt = case["prompt"]
        for number, name in enumerate(case["images"]):
            link = Path(f"i{number}")
            link.unlink(missing_ok=True)
            link.symlink_to(name)
            prompt = prompt.replace("<img></img>", f"<img>{link}</img>", 1)
        ids = tokenizer(prompt)["input_ids"]
        given.clear()
        found = published.greedy(model, torch.tensor([ids]), case["max_tokens"], {})
        if case["images"]:
            pixels, embeds = given[0]
            found |= published.seen([pixels], [embeds.flatten(0, -2)])
        shown, inside = [], False
        for token in ids:
            inside = inside and token != tokenizer.img_end_id
            shown.append(tokenizer.img_pad_id if inside else token)
            inside = inside or token == tokenizer.img_start_id
        return {"prompt_token_ids": shown, **found}

    return answer


if __name__ == "__main__":
    published.record("qwen_vl", answers, __doc__)
