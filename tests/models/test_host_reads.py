"""Which tower calls wait for the device; it is a stand-in here (meta), whose tensors have no values to be read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from beheld import LLM, SamplingParams
from beheld.families.ernie4_5_vl_moe import model as ernie4_5_vl_moe
from beheld.families.glm4v import model as glm4v
from beheld.families.rwkv import model as rwkv
from beheld.platform import host
from tests import tiny
from tests.oracle.cases import Clip
from tests.platform import stand_in

GREEDY = SamplingParams(temperature=0.0, max_tokens=1)


class Sent(TorchFunctionMode):
    """Notes numbers that go from the host to the device, which waits like a read."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func in (torch.tensor, torch.as_tensor)
            and torch.device((kwargs or {}).get("device") or "cpu").type == "meta"
        ):
            self.made.append(args[0])
        result = func(*args, **(kwargs or {}))
        seen = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        there = any(x.is_meta for x in (*seen, *tree_leaves(result)) if isinstance(x, torch.Tensor))
        # One number is given along with a kernel.
        self.made += [(func, x) for x in seen if there and not x.is_meta and x.dim()]
        return result


def calls_of(family: str) -> tuple[Any, list[tuple[str, dict[str, Any]]]]:
    """An adapter on a CPU, and the tower calls of two pictures, alone and beside one another, and of videos."""
    calls: list[tuple[str, dict[str, Any]]] = []
    # Weights in oneDNN's order cannot lie on the stand-in.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "cpu_flags", lambda: "")
        llm = LLM(str(tiny.checkpoint(family)), dtype="bfloat16", seed=0, max_num_seqs=4, media_workers=0)
    with llm:
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
        if family in tiny.VIDEO_FAMILIES:
            clips = [Clip(4, 1, fps=2.0), Clip(6, 2, fps=2.0)]
            prompts += [
                {"prompt": tiny.prompt(family, 0, 1, "Hi?"), "multi_modal_data": {"video": [(c.array, c.metadata)]}}
                for c in clips
            ]
        llm.generate(prompts, GREEDY, use_tqdm=False)
        del adapter._tower
    return adapter, calls


def put_away(adapter: Any) -> None:
    """Let the adapter's model lie on the stand-in, and what the adapter uploads."""
    adapter.model.to("meta")
    adapter.device = torch.device("meta")
    adapter._upload = lambda host: torch.empty(host.shape, dtype=host.dtype, device="meta")


FAMILIES = ["llava", "llava_next", "llava_onevision", "qwen2_5_vl", "qwen3_vl"]
FAMILIES += ["glm4v", "glm4v_moe", "glm46v", "ernie4_5_vl_moe", "hunyuan_vl", "glm_ocr", "lighton_ocr", "paddleocr_vl"]
FAMILIES += ["got_ocr2", "qwen3_5"]


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_tower_call_reads_nothing_back_and_sends_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in.register(monkeypatch)
    adapter, calls = calls_of(family)
    put_away(adapter)
    assert {modality for modality, _ in calls} == ({"image", "video"} if family in tiny.VIDEO_FAMILIES else {"image"})
    for modality, options in calls:
        with Sent() as sent:
            assert adapter._tower(modality, options).is_meta
        assert not sent.made


def test_the_token_before_each_is_found_without_numbers_of_the_host() -> None:
    """RWKV's layers ask for it in each step."""
    with Sent() as sent:
        assert rwkv._before(torch.empty(3, 4, device="meta")).shape == (4, 2)
    assert not sent.made
    assert rwkv._before(torch.empty(3, 4)).tolist() == [[1.0, 0.0]] * 4


def test_positions_of_glm_are_looked_up_as_by_the_tower_itself() -> None:
    """By the sizes that it is given; here they are found from rows and columns."""
    from transformers.models.glm4v.configuration_glm4v import Glm4vVisionConfig
    from transformers.models.glm4v.modeling_glm4v import Glm4vVisionEmbeddings
    from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids

    torch.manual_seed(0)
    own = Glm4vVisionEmbeddings(Glm4vVisionConfig(hidden_size=8, image_size=24, patch_size=4))
    for grids in ([[1, 2, 6]], [[1, 4, 2], [1, 6, 6], [1, 2, 2]], [[1, 4, 4]] * 5):
        grid_I3 = torch.tensor(grids)
        lengths = get_vision_cu_seqlens(grid_I3).diff()
        rows_P, columns_P = get_vision_position_ids(grid_I3, 2).unbind(1)
        patches = torch.randn(int(lengths.sum()), 8)
        want = own(patches, lengths, grid_I3, rows_P, columns_P)
        assert torch.equal(glm4v._Sized(own.forward)(patches, lengths, None, rows_P, columns_P), want)


def test_frames_of_ernie_are_joined_as_by_the_model_itself() -> None:
    from transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe import (
        Ernie4_5_VLMoeVariableResolutionResamplerModel as Resampler,
    )

    class Sizes:
        spatial_merge_size = 2

    for grids in (
        [[1, 2, 6]],
        [[1, 4, 2], [1, 2, 2]],
        [[4, 4, 4]],
        [[5, 2, 2]],
        [[6, 2, 4], [1, 4, 4], [3, 4, 2], [2, 2, 2]],
    ):
        grid_I3 = torch.tensor(grids)
        hidden_PH = torch.randn(int(grid_I3.prod(-1).sum()) // 4, 3)
        want = Resampler._temporal_slicing(Sizes(), hidden_PH, grid_I3)
        assert torch.equal(ernie4_5_vl_moe._Pairs(2)(hidden_PH, grid_I3), want)
