"""The checkpoints of tests/census as benchmarks.families measures them: enlarged, and asked in batches.

All prompts of a batch have one length and media of one size, so that transformers' inputs of each, which many
processors make of one prompt alone, are a batch as they are, without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Reshape = Callable[[dict[str, Any]], dict[str, Any]]
PROMPT = 64
"""Tokens of a prompt of text alone."""


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Inputs of several prompts of one length as one batch: what is an array or a list is put one behind the other.

    Patches of images of all sizes, (1, channels, size, patches and their columns), stand along one line.
    """
    import torch

    made: dict[str, Any] = {}
    for name, first in parts[0].items():
        values = [part[name] for part in parts]
        if isinstance(first, torch.Tensor) and first.ndim:
            packed = name == "pixel_values" and "target_sizes" in parts[0] and first.shape[0] == 1
            made[name] = torch.cat(values, -1 if packed else 0)
        elif isinstance(first, list):
            made[name] = [each for value in values for each in value]
        else:
            made[name] = first
    return made


class Texts:
    """A type of text that has no row of its own; prompts are random ids."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def make(self, folder: Path, reshape: Reshape) -> Path:
        """Write the enlarged checkpoint into the new `folder`."""
        from tests import census, tiny

        folder.mkdir(parents=True)
        with tiny.reshaping(reshape):
            self._class = type(census.make(self._kind, folder))
        return folder

    def load(self, folder: Path) -> Any:
        """transformers' model, with the attention that it chooses itself."""
        import torch
        from transformers import GenerationConfig

        model = self._class.from_pretrained(folder, dtype=torch.float32).eval()
        model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
        return model

    def asks(self, requests: int, turn: int) -> list[Any]:
        """Ids of prompts, other ones in every turn."""
        import torch

        generator = torch.Generator().manual_seed(1000 * turn)
        return torch.randint(3, 400, (requests, PROMPT), generator=generator).tolist()  # type: ignore[no-any-return]

    def batch(self, asks: list[Any]) -> dict[str, Any]:
        """transformers' inputs."""
        import torch

        ids = torch.tensor(asks)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def request(self, ask: Any) -> dict[str, Any]:
        """A prompt as the engine takes it."""
        return {"prompt_token_ids": ask}

    def options(self) -> dict[str, Any]:
        """The engine's options that the prompts need."""
        return {}


class Media:
    """A type that reads media and is made of a recipe; every prompt has one image, audio or video."""

    def __init__(self, kind: str) -> None:
        from tests import census

        self._kind, self._recipe = kind, census.RECIPES[kind]

    def make(self, folder: Path, reshape: Reshape) -> Path:
        """Write the enlarged checkpoint into the new `folder`; its model and processor are kept."""
        from tests import census_media, tiny

        folder.mkdir(parents=True)
        with tiny.reshaping(reshape):
            self._model, self._processor = census_media.make(self._kind, self._recipe, folder)
        return folder

    def load(self, folder: Path) -> Any:
        """transformers' model, which `make` made."""
        from tests import census_media

        inputs, _ = census_media.prepared(self._processor, self._recipe, self.asks(1, 0)[0])
        self._model.generation_config = census_media.settings(self._processor, self._recipe, inputs)
        return self._model

    def asks(self, requests: int, turn: int) -> list[Any]:
        """Media of each prompt, other ones in every turn."""
        from tests import census_media, tiny

        seeds = range(1000 * turn + 1, 1000 * turn + 1 + requests)
        if self._recipe.image:
            return [[tiny.picture(84, 56, seed)] for seed in seeds]
        if self._recipe.audio:
            seconds = self._recipe.rate / tiny.SOUND_RATE
            return [census_media.Sounds([tiny.sound(seconds, seed)]) for seed in seeds]
        return [str(seed) for seed in seeds]

    def batch(self, asks: list[Any]) -> dict[str, Any]:
        """transformers' inputs, with what its generate() must know."""
        from tests import census_media

        parts = [census_media.prepared(self._processor, self._recipe, ask)[0] for ask in asks]
        return joined(parts) | dict(self._recipe.generating)

    def request(self, ask: Any) -> dict[str, Any]:
        """A prompt as the engine takes it."""
        from tests import census_media

        return census_media.request(self._recipe, ask)

    def options(self) -> dict[str, Any]:
        """The engine's options that the prompts need."""
        from tests import census_media

        return census_media.options(self._recipe)
