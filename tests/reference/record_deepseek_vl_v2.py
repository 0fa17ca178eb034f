"""Records the greedy answers of DeepSeek-VL2's published code to a folder of tests.reference.prepare.

    python record_deepseek_vl_v2.py FOLDER CODE OUTPUTS.json

CODE is a checkout of github.com/deepseek-ai/DeepSeek-VL2; it runs in an environment of its own with transformers 4.46,
timm and einops. In place of the attention of xformers stands torch's, and in place of the package attrdict, which the
code imports and never uses, a plain dict. Each answer is computed without a cache, in float32.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import published


def attention(q: Any, k: Any, v: Any, p: float = 0.0) -> Any:
    """Attend as xformers does: (batch, positions, heads, width)."""
    import torch

    heads = (part.transpose(1, 2) for part in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*heads, dropout_p=p).transpose(1, 2)


def stand_in(name: str, **members: Any) -> None:
    """Make a module that the code imports and the environment lacks."""
    module = types.ModuleType(name)
    vars(module).update(members)
    sys.modules[name] = module


def load(code: Path) -> tuple[Any, Any]:
    """Import the code's modules of the model and of the processor."""
    stand_in("attrdict", AttrDict=dict)
    stand_in("xformers")
    stand_in("xformers.ops", memory_efficient_attention=attention)
    sys.path.insert(0, str(code))
    from deepseek_vl2.models import modeling_deepseek_vl_v2, processing_deepseek_vl_v2

    return modeling_deepseek_vl_v2, processing_deepseek_vl_v2


def answers(folder: Path, code: Path) -> published.Answer:
    """Return what answers one case; see published.record."""
    import json

    import torch
    import transformers
    from PIL import Image
    from safetensors.torch import load_file

    modeling, processing = load(code)
    checkpoint = folder / "checkpoint"
    config, settings = (
        json.loads((checkpoint / f"{name}.json").read_text(encoding="utf-8")) for name in ("config", "processor_config")
    )
    del config["torch_dtype"]
    made = modeling.DeepseekVLV2Config(**config)
    made._attn_implementation = made.language_config._attn_implementation = "eager"
    model = modeling.DeepseekVLV2ForCausalLM(made).eval().float()
    weights = {name: weight.float() for name, weight in load_file(checkpoint / "model.safetensors").items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected, unexpected
    assert all("attn_pool" in name for name in missing), missing
    tokenizer = transformers.LlamaTokenizerFast.from_pretrained(checkpoint)
    del settings["processor_class"]
    processor = processing.DeepseekVLV2Processor(tokenizer, **settings)

    def answer(case: dict[str, Any]) -> dict[str, Any]:
        images = [Image.open(folder / name).convert("RGB") for name in case["images"]]
        seen = processor.process_one(prompt=case["prompt"], images=images)
        ids = seen.input_ids[None]
        tokens: list[int] = []
        logprobs: list[float] = []
        with torch.inference_mode():
            embeds = model.prepare_inputs_embeds(
                ids, seen.images[None], seen.images_seq_mask[None], seen.images_spatial_crop[None]
            )
            for _ in range(case["max_tokens"]):
                logits = model.language(inputs_embeds=embeds, use_cache=False).logits[0, -1].double().log_softmax(-1)
                tokens.append(int(logits.argmax()))
                logprobs.append(round(float(logits.max()), 6))
                added = model.language.get_input_embeddings()(torch.tensor([tokens[-1:]]))
                embeds = torch.cat((embeds, added), dim=1)
            counts = (1 + (seen.images_spatial_crop.prod(1))).tolist() if images else []
            views = seen.images.split(counts) if images else ()
            placed = [embeds[0, : ids.shape[1]][seen.images_seq_mask]] if images else []
        told = published.seen([view[:1] for view in views], placed, [view[1:] for view in views])
        return {"prompt_token_ids": ids[0].tolist(), "token_ids": tokens, "logprobs": logprobs, **told}

    return answer


if __name__ == "__main__":
    published.record("deepseek_vl_v2", answers, __doc__)
