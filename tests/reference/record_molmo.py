"""Records the greedy answers of Molmo's published code to a folder of tests.reference.prepare.

    python record_molmo.py FOLDER CODE OUTPUTS.json

CODE holds the repository's config_molmo.py, image_preprocessing_molmo.py, modeling_molmo.py and preprocessing_molmo.py;
they run in an environment of their own with transformers 4.48 and einops. The code has the sizes of the real tower as
constants, which are replaced by those of the tiny checkpoint, and resizes images with TensorFlow, in whose place stands
torch's resizing, which the code has as a comment. The text is given as it is, without "User:" and "Assistant:". Each
answer is computed without a cache, in float32.
"""

from __future__ import annotations

import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import published

MODULES = ("config", "image_preprocessing", "preprocessing", "modeling")


def constants(tower: dict[str, Any]) -> list[tuple[str, str]]:
    """Texts of the code with sizes of the real tower, and what stands for them."""
    heads, width = tower["num_attention_heads"], tower["hidden_size"]
    return [
        ("image_default_input_size=(336, 336)", f"image_default_input_size=({tower['image_size']},) * 2"),
        ("image_emb_dim=1024", f"image_emb_dim={width}"),
        ("image_num_heads=16", f"image_num_heads={heads}"),
        ("image_num_key_value_heads=16", f"image_num_key_value_heads={heads}"),
        ("image_num_layers=23", f"image_num_layers={tower['num_hidden_layers']}"),
        ("image_head_dim=64", f"image_head_dim={width // heads}"),
        ("image_mlp_dim=4096", f"image_mlp_dim={tower['intermediate_size']}"),
        ("image_num_pos=577", f"image_num_pos={(tower['image_size'] // 14) ** 2 + 1}"),
    ]


def resized(image: Any, size: list[int], **options: Any) -> Any:
    """Resize as torchvision's Resize does a tensor; for tf.image.resize."""
    import numpy as np
    import torch

    pixels = torch.from_numpy(image).permute(2, 0, 1)[None]
    made = torch.nn.functional.interpolate(pixels, tuple(size), mode="bilinear", antialias=True)
    return np.ascontiguousarray(made[0].permute(1, 2, 0).numpy())


class Clipped:
    """An array with the method that the code calls on TensorFlow's."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def numpy(self) -> Any:
        """Return the array."""
        return self.array


def stand_in() -> types.ModuleType:
    """Return a module with what the code takes of TensorFlow."""
    import numpy as np

    module = types.ModuleType("tensorflow")
    module.__spec__ = ModuleSpec("tensorflow", None)
    module.float32 = np.float32
    module.Tensor = module.Variable = Clipped
    module.constant = lambda array: array
    module.clip_by_value = lambda array, low, high: Clipped(np.clip(array, low, high))
    module.image = types.SimpleNamespace(
        convert_image_dtype=lambda array, dtype: array.astype(dtype) / np.float32(255),
        resize=resized,
        ResizeMethod=types.SimpleNamespace(BILINEAR="bilinear"),
    )
    return module


def load(code: Path, tower: dict[str, Any]) -> dict[str, types.ModuleType]:
    """Import the code's modules with the checkpoint's sizes."""

    def edited(name: str, source: str) -> str:
        source = "\n".join(line for line in source.splitlines() if "register_for_auto_class" not in line)
        if name == "modeling":
            for real, tiny in constants(tower):
                assert real in source, real
                source = source.replace(real, tiny)
        return source

    found = published.load_code(code, "molmo", MODULES, edited)
    # It is imported where it is used.
    sys.modules["tensorflow"] = stand_in()
    return found


def answers(folder: Path, code: Path) -> published.Answer:
    """Return what answers one case; see published.record."""
    import numpy as np
    import torch
    from PIL import Image

    raw, pixels, weights, tokenizer = published.read_checkpoint(folder)
    modules = load(code, raw["vision_config"])
    model = modules["modeling"].MolmoForCausalLM(modules["config"].MolmoConfig(**published.settings(raw))).eval()
    model.load_state_dict(weights)
    names = ("<im_patch>", "<im_col>", "<im_start>", "<im_end>")
    patch, column, start, end = (tokenizer.convert_tokens_to_ids(name) for name in names)
    kept = ("max_crops", "overlap_margins", "base_image_input_size", "image_token_length_w", "image_token_length_h")
    images = modules["image_preprocessing"].MolmoImageProcessor(**{name: pixels[name] for name in kept})

    def answer(case: dict[str, Any]) -> dict[str, Any]:
        opened = [np.array(Image.open(folder / name).convert("RGB")) for name in case["images"]]
        # As preprocessing_molmo.MolmoProcessor.process does it for a text without its own words around it. Of several
        # images it would add all to the places of the first, so each is prepared alone, and its places are moved.
        prompt = [tokenizer.convert_tokens_to_ids("<|endoftext|>")]
        parts: dict[str, list[Any]] = {"images": [], "image_masks": [], "image_input_idx": []}
        for image in opened:
            made = images.multimodal_preprocess(
                images=[image],
                tokens=np.zeros(0, dtype=np.int32),
                image_idx=[-1],
                sequence_length=1536,
                image_patch_token_id=patch,
                image_col_token_id=column,
                image_start_token_id=start,
                image_end_token_id=end,
            )
            places = made["image_input_idx"]
            made["image_input_idx"] = np.where(places < 0, places, places + len(prompt))
            prompt += made["input_ids"].tolist()
            for name, values in parts.items():
                values.append(torch.from_numpy(made[name]))
        prompt += tokenizer.encode(" " + case["prompt"], add_special_tokens=False)
        seen = {name: torch.cat(values)[None] for name, values in parts.items()} if opened else {}
        found = published.greedy(model, torch.tensor([prompt]), case["max_tokens"], seen)
        if opened:
            with torch.inference_mode():
                features, _ = model.model.vision_backbone(seen["images"], seen["image_masks"])
            places = seen["image_input_idx"].flatten()
            order = places.argsort(stable=True)[int((places < 0).sum()) :]
            # The code adds them to the embeddings of their token.
            token = model.model.transformer.wte(torch.tensor(patch))
            found |= published.seen(parts["images"], [token + features.flatten(0, -2)[order]])
        return {"prompt_token_ids": prompt, **found}

    return answer


if __name__ == "__main__":
    published.record("molmo", answers, __doc__)
