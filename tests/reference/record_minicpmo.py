"""Records the greedy answers of MiniCPM-o's published code to a folder of tests.reference.prepare.

    python record_minicpmo.py FOLDER CODE OUTPUTS.json

CODE holds the repository's image_processing_minicpmv.py, modeling_minicpmo.py, modeling_navit_siglip.py,
processing_minicpmo.py and resampler.py; they run in an environment of their own with transformers 4.51. What speaks is
not made. Each answer is computed without a cache, in float32. OUTPUTS.json also has values of the slices and of their
embeddings.
"""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import published
import published_slices

METHODS = (
    "get_vllm_embedding",
    "get_omni_embedding",
    "get_audio_embedding",
    "subsequent_chunk_mask",
    "_get_feat_extract_output_lengths",
)
STUBS = ("configuration_minicpm", "utils")
MARKS = {"audio_start": "<|audio_start|>", "audio_end": "<|audio_end|>"}


class Stub(types.ModuleType):
    """A module that is imported and not used."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def load(code: Path) -> dict[str, Any]:
    """Import the code's modules, without what they print and log."""
    for name in ("soundfile", "torchaudio", *(f"{published.PACKAGE}.{stub}" for stub in STUBS)):
        sys.modules[name] = Stub(name)
    found = {}
    (found["modeling_navit_siglip"],) = published_slices.modules(code, "modeling_navit_siglip")
    for name in ("image_processing_minicpmv", "processing_minicpmo", "modeling_minicpmo"):
        source = (code / f"{name}.py").read_text(encoding="utf-8")
        source = re.sub(r"^( +)(print_timestamp|log_to_txt)\(.*$", r"\1pass", source, flags=re.MULTILINE)
        # Of older versions of transformers; what speaks derives from it.
        source = source.replace("from transformers import LogitsWarper", "LogitsWarper = object")
        found[name] = published_slices.run(name, source)
    return found


def answers(folder: Path, code: Path) -> published.Answer:
    """Return what answers one case; see published.record."""
    import numpy as np
    import torch
    import transformers
    from torch import nn

    raw, pixels, weights, tokenizer = published.read_checkpoint(folder)
    modules = load(code)
    model_code, tower = modules["modeling_minicpmo"], modules["modeling_navit_siglip"]
    config = transformers.Qwen2Config(**{key: value for key, value in raw.items() if key != "auto_map"})
    ears = transformers.WhisperConfig(**raw["audio_config"])
    eyes = tower.SiglipVisionConfig(**raw["vision_config"])
    config._attn_implementation = ears._attn_implementation = eyes._attn_implementation = "eager"

    class Model(nn.Module):
        """The published model without what speaks."""

        def __init__(self) -> None:
            super().__init__()
            self.config = config
            self.llm = transformers.Qwen2ForCausalLM(config)
            self.vpm = tower.SiglipVisionTransformer(eyes)
            self.resampler = model_code.Resampler(
                num_queries=raw["query_num"],
                embed_dim=config.hidden_size,
                num_heads=config.hidden_size // 128,
                kv_dim=eyes.hidden_size,
                adaptive=True,
            )
            self.apm = model_code.MiniCPMWhisperEncoder(ears)
            self.audio_avg_pooler = nn.AvgPool1d(raw["audio_pool_step"], stride=raw["audio_pool_step"])
            self.audio_projection_layer = model_code.MultiModalProjector(ears.encoder_ffn_dim // 4, config.hidden_size)
            self.audio_encoder_layer = -1

        def forward(self: Any, input_ids: Any, use_cache: bool, **data: Any) -> Any:
            embeds, _ = self.get_vllm_embedding({"input_ids": input_ids} | data)
            embeds = self.get_omni_embedding(data, embeds, chunk_length=raw["audio_chunk_length"])
            return self.llm(inputs_embeds=embeds, use_cache=use_cache)

    for name in METHODS:
        setattr(Model, name, getattr(model_code.MiniCPMO, name))
    model: Any = Model().eval()
    model.load_state_dict({name: weight for name, weight in weights.items() if not name.startswith("tts.")})

    published_slices.name_tokens(tokenizer, bos=False)
    for name, token in MARKS.items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    # Marks that no prompt has.
    tokenizer.spk_start_id = tokenizer.spk_end_id = -1
    processor_class = modules["processing_minicpmo"].MiniCPMOProcessor
    processor = processor_class.__new__(processor_class)
    processor.tokenizer = tokenizer
    processor.image_processor = modules["image_processing_minicpmv"].MiniCPMVImageProcessor(**pixels)
    processor.feature_extractor = transformers.WhisperFeatureExtractor(feature_size=pixels["feature_size"])

    def answer(case: dict[str, Any]) -> dict[str, Any]:
        waves = [np.load(folder / name) for name in case["audios"]]
        features, lengths, words = (
            processor.audio_feature_extract([waves], None, True, 16000) if waves else ([], [], [[]])
        )
        prompt, items = published_slices.lay_out(processor.image_processor, case, folder)
        for part in words[0]:
            prompt = prompt.replace("(<audio>./</audio>)", part, 1)
        ids, image_bounds, bounds, _ = processor._convert(prompt)
        ids = ids.long()[None]
        slices = [one for item in items for one in item[0]]
        sizes = torch.tensor([size for item in items for size in item[1]])
        data = {"pixel_values": [slices], "tgt_sizes": [sizes], "image_bound": [image_bounds]}
        with torch.inference_mode():
            _, embeds = model.get_vllm_embedding({"input_ids": ids} | data)
        told = published_slices.seen(items, raw["patch_size"], embeds)
        given = {"vision_hidden_states": embeds, "image_bound": [image_bounds]}
        heard = {"audio_features": features, "audio_feature_lens": lengths, "audio_bounds": [bounds]}
        found = published.greedy(model, ids, case["max_tokens"], given | heard)
        return {"prompt_token_ids": ids[0].tolist(), **found, **told}

    return answer


if __name__ == "__main__":
    published.record("minicpmo", answers, __doc__)
