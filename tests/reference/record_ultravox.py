"""Records the greedy answers of Ultravox's published code to a folder of tests.reference.prepare.

    python record_ultravox.py FOLDER CODE OUTPUTS.json

CODE holds the repository's ultravox_config.py, ultravox_model.py and ultravox_processing.py; they run in an environment
of their own with transformers 4.51, peft and accelerate. Each answer is computed without a cache, in float32. The code
gives audio the id of the end of a turn; OUTPUTS.json has the placeholder's.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import published


def load(code: Path) -> tuple[Any, Any, Any]:
    """Import the code's modules: config, model, processing."""
    package = types.ModuleType(published.PACKAGE)
    package.__path__ = [str(code)]
    sys.modules[published.PACKAGE] = package
    names = ("config", "model", "processing")
    config, model, processing = (importlib.import_module(f"{published.PACKAGE}.ultravox_{name}") for name in names)
    return config, model, processing


def answers(folder: Path, code: Path) -> published.Answer:
    """Return what answers one case; see published.record."""
    import numpy as np
    import torch
    import transformers
    from safetensors.torch import load_file

    folder = folder.resolve()
    config_module, model_module, processing_module = load(code.resolve())
    # config.json names the other checkpoints relative to itself.
    os.chdir(folder / "checkpoint")
    raw = json.loads(Path("config.json").read_text(encoding="utf-8"))
    config = config_module.UltravoxConfig(**{name: value for name, value in raw.items() if name != "auto_map"})
    config.torch_dtype = torch.float32
    model = model_module.UltravoxModel(config).float().eval()
    unknown = model.load_state_dict(load_file("model.safetensors"), strict=False).unexpected_keys
    assert not unknown, unknown

    class Ear(transformers.WhisperProcessor):
        """The feature extractor alone; Whisper's tokenizer is not needed."""

        def __init__(self, extractor: Any) -> None:
            self.feature_extractor = extractor

        def __call__(self, *arguments: Any, **keywords: Any) -> Any:
            return self.feature_extractor(*arguments, **keywords)

    embeds: list[Any] = []
    project = model.multi_modal_projector.forward

    def projected(states: Any) -> Any:
        embeds.append(project(states))
        return embeds[-1]

    model.multi_modal_projector.forward = projected
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(raw["audio_model_id"])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file="tokenizer.json", eos_token="<|eot_id|>")
    processor = processing_module.UltravoxProcessor(Ear(extractor), tokenizer, stack_factor=config.stack_factor)

    def answer(case: dict[str, Any]) -> dict[str, Any]:
        waves = [np.load(folder / name) for name in case["audios"]]
        made = processor(text=case["prompt"], audios=waves or None, sampling_rate=16000)
        ids = made.pop("input_ids")
        made.pop("attention_mask")
        heard = {name: value for name, value in made.items() if name.startswith("audio_")}
        prompt = ids[0].tolist()
        for start, count in zip(heard.get("audio_token_start_idx", ()), heard.get("audio_token_len", ()), strict=True):
            prompt[start : start + count] = [raw["audio_token_index"]] * int(count)
        embeds.clear()
        found = published.greedy(model, ids, case["max_tokens"], heard)
        if waves:
            lengths, made = heard["audio_token_len"].tolist(), embeds[0]
            parts = [part[:length] for part, length in zip(made, lengths, strict=True)]
            found |= published.seen([heard["audio_values"]], parts)
        return {"prompt_token_ids": prompt, **found}

    return answer


if __name__ == "__main__":
    published.record("ultravox", answers, __doc__)
