"""Keys and values in int8: whole models against ones that round them, the same answers however prompts are cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from beheld import LLM, SamplingParams
from beheld.attention.rounded_kv import RoundedKV
from beheld.core.config import EngineArgs
from beheld.core.errors import ConfigError
from beheld.engine.setup import describe, resolve_and_decide
from beheld.models.load import load_model
from tests import tiny
from tests.api.test_interrupts import core_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
PROMPTS = [[5 + (7 * n + 3 * m) % 80 for n in range(m)] for m in (40, 3, 17, 1)]


def rounded(x: Tensor) -> Tensor:
    """Each head of each position in steps of its largest number / 127."""
    step = x.abs().amax(-1, keepdim=True) / 127
    return torch.where(step > 0, torch.round(x / step) * step, x)


def rounding_attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
    return sdpa_attention_forward(module, q, rounded(k), rounded(v), mask, **options)


@torch.inference_mode()
def meant(family: str) -> list[tuple[int, ...]]:
    """The answers of transformers' model whose attention rounds keys and values."""
    decided = resolve_and_decide(EngineArgs(model=str(tiny.checkpoint(family)), device="cpu", dtype="float32"))
    model = load_model(decided.hf_config, decided.info, decided.config).target.model.eval()
    AttentionInterface.register("beheld_test_rounding", rounding_attention)
    AttentionMaskInterface.register("beheld_test_rounding", sdpa_mask)
    model.set_attn_implementation("beheld_test_rounding")
    found = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(GREEDY.max_tokens or 0):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        found.append(tuple(ids[len(prompt) :]))
    return found


def answers(family: str, rounds: int = 1, **options: Any) -> list[tuple[tuple[int, ...], list[float]]]:
    path = str(tiny.checkpoint(family))
    given = {"dtype": "float32", "seed": 0, "max_model_len": 256, "kv_cache_dtype": "int8", "device": "cpu"} | options
    with LLM(path, **given) as llm:
        for _ in range(rounds):
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], GREEDY, use_tqdm=False)
        assert all(isinstance(layer, RoundedKV) for layer in layers(llm)) == (given["kv_cache_dtype"] == "int8")
    found = [output.outputs[0] for output in outputs]
    return [
        (tuple(o.token_ids), [step[t].logprob for step, t in zip(o.logprobs, o.token_ids, strict=True)]) for o in found
    ]


def layers(llm: LLM) -> list[Any]:
    return list(core_of(llm).executor.runner.kv.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_answers_are_those_of_rounded_keys_and_values(family: str) -> None:
    assert [tokens for tokens, _ in answers(family)] == meant(family)


def test_an_answer_does_not_depend_on_how_its_prompt_was_computed() -> None:
    whole = [tokens for tokens, _ in answers("qwen2")]
    assert [tokens for tokens, _ in answers("qwen2", max_num_batched_tokens=8, max_num_seqs=4)] == whole
    # The second round finds the first one's prefixes.
    assert [tokens for tokens, _ in answers("qwen2", rounds=2)] == whole


def test_what_is_lost_is_little() -> None:
    exact, found = answers("qwen2", kv_cache_dtype="auto"), answers("qwen2")
    far = [
        abs(a - b)
        for (_, one), (_, two) in zip(exact, found, strict=True)
        for a, b in zip(one[:1], two[:1], strict=True)
    ]
    assert 0 < max(far) < 0.02


def test_it_is_weighed() -> None:
    args = EngineArgs(model=str(tiny.checkpoint("qwen2")), device="cpu", dtype="float32")
    whole = describe(args)[2]["kv_bytes_per_token"]
    args.kv_cache_dtype = "int8"
    head = 16
    assert describe(args)[2]["kv_bytes_per_token"] == whole * (head + 4) / (4 * head)


def test_others_are_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype='fp8' is not available"):
        LLM(str(tiny.checkpoint("qwen2")), kv_cache_dtype="fp8")
    for family in ("deepseek_v3", "lfm2_vl", "falcon_h1"):
        with pytest.raises(ConfigError, match="latents, inputs or states instead"):
            describe(EngineArgs(model=str(tiny.checkpoint(family)), device="cpu", kv_cache_dtype="int8"))
