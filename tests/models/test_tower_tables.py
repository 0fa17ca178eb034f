"""Images for which a tower has no place in its tables are refused before they reach it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from beheld import LLM, SamplingParams
from beheld.core.errors import StepError
from tests import tiny

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.mark.parametrize(
    ("family", "options", "side", "words"),
    [
        ("mllama", {"max_image_tiles": 9}, 70, "cut for 9 tiles .* takes 4"),
        ("mllama", {"max_image_tiles": 3}, 70, "cut for 3 tiles .* takes 4"),
        ("florence2", {"do_resize": False}, 168, "21 x 21 patches, .* at most 20 per side"),
    ],
)
def test_what_a_tower_has_no_place_for_never_reaches_it(
    family: str, options: dict[str, Any], side: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, an index behind the end of a table would end the work of all."""
    prompt = {"prompt": tiny.prompt(family, 1), "multi_modal_data": {"image": tiny.picture(side, side, 1)}}
    with LLM(str(tiny.checkpoint(family)), dtype="float32", max_model_len=512, max_num_seqs=2) as llm:
        behind: list[bool] = []
        looked_up = torch.nn.Embedding.forward

        def forward(table: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
            behind.append(int(ids.max()) >= table.num_embeddings)
            return looked_up(table, ids)

        monkeypatch.setattr(torch.nn.Embedding, "forward", forward)
        with pytest.raises(StepError, match=f"(?s){words}.*leave out options that change its size"):
            llm.generate(prompt | {"mm_processor_kwargs": options}, PARAMS, use_tqdm=False)
        assert not any(behind)
        (answered,) = llm.generate(prompt, PARAMS, use_tqdm=False)
        assert len(answered.outputs[0].token_ids) == 4
        assert behind
