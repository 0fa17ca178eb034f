"""Records the greedy answers of MiniCPM-V's published code to a folder of tests.reference.prepare.

    python record_minicpmv.py FOLDER CODE OUTPUTS.json

CODE holds the repository's configuration_minicpm.py, image_processing_minicpmv.py, modeling_minicpmv.py,
processing_minicpmv.py, resampler.py, in 2.0 modeling_minicpm.py, and from 2.6 on modeling_navit_siglip.py; they run in
an environment of their own with transformers 4.51, for 2.0 with timm 0.9.10. Versions 4.0 and 4.5 run the code of 2.6,
with the text model that they have in place of Qwen 2. Each answer is computed without a cache, in float32.
OUTPUTS.json also has values of the slices and of their embeddings.

Slices are laid out by the processor's parts, and those of each image are computed on their own: the code of 2.0 and 2.5
answers questions about one image, and 2.0's processor ends each prompt with a further `<AI>`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import published
import published_slices

NAMES = ("configuration_minicpm", "image_processing_minicpmv", "processing_minicpmv", "modeling_minicpmv")
TEXTS = {"4.0": "LlamaForCausalLM", "4.5": "Qwen3ForCausalLM"}


def load(folder: Path, code: Path, raw: dict[str, Any], weights: dict[str, Any]) -> tuple[Any, ...]:
    """Return the model and the classes of its two processors."""
    import transformers

    configuration, image_processing, processing, modeling = published_slices.modules(code, *NAMES)
    given = {key: value for key, value in raw.items() if key != "auto_map"}
    if "version" not in raw:
        # The sizes are in the other library's registry.
        modeling.timm.create_model = partial(modeling.timm.create_model, **sizes(given.pop("vision_config")))
    text = TEXTS.get(str(raw.get("version")))
    if text is not None:
        modeling.Qwen2ForCausalLM = getattr(transformers, text)
    config = configuration.MiniCPMVConfig(**given)
    config._attn_implementation = "eager"
    if text == "LlamaForCausalLM":
        config.attention_bias = config.mlp_bias = False
    if hasattr(config, "vision_config"):
        config.vision_config._attn_implementation = "eager"
    model = modeling.MiniCPMV(config).eval()
    model.load_state_dict(weights)
    return model, image_processing.MiniCPMVImageProcessor, processing.MiniCPMVProcessor


def sizes(vision: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of version 2.0's tower as its library names them."""
    return {
        "depth": vision["num_hidden_layers"],
        "embed_dim": vision["hidden_size"],
        "img_size": vision["image_size"],
        "mlp_ratio": vision["intermediate_size"] / vision["hidden_size"],
        "num_heads": vision["num_attention_heads"],
    }


def answers(folder: Path, code: Path) -> published.Answer:
    """Return what answers one case; see published.record."""
    import torch

    raw, pixels, weights, tokenizer = published.read_checkpoint(folder)
    model, image_processor, processor_class = load(folder, code, raw, weights)
    published_slices.name_tokens(tokenizer, bos="version" not in raw)
    processor = processor_class.__new__(processor_class)
    processor.tokenizer, processor.version = tokenizer, pixels.get("version")
    processor.image_processor = image_processor(**pixels)
    bounded = "image_bound" if "version" in raw else "image_bounds"

    def forward(input_ids: Any, use_cache: bool, **data: Any) -> Any:
        embeds, _ = model.get_vllm_embedding({"input_ids": input_ids} | data)
        return model.llm(input_ids=None, inputs_embeds=embeds, use_cache=use_cache)

    def answer(case: dict[str, Any]) -> dict[str, Any]:
        text, items = published_slices.lay_out(processor.image_processor, case, folder)
        ids, bounds = processor._convert(text)
        ids = ids.long().reshape(1, -1)
        embeds = []
        with torch.inference_mode():
            for slices, grids in items:
                data = {"pixel_values": [slices], "tgt_sizes": [torch.tensor(grids)], bounded: [[]]}
                embeds += model.get_vllm_embedding({"input_ids": ids} | data)[1]
        told = published_slices.seen(items, model.config.patch_size, embeds)
        given = {"vision_hidden_states": [torch.cat(embeds) if embeds else []], bounded: [bounds]}
        found = published.greedy(forward, ids, case["max_tokens"], given)
        return {"prompt_token_ids": ids[0].tolist(), **found, **told}

    return answer


if __name__ == "__main__":
    published.record("minicpmv", answers, __doc__)
