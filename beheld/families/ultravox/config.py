"""Ultravox's configuration: the projector's at the top level, the encoder's and the language model's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig, WhisperConfig
from transformers.models.auto import AutoConfig

from beheld.core.errors import ModelError

_REMEDY = "Use a checkpoint of the layout of fixie-ai/ultravox-v0_5-llama-3_2-1b."


class UltravoxConfig(PreTrainedConfig):
    """config.json as published; the configurations of parts that it only names are filled in before.

    Attributes:
        audio_config, text_config: the encoder's and the language model's.
        audio_model_id, text_model_id: the checkpoints with their weights; None for this one.
        hidden_size: of the projector.
        stack_factor: frames of the encoder that one embedding is made of.
        projector_act: the projector's activation.
        projector_ln_mid: whether its last norm stands before its last layer (from version 0.5 on) or after it.
        num_projector_layers: encoder layers of another projector, which is not supported.
        audio_latency_block_size: frames of a block that does not attend to later ones, which is not supported.
        audio_token_id: of the placeholder; the tokenizer's files name it, see Family.placeholder_tokens.
    """

    model_type = "ultravox"
    sub_configs = {"audio_config": WhisperConfig, "text_config": AutoConfig}  # noqa: RUF012
    audio_config: Any = None
    text_config: Any = None
    audio_model_id: str | None = None
    text_model_id: str | None = None
    hidden_size: int = 4096
    stack_factor: int = 8
    projector_act: str = "swiglu"
    projector_ln_mid: bool = False
    num_projector_layers: int = 0
    audio_latency_block_size: int | None = None
    text_model_lora_config: Any = None
    audio_model_lora_config: Any = None
    audio_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Make the configurations of the parts.

        Raises:
            ModelError: the layout is one without a definition here.
        """
        self.audio_config = _made(self.audio_config, "audio_config", ("whisper",))
        self.text_config = _made(self.text_config, "text_config", ("llama",))
        self._refuse()
        self.tie_word_embeddings = self.text_config.tie_word_embeddings
        self.vocab_size = self.text_config.vocab_size
        super().__post_init__(**kwargs)

    def _refuse(self) -> None:
        if self.num_projector_layers:
            raise ModelError(
                f"config.json sets num_projector_layers to {self.num_projector_layers}: a projector with layers of its "
                "own is not supported.",
                _REMEDY,
            )
        if self.audio_latency_block_size:
            raise ModelError(
                f"config.json sets audio_latency_block_size to {self.audio_latency_block_size}: masks for streaming "
                "are not supported.",
                _REMEDY,
            )
        if self.projector_act != "swiglu":
            raise ModelError(
                f"config.json sets projector_act to {self.projector_act!r}, which is not supported; swiglu is.", _REMEDY
            )
        for name in ("text_model_lora_config", "audio_model_lora_config"):
            rank = (getattr(self, name) or {}).get("r")
            if rank:
                raise ModelError(
                    f"{name} in config.json has the rank {rank}: an adapter that is not merged is not supported.",
                    "Merge it into the weights, as published checkpoints do.",
                )


def _made(given: Any, entry: str, known: tuple[str, ...]) -> Any:
    if given is not None and not isinstance(given, Mapping):
        return given
    given = dict(given or {})
    kind = given.pop("model_type", known[0])
    if kind not in known:
        raise ModelError(
            f"{entry} is of the model type {kind!r}, which is not supported; {', '.join(known)} is.", _REMEDY
        )
    return CONFIG_MAPPING[kind](**given)
