"""Operations on a loaded model are applied in a fixed order, and all that they changed is taken back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from beheld.models.surgery.operation import Changes, Operation, Phase, Surgery, Target


class Doubled(nn.Module):
    """Holds no weights of its own that the old layer's could not be made from."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.data * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


def halved(module: nn.Module) -> nn.Module:
    weight: Any = module.weight
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight.data / 2)
    return linear


def test_all_kinds_of_changes_are_taken_back() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    before, x = [layer.weight.detach().clone() for layer in model], torch.randn(2, 3)  # type: ignore[union-attr]
    want, seen, methods = model(x), [], [dict(vars(layer)) for layer in model]
    changes = Changes()
    changes.set(model[1], "forward", lambda x: x)
    changes.set(model[1], "forward", lambda x: x + 1)
    changes.replace(model, "0", Doubled(model[0]), halved)  # type: ignore[arg-type]
    changes.hook(model[1].register_forward_hook(lambda *given: seen.append(given)))
    changes.undo_with(lambda: seen.append("undone"))
    assert len(changes) == 5
    assert torch.equal(model(x), x @ before[0].t() * 2 + 1)
    assert len(seen) == 1
    changes.take_back()
    assert seen[1:] == ["undone"]
    assert len(changes) == 0
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear]
    assert "forward" not in vars(model[1])
    assert vars(model[1]).keys() == methods[1].keys()
    assert not model[1]._forward_hooks
    assert torch.equal(model(x), want)
    assert len(seen) == 2


def operation(name: str, stage: Phase, said: list[str], **options: Any) -> Operation:
    def apply(target: Target, changes: Changes) -> None:
        said.append(name)
        changes.undo_with(lambda: said.append(f"not {name}"))

    return Operation(name, stage, needs="nothing", replaces="nothing", apply=apply, **options)


def test_operations_follow_their_stages_and_are_undone_in_reverse() -> None:
    said: list[str] = []
    surgery = Surgery(Target(nn.Identity(), config=None))  # type: ignore[arg-type]
    surgery.perform(
        [
            operation("compile", Phase.COMPILE, said),
            operation("adapt", Phase.ADAPT, said),
            operation("fuse one", Phase.FUSE, said),
            operation("not here", Phase.FUSE, said, suits=lambda target: False),
            operation("fuse two", Phase.FUSE, said),
        ]
    )
    assert said == ["adapt", "fuse one", "fuse two", "compile"]
    with pytest.raises(AssertionError, match="too late"):
        surgery.perform([operation("late", Phase.ADAPT, said)])
    said.clear()
    surgery.take_back()
    assert said == ["not compile", "not fuse two", "not fuse one", "not adapt"]
    assert surgery.done == []


def test_what_fails_half_way_can_be_taken_back() -> None:
    model = nn.Sequential(nn.Linear(2, 2))

    def apply(target: Target, changes: Changes) -> None:
        changes.set(model[0], "forward", lambda x: x)
        raise RuntimeError("no memory")

    surgery = Surgery(Target(model, config=None))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="no memory"):
        surgery.perform([Operation("fails", Phase.FUSE, "", "", apply)])
    surgery.take_back()
    assert "forward" not in vars(model[0])
