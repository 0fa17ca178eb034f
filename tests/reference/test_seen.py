"""What our processors and towers make of media equals what another implementation made: sizes, pixels, embeddings.

Of the arrays, the outputs in tests/reference/outputs have the shape, the norm and values that are evenly spaced.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.oracle import reference
from tests.oracle.cases import Ask
from tests.reference.cases import asks
from tests.reference.test_recorded import FAMILIES, TOLERANCE, recorded

SEEN = [(family, name) for family in FAMILIES for name, case in recorded(family)["cases"].items() if "pixels" in case]
NOT_SEEN = {
    # One image is compared whole, in tests/families/test_glm4v_9b.py.
    "glm4v_9b": "image",
    # Its pixels are those of a stand-in for the processor; see the file's entry "processor".
    "hyperclovax_vlm": "image video",
    "minicpmo": "sound",
}
"""Families whose recorded answers come without what their towers received and made, of these kinds."""
PIXELS = ("pixel_values", "pixel_values_videos", "audio_values")
TILES = "pixel_values_local"


def check(values: torch.Tensor, told: dict[str, Any], atol: float) -> None:
    flat = values.detach().double().flatten()
    count = len(told["values"])
    kept = flat[[int(index * (len(flat) - 1) / (count - 1)) for index in range(count)]]
    assert list(values.shape) == told["shape"]
    assert float(flat.norm()) == pytest.approx(told["norm"], rel=1e-5)
    # Of values of size one: products of larger ones are rounded more, and otherwise by other processors.
    size = max(1.0, told["norm"] / len(flat) ** 0.5)
    assert kept.tolist() == pytest.approx(told["values"], abs=atol * size)


def prepared(family: str, ask: Ask) -> dict[str, Any]:
    """What our processor makes of a request."""
    if not family.startswith("minicpm"):
        return reference.inputs(family, ask)
    made = reference.processor(family)(
        text=[ask.prompt(family)],
        images=[ask.pictures()] if ask.images else None,
        videos=[clip.array for clip in ask.videos] or None,
    )
    return dict(made)


def embedded(family: str, inputs: dict[str, Any]) -> torch.Tensor:
    """The embeddings (N, H) of all its media, in their order."""
    model = reference.model(family)
    sort = "audio" if "audio_values" in inputs else "video" if "pixel_values_videos" in inputs else "image"
    method = getattr(model, f"get_{sort}_features", None) or getattr(model.model, f"get_{sort}_features")
    taken = inspect.signature(method).parameters
    with torch.inference_mode():
        found = method(**{name: value for name, value in inputs.items() if name in taken}).pooler_output
    parts: Sequence[torch.Tensor] = [found] if isinstance(found, torch.Tensor) else found
    return torch.cat([part.flatten(0, -2) for part in parts])


@pytest.mark.parametrize(("family", "name"), SEEN)
def test_pixels_and_embeddings_are_those_of_the_other_implementation(family: str, name: str) -> None:
    told = recorded(family)["cases"][name]
    inputs = prepared(family, asks(family)[name])
    if "sizes" in told:
        assert inputs["tgt_sizes"].tolist() == told["sizes"]
    (pixels,) = (inputs[part] for part in PIXELS if part in inputs)
    if family == "bee":
        # Both fill up the tiles of an image to those of the largest.
        pixels = pixels.flatten(0, 1)
    check(pixels, told["pixels"], 1e-5)
    assert (TILES in inputs and len(inputs[TILES]) > 0) == ("tiles" in told)
    if "tiles" in told:
        check(inputs[TILES], told["tiles"], 1e-5)
    check(embedded(family, inputs), told["embeds"], TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_case_with_media_of_one_kind_has_them(family: str) -> None:
    cases = recorded(family)["cases"]
    missing = set()
    for name, ask in asks(family).items():
        kinds = [kind for kind in ("image", "video", "sound") if getattr(ask, f"{kind}s")]
        if len(kinds) == 1 and name in cases and "pixels" not in cases[name]:
            missing.add(kinds[0])
    assert missing == set(NOT_SEEN.get(family, "").split())


@pytest.mark.parametrize("name", [name for name, case in recorded("phi3_v")["cases"].items() if "vector" in case])
def test_vectors_of_vlm2vec_are_those_of_the_published_code(name: str) -> None:
    ask = asks("phi3_v")[name]
    with torch.inference_mode():
        made = reference.model("phi3_v")(**reference.inputs("phi3_v", ask), output_hidden_states=True)
    vector = F.normalize(made.hidden_states[-1][0, -1], dim=0)
    assert vector.tolist() == pytest.approx(recorded("phi3_v")["cases"][name]["vector"], abs=1e-5)
