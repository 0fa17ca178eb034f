"""MiniCPM-o's configuration: MiniCPM-V's, and the audio encoder's."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import SiglipVisionConfig, WhisperConfig

from beheld.families.minicpmv.config import MiniCPMVConfig


def num_embeds(frames: int, step: int) -> int:
    """Return the number of embeddings of so many mel frames; `step` encoder positions make one."""
    positions = (frames - 1) // 2 + 1
    return max(0, (positions - step) // step + 1)


class MiniCPMOConfig(MiniCPMVConfig):
    """config.json as published.

    Attributes:
        audio_config: the audio encoder's.
        audio_pool_step: encoder positions of one embedding.
        audio_chunk_length: seconds of a block of audio, which does not attend to later ones; 0 for no blocks.
        chunk_input: whether the prompt marks each second of audio.
        audio_token_id: of `<unk>`, as image_token_id.
    """

    model_type = "minicpmo"
    model_name: ClassVar[str] = "MiniCPM-o"
    example: ClassVar[str] = "openbmb/MiniCPM-o-2_6"
    known: ClassVar[tuple[str, ...]] = ("2.6",)
    sub_configs = {"vision_config": SiglipVisionConfig, "audio_config": WhisperConfig}  # noqa: RUF012
    audio_config: Any = None
    audio_pool_step: int = 2
    audio_chunk_length: float = 1.0
    chunk_input: bool = True
    audio_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Make the encoder's configuration; else as MiniCPM-V's."""
        if not isinstance(self.audio_config, WhisperConfig):
            given = {key: value for key, value in (self.audio_config or {}).items() if key != "model_type"}
            self.audio_config = WhisperConfig(**given)
        super().__post_init__(**kwargs)
