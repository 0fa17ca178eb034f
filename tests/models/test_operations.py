"""What is prepared for a GPU, looked at where there is none."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from beheld import SamplingParams
from beheld.core.config import EngineArgs
from beheld.engine.setup import resolve_and_decide
from beheld.models.load import model_class_of
from beheld.models.surgery import compiled as compiling
from beheld.models.surgery import operations
from beheld.models.surgery.operation import Surgery, Target
from beheld.models.surgery.parts import text_model
from tests import tiny
from tests.fakes import fake_config
from tests.oracle import cases, reference, test_oracle


def made(family: str) -> tuple[Any, Any]:
    """The family's tiny model with weights of chance, and what its checkpoint says."""
    resolved = resolve_and_decide(EngineArgs(model=str(tiny.checkpoint(family)), device="cpu", dtype="float32"))
    model_class = model_class_of(resolved.info, resolved.hf_config)
    return model_class._from_config(resolved.hf_config).float().eval(), resolved.info


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "cohere2_vision", "qwen2_5_vl", "llama4", "phi4_mm"])
@torch.inference_mode()
def test_what_is_around_the_layers_is_compiled_for_single_rows(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotations and the last norm of many rows run as they came, whichever way positions lie in memory."""
    plain, entered = torch.compile, []

    def compiled(call: Any, **_: Any) -> Any:
        taken = plain(call, backend="eager", dynamic=True, fullgraph=True)

        def noted(*args: Any, **kwargs: Any) -> Any:
            entered.append(args[0])
            # Of these alone it is tried whether a compiler takes them.
            return (taken if args[0] in around else call)(*args, **kwargs)

        return noted

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setenv("BEHELD_FUSE", "0")
    told: list[Any] = []
    monkeypatch.setattr(compiling.logger, "log", lambda *args: told.append(args))
    model, info = made(family)
    surgery = Surgery(Target(model, fake_config(device="cuda", dtype="float32")))
    surgery.perform(operations.operations_of(info))
    text = text_model(model)
    around = [text.rotary_emb, text.norm]
    axes = 3 if family == "qwen2_5_vl" else 1
    for rows, expected in ((1, around), (3, [])):
        entered.clear()
        positions = torch.arange(rows).expand(axes, rows)
        text(
            inputs_embeds=torch.randn(1, rows, text.config.hidden_size),
            position_ids=positions if axes == 1 else positions.unsqueeze(1),
            use_cache=False,
        )
        assert all(layer in entered for layer in text.layers)
        assert [module for module in around if module in entered] == expected
    assert not told
    torch._dynamo.reset()


def test_layers_with_the_delta_rule_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler sees the rule as one operator, in prompts and answers; answers stay transformers'."""
    plain, taken = torch.compile, []

    def compiled(call: Any, **_: Any) -> Any:
        taken.append(call)
        return plain(call, backend="eager", dynamic=True, fullgraph=True)

    monkeypatch.setattr(torch, "compile", compiled)
    wanted = ("layer numbers", "compiled text", "compiler settings")
    every = [
        dataclasses.replace(each, suits=lambda target: True) if each.name in wanted else each
        for each in operations.OPERATIONS
    ]
    monkeypatch.setattr(operations, "OPERATIONS", tuple(every))
    told: list[Any] = []
    monkeypatch.setattr(compiling.logger, "log", lambda *args: told.append(args))
    family = "qwen3_5"
    torch._dynamo.reset()
    with test_oracle.make(family, cases.options(family, "cut")) as llm:
        for ask in cases.fit(family, cases.FOUR):
            params = SamplingParams(temperature=0, max_tokens=ask.max_tokens, ignore_eos=True)
            (output,) = llm.generate([test_oracle.request(family, ask)], params, use_tqdm=False)
            assert tuple(output.outputs[0].token_ids) == reference.answer(family, ask).token_ids
    assert taken
    assert not told, "a layer could not be compiled"
    torch._dynamo.reset()
