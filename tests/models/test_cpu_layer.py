"""Decoder layers computed in two calls on a CPU, against transformers' layers with the same products."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from beheld.attention.backend import AttnMetadata, GroupMetadata, LayerKV
from beheld.attention.context import ForwardContext, forward_context
from beheld.attention.torch_ref import TorchBackend
from beheld.core.errors import EngineDeadError, ModelError
from beheld.models.surgery import cpu_layer, one_row_layer, rank_trial
from beheld.models.surgery.cpu_layer import CpuLayer, compute_layers
from beheld.models.surgery.joined import fuse_linears
from beheld.models.surgery.linears import replace_children
from beheld.models.surgery.one_row_layer import one_row_layers
from beheld.models.surgery.operation import Changes
from beheld.models.surgery.sharded import SummedOverRanks
from beheld.models.surgery.vector_linear import VectorLinear, can_multiply
from beheld.parallel.group import RankGroup
from beheld.platform import host, jit
from beheld.quant.grouped_linear import GroupedLinear

pytestmark = pytest.mark.skipif(
    not jit.available() or host.byte_products() is None, reason="needs llvmlite and a CPU with vectors"
)
# Weights of 16 bits.
_BFLOAT16 = pytest.mark.skipif(not can_multiply(), reason="needs a CPU that multiplies bfloat16")
_SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 16,
}  # fmt: skip


def _text(family: str, bits: int, dtype: torch.dtype, layers: int = 1) -> Any:
    """A text model with weights of few bits, whose norms and biases are random."""
    from transformers import (
        Gemma2Config,
        Gemma2Model,
        LlamaConfig,
        LlamaModel,
        Ministral3Config,
        Ministral3Model,
        Qwen3Config,
        Qwen3Model,
    )

    torch.manual_seed(0)
    sizes = _SIZES | {"num_hidden_layers": layers}
    made: Any = {
        "llama": lambda: LlamaModel(LlamaConfig(**sizes, attention_bias=True, mlp_bias=True)),
        "qwen3": lambda: Qwen3Model(Qwen3Config(**_SIZES)),
        "ministral3": lambda: Ministral3Model(Ministral3Config(**_SIZES)),
        "gemma2": lambda: Gemma2Model(Gemma2Config(**_SIZES)),
        "tanh": lambda: LlamaModel(LlamaConfig(**_SIZES, hidden_act="gelu_pytorch_tanh")),
    }[family]()
    text = made.to(dtype).eval().requires_grad_(False)
    for module in text.modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.data.normal_()
        if type(module).__name__.endswith("RMSNorm"):
            module.weight.data.normal_().add_(1)
    if bits < 16:
        _replace(text, lambda linear: GroupedLinear.of(linear, bits, 32))
    assert fuse_linears(text, Changes()) == 2 * layers
    if bits == 16:
        _replace(text, VectorLinear)
    return text


def _replace(text: Any, kind: Any) -> None:
    replace_children(text.layers, lambda child: kind(child) if type(child) is nn.Linear else None, Changes())


def _attention(layer: int, q: Tensor, k: Tensor, v: Tensor, window: Any, scale: float, softcap: Any) -> Tensor:
    """Something of each row alone, from all of q, k and v."""
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
    return (v.float() * torch.sigmoid((q.float() * k.float()).sum(-1, keepdim=True))).to(v.dtype).transpose(1, 2)


def _inputs(rows: int, dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    angles = torch.arange(rows)[:, None] * torch.arange(1, 17).reciprocal().repeat(2)
    both: Any = tuple(each[None].to(dtype) for each in (angles.cos(), angles.sin()))
    return torch.randn(1, rows, 64).to(dtype), both


def _original(layer: Any, x: Tensor, angles: Any) -> Tensor:
    """transformers' layer, with the same attention."""
    from transformers import AttentionInterface

    AttentionInterface.register(
        "by_row", lambda module, q, k, v, mask, **options: (_attention(0, q, k, v, None, 0.0, None), None)
    )
    layer.self_attn.config._attn_implementation = "by_row"
    made: Tensor = layer(x, position_embeddings=angles)
    return made


def _form(family: str, bits: int, dtype: torch.dtype) -> tuple[Any, CpuLayer]:
    text = _text(family, bits, dtype)
    (made,) = one_row_layers(text, CpuLayer).values()
    made.attend = _attention
    return text.layers[0], made


@pytest.fixture(params=[1, 2])
def threads(request: Any) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("family", ["llama", "qwen3", "tanh"])
@pytest.mark.parametrize(
    ("bits", "dtype", "off"),
    [(4, torch.float32, 0.02), (8, torch.bfloat16, 0.03), pytest.param(16, torch.bfloat16, 0.01, marks=_BFLOAT16)],
)
def test_computes_as_transformers_does(family: str, bits: int, dtype: torch.dtype, off: float) -> None:
    layer, made = _form(family, bits, dtype)
    x, angles = _inputs(5, dtype)
    wanted = _original(layer, x, angles).float()
    found = made(x, position_embeddings=angles).float()
    # Rounding activations to 8 bits makes another number of some that lie in the middle; the output is rounded too.
    rounding = 0.5 * torch.finfo(dtype).eps * wanted.norm()
    assert (found - wanted).norm() <= off * (wanted - x.float()).norm() + rounding


@pytest.mark.parametrize(("bits", "dtype"), [(4, torch.float32), pytest.param(16, torch.bfloat16, marks=_BFLOAT16)])
def test_a_row_has_the_same_bits_alone_and_among_many(threads: int, bits: int, dtype: torch.dtype) -> None:
    _, made = _form("qwen3", bits, dtype)
    rows = 2 * cpu_layer._ROWS + 3
    x, (cos, sin) = _inputs(rows, dtype)
    together = made(x, position_embeddings=(cos, sin))
    for row in (0, 255, 256, rows - 1):
        own = slice(row, row + 1)
        alone = made(x[:, own], position_embeddings=(cos[:, own], sin[:, own]))
        assert torch.equal(alone, together[:, own])


def test_keys_are_stored_as_the_whole_layer_gives_them() -> None:
    _, made = _form("llama", 8, torch.bfloat16)
    x, angles = _inputs(7, torch.bfloat16)
    seen: list[tuple[Tensor, ...]] = []

    def attend(*given: Any) -> Tensor:
        seen.append((given[2].clone(), given[3].clone()))
        return _attention(*given)

    made.attend = attend
    made(x, position_embeddings=angles)
    made.stores(x, position_embeddings=angles)
    assert all(torch.equal(whole, alone) for whole, alone in zip(*seen, strict=True))


def test_layers_of_another_form_stay() -> None:
    # Norms between products and residuals.
    assert not one_row_layers(_text("gemma2", 4, torch.float32), CpuLayer)


def test_layers_that_scale_queries_by_their_position_stay() -> None:
    """Ministral 3 does from the original context on; before that its layers are as Llama's."""
    assert not one_row_layers(_text("ministral3", 8, torch.float32), CpuLayer)


def test_tensors_of_another_type_are_refused() -> None:
    """Compiled functions read them by their addresses alone."""
    _, made = _form("llama", 8, torch.bfloat16)
    x, (cos, sin) = _inputs(3, torch.bfloat16)
    others = [(x.float(), (cos, sin)), (x, (cos.float(), sin)), (x, (cos, sin.float()))]
    for other, angles in others:
        for call in (made, made.stores):
            with pytest.raises(TypeError, match=r"float32.*bfloat16"):
                call(other, position_embeddings=angles)


def test_what_llvm_refuses_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(kind: str) -> jit.CompiledModule:
        raise RuntimeError("LLVM knows no such type")

    monkeypatch.setattr(cpu_layer, "compiled_layers", refuse)
    changes = Changes()
    assert compute_layers(_text("llama", 8, torch.float32), changes) == len(changes) == 0
    assert any(each.levelname == "WARNING" and "LLVM knows no such type" in each.message for each in caplog.records)


def test_layers_of_one_shape_share_their_memory_from_the_trial_on(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []
    plain = cpu_layer.LayerBuffers

    def counted(*sizes: int) -> cpu_layer.LayerBuffers:
        made.append(sizes)
        return plain(*sizes)

    monkeypatch.setattr(cpu_layer, "LayerBuffers", counted)
    assert compute_layers(_text("llama", 8, torch.float32, layers=3), Changes()) == 3
    assert len(made) == 1


def _decoding(dtype: torch.dtype, window: int | None = None) -> ForwardContext:
    """A step of three decoding sequences, whose keys and values lie in blocks of 4 positions."""
    lengths = (3, 9, 6)
    tables_BN = torch.tensor([[1, 0, 0], [2, 4, 5], [3, 6, 0]], dtype=torch.int32)
    slots_T = torch.tensor([4 * int(tables_BN[b, (n - 1) // 4]) + (n - 1) % 4 for b, n in enumerate(lengths)])
    group = GroupMetadata(slots_T, tables_BN, window)
    starts = tuple(length - 1 for length in lengths)
    metadata = AttnMetadata(3, starts, lengths, torch.tensor(lengths), torch.arange(4), (group,), block_size=4)
    chance = torch.Generator().manual_seed(1)
    kv = LayerKV(*(torch.randn(7, 4, 2, 32, generator=chance).to(dtype) for _ in range(2)), 0)
    backend = TorchBackend()
    backend.begin(metadata)
    return ForwardContext(backend, metadata, {0: kv})


@pytest.mark.parametrize(
    ("bits", "dtype"), [(4, torch.float32), (8, torch.bfloat16), pytest.param(16, torch.bfloat16, marks=_BFLOAT16)]
)
def test_decoding_sequences_in_one_call_are_as_in_two(
    threads: int, bits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, made = _form("qwen3", bits, dtype)
    made.attend = cpu_layer.attend_layer
    x, angles = _inputs(3, dtype)
    found, taken, plain = [], [], cpu_layer.decodes_alone

    def noted(*given: Any) -> bool:
        taken.append(plain(*given))
        return taken[-1]

    for function in (noted, lambda *given: False):
        monkeypatch.setattr(cpu_layer, "decodes_alone", function)
        with forward_context(_decoding(dtype)) as context:
            out = made(x, position_embeddings=angles)
        kv: Any = context.kv[0]
        assert context.called == {0: 1}
        found.append((out, kv.keys, kv.values))
    assert taken == [True]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("bits", [4, pytest.param(16, marks=_BFLOAT16)])
def test_threads_wait_wherever_a_step_reads_what_another_thread_did(bits: int) -> None:
    """Without waiting a thread goes on to the next step, of whose parts it has the same rows only if they are rows."""
    _, made = _form("qwen3", bits, torch.bfloat16)
    made._made()
    assert made._whole is not None
    assert made._before is not None
    assert made._after is not None
    programs = [part.program for part in (made._before, *made._after.parts, *made._whole.parts)]
    passed = 0
    for program in programs:
        for step, after in itertools.pairwise(program._steps):
            if not step.waits:
                assert (step.parts, step.per_row, after.parts, after.per_row) == (None, 1, None, 1)
                passed += 1
    assert passed > len(programs), "some steps follow without waiting"


@pytest.mark.parametrize("asked", [2, 3, 5])
def test_a_layer_in_one_call_is_the_same_for_any_number_of_threads(asked: int) -> None:
    """Fewer rows than threads, and rows that threads cannot share evenly."""
    _, made = _form("qwen3", 8, torch.bfloat16)
    made.attend = cpu_layer.attend_layer
    x, angles = _inputs(3, torch.bfloat16)
    before, found = torch.get_num_threads(), []
    try:
        for count in (1, asked):
            torch.set_num_threads(count)
            with forward_context(_decoding(torch.bfloat16)) as context:
                out = made(x, position_embeddings=angles)
            kv: Any = context.kv[0]
            found.append((out, kv.keys, kv.values))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_layer_of_another_window_is_refused_in_one_call_too() -> None:
    _, made = _form("qwen3", 4, torch.float32)
    made.attend = cpu_layer.attend_layer
    x, angles = _inputs(3, torch.float32)
    with forward_context(_decoding(torch.float32, window=4)), pytest.raises(ModelError, match="window"):
        made(x, position_embeddings=angles)


def test_a_prompt_among_decoding_sequences_takes_two_calls() -> None:
    _, made = _form("qwen3", 4, torch.float32)
    made._made()
    memory, jobs = torch.empty(3, 4, 32), made._whole.jobs  # type: ignore[union-attr]
    context = _decoding(torch.float32)
    context.metadata.num_decodes = 2
    with forward_context(context):
        assert not cpu_layer.decodes_alone(0, memory, None, jobs["attention"])
    assert context.called == {}


@pytest.fixture
def group(tmp_path: Path) -> Iterator[RankGroup]:
    """Of this process alone."""
    made = RankGroup(0, 1, tmp_path, None, lambda: None)
    yield made
    made.close()


@pytest.mark.parametrize("summed", [("o_proj", "down_proj"), ("o_proj",), ("down_proj",)])
def test_ranks_add_up_within_a_layer(group: RankGroup, summed: tuple[str, ...]) -> None:
    """A group of one, whose sums leave everything as it is: what is whole on every rank is not added up."""
    text = _text("llama", 8, torch.bfloat16)
    (alone,) = one_row_layers(text, CpuLayer).values()
    (layer,) = text.layers
    for owner, name in ((layer.self_attn, "o_proj"), (layer.mlp, "down_proj")):
        if name in summed:
            setattr(owner, name, SummedOverRanks(getattr(owner, name), group))
    assert compute_layers(text, Changes(), group) == 1
    made = layer.forward
    assert isinstance(made, CpuLayer)
    alone.attend = made.attend = _attention
    before = group.entered
    x, angles = _inputs(5, torch.bfloat16)
    assert torch.equal(made(x, position_embeddings=angles), alone(x, position_embeddings=angles))
    assert group.entered == before + len(summed)


def test_ranks_compute_a_layer_so_together_or_not_at_all(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "least", lambda values: [0])
    assert compute_layers(_text("llama", 8, torch.bfloat16), Changes(), group) == 0


@pytest.mark.parametrize("failing", [{1}, {0, 1}], ids=["one", "both"])
def test_a_trial_that_fails_on_one_rank_alone_leaves_no_rank_waiting(
    failing: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank waits for a sum of the trial; where all fail, layers stay as they are."""
    monkeypatch.setattr(rank_trial, "_ALIKE_S", 5.0 if len(failing) == 2 else 0.3)
    groups = [RankGroup(rank, 2, tmp_path, None, lambda: None) for rank in range(2)]
    texts = [_text("llama", 8, torch.bfloat16) for _ in groups]
    for text, group in zip(texts, groups, strict=True):
        text.layers[0].self_attn.o_proj = SummedOverRanks(text.layers[0].self_attn.o_proj, group)
    watched, ends = one_row_layer._watched, dict[int, Any]()

    def fails(text: Any, first: int, **more: Any) -> Any:
        if any(text is texts[rank] for rank in failing):
            raise RuntimeError("no memory here")
        return watched(text, first, **more)

    def load(rank: int) -> None:
        try:
            ends[rank] = compute_layers(texts[rank], Changes(), groups[rank])
        except Exception as error:
            ends[rank] = error
            # As the watchdog does once a rank says that it has failed.
            groups[1 - rank].abort()

    monkeypatch.setattr(one_row_layer, "_watched", fails)
    threads = [threading.Thread(target=load, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert set(ends) == {0, 1}
    if len(failing) == 2:
        assert list(ends.values()) == [0, 0]
    else:
        assert isinstance(ends[1], EngineDeadError)
        assert "on rank 1 alone (no memory here)" in str(ends[1])
        assert isinstance(ends[0], Exception)
    for group in groups:
        group.abort()
        group.close()
