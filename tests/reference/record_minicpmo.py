"""Records the greedy answers of MiniCPM-o's published code to a folder of tests.reference.prepare, on text and audio.

    python record_minicpmo.py FOLDER CODE OUTPUTS.json

CODE holds the repository's modeling_minicpmo.py and processing_minicpmo.py; they run in an environment of their own
with transformers 4.51. What speaks and what sees is not made; images are MiniCPM-V's. Each answer is computed without
a cache, in float32.
"""

from __future__ import annotations

import importlib
import re
import sys
import types
from pathlib import Path
from typing import Any

import published

METHODS = ("get_omni_embedding", "get_audio_embedding", "subsequent_chunk_mask", "_get_feat_extract_output_lengths")
STUBS = ("configuration_minicpm", "image_processing_minicpmv", "modeling_navit_siglip", "resampler", "utils")
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
    package = types.ModuleType(published.PACKAGE)
    package.__path__ = [str(code)]
    sys.modules[published.PACKAGE] = package
    found = {}
    for name in ("processing_minicpmo", "modeling_minicpmo"):
        source = (code / f"{name}.py").read_text(encoding="utf-8")
        source = re.sub(r"^( +)(print_timestamp|log_to_txt)\(.*$", r"\1pass", source, flags=re.MULTILINE)
        # Of older versions of transformers; what speaks derives from it.
        source = source.replace("from transformers import LogitsWarper", "LogitsWarper = object")
        full = f"{published.PACKAGE}.{name}"
        module = types.ModuleType(full)
        module.__spec__ = importlib.machinery.ModuleSpec(full, None)
        module.__package__ = published.PACKAGE
        sys.modules[full] = module
        exec(compile(source, full, "exec"), module.__dict__)
        found[name] = module
    return found


def answers(folder: Path, code: Path) -> published.Answer:
    """Return what answers one case; see published.record."""
    import numpy as np
    import transformers
    from torch import nn

    raw, pixels, weights, tokenizer = published.read_checkpoint(folder)
    modules = load(code)
    model_code = modules["modeling_minicpmo"]
    config = transformers.Qwen2Config(**{key: value for key, value in raw.items() if key != "auto_map"})
    ears = transformers.WhisperConfig(**raw["audio_config"])
    config._attn_implementation = ears._attn_implementation = "eager"

    class Model(nn.Module):
        """The published model without what speaks and sees."""

        def __init__(self) -> None:
            super().__init__()
            self.config = config
            self.llm = transformers.Qwen2ForCausalLM(config)
            self.apm = model_code.MiniCPMWhisperEncoder(ears)
            self.audio_avg_pooler = nn.AvgPool1d(raw["audio_pool_step"], stride=raw["audio_pool_step"])
            self.audio_projection_layer = model_code.MultiModalProjector(ears.encoder_ffn_dim // 4, config.hidden_size)
            self.audio_encoder_layer = -1

        def forward(self, input_ids: Any, use_cache: bool, **data: Any) -> Any:
            embeds = self.llm.model.embed_tokens(input_ids)
            embeds = self.get_omni_embedding(data, embeds, chunk_length=raw["audio_chunk_length"])
            return self.llm(inputs_embeds=embeds, use_cache=use_cache)

    for name in METHODS:
        setattr(Model, name, getattr(model_code.MiniCPMO, name))
    model = Model().eval()
    left_out = ("tts.", "vpm.", "resampler.")
    model.load_state_dict({name: weight for name, weight in weights.items() if not name.startswith(left_out)})

    for name, token in MARKS.items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    # Marks that no prompt has.
    for name in ("im_start", "im_end", "slice_start", "slice_end", "spk_start", "spk_end"):
        setattr(tokenizer, f"{name}_id", -1)
    processor_class = modules["processing_minicpmo"].MiniCPMOProcessor
    processor = processor_class.__new__(processor_class)
    processor.tokenizer = tokenizer
    processor.feature_extractor = transformers.WhisperFeatureExtractor(feature_size=pixels["feature_size"])

    def answer(case: dict[str, Any]) -> dict[str, Any]:
        waves = [np.load(folder / name) for name in case["audios"]]
        features, lengths, words = (
            processor.audio_feature_extract([waves], None, True, 16000) if waves else ([], [], [[]])
        )
        prompt = case["prompt"]
        for part in words[0]:
            prompt = prompt.replace("(<audio>./</audio>)", part, 1)
        ids, _, bounds, _ = processor._convert(prompt)
        ids = ids.long()[None]
        heard = {"audio_features": features, "audio_feature_lens": lengths, "audio_bounds": [bounds]}
        found = published.greedy(model, ids, case["max_tokens"], heard)
        return {"prompt_token_ids": ids[0].tolist(), **found}

    return answer


if __name__ == "__main__":
    published.record("minicpmo", answers, __doc__, lambda case: not case["images"] + case["videos"])
