"""Records the greedy answers of DeepSeek-OCR's published code to a folder of tests.reference.prepare.

    python record_deepseek_ocr.py FOLDER CODE OUTPUTS.json

CODE holds checkouts of github.com/deepseek-ai/DeepSeek-OCR, for the towers and the images, and of
github.com/deepseek-ai/DeepSeek-VL2, for the text, which is the same; they run in an environment of their own with
transformers 4.46, timm, einops and easydict. The code has sizes as constants, which are replaced by those of the tiny
checkpoint. Each answer is computed without a cache, in float32.
"""

from __future__ import annotations

import json
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import published
import record_deepseek_vl_v2 as text_code

_INNER = "DeepSeek-OCR/DeepSeek-OCR-master/DeepSeek-OCR-vllm"


def edited(code: Path, name: str, changes: list[tuple[str, str]]) -> Any:
    """Run one file of the code with other constants."""
    source = (code / _INNER / f"{name}.py").read_text(encoding="utf-8")
    for real, tiny in changes:
        assert real in source, real
        source = source.replace(real, tiny)
    module = types.ModuleType(name.replace("/", "."))
    exec(compile(source, name, "exec"), module.__dict__)
    return module


def towers(code: Path, vision: dict[str, Any]) -> tuple[Any, Any]:
    """Make SAM and CLIP of the checkpoint's sizes."""
    import torch
    from easydict import EasyDict

    own, clip = (vision["width"][name] for name in ("sam_vit_b", "clip-l-14-224"))
    inner, (middle, last) = own["output_channels"], own["downsample_channels"]
    text_code.stand_in("flash_attn", flash_attn_qkvpacked_func=None, flash_attn_func=None)
    convolutions = [("(256, 512,", f"({inner}, {middle},"), ("(512, 1024,", f"({middle}, {last},")]
    sam = edited(code, "deepencoder/sam_vary_sdpa", convolutions).ImageEncoderViT(
        depth=own["layers"],
        embed_dim=own["width"],
        img_size=vision["image_size"],
        mlp_ratio=4,
        norm_layer=partial(torch.nn.LayerNorm, eps=1e-6),
        num_heads=own["heads"],
        patch_size=16,
        qkv_bias=True,
        use_rel_pos=True,
        global_attn_indexes=own["global_attn_indexes"],
        window_size=14,
        out_chans=inner,
    )
    module = edited(code, "deepencoder/clip_sdpa", [("@torch.jit.script\n", "")])
    sizes = {
        "num_layers": clip["layers"],
        "hidden_size": clip["width"],
        "num_heads": clip["heads"],
        "num_attention_heads": clip["heads"],
        "ffn_hidden_size": 4 * clip["width"],
        "image_size": clip["image_size"],
        "patch_size": clip["patch_size"],
    }
    return sam, module.VitModel(EasyDict(dict(module.vit_model_cfg) | sizes))


def answers(folder: Path, code: Path) -> published.Answer:
    """Return what answers one case; see published.record."""
    import torch
    import transformers
    from easydict import EasyDict
    from PIL import Image
    from safetensors.torch import load_file

    modeling, _ = text_code.load(code / "DeepSeek-VL2")
    from deepseek_vl2.models.configuration_deepseek import DeepseekV2Config

    checkpoint = folder / "checkpoint"
    config, settings = (
        json.loads((checkpoint / f"{name}.json").read_text(encoding="utf-8")) for name in ("config", "processor_config")
    )
    weights = {name: weight.float() for name, weight in load_file(checkpoint / "model.safetensors").items()}
    inner = {name: value for name, value in config["language_config"].items() if name != "torch_dtype"}
    made = DeepseekV2Config(**inner)
    made._attn_implementation = "eager"
    language = modeling.DeepseekV2ForCausalLM(made).eval().float()
    sam, clip = towers(code, config["vision_config"])
    projector = edited(code, "deepencoder/build_linear", []).MlpProjector(EasyDict(config["projector_config"]))
    parts = {"model.sam_model.": sam, "model.vision_model.": clip, "model.projector.": projector, "": language}
    for prefix, part in parts.items():
        taken = [name for name in weights if name.startswith(prefix)]
        own = {name.removeprefix(prefix): weights.pop(name) for name in taken if not name.endswith(("newline", "ator"))}
        missing, unexpected = part.eval().load_state_dict(own, strict=False)
        assert not unexpected, unexpected
        assert all("position_ids" in name for name in missing), missing
    newline, separator = (weights[f"model.{name}"] for name in ("image_newline", "view_seperator"))

    tokenizer = transformers.LlamaTokenizerFast.from_pretrained(checkpoint)
    side, base = settings["image_size"], settings["candidate_resolutions"][0][0]
    constants = {"IMAGE_SIZE": side, "BASE_SIZE": base, "CROP_MODE": True, "MIN_CROPS": 2}
    constants |= {"MAX_CROPS": settings["max_crops"], "PROMPT": "", "TOKENIZER": tokenizer}
    text_code.stand_in("config", **constants)
    processing = edited(code, "process/image_process", [("640", str(side)), ("\nAutoProcessor.register(", "\n(")])
    processor = processing.DeepseekOCRProcessor()

    def features(pixels: Any) -> Any:
        first = sam(pixels)
        return projector(torch.cat((clip(pixels, first)[:, 1:], first.flatten(2).permute(0, 2, 1)), dim=-1))

    def lines(views: Any, columns: int, rows: int) -> Any:
        edge = int(views.shape[1] ** 0.5)
        grid = views.view(rows, columns, edge, edge, -1).permute(0, 2, 1, 3, 4)
        grid = grid.reshape(rows * edge, columns * edge, -1)
        return torch.cat((grid, newline[None, None].expand(rows * edge, 1, -1)), dim=1).flatten(0, 1)

    def answer(case: dict[str, Any]) -> dict[str, Any]:
        images = [Image.open(folder / name).convert("RGB") for name in case["images"]]
        processing.PROMPT = case["prompt"]
        ((ids, pixels, crops, mask, sizes, *_),) = processor.tokenize_with_images(images)
        tokens: list[int] = []
        logprobs: list[float] = []
        with torch.inference_mode():
            embeds = language.get_input_embeddings()(ids)
            found, used = [], 0
            for image, (columns, rows) in zip(pixels, sizes.tolist() if images else (), strict=False):
                cut = columns * rows if columns * rows > 1 else 0
                if cut:
                    found.append(lines(features(crops[0][used : used + cut]), columns, rows))
                used += cut
                found += [lines(features(image[None]), 1, 1), separator[None]]
            if found:
                embeds = embeds.masked_scatter(mask[None, :, None], torch.cat(found))
            for _ in range(case["max_tokens"]):
                logits = language(inputs_embeds=embeds, use_cache=False).logits[0, -1].double().log_softmax(-1)
                tokens.append(int(logits.argmax()))
                logprobs.append(round(float(logits.max()), 6))
                added = language.get_input_embeddings()(torch.tensor([tokens[-1:]]))
                embeds = torch.cat((embeds, added), dim=1)
        told = published.seen([pixels] if images else [], found, crops[:1] if images and used else ())
        return {"prompt_token_ids": ids[0].tolist(), "token_ids": tokens, "logprobs": logprobs, **told}

    return answer


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    published.record("deepseek_ocr", answers, __doc__)
