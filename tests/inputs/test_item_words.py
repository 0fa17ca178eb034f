"""Items that a tower reads together with the prompt's words differ where the words do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from beheld.core.errors import PromptError
from beheld.core.media import MediaItem
from beheld.inputs.prompt.item_words import joined


def item(digest: bytes = b"a", **features: torch.Tensor) -> MediaItem:
    return MediaItem("image", digest, features or {"pixel_values": torch.zeros(1, 2)}, {}, (5,), None, 1, 8)


def words(processor: Any, modality: str, text: str) -> dict[str, torch.Tensor]:
    return {"words": torch.tensor([[ord(letter) for letter in text]])}


def digest(text: str, content: bytes = b"a") -> bytes:
    return joined({"image": [item(content)]}, text, words, None)["image"][0].digest


def test_the_same_image_with_other_words_is_another_item() -> None:
    assert digest("cat") == digest("cat")
    assert len({digest("cat"), digest("dog"), digest("cat", b"b"), item().digest}) == 4


def test_words_are_features_and_counted() -> None:
    (made,) = joined({"image": [item()]}, "cat", words, None)["image"]
    assert made.features["words"].tolist() == [[99, 97, 116]]
    assert "pixel_values" in made.features
    assert made.feature_bytes == 8 + 3 * 8


def test_embeddings_need_no_words() -> None:
    given = item(embeds=torch.zeros(1, 4))
    assert joined({"image": [given]}, None, words, None) == {"image": [given]}
    assert joined({"image": [given]}, "cat", words, None) == {"image": [given]}


def test_token_ids_have_no_words() -> None:
    with pytest.raises(PromptError, match="Give the prompt as text"):
        joined({"image": [item()]}, None, words, None)
