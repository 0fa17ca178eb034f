"""The Triton kernel of attention beside the text in Triton's interpreter; test_triton.py runs this file."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from beheld import LLM, SamplingParams
from beheld.attention import triton_cross
from beheld.attention.cross import CrossMetadata, SDPACross
from beheld.attention.triton_cross import TritonCross
from tests import tiny
from tests.attention.cross_reference import LAYERS, decode, expected, metadata, states

SCALE = 0.3


def queries(num_tokens: int, heads: int, size: int) -> torch.Tensor:
    return torch.randn(num_tokens, heads, size)


def check(q_THC: torch.Tensor, known: CrossMetadata) -> None:
    """All layers of one step: the second finds what the first left behind."""
    backend = TritonCross()
    for layer in range(LAYERS):
        out_THC = backend.attend(q_THC, layer, known, SCALE)
        torch.testing.assert_close(out_THC.double(), expected(q_THC, layer, known, SCALE), atol=3e-6, rtol=1e-5)
        want_THC = SDPACross().attend(q_THC, layer, known, SCALE)
        torch.testing.assert_close(out_THC, want_THC, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("counts", "heads", "kv_heads", "size"),
    [
        ([5], 2, 2, 64),
        ([1, 64, 65], 6, 2, 80),
        ([700, 17], 5, 1, 96),
        ([300], 4, 4, 128),
        ([65, 130], 16, 1, 64),
        ([260, 1], 8, 2, 112),
    ],
    ids=str,
)
def test_decoding(counts: list[int], heads: int, kv_heads: int, size: int) -> None:
    torch.manual_seed(sum(counts))
    check(queries(len(counts), heads, size), decode(*((states(count, kv_heads, size),) for count in counts)))


@pytest.mark.parametrize(("heads", "kv_heads", "longest"), [(2, 2, 30), (6, 2, 600), (3, 1, 300), (40, 1, 30)])
def test_runs_of_all_kinds(longest: int, heads: int, kv_heads: int) -> None:
    """Scattered tokens, several items at once, beginnings of items, and tokens that see nothing between and behind."""
    torch.manual_seed(longest)
    a, b, c = (states(count, kv_heads, 24) for count in (longest, 11, 70))
    known = metadata(
        61,
        (((0, 1), (5, 6), (30, 52)), (a,)),
        (((1, 3),), (a, b, c)),
        (((3, 4),), (b[:4],)),
        (((6, 29),), (c, a[: longest // 2])),
        (((57, 58),), (b, b)),
    )
    q_THC = queries(61, heads, 24)
    check(q_THC, known)
    blind = [4, 29, *range(52, 57), *range(58, 61)]
    assert (TritonCross().attend(q_THC, 1, known, SCALE)[blind] == 0).all()


@pytest.mark.parametrize("most", [1, 9])
def test_halves(most: int) -> None:
    """In float16: the interpreter computes no products of bfloat16."""
    torch.manual_seed(most)
    a, b = (states(count, 2, 64, torch.float16) for count in (300, 70))
    known = metadata(20, (((0, 1),), (a, b)), (((10, 10 + most),), (b,)))
    q_THC = queries(20, 4, 64).half()
    out_THC = TritonCross().attend(q_THC, 1, known, SCALE)
    want_THC = expected(q_THC, 1, known, SCALE)
    assert (out_THC.double() - want_THC).norm() < 1e-3 * want_THC.norm()


def test_long_states_are_split_and_short_ones_are_not() -> None:
    """Otherwise the tests above would not join anything."""
    q_THC, long, short = queries(2, 2, 16), states(900, 2, 16), states(100, 2, 16)
    for item, splits in ((long, True), (short, False)):
        known = decode((item,), (item,))
        TritonCross().attend(q_THC, 0, known, SCALE)
        plan = known.extra["triton"]
        assert (len(plan.items_W8) > 2) == splits
        assert (len(plan.arrived) > 0) == splits


def test_no_more_parts_than_one_program_joins() -> None:
    item = states(64 * (triton_cross._MAX_PARTS + 3), 1, 16)
    table = triton_cross._Table(1, 1, 16 * 4)
    table.fill(decode((item,)).runs, target=1000)
    assert 1 < table._items[5] <= triton_cross._MAX_PARTS
    assert sum(table._pieces[3::4]) == len(item)


def test_strided_queries_and_one_launch_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    known = decode((states(200, 2, 16),), (states(9, 2, 16),))
    fused = torch.randn(2, 3, 4, 16)
    check(fused[:, 1], known)
    check(torch.randn(2, 4, 16, 2)[..., 0], known)
    launched = []
    launch = triton_cross._launch
    monkeypatch.setattr(triton_cross, "_launch", lambda *args: launched.append(launch(*args)))
    TritonCross().attend(fused[:, 1], 0, known, SCALE)
    assert len(launched) == 1


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_one_request_s_nan_stays_its_own() -> None:
    a, b = states(300, 2, 16), states(300, 2, 16)
    q_THC, known = queries(6, 4, 16), metadata(6, (((0, 4),), (a,)), (((4, 5),), (b,)))
    want = TritonCross().attend(q_THC, 0, known, SCALE)
    q_THC[2] = float("nan")
    b[:] = float("nan")
    out = TritonCross().attend(q_THC, 0, known, SCALE)
    assert out[2].isnan().all()
    assert out[4].isnan().all()
    sound = [0, 1, 3, 5]
    assert torch.equal(out[sound], want[sound])


def test_states_of_another_layout_are_refused() -> None:
    item = torch.randn(5, LAYERS, 2, 2, 16)
    with pytest.raises(AssertionError, match="another layout"):
        TritonCross().attend(queries(1, 2, 16), 0, decode((item,)), SCALE)


@pytest.mark.parametrize("family", ["mllama", "florence2"])
def test_the_engine_s_answers_are_those_of_pytorch_s_own(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of several lengths, with and without pictures, in steps of their own and in common ones."""
    pictures = [tiny.picture(150, 56, 3), tiny.picture(56, 90, 4)]
    prompts: list[Any] = [
        {"prompt": tiny.prompt(family, 1, 0, text), "multi_modal_data": {"image": picture}}
        for text, picture in zip(("Hi?", "What is it that you see?"), pictures, strict=True)
    ]
    if family == "mllama":
        prompts.append({"prompt": tiny.prompt(family, 2, 0, "Both?"), "multi_modal_data": {"image": pictures}})
        prompts.append({"prompt": tiny.prompt(family, 0, 0, "None of them.")})
    answers, used = [], []
    for backend in (SDPACross(), TritonCross()):
        attend = backend.attend
        monkeypatch.setattr(backend, "attend", lambda *args, attend=attend: used.append(attend) or attend(*args))
        monkeypatch.setattr("beheld.runner.build.select_cross", lambda device, backend=backend: backend)
        with LLM(str(tiny.checkpoint(family)), dtype="float32", seed=0, max_num_seqs=3, media_workers=0) as llm:
            outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=6), use_tqdm=False)
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]
    assert {attend.__self__.name for attend in used} == {"sdpa", "triton"}
