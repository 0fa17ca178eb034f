"""After its start an engine compiles nothing for a request of any usual kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from PIL import Image

from beheld import LLM, SamplingParams
from tests import tiny
from tests.oracle import cases

PLAIN: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True}
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "greedy": (1, {"temperature": 0}),
    "sampled": (1, {"temperature": 0.8, "top_p": 0.9}),
    "sampled_beside": (8, {"temperature": 0.8, "top_k": 5}),
    "penalised": (1, {"temperature": 0, "repetition_penalty": 1.1}),
    "penalised_and_sampled": (8, {"temperature": 0.8, "presence_penalty": 0.5}),
    "logprobs": (2, {"temperature": 0, "logprobs": 3}),
    "answers": (1, {"temperature": 0.8, "n": 4}),
}


def test_no_kernel_is_compiled_for_a_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from triton import knobs

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    heard: list[str] = []

    def listen(*, metadata: dict[str, Any], cache_hit: bool, **_: Any) -> None:
        heard.append(metadata["name"])

    options = cases.options("qwen2_5_vl", "roomy") | {"dtype": "bfloat16", "max_num_seqs": 8}
    llm = LLM(model=str(tiny.checkpoint("qwen2_5_vl")), gpu_memory_utilization=0.3, **options)
    monkeypatch.setattr(knobs.compilation, "listener", listen)
    try:
        picture = Image.effect_noise((448, 448), 90).convert("RGB")
        content = [{"type": "image_pil", "image_pil": picture}, {"type": "text", "text": "What is this?"}]
        for name, (count, options) in KINDS.items():
            llm.chat(
                [[{"role": "user", "content": content}]] * count, SamplingParams(**PLAIN | options), use_tqdm=False
            )
            assert not heard, name
    finally:
        llm.close()
