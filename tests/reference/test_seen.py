"""What our processors and towers make of images and videos equals what published code made: sizes, pixels, embeddings.

Of the arrays, the outputs in tests/reference/outputs have the shape, the norm and values that are evenly spaced.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.oracle import reference
from tests.reference.cases import asks
from tests.reference.test_recorded import FAMILIES, TOLERANCE, recorded

SEEN = [(family, name) for family in FAMILIES for name, case in recorded(family)["cases"].items() if "pixels" in case]


def check(values: torch.Tensor, told: dict[str, Any], atol: float) -> None:
    flat = values.detach().double().flatten()
    count = len(told["values"])
    kept = flat[[int(index * (len(flat) - 1) / (count - 1)) for index in range(count)]]
    assert list(values.shape) == told["shape"]
    assert float(flat.norm()) == pytest.approx(told["norm"], rel=1e-5)
    assert kept.tolist() == pytest.approx(told["values"], abs=atol)


@pytest.mark.parametrize(("family", "name"), SEEN)
def test_slices_and_their_embeddings_are_those_of_the_published_code(family: str, name: str) -> None:
    told, ask = recorded(family)["cases"][name], asks(family)[name]
    inputs = reference.processor(family)(
        text=[ask.prompt(family)],
        images=[ask.pictures()] if ask.images else None,
        videos=[clip.array for clip in ask.videos] or None,
    )
    assert inputs["tgt_sizes"].tolist() == told["sizes"]
    check(inputs["pixel_values"], told["pixels"], 1e-5)
    features = {part: inputs[part] for part in ("pixel_values", "tgt_sizes", "num_slices")}
    with torch.inference_mode():
        embeds = reference.model(family).get_image_features(**features).pooler_output
    check(torch.cat(list(embeds)), told["embeds"], TOLERANCE)
