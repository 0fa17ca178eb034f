"""Routers of a single row in Triton's interpreter, on a CPU; test_route_row.py runs this in a process of its own."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from beheld.models.route_row_kernel import choose
from beheld.models.surgery.operation import Changes
from beheld.models.surgery.rank_trial import RankTrial
from beheld.models.surgery.route_row import use_row_routers
from tests.long import LONG

HIDDEN = 40
# Scores by sigmoid in float32, with corrections; by softmax; of products in the row's type, with biases.
ROUTERS = (
    ("deepseek_v3", "DeepseekV3TopkRouter"),
    ("glm4_moe", "Glm4MoeTopkRouter"),
    ("glm4_moe_lite", "Glm4MoeLiteTopkRouter"),
    ("kimi_linear", "KimiLinearTopkRouter"),
    ("gpt_oss", "GptOssTopKRouter"),
    ("qwen3_moe", "Qwen3MoeTopKRouter"),
    ("qwen3_vl_moe", "Qwen3VLMoeTextTopKRouter"),
    ("qwen3_5_moe", "Qwen3_5MoeTopKRouter"),
    ("deepseek_v2", "DeepseekV2TopkRouter"),
)


def router(
    name: str, kind: str, experts: int, choices: int, dtype: torch.dtype, groups: tuple[int, int] = (1, 1), **more: Any
) -> Any:
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    config = SimpleNamespace(
        hidden_size=HIDDEN, num_experts=experts, num_local_experts=experts, num_experts_per_tok=choices,
        n_group=groups[0], topk_group=groups[1], routed_scaling_factor=1.8, norm_topk_prob=True, topk_method="greedy",
    )  # fmt: skip
    vars(config).update(more)
    made = getattr(module, kind)(config)
    chance = torch.Generator().manual_seed(experts)
    for own in (*made.parameters(), *made.buffers()):
        own.data = torch.randn(own.shape, generator=chance).mul_(0.3).to(dtype if own.dim() == 2 else own.dtype)
        if own.dim() == 1 and isinstance(own, nn.Parameter):
            own.data = own.data.to(dtype)
    return made.eval()


def agree(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    """The same products, and the same experts with the same shares, in whatever order."""
    assert [each.dtype for each in found] == [each.dtype for each in wanted]
    assert [each.shape for each in found] == [each.shape for each in wanted]
    torch.testing.assert_close(found[0], wanted[0], atol=2e-3 if wanted[0].element_size() == 2 else 1e-5, rtol=1e-3)
    # In 16 bits, products that differ by a rounding may make another choice.
    if wanted[0].dtype == torch.float32:
        order, want = found[2].sort(-1), wanted[2].sort(-1)
        assert torch.equal(order[0], want[0])
        shares, own = found[1].gather(1, order[1]), wanted[1].gather(1, want[1])
        torch.testing.assert_close(shares, own, atol=2e-3 if own.element_size() == 2 else 1e-6, rtol=1e-5)


SIZES = ((20, 8), (64, 4), (3, 1), (5, 5))
# One of each rule that a kernel follows has all sizes, as the others have in the long form.
OF_ALL_SIZES = ("deepseek_v3", "gpt_oss", "qwen3_moe")


@pytest.mark.parametrize(
    ("name", "kind", "experts", "choices"),
    [(name, kind, *size) for name, kind in ROUTERS for size in SIZES[: None if LONG or name in OF_ALL_SIZES else 1]],
)
@torch.inference_mode()
def test_routers_of_transformers(name: str, kind: str, experts: int, choices: int) -> None:
    """In float32, where products differ by less than their distance."""
    own = router(name, kind, experts, choices, torch.float32)
    x_RH = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(1))
    want = [own(x_1H) for x_1H in x_RH.split(1)]
    changes = Changes()
    assert use_row_routers(nn.ModuleList([nn.Linear(3, 3), own]), torch.float32, changes, RankTrial(None)) == 1
    for x_1H, wanted in zip(x_RH.split(1), want, strict=True):
        agree(own(x_1H), wanted)
    # Some blocks give rows as they are.
    if name not in ("gpt_oss",):
        agree(own(x_RH[:1].unsqueeze(0)), want[0])
    # Several rows: by the module's own method.
    many = type(own).forward(own, x_RH)
    assert all(torch.equal(a, b) for a, b in zip(own(x_RH), many, strict=True))
    changes.take_back()
    assert "forward" not in vars(own)
    assert not hasattr(own, "row_rule")


@pytest.mark.parametrize(("name", "kind"), ROUTERS)
@torch.inference_mode()
def test_routers_in_16_bits(name: str, kind: str) -> None:
    """In float16: the interpreter rounds to bfloat16 by cutting."""
    own = router(name, kind, 32, 4, torch.float16)
    x_1H = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(2)).half()
    wanted = own(x_1H)
    assert use_row_routers(nn.ModuleList([own]), torch.float16, Changes(), RankTrial(None)) == 1
    agree(own(x_1H), wanted)


@pytest.mark.parametrize(("groups", "experts"), [((4, 2), 32), ((8, 3), 40), ((3, 2), 15)])
@pytest.mark.parametrize("normed", [False, True])
@torch.inference_mode()
def test_groups(groups: tuple[int, int], experts: int, normed: bool) -> None:
    """Of sizes that fill their lanes and that do not."""
    own = router(*ROUTERS[0], experts, 6, torch.float32, groups, norm_topk_prob=normed)
    x_RH = torch.randn(12, HIDDEN, generator=torch.Generator().manual_seed(3))
    want = [own(x_1H) for x_1H in x_RH.split(1)]
    own.num_group, own.topk_group = 1, 1
    free = own(x_RH)[2]
    own.num_group, own.topk_group = groups
    # The limits matter.
    assert any(set(a.tolist()) != set(b[2][0].tolist()) for a, b in zip(free[:4], want[:4], strict=True))
    assert use_row_routers(nn.ModuleList([own]), torch.float32, Changes(), RankTrial(None)) == 1
    # The interpreter takes a tenth of a second for each.
    for x_1H, wanted in zip(x_RH[:4].split(1), want[:4], strict=True):
        agree(own(x_1H), wanted)


@torch.inference_mode()
def test_a_router_that_leaves_its_groups_is_not_taken() -> None:
    """Experts of other groups count as zero in A.X-K2, so they come before chosen groups' scores below zero."""
    own = router("axk2", "AXK2TopkRouter", 32, 6, torch.float32, (4, 2))
    correction_E = own.e_score_correction_bias.clone()
    assert use_row_routers(nn.ModuleList([own]), torch.float32, Changes(), RankTrial(None)) == 0
    assert torch.equal(own.e_score_correction_bias, correction_E)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")
@pytest.mark.parametrize("sigmoid", [False, True])
def test_odd_logits(sigmoid: bool) -> None:
    """Equal ones: the first; extremes, and the like of which torch says that it is the largest."""
    given = {"groups": 1, "kept": 1, "normed": True, "scale": 1.0, "dtype": torch.float32, "early": False}
    share_C, choice_C = choose(torch.zeros(7), None, sigmoid=sigmoid, choices=3, **given)  # type: ignore[arg-type]
    assert choice_C.tolist() == [0, 1, 2]
    torch.testing.assert_close(share_C, torch.full((3,), 1 / 3))
    extreme = torch.tensor([-3e38, 90.0, -torch.inf, 3e38, -1.0])
    _, choice_C = choose(extreme, None, sigmoid=sigmoid, choices=5, **given)  # type: ignore[arg-type]
    assert choice_C.tolist() == [3, 1, 4, 0, 2]
    for lost in (torch.nan, -torch.nan):
        logits = torch.tensor([1.0, lost, 2.0, 3.0])
        _, choice_C = choose(logits, None, sigmoid=sigmoid, choices=2, **given)  # type: ignore[arg-type]
        assert choice_C.tolist() == [1, 3]
        choices = choose(torch.full((6,), lost), torch.zeros(6), sigmoid=sigmoid, choices=6, **given)[1]  # type: ignore[arg-type]
        assert sorted(choices.tolist()) == list(range(6))


@pytest.mark.parametrize("change", ["another score", "the worst", "a factor", "fewer"])
@torch.inference_mode()
def test_a_router_that_does_something_else_is_not_taken(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = router(*ROUTERS[5], 16, 3, torch.float32)
    plain = type(own).forward

    def forward(self: Any, x: Tensor) -> Any:
        logits, shares, choices = plain(self, x)
        if change == "another score":
            return logits, logits.gather(1, choices).relu(), choices
        if change == "the worst":
            return logits, shares, logits.topk(3, largest=False)[1]
        return (logits, 2 * shares, choices) if change == "a factor" else (logits, shares[:, :2], choices[:, :2])

    monkeypatch.setattr(type(own), "forward", forward)
    assert use_row_routers(nn.ModuleList([own]), torch.float32, Changes(), RankTrial(None)) == 0
    assert "forward" not in vars(own)


@torch.inference_mode()
def test_what_takes_more_than_a_row_is_left_alone() -> None:
    own = router("minimax_m2", "MiniMaxM2TopKRouter", 8, 2, torch.float32)
    assert use_row_routers(nn.ModuleList([own]), torch.float32, Changes(), RankTrial(None)) == 0


@torch.inference_mode()
def test_compiled_code_calls_it() -> None:
    own = router(*ROUTERS[0], 16, 3, torch.float32)
    x_1H = torch.randn(1, 1, HIDDEN, generator=torch.Generator().manual_seed(4))
    wanted = own(x_1H)
    assert use_row_routers(nn.ModuleList([own]), torch.float32, Changes(), RankTrial(None)) == 1

    def block(module: nn.Module, x: Tensor) -> Any:
        return module(x * 1.0)

    compiled = torch.compile(block, backend="aot_eager", dynamic=True, fullgraph=True)
    agree(compiled(own, x_1H), wanted)
