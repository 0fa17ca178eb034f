"""Records the greedy answers of Phi-3-vision's published code to a folder of tests.reference.prepare.

    python record_phi3_v.py FOLDER CODE OUTPUTS.json

CODE holds the repository's configuration_phi3_v.py, image_embedding_phi3_v.py, image_processing_phi3_v.py,
modeling_phi3_v.py and processing_phi3_v.py; they run in an environment of their own with transformers 4.48. The code
has the sizes of the real tower as constants, which are replaced by those of the tiny checkpoint. Each answer is
computed without a cache, in float32. It gives images negative ids; OUTPUTS.json has the placeholder's. "vector" is what
VLM2Vec, which has this code, gives of a prompt: the last hidden state of its last token, of length 1.
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import published


def constants(side: int, width: int) -> list[tuple[str, str]]:
    """Texts of the code with sizes of the real tower, and what stands for them with tiles of `side` pixels."""
    patches = side // 14
    lines = patches // 2
    return [
        ("24 * 24", f"{patches} * {patches}"),
        ("C == 1024", f"C == {width}"),
        ("* 144 +", f"* {lines * lines} +"),
        (") * 12)", f") * {lines})"),
        ("* 336)", f"* {side})"),
        ("/ 336)", f"/ {side})"),
        ("// 336", f"// {side}"),
        ("== 336", f"== {side}"),
        ("(336, 336)", f"({side}, {side})"),
        ("=336", f"={side}"),
        (" 336, w", f" {side}, w"),
        (" 336).permute", f" {side}).permute"),
        ("3, 336,", f"3, {side},"),
        (" 336).contiguous", f" {side}).contiguous"),
    ]


def load(code: Path, tower: dict[str, Any]) -> dict[str, types.ModuleType]:
    """Import the code's modules with the checkpoint's sizes."""

    def edited(name: str, source: str) -> str:
        if name.startswith("image_"):
            for real, tiny in constants(tower["image_size"], tower["hidden_size"]):
                source = source.replace(real, tiny)
        return source

    names = ("configuration", "image_embedding", "image_processing", "processing", "modeling")
    found = published.load_code(code, "phi3_v", names, edited)
    from transformers import CLIPVisionConfig

    found["image_embedding"].CLIP_VIT_LARGE_PATCH14_336_CONFIG = CLIPVisionConfig(
        hidden_act="quick_gelu", patch_size=14, projection_dim=768, **tower
    )
    return found


def answers(folder: Path, code: Path) -> published.Answer:
    """Return what answers one case; see published.record."""
    import torch
    from PIL import Image

    raw, pixels, weights, tokenizer = published.read_checkpoint(folder)
    modules = load(code, raw["vision_config"])
    config = modules["configuration"].Phi3VConfig(**published.settings(raw))
    config._attn_implementation = "eager"
    model = modules["modeling"].Phi3VForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected, unexpected
    assert all(".wte." in name or "position_ids" in name for name in missing), missing
    names = ("num_crops", "image_mean", "image_std", "num_img_tokens")
    images = modules["image_processing"].Phi3VImageProcessor(**{name: pixels[name] for name in names})
    convert = modules["processing"].Phi3VProcessor._convert_images_texts_to_inputs
    shell = types.SimpleNamespace(tokenizer=tokenizer)
    embeds: list[Any] = []
    tower = model.model.vision_embed_tokens
    tower.img_projection.register_forward_hook(lambda part, given, made: embeds.append(made))

    def answer(case: dict[str, Any]) -> dict[str, Any]:
        prompt = case["prompt"]
        for number in range(1, 1 + len(case["images"])):
            prompt = prompt.replace("<|image|>", f"<|image_{number}|>", 1)
        opened = [Image.open(folder / name) for name in case["images"]]
        media = images(opened, return_tensors="pt") if opened else {}
        made = convert(shell, media, prompt, return_tensors="pt")
        ids = made["input_ids"]
        seen = {name: [made[name]] for name in ("pixel_values", "image_sizes")} if opened else {"image_sizes": [None]}
        prompt_ids = torch.where(ids[0] < 0, raw["image_token_id"], ids[0]).tolist()
        embeds.clear()
        with torch.inference_mode():
            states = model(input_ids=ids, use_cache=False, output_hidden_states=True, **seen).hidden_states[-1][0, -1]
        told = {"vector": [round(value, 6) for value in torch.nn.functional.normalize(states, dim=0).tolist()]}
        if opened:
            sizes = (made["image_sizes"] // raw["vision_config"]["image_size"]).prod(1)
            tiles = [image[: 1 + int(size)] for image, size in zip(made["pixel_values"], sizes, strict=True)]
            told |= published.seen(tiles, [made.flatten(0, -2) for made in embeds])
        return {"prompt_token_ids": prompt_ids, **published.greedy(model, ids, case["max_tokens"], seen), **told}

    return answer


if __name__ == "__main__":
    published.record("phi3_v", answers, __doc__)
