"""Records the greedy answers of Phi-3-vision's published code to a folder of tests.reference.prepare.

    python record_phi3_v.py FOLDER CODE OUTPUTS.json

CODE holds the repository's configuration_phi3_v.py, image_embedding_phi3_v.py, image_processing_phi3_v.py,
modeling_phi3_v.py and processing_phi3_v.py; they run in an environment of their own with transformers 4.48. The code
has the sizes of the real tower as constants, which are replaced by those of the tiny checkpoint. Each answer is
computed without a cache, in float32. It gives images negative ids; OUTPUTS.json has the placeholder's.
"""

from __future__ import annotations

import argparse
import json
import sys
import types
from pathlib import Path
from typing import Any

PACKAGE = "published"


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


def load(code: Path, config: dict[str, Any]) -> dict[str, types.ModuleType]:
    """Import the code's modules with the checkpoint's sizes."""
    tower = config["vision_config"]
    package = types.ModuleType(PACKAGE)
    package.__path__ = [str(code)]
    sys.modules[PACKAGE] = package
    found = {}
    for name in ("configuration", "image_embedding", "image_processing", "processing", "modeling"):
        source = (code / f"{name}_phi3_v.py").read_text(encoding="utf-8")
        if name.startswith("image_"):
            for real, tiny in constants(tower["image_size"], tower["hidden_size"]):
                source = source.replace(real, tiny)
        full = f"{PACKAGE}.{name}_phi3_v"
        module = types.ModuleType(full)
        module.__package__ = PACKAGE
        sys.modules[full] = module
        exec(compile(source, full, "exec"), module.__dict__)
        found[name] = module
        if name == "image_embedding":
            from transformers import CLIPVisionConfig

            module.CLIP_VIT_LARGE_PATCH14_336_CONFIG = CLIPVisionConfig(
                hidden_act="quick_gelu", patch_size=14, projection_dim=768, **tower
            )
    return found


def main() -> None:
    """Read the command line, ask the code, write the outputs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("code", type=Path)
    parser.add_argument("outputs", type=Path)
    options = parser.parse_args()

    import torch
    import transformers
    from PIL import Image
    from safetensors.torch import load_file

    checkpoint = options.folder / "checkpoint"
    raw = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    modules = load(options.code, raw)
    settings = {key: value for key, value in raw.items() if key not in ("vision_config", "torch_dtype", "auto_map")}
    config = modules["configuration"].Phi3VConfig(**settings)
    config._attn_implementation = "eager"
    model = modules["modeling"].Phi3VForCausalLM(config).eval()
    weights = {name: weight.float() for name, weight in load_file(checkpoint / "model.safetensors").items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected, unexpected
    assert all(".wte." in name or "position_ids" in name for name in missing), missing
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(checkpoint / "tokenizer.json"))
    pixels = json.loads((checkpoint / "preprocessor_config.json").read_text(encoding="utf-8"))
    names = ("num_crops", "image_mean", "image_std", "num_img_tokens")
    images = modules["image_processing"].Phi3VImageProcessor(**{name: pixels[name] for name in names})
    convert = modules["processing"].Phi3VProcessor._convert_images_texts_to_inputs
    shell = types.SimpleNamespace(tokenizer=tokenizer)

    found = {}
    for case in json.loads((options.folder / "cases.json").read_text(encoding="utf-8")):
        prompt = case["prompt"]
        for number in range(1, 1 + len(case["images"])):
            prompt = prompt.replace("<|image|>", f"<|image_{number}|>", 1)
        opened = [Image.open(options.folder / name) for name in case["images"]]
        media = images(opened, return_tensors="pt") if opened else {}
        made = convert(shell, media, prompt, return_tensors="pt")
        ids = made["input_ids"]
        seen = {name: [made[name]] for name in ("pixel_values", "image_sizes")} if opened else {"image_sizes": [None]}
        tokens: list[int] = []
        logprobs: list[float] = []
        with torch.inference_mode():
            for _ in range(case["max_tokens"]):
                logits = model(input_ids=ids, use_cache=False, **seen).logits[0, -1].double().log_softmax(-1)
                tokens.append(int(logits.argmax()))
                logprobs.append(round(float(logits.max()), 6))
                ids = torch.cat([ids, torch.tensor([tokens[-1:]])], dim=1)
        prompt_ids = made["input_ids"][0]
        found[case["name"]] = {
            "prompt_token_ids": torch.where(prompt_ids < 0, raw["image_token_id"], prompt_ids).tolist(),
            "token_ids": tokens,
            "logprobs": logprobs,
        }
        print(case["name"], tokens, flush=True)
    told = {"reference": "the published code of phi3_v", "transformers": transformers.__version__, "options": {}}
    options.outputs.write_text(json.dumps(told | {"cases": found}, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
