"""Ranks that share a model answer as transformers does, and as one process does, whatever shares the batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from beheld import LLM, LoRARequest, SamplingParams
from beheld.core.errors import ConfigError, LoRAError
from beheld.core.structured_outputs import StructuredOutputs
from beheld.executor.multi import MultiExecutor
from beheld.models.surgery.parts import text_model
from beheld.models.surgery.sharded import JoinedOverRanks, SomeExperts, SummedOverRanks
from tests import census, ranks, tiny
from tests.long import LONG
from tests.lora import test_oracle as lora
from tests.oracle import cases, test_axes
from tests.oracle import test_whisper as whisper
from tests.oracle.test_oracle import check, make

RANKS: dict[str, Any] = {"device": "cpu", "distributed_executor_backend": "mp", "tensor_parallel_size": 2}
# A text model, towers, experts, and heads and inner sizes that do not divide: four heads and two of keys on three.
# Then what keeps latents, and states of sequences. The long form has all others.
EVERY_TIME = (
    *(("llama", 3), ("qwen2_5_vl", 2), ("qwen3_vl_moe", 2), ("llava", 2)),
    *(("deepseek_v2", 2), ("qwen3_5", 2)),
    # Queries, keys and values of each head lie next to each other in one layer.
    ("fuyu", 2),
)
SHARED_ITEMS = (("qwen2_5_vl", 2), ("qwen3_vl_moe", 2))
ON_FOUR = ("llama", "llava", "qwen2_5_vl", "qwen3_vl_moe", "gemma3", "glm4v_moe_fp8", "deepseek_v2", "qwen3_5")
LONG_FORM = (*EVERY_TIME, *((family, 2) for family in tiny.TINY), *((family, 4) for family in ON_FOUR))
FAMILIES = tuple(dict.fromkeys(LONG_FORM)) if LONG else EVERY_TIME
# Of a plain kind; then with experts for all tokens, in groups, for text and for images, and in FP8.
ALL_WITH_EXPERTS = (
    *("qwen3_vl_moe", "glm4v_moe", "glm4v_moe_fp8", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
    *("ernie4_5_vl_moe", "qwen3_omni_moe", "qwen3_5_moe", "qwen3_next", "granitemoehybrid"),
)
WITH_EXPERTS = ALL_WITH_EXPERTS if LONG else ALL_WITH_EXPERTS[:1]
# No part of the text models of these is cut, and the engine says why: layers have another form, or are converted.
WHOLE = ("florence2", "molmo", "molmo2")


@pytest.fixture(scope="module", autouse=True)
def forked() -> Iterator[None]:
    """All ranks of this module start quickly."""
    with ranks.forked():
        yield


def executor_of(llm: LLM) -> MultiExecutor:
    found = llm._live().core.executor
    assert isinstance(found, MultiExecutor)
    return found


@pytest.mark.parametrize(("family", "count"), FAMILIES)
def test_ranks_equal_transformers(family: str, count: int) -> None:
    """Cut prompts, overlap and prefix hits; ranks share media, or layers of towers."""
    mode = "data" if (family, count) in SHARED_ITEMS else "weights"
    more = RANKS | {"tensor_parallel_size": count, "mm_encoder_tp_mode": mode}
    with make(family, cases.options(family, "cut") | more) as llm:
        target = executor_of(llm)._local.runner._adapter.surgery.target  # type: ignore[attr-defined]
        cut = any(isinstance(module, SummedOverRanks) for module in text_model(target.model).modules())
        assert cut == (family not in WHOLE)
        assert cut or any("layers" in part or "converted" in part for part in target.shards.whole)
        asks = cases.mixed(family)[: None if LONG else 6]
        check(llm, family, asks)
        check(llm, family, asks[::-1])


def test_ranks_share_out_items_of_unlike_widths() -> None:
    """An image's embeddings bring what goes into later layers, an audio's do not."""
    family = "qwen3_omni_moe"
    with make(family, cases.ROOMY | RANKS | {"mm_encoder_tp_mode": "data"}) as llm:
        check(llm, family, cases.fit(family, cases.ALL_KINDS))


def towers_of(llm: LLM) -> list[str]:
    """The paths of modules outside the text model whose outputs ranks add up."""
    model: Any = executor_of(llm)._local.runner._adapter.model  # type: ignore[attr-defined]
    inside = set(text_model(model).modules())
    return [n for n, m in model.named_modules() if isinstance(m, SummedOverRanks) and m not in inside]


@pytest.mark.parametrize(
    ("family", "more", "layers"),
    [
        ("qwen2_vl", {}, 2),
        ("qwen3_vl", {}, 3),
        # SigLIP's heads on more ranks than divide them; CLIP's tower is in the test above.
        ("gemma3", {"tensor_parallel_size": 3}, 2),
        # The ranks of the first stage share the towers.
        ("qwen2_5_vl", {"pipeline_parallel_size": 2}, 0),
    ],
)
def test_towers_are_cut(family: str, more: dict[str, Any], layers: int) -> None:
    """Heads and inner units of each layer of a tower, if the first rank's stage has it."""
    with make(family, cases.options(family, "cut") | RANKS | more) as llm:
        assert len(towers_of(llm)) == 2 * layers
        check(llm, family, cases.mixed(family)[:4])


# Why no stage can hold a part of these, in the words of the refusal.
NOT_STAGED = {
    "mllama": "states of media",
    "florence2": "states of media",
    "phi4_mm": "LoRA adapters",
    "falcon_h1": "it reads `mamba` of every layer",
    # So few layers are all in one stage; more are below.
    "gemma4": "cannot be cut into 2 stages",
}
STAGED = (
    [
        (family, stages)
        for family in tiny.TINY
        if family not in NOT_STAGED
        for stages in ({"pipeline_parallel_size": 2}, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2})
    ]
    if LONG
    # Media and extra columns of layers; states of recurrent layers, on four ranks.
    else [("qwen3_vl", {"pipeline_parallel_size": 2}), ("qwen3_next", {"pipeline_parallel_size": 2, **RANKS})]
)


@pytest.mark.parametrize(("family", "more"), STAGED)
def test_stages_equal_transformers(family: str, more: dict[str, Any]) -> None:
    """Cut prompts, overlap and prefix hits; hidden states go from stage to stage, tokens back."""
    with make(family, cases.options(family, "cut") | RANKS | {"tensor_parallel_size": 1} | more) as llm:
        stage = executor_of(llm)._local.runner._adapter.surgery.target.stage  # type: ignore[attr-defined]
        assert stage.stage == 1
        assert stage.layers.start > 0
        asks = cases.mixed(family)[: None if LONG else 5]
        check(llm, family, asks)
        check(llm, family, asks[::-1])


@torch.inference_mode()
def test_layers_that_read_anothers_cache_are_in_its_stage(tmp_path: Path) -> None:
    """As the later layers of Gemma 4 E2B, which read the caches of two earlier ones."""

    def deeper(config: dict[str, Any]) -> dict[str, Any]:
        text = config.get("text_config")
        if text is None:
            return config
        kinds = ["sliding_attention", "full_attention"] * 3
        return config | {"text_config": text | {"num_hidden_layers": 6, "layer_types": kinds}}

    folder = tiny.reshaped("gemma4", tmp_path / "gemma4", deeper)
    more = cases.ROOMY | RANKS | {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
    with LLM(str(folder), dtype="float32", seed=0, disable_log_stats=True, **more) as llm:
        stage = executor_of(llm)._local.runner._adapter.surgery.target.stage  # type: ignore[attr-defined]
        assert stage.bounds in ((0, 1, 6), (0, 2, 6))
        for ask in cases.mixed("gemma4")[:4]:
            test_axes.same(llm, "gemma4", folder, ask)


@torch.inference_mode()
def test_stages_of_a_model_that_names_its_layers_otherwise(tmp_path: Path) -> None:
    """GPT-2's list is `h` until its family gives it the usual name, which is after a stage's layers are chosen."""
    model: Any = census.make("gpt2", tmp_path)
    prompts = [list(range(5, 9)), list(range(9, 29))]
    wanted = [
        model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=8, eos_token_id=None)[
            0, len(ids) :
        ].tolist()
        for ids in prompts
    ]
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "num_gpu_blocks_override": 40}
    more = RANKS | {"tensor_parallel_size": 1, "pipeline_parallel_size": 2, "skip_tokenizer_init": True}
    with LLM(str(tmp_path), **options, **more) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in found] == wanted


@pytest.mark.parametrize("family", NOT_STAGED)
def test_families_that_no_stage_can_hold_a_part_of_are_refused(family: str) -> None:
    more = RANKS | {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
    with pytest.raises(ConfigError, match=NOT_STAGED[family]):
        make(family, cases.options(family, "cut") | more)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("rwkv", "its layers keep more than one state or cache each"),
        ("zamba2", "its layers share weights"),
        ("falcon_h1", "it reads `mamba` of every layer"),
    ],
)
def test_models_that_no_stage_can_hold_a_part_of_are_refused(kind: str, reason: str, tmp_path: Path) -> None:
    census.make(kind, tmp_path)
    more = RANKS | {"tensor_parallel_size": 1, "pipeline_parallel_size": 2, "skip_tokenizer_init": True}
    with pytest.raises(ConfigError, match=f"cannot be cut into stages: {reason}"):
        LLM(str(tmp_path), dtype="float32", max_model_len=64, **more)


@pytest.fixture(scope="module")
def forked_engines() -> Iterator[None]:
    """Engines side by side start quickly; their further ranks do not."""
    with ranks.forked_engines():
        yield


BESIDE = [*((family, {}) for family in tiny.TINY), *((family, RANKS) for family in ON_FOUR)]


@pytest.mark.skipif(not LONG, reason="the long form's; tests/api/test_data_parallel.py has one family")
@pytest.mark.parametrize(("family", "more"), BESIDE)
def test_engines_side_by_side_equal_transformers(forked_engines: None, family: str, more: dict[str, Any]) -> None:
    """Whichever of them a request goes to, and if each of the two is shared by two ranks."""
    options = cases.options(family, "cut") | {"device": "cpu", "data_parallel_size": 2} | more
    with make(family, options) as llm:
        asks = cases.mixed(family)
        check(llm, family, asks)
        check(llm, family, asks[::-1])
        assert all(report.stats and report.stats.steps for report in llm.stats().engines)


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_experts_are_shared_out_whole(family: str) -> None:
    with make(family, cases.options(family, "cut") | RANKS | {"enable_expert_parallel": True}) as llm:
        target = executor_of(llm)._local.runner._adapter.surgery.target  # type: ignore[attr-defined]
        assert any(isinstance(module, SomeExperts) for module in target.model.modules())
        assert not any("converted" in part for part in target.shards.whole)
        check(llm, family, cases.mixed(family)[:4])


def test_states_of_sounds_are_the_same_on_all_ranks() -> None:
    """Ranks share the layers of Whisper's encoder; the attention of its decoder is whole on every rank."""
    with whisper.make(**RANKS) as llm:
        assert isinstance(executor_of(llm), MultiExecutor)
        whisper.check(llm, *whisper.ALL[: None if LONG else 2])
        whisper.check(llm, *whisper.ALL[1::-1])
    with pytest.raises(ConfigError, match="states of media"):
        whisper.make(**RANKS | {"tensor_parallel_size": 1, "pipeline_parallel_size": 2})


@pytest.mark.skipif(not LONG, reason="the long form's")
def test_stages_resume_preempted_sequences() -> None:
    family = "llama"
    more = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2, "async_scheduling": True}
    with make(family, cases.tight(family) | RANKS | more) as llm:
        check(llm, family, cases.crowd(family))
        assert llm.stats().scheduler.num_preemptions > 0


def test_preempted_sequences_resume_and_adapters_are_shared_out(tmp_path: Path) -> None:
    family = "llama"
    more = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "async_scheduling": True}
    with make(family, cases.tight(family) | RANKS | more) as llm:
        model: Any = executor_of(llm)._local.runner._adapter.model  # type: ignore[attr-defined]
        assert isinstance(model.get_output_embeddings(), JoinedOverRanks)
        check(llm, family, cases.crowd(family))
        assert llm.stats().scheduler.num_preemptions > 0
        first, second = lora.pair(family)
        adapters = lora.requests_of((first, second), tmp_path)
        asks = (cases.SHORT, cases.LONG_ELSE, cases.SHORT, cases.SHORT)
        lora.check(llm, family, asks, (first, second, None, first), adapters)
        broken = LoRARequest("broken", 9, str(tmp_path / "missing"))
        with pytest.raises(LoRAError, match="missing"):
            llm.generate("hi", SamplingParams(max_tokens=1), lora_request=broken, use_tqdm=False)
        # All ranks still agree.
        lora.check(llm, family, asks, (second, None, None, second), adapters)


def answers(llm: LLM) -> list[Any]:
    """What options of every sort give."""
    prompts = [tiny.wrap("llama", f"{n} shapes on a white ground") for n in range(4)]
    ban = [lambda ids, logits: logits.index_fill(0, torch.tensor([5, 6, 7]), -torch.inf)]
    params = [
        SamplingParams(temperature=0.9, seed=3, max_tokens=8, repetition_penalty=1.2, top_p=0.8, logprobs=2),
        SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=2, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=8, structured_outputs=StructuredOutputs(regex="(red|green|blue){3}")),
        SamplingParams(temperature=0, max_tokens=8, logits_processors=ban, ignore_eos=True, n=2),
    ]
    length = len(llm.get_tokenizer().encode(prompts[2]))
    named = np.add.outer(np.arange(length - 3), (5, 70))
    prompts.append(prompts[2])
    params.append(SamplingParams(max_tokens=0, prompt_logprob_token_ids=named, prompt_logprob_start=2))
    found = llm.generate(prompts, params, use_tqdm=False)
    return [
        (
            [tuple(each.token_ids) for each in output.outputs],
            None if output.prompt_logprobs is None else [sorted(place or ()) for place in output.prompt_logprobs],
            # Parts of a sum are added in another order.
            None if (scores := output.prompt_token_id_logprobs) is None else scores.round(2).tolist(),
        )
        for output in found
    ]


@pytest.mark.parametrize("form", [{}, *([{"tensor_parallel_size": 1, "pipeline_parallel_size": 2}] if LONG else [])])
def test_every_option_gives_the_same_tokens(form: dict[str, Any]) -> None:
    options: dict[str, Any] = cases.ROOMY | {"device": "cpu"}
    with make("llama", options) as llm:
        wanted = answers(llm)
    with make("llama", options | RANKS | form) as llm:
        assert answers(llm) == wanted


def test_weights_rounded_at_load_are_cut_as_they_are_stored() -> None:
    """Activations are rounded part by part, so near ties may fall otherwise; most tokens are the same."""
    prompts = [tiny.wrap("llama", f"{n} shapes on a white ground") for n in range(4)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    options: dict[str, Any] = cases.ROOMY | {"device": "cpu", "quantization": "int4"}
    found = []
    for more in ({}, RANKS):
        with make("llama", options | more) as llm:
            found.append([output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
            if more:
                model: Any = executor_of(llm)._local.runner._adapter.model  # type: ignore[attr-defined]
                layer = model.model.layers[0].mlp.down_proj
                assert isinstance(layer, SummedOverRanks)
                assert layer.inner.in_features == model.config.intermediate_size // 2
    same = sum(a == b for one, two in zip(*found, strict=True) for a, b in zip(one, two, strict=True))
    assert same >= 36, found
