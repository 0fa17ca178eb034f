"""Which tower calls wait for the device; it is a stand-in here (meta), whose tensors have no values to be read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from beheld import LLM, SamplingParams
from tests import tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=1)


class Sent(TorchFunctionMode):
    """Notes numbers that are made on the host for the device, which waits like a read."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func in (torch.tensor, torch.as_tensor)
            and torch.device((kwargs or {}).get("device") or "cpu").type == "meta"
        ):
            self.made.append(args[0])
        return func(*args, **(kwargs or {}))


def calls_of(family: str) -> tuple[Any, list[tuple[str, dict[str, Any]]]]:
    """An adapter on a CPU, and the tower calls of two pictures, alone and beside one another."""
    calls: list[tuple[str, dict[str, Any]]] = []
    with LLM(str(tiny.checkpoint(family)), dtype="bfloat16", seed=0, max_num_seqs=4, media_workers=0) as llm:
        adapter: Any = llm._run.core.executor.runner._adapter  # type: ignore[union-attr]
        tower = adapter._tower

        def noted(modality: str, options: dict[str, Any]) -> Any:
            calls.append((modality, options))
            return tower(modality, options)

        adapter._tower = noted
        one, two = tiny.picture(150, 56, 3), tiny.picture(56, 90, 4)
        prompts = [
            {"prompt": tiny.prompt(family, 1, 0, "Hi?"), "multi_modal_data": {"image": one}},
            {"prompt": tiny.prompt(family, 2, 0, "Hi?"), "multi_modal_data": {"image": [two, one]}},
        ]
        llm.generate(prompts, GREEDY, use_tqdm=False)
        del adapter._tower
    return adapter, calls


def put_away(adapter: Any) -> None:
    """Let the adapter's model lie on the stand-in, and what the adapter uploads."""
    adapter.model.to("meta")
    adapter.device = torch.device("meta")
    adapter._upload = lambda host: host.to("meta")


@pytest.mark.parametrize("family", ["llava", "llava_next", "llava_onevision"])
@torch.inference_mode()
def test_a_tower_call_reads_nothing_back_and_sends_nothing(family: str) -> None:
    adapter, calls = calls_of(family)
    put_away(adapter)
    assert calls
    for modality, options in calls:
        with Sent() as sent:
            assert adapter._tower(modality, options).is_meta
        assert not sent.made
