"""Keys and values in 8 bits: whole models against ones that round them, the same answers however prompts are cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from beheld import LLM, SamplingParams
from beheld.attention.backend import LayerKV
from beheld.attention.float8_kv import Float8KV
from beheld.attention.rounded_kv import RoundedKV
from beheld.core.config import EngineArgs
from beheld.core.errors import ConfigError
from beheld.engine import setup
from beheld.engine.setup import describe, resolve_and_decide
from beheld.models.load import load_model
from beheld.platform.cuda import Cuda
from beheld.platform.platform import Needs
from tests import tiny
from tests.api.test_interrupts import core_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
PROMPTS = [[5 + (7 * n + 3 * m) % 80 for n in range(m)] for m in (40, 3, 17, 1)]


def in_steps(x: Tensor) -> Tensor:
    """Each head of each position in steps of its largest number / 127."""
    step = x.abs().amax(-1, keepdim=True) / 127
    return torch.where(step > 0, torch.round(x / step) * step, x)


def in_float8(x: Tensor) -> Tensor:
    """Three bits behind the leading one, and no step below 2^-9."""
    _, exponent = torch.frexp(x)
    step = torch.exp2((exponent - 4).clamp(min=-9).float())
    return (torch.round(x / step) * step).clamp(-448, 448)


# Option -> what it makes of keys and values, and the class of a layer's.
KINDS: dict[str, tuple[Callable[[Tensor], Tensor], type]] = {
    "int8": (in_steps, RoundedKV),
    "fp8": (in_float8, Float8KV),
}


@torch.inference_mode()
def meant(family: str, kind: str) -> list[tuple[int, ...]]:
    """The answers of transformers' model whose attention rounds keys and values."""
    rounded = KINDS[kind][0]

    def rounding_attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
        return sdpa_attention_forward(module, q, rounded(k), rounded(v), mask, **options)

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
        kept = KINDS.get(str(given["kv_cache_dtype"]), (None, LayerKV))[1]
        assert all(type(layer) is kept for layer in layers(llm))
    found = [output.outputs[0] for output in outputs]
    return [
        (tuple(o.token_ids), [step[t].logprob for step, t in zip(o.logprobs, o.token_ids, strict=True)]) for o in found
    ]


def layers(llm: LLM) -> list[Any]:
    return list(core_of(llm).executor.runner.kv.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_answers_are_those_of_rounded_keys_and_values(family: str, kind: str) -> None:
    assert [tokens for tokens, _ in answers(family, kv_cache_dtype=kind)] == meant(family, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_does_not_depend_on_how_its_prompt_was_computed(kind: str) -> None:
    whole = [tokens for tokens, _ in answers("qwen2", kv_cache_dtype=kind)]
    cut = answers("qwen2", kv_cache_dtype=kind, max_num_batched_tokens=8, max_num_seqs=4)
    assert [tokens for tokens, _ in cut] == whole
    # The second round finds the first one's prefixes.
    assert [tokens for tokens, _ in answers("qwen2", rounds=2, kv_cache_dtype=kind)] == whole


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.02), ("fp8", 0.3)])
def test_what_is_lost_is_little(kind: str, most: float) -> None:
    exact, found = answers("qwen2", kv_cache_dtype="auto"), answers("qwen2", kv_cache_dtype=kind)
    far = [
        abs(a - b)
        for (_, one), (_, two) in zip(exact, found, strict=True)
        for a, b in zip(one[:1], two[:1], strict=True)
    ]
    assert 0 < max(far) < most


def test_it_is_weighed() -> None:
    args = EngineArgs(model=str(tiny.checkpoint("qwen2")), device="cpu", dtype="float32")
    whole = describe(args)[2]["kv_bytes_per_token"]
    args.kv_cache_dtype = "int8"
    head = 16
    assert describe(args)[2]["kv_bytes_per_token"] == whole * (head + 4) / (4 * head)
    args.kv_cache_dtype = "fp8_e4m3"
    assert describe(args)[2]["kv_bytes_per_token"] == whole / 4


def test_the_type_of_activations_may_be_named() -> None:
    assert answers("qwen2", kv_cache_dtype="float32") == answers("qwen2", kv_cache_dtype="auto")
    with pytest.raises(ConfigError, match="'bfloat16' is not the type of activations, float32"):
        describe(args_of("qwen2", "bfloat16", dtype="float32"))


def test_others_are_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype='fp8_e5m2' is not available"):
        LLM(str(tiny.checkpoint("qwen2")), kv_cache_dtype="fp8_e5m2")
    for family, kind in itertools.product(("deepseek_v3", "lfm2_vl", "falcon_h1"), KINDS):
        with pytest.raises(ConfigError, match="latents, inputs or states instead"):
            describe(args_of(family, kind))


def test_on_a_gpu_it_is_float8_if_the_gpu_converts_it() -> None:
    info, gpu, old = decided_of("qwen2"), Gpu(True), Gpu(False)
    assert setup._kv_dtype(args_of("qwen2", "fp8"), info, gpu, "bfloat16") == "float8_e4m3fn"  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"compute capability 8\.9"):
        setup._kv_dtype(args_of("qwen2", "fp8"), info, old, "bfloat16")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="without scales") as told:
        setup._kv_dtype(args_of("qwen2", "int8"), info, gpu, "bfloat16")  # type: ignore[arg-type]
    assert "kv_cache_dtype='fp8'" in told.value.remedy


@dataclass
class Gpu:
    """As much of a platform as the choice looks at."""

    fp8_products: bool
    shares_host_memory: bool = False
    place: str = "on a GPU"
    needs: Needs = Cuda.needs


def args_of(family: str, kind: str, dtype: str = "auto") -> EngineArgs:
    return EngineArgs(model=str(tiny.checkpoint(family)), device="cpu", dtype=dtype, kv_cache_dtype=kind)


def decided_of(family: str) -> Any:
    return resolve_and_decide(EngineArgs(model=str(tiny.checkpoint(family)), device="cpu")).info
