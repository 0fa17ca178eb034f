"""Ranks read their own part of weights of few bits, and hold the numbers that the whole has there."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file
from torch import Tensor

from beheld import LLM, SamplingParams
from beheld.core.config import EngineArgs
from beheld.engine.setup import describe, resolve_and_decide
from beheld.models.load import load_model
from beheld.parallel.shards import Cut
from beheld.platform.cpu import Cpu
from beheld.quant import gguf as quant_gguf
from beheld.quant import mxfp4
from beheld.quant.linear import StoredExperts, StoredLinear
from tests import ranks, tiny, tiny_gguf, tiny_quantized
from tests.long import LONG
from tests.quant import (
    stored_forms,
    test_awq,
    test_bitsandbytes,
    test_compressed_integers,
    test_gptq,
    test_nvfp4,
    test_torchao,
)

Reads = Counter[str]
RANKS = 2
# Outputs and inputs of a block.
BLOCKS = (16, 32)
# What is read of checkpoints with blocks across outputs, or with groups of which a rank has parts; else it is half.
SHARE = {"bitsandbytes, 4 bits": 0.6, "torchao, 4 bits in int8": 0.7, "torchao, FP8 by block": 0.57, "MXFP4": 0.58}
PROMPTS = [[5 + (7 * n + 3 * m) % 80 for n in range(m)] for m in (40, 3, 17, 1)]


class Opened:
    """A safetensors file that counts the bytes of what is read of it."""

    def __init__(self, opened: Any, reads: Reads) -> None:
        self._opened, self._reads = opened, reads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def get_slice(self, name: str) -> Entry:
        return Entry(self._opened.get_slice(name), self._reads)


class Entry:
    """An entry of such a file."""

    def __init__(self, entry: Any, reads: Reads) -> None:
        self._entry, self._reads = entry, reads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)

    def __getitem__(self, index: Any) -> Tensor:
        found: Tensor = self._entry[index]
        self._reads["bytes"] += found.nbytes
        return found


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Bytes that are read of checkpoints."""
    made: Reads = Counter()
    opening = safetensors.safe_open
    monkeypatch.setattr(safetensors, "safe_open", lambda *args, **keywords: Opened(opening(*args, **keywords), made))
    parts = quant_gguf.GGUFTensor._parts

    def counted(self: Any) -> Any:
        for part in parts(self):
            made["bytes"] += part.nbytes
            yield part

    monkeypatch.setattr(quant_gguf.GGUFTensor, "_parts", counted)
    return made


def load(path: Path, rank: int | None, **options: Any) -> Any:
    """The model, or a rank's part of it, before surgery."""
    args = EngineArgs(model=str(path), device="cpu", skip_tokenizer_init=True, **options)
    decided = resolve_and_decide(args)
    group: Any = None if rank is None else SimpleNamespace(rank=rank, size=RANKS)
    return load_model(decided.hf_config, decided.info, decided.config, group).target.model


def numbers(model: Any, name: str) -> Tensor:
    """The dequantized weight of this name."""
    path, _, own = name.rpartition(".")
    module: Any = model.get_submodule(path)
    if isinstance(module, StoredLinear | StoredExperts):
        module = module.restored()
    found: Tensor = getattr(module, own)
    return found.detach()


@functools.cache
def source(family: str) -> Path:
    """A checkpoint whose sizes divide into groups on each rank."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3MoeConfig

    vocabulary = json.loads((tiny.checkpoint("qwen2") / "config.json").read_text())["vocab_size"]
    sizes: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 512, "vocab_size": vocabulary}

    if family == "qwen2 with three heads":
        sizes |= {"num_attention_heads": 3, "num_key_value_heads": 3}
    if family.startswith("llama"):
        config: Any = LlamaConfig(intermediate_size=256, tie_word_embeddings=family == "llama tied", **sizes)
    elif family.startswith("qwen2"):
        config = Qwen2Config(intermediate_size=256, tie_word_embeddings=True, **sizes)
    else:
        config = Qwen3MoeConfig(moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2, **sizes)
    torch.manual_seed(0)
    path = Path(tempfile.mkdtemp(dir=tiny.checkpoint("qwen2").parent))
    shutil.copytree(tiny.checkpoint("qwen2"), path, dirs_exist_ok=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.2 if parameter.dim() > 1 else 0.5)
    model.save_pretrained(path)
    return path


def forms() -> dict[str, Callable[[Path], Any]]:
    """Checkpoints by the form of their weights."""

    def written(entry: dict[str, Any], form: stored_forms.Form, family: str = "qwen2") -> Callable[[Path], Any]:
        return lambda path: stored_forms.write(source(family), path, entry, form, "lm_head")

    def torchao(name: str) -> Callable[[Path], Any]:
        return lambda path: test_torchao.write(path, name)

    def gguf(kind: Kind, family: str) -> Callable[[Path], Any]:
        return lambda path: tiny_gguf.write(source(family), path / "a.gguf", kind)

    blocks = stored_forms.block_fp8(BLOCKS)
    eights = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": list(BLOCKS)}
    names = ("W8A8", "W4A16 by channel", "W8A16 with zeros")
    return {
        "AWQ": written(test_awq.ENTRY, stored_forms.awq(16)),
        "AWQ with experts": written(test_awq.ENTRY, stored_forms.awq(16), "qwen3_moe"),
        "GPTQ, 4 bits": written(test_gptq.ENTRY | {"bits": 4, "group_size": 16}, stored_forms.gptq(4, 16, 1)),
        "GPTQ, 3 bits": written(test_gptq.ENTRY | {"bits": 3, "group_size": 32}, stored_forms.gptq(3, 32, 1)),
        "FP8 in blocks": written(eights, blocks),
        "FP8 in blocks with experts": written(eights, blocks, "qwen3_moe"),
        "FP8 by row": lambda path: tiny_quantized.quantize(source("qwen2"), path, "float32"),
        "NVFP4": written(test_nvfp4.scheme(), stored_forms.nvfp4()),
        "bitsandbytes, 4 bits": written(test_bitsandbytes.FOUR, stored_forms.blocks_of_codes(64)),
        "bitsandbytes, 8 bits": written(test_bitsandbytes.EIGHT, stored_forms.eight_bit_rows()),
        **{name: written(*test_compressed_integers.FORMS[name]) for name in names},
        **{f"torchao, {name}": torchao(name) for name in test_torchao.FORMS},
        # Gate and up side by side, biases; and a scale for each 32 inputs.
        "MXFP4": lambda path: tiny_quantized.quantize_mxfp4(tiny.checkpoint("gpt_oss"), path),
        # Rows of queries and keys are in another order there; a head that is tied.
        "GGUF, Q4_0": gguf(Kind.Q4_0, "llama"),
        "GGUF, Q8_0": gguf(Kind.Q8_0, "llama tied"),
    }


def most_are_the_same(one: list[Any], two: list[Any]) -> bool:
    """Whether nine of ten tokens are."""
    pairs = [pair for a, b in zip(one, two, strict=True) for pair in zip(a, b, strict=True)]
    return sum(a == b for a, b in pairs) >= 0.9 * len(pairs)


def size_of(model: Any) -> int:
    """The bytes of a model's weights."""
    packed = sum(getattr(module, "packed_bytes", 0) for module in model.modules())
    return packed + sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", forms())
def test_a_rank_reads_its_part(
    name: str, dtype: str, tmp_path: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept as stored in bfloat16, dequantized in float32."""
    if name.startswith("FP8"):
        monkeypatch.setattr(Cpu, "fp8_products", True)
    forms()[name](tmp_path)
    path = tmp_path / "a.gguf" if name.startswith("GGUF") else tmp_path
    reads.clear()
    whole = load(path, None, dtype=dtype)
    read = reads["bytes"]
    kept = {path for path, module in whole.named_modules() if isinstance(module, StoredLinear | StoredExperts)}
    for rank in range(RANKS):
        reads.clear()
        part = load(path, rank, dtype=dtype)
        assert reads["bytes"] < SHARE.get(name, 0.525) * read, (rank, reads["bytes"] / read)
        args = EngineArgs(model=str(path), device="cpu", dtype=dtype)
        assert describe(args, RANKS)[2]["weights_bytes"] == pytest.approx(size_of(part), rel=0.02), "as a plan says"
        cuts = part.shard_plan.cuts
        assert {
            path for path, module in part.named_modules() if isinstance(module, StoredLinear | StoredExperts)
        } == kept
        sums = 0
        for each, cut in cuts.items():
            there = numbers(whole, each)
            assert torch.equal(numbers(part, each), cut.of(there, there.shape)), each
            sums += there.dim() > 1
        assert sums > 5


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_ranks_leave_the_same_modules_whole(dtype: str, tmp_path: Path) -> None:
    """Of three heads the second rank holds one, and one of zeros, which no stored form has."""
    stored_forms.write(source("qwen2 with three heads"), tmp_path, test_awq.ENTRY, stored_forms.awq(16), "lm_head")
    plans = [load(tmp_path, rank, dtype=dtype).shard_plan for rank in range(RANKS)]
    cut = [{shard.path.rpartition(".")[2] for shard in plan.shards} for plan in plans]
    expected = {"mlp", "vocabulary"} if dtype == "bfloat16" else {"mlp", "self_attn", "vocabulary"}
    assert cut == [expected, expected]


def test_mxfp4_experts(tmp_path: Path) -> None:
    """Experts, outputs and inputs in whole groups; transformers has inputs before outputs."""
    made = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (4, 6, 4, 16), generator=made, dtype=torch.uint8)
    scales = torch.randint(120, 130, (4, 6, 4), generator=made, dtype=torch.uint8)
    save_file({"w_blocks": blocks, "w_scales": scales}, tmp_path / "model.safetensors")
    weight = mxfp4.open_weights(tmp_path)["w"]
    for cut in (Cut(0, (range(2, 4),)), Cut(1, (range(32), range(64, 96))), Cut(2, (range(3, 6),))):
        part = weight.rank_part(cut)
        assert torch.equal(part[...], cut.of(weight[...], (4, 128, 6)))
        assert part.stored().numel() == weight.stored().numel() // 2
    assert weight.rank_part(Cut(1, (range(16),))) is None


def answers(path: Path, **options: Any) -> list[Any]:
    ask = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(str(path), device="cpu", max_model_len=128, skip_tokenizer_init=True, **options) as llm:
        made = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], ask, use_tqdm=False)
    return [each.outputs[0].token_ids for each in made]


@pytest.fixture(scope="module")
def quick() -> Iterator[None]:
    """Ranks start quickly."""
    with ranks.forked():
        yield


SHARED: list[tuple[str, dict[str, Any]]] = [
    ("AWQ with experts", {"enable_expert_parallel": True}),
    ("GPTQ, 4 bits", {"pipeline_parallel_size": 2}),
    ("GGUF, Q8_0", {}),
]
FURTHER: list[tuple[str, dict[str, Any]]] = [
    ("AWQ with experts", {}),
    ("GPTQ, 4 bits", {"pipeline_parallel_size": 2, "tensor_parallel_size": 1}),
    ("FP8 in blocks with experts", {}),
    ("MXFP4", {}),
    # A tied head whose rows do not divide by the ranks, and experts of fewer groups than there are ranks.
    ("GGUF, Q8_0", {"tensor_parallel_size": 3}),
    ("MXFP4", {"tensor_parallel_size": 4}),
]


@pytest.mark.parametrize(("name", "more"), SHARED + FURTHER if LONG else SHARED)
def test_ranks_answer_as_one_process(quick: None, name: str, more: dict[str, Any], tmp_path: Path) -> None:
    """Exactly with dequantized numbers; kept ones round activations on each rank by themselves."""
    forms()[name](tmp_path)
    path = tmp_path / "a.gguf" if name.startswith("GGUF") else tmp_path
    many = {"distributed_executor_backend": "mp", "tensor_parallel_size": RANKS} | more
    assert answers(path, dtype="float32", **many) == answers(path, dtype="float32")
    if not name.startswith(("MXFP4", "FP8")):
        # Those are dequantized here whatever the type, and bfloat16 rounds otherwise in each part.
        assert most_are_the_same(answers(path, dtype="bfloat16", **many), answers(path, dtype="bfloat16"))
