"""Records the greedy answers of Molmo's published code to a folder of tests.reference.prepare.

    python record_molmo.py FOLDER CODE OUTPUTS.json

CODE holds the repository's config_molmo.py, image_preprocessing_molmo.py, modeling_molmo.py and preprocessing_molmo.py;
they run in an environment of their own with transformers 4.48 and einops. The code has the sizes of the real tower as
constants, which are replaced by those of the tiny checkpoint, and resizes images with TensorFlow, in whose place stands
torch's resizing, which the code has as a comment. The text is given as it is, without "User:" and "Assistant:". Each
answer is computed without a cache, in float32.
"""

from __future__ import annotations

import argparse
import json
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

PACKAGE = "published"
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
    package = types.ModuleType(PACKAGE)
    package.__path__ = [str(code)]
    sys.modules[PACKAGE] = package
    found = {}
    for name in MODULES:
        source = (code / f"{name}_molmo.py").read_text(encoding="utf-8")
        source = "\n".join(line for line in source.splitlines() if "register_for_auto_class" not in line)
        if name == "modeling":
            for real, tiny in constants(tower):
                assert real in source, real
                source = source.replace(real, tiny)
        full = f"{PACKAGE}.{name}_molmo"
        module = types.ModuleType(full)
        module.__package__ = PACKAGE
        sys.modules[full] = module
        exec(compile(source, full, "exec"), module.__dict__)
        found[name] = module
    # It is imported where it is used.
    sys.modules["tensorflow"] = stand_in()
    return found


def main() -> None:
    """Read the command line, ask the code, write the outputs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("code", type=Path)
    parser.add_argument("outputs", type=Path)
    options = parser.parse_args()

    import numpy as np
    import torch
    import transformers
    from PIL import Image
    from safetensors.torch import load_file

    checkpoint = options.folder / "checkpoint"
    raw = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    modules = load(options.code, raw["vision_config"])
    settings = {key: value for key, value in raw.items() if key not in ("vision_config", "torch_dtype", "auto_map")}
    model = modules["modeling"].MolmoForCausalLM(modules["config"].MolmoConfig(**settings)).eval()
    weights = {name: weight.float() for name, weight in load_file(checkpoint / "model.safetensors").items()}
    model.load_state_dict(weights)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(checkpoint / "tokenizer.json"))
    names = ("<im_patch>", "<im_col>", "<im_start>", "<im_end>")
    patch, column, start, end = (tokenizer.convert_tokens_to_ids(name) for name in names)
    pixels = json.loads((checkpoint / "preprocessor_config.json").read_text(encoding="utf-8"))
    kept = ("max_crops", "overlap_margins", "base_image_input_size", "image_token_length_w", "image_token_length_h")
    images = modules["image_preprocessing"].MolmoImageProcessor(**{name: pixels[name] for name in kept})

    found = {}
    for case in json.loads((options.folder / "cases.json").read_text(encoding="utf-8")):
        opened = [np.array(Image.open(options.folder / name).convert("RGB")) for name in case["images"]]
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
        ids = torch.tensor([prompt])
        seen = {name: torch.cat(values)[None] for name, values in parts.items()} if opened else {}
        tokens: list[int] = []
        logprobs: list[float] = []
        with torch.inference_mode():
            for _ in range(case["max_tokens"]):
                logits = model(input_ids=ids, use_cache=False, **seen).logits[0, -1].double().log_softmax(-1)
                tokens.append(int(logits.argmax()))
                logprobs.append(round(float(logits.max()), 6))
                ids = torch.cat([ids, torch.tensor([tokens[-1:]])], dim=1)
        found[case["name"]] = {"prompt_token_ids": prompt, "token_ids": tokens, "logprobs": logprobs}
        print(case["name"], tokens, flush=True)
    told = {"reference": "the published code of molmo", "transformers": transformers.__version__, "options": {}}
    options.outputs.write_text(json.dumps(told | {"cases": found}, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
