"""Records the greedy answers of MiniCPM-V's published code to a folder of tests.reference.prepare.

    python record_minicpmv.py FOLDER CODE OUTPUTS.json

CODE holds the repository's configuration_minicpm.py, image_processing_minicpmv.py, modeling_minicpmv.py,
processing_minicpmv.py, resampler.py and, from 2.6 on, modeling_navit_siglip.py; they run in an environment of their own
with transformers 4.48. Each answer is computed without a cache, in float32. OUTPUTS.json also has values of the slices
and of their embeddings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import published
import published_slices


def answers(folder: Path, code: Path) -> published.Answer:
    """Return what answers one case; see published.record."""
    import torch

    raw, pixels, weights, tokenizer = published.read_checkpoint(folder)
    names = ("configuration_minicpm", "image_processing_minicpmv", "processing_minicpmv", "modeling_minicpmv")
    configuration, image_processing, processing, modeling = published_slices.modules(code, *names)
    config = configuration.MiniCPMVConfig(**{key: value for key, value in raw.items() if key != "auto_map"})
    config._attn_implementation = config.vision_config._attn_implementation = "eager"
    model = modeling.MiniCPMV(config).eval()
    model.load_state_dict(weights)
    published_slices.name_tokens(tokenizer, bos=False)
    processor = processing.MiniCPMVProcessor.__new__(processing.MiniCPMVProcessor)
    processor.tokenizer, processor.version = tokenizer, pixels["version"]
    processor.image_processor = image_processing.MiniCPMVImageProcessor(**pixels)

    def forward(input_ids: Any, use_cache: bool, **data: Any) -> Any:
        embeds, _ = model.get_vllm_embedding({"input_ids": input_ids} | data)
        return model.llm(inputs_embeds=embeds, use_cache=use_cache)

    def answer(case: dict[str, Any]) -> dict[str, Any]:
        text, slices, sizes = published_slices.lay_out(processor.image_processor, case, folder)
        ids, bounds = processor._convert(text)
        tgt_sizes = torch.tensor(sizes, dtype=torch.int32)
        ids = ids.long().reshape(1, -1)
        data = {"pixel_values": [slices], "tgt_sizes": [tgt_sizes], "image_bound": [bounds]}
        with torch.inference_mode():
            _, embeds = model.get_vllm_embedding({"input_ids": ids} | data)
        told = published_slices.seen(slices, sizes, config.patch_size, embeds)
        given = {"vision_hidden_states": embeds, "image_bound": [bounds]}
        found = published.greedy(forward, ids, case["max_tokens"], given)
        return {"prompt_token_ids": ids[0].tolist(), **found, **told}

    return answer


if __name__ == "__main__":
    published.record("minicpmv", answers, __doc__)
