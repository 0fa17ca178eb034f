"""MiniCPM-V's configuration: the text's at the top level, and the tower's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from transformers import Qwen2Config, SiglipVisionConfig

from beheld.core.errors import ModelError


@dataclass(frozen=True)
class Version:
    """What distinguishes one version.

    Attributes:
        text: the class of transformers that computes its text.
        entries: settings of that class which config.json may leave out.
        patches: how the tower's learned positions reach patches: "interpolated", "in a row" or "in a grid".
        query_positions: whether the resampler's queries have stored positions, too.
        marked_together: whether all slices of an image are between one pair of marks.
        after: the text after an image.
        videos: whether the model takes videos.
    """

    text: str
    entries: Mapping[str, Any] = field(default_factory=dict)
    patches: str = "in a grid"
    query_positions: bool = False
    marked_together: bool = False
    after: str = ""
    videos: bool = True


_LLAMA = {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1}
_FIRST = "2.0"

VERSIONS: Mapping[str, Version] = {
    # Granite's class has the factors that MiniCPM's text multiplies with.
    _FIRST: Version(
        "GraniteModel",
        {**_LLAMA, "embedding_multiplier": 1.0},
        patches="interpolated",
        query_positions=True,
        marked_together=True,
        after="\n",
        videos=False,
    ),
    "2.5": Version("LlamaModel", _LLAMA, patches="in a row", marked_together=True, videos=False),
    "2.6": Version("Qwen2Model"),
    "4.0": Version("LlamaModel", _LLAMA),
    "4.5": Version("Qwen3Model", {"attention_bias": False, "head_dim": 128}),
}


def _name_of(version: Any) -> str:
    """Return the name of a version as config.json has it: 4, "4.0" and 4.0 are one."""
    try:
        return f"{float(version):.1f}"
    except (TypeError, ValueError):
        return str(version)


# The tower of version 2.0, whose sizes are in the repository's code; a smaller checkpoint's `vision_config` overrides
# them.
_FIRST_TOWER = {
    "hidden_act": "gelu",
    "hidden_size": 1152,
    "image_size": 378,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
}


class MiniCPMVConfig(Qwen2Config):
    """config.json as published; also the configuration of the text, whichever its class.

    Attributes:
        version: the version of the architecture; absent in 2.0.
        query_num: embeddings of one slice.
        drop_vision_last_layer: whether the tower ends before its last layer.
        batch_vision_input: whether the tower of version 2.5 sees the slices of an image filled up to the largest.
        slice_mode: whether images are cut.
        scale_emb, scale_depth, dim_model_base: factors of version 2.0's text.
        vision_config: the tower.
        image_token_id: of `<unk>`; the tokenizer's files name it, see Family.placeholder_tokens.
    """

    model_type = "minicpmv"
    model_name: ClassVar[str] = "MiniCPM-V"
    example: ClassVar[str] = "openbmb/MiniCPM-V-2_6"
    known: ClassVar[tuple[str, ...]] = tuple(VERSIONS)
    sub_configs = {"vision_config": SiglipVisionConfig}  # noqa: RUF012
    version: Any = None
    query_num: int = 64
    drop_vision_last_layer: bool = False
    batch_vision_input: bool = True
    slice_mode: bool = False
    scale_emb: float = 1.0
    scale_depth: float | None = None
    dim_model_base: int | None = None
    vision_config: Any = None
    image_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the version, make the tower's configuration and complete the text's.

        Raises:
            ModelError: the version is unknown.
        """
        name = self._version_name()
        if name not in self.known:
            known = " and ".join(filter(None, (", ".join(self.known[:-1]), self.known[-1])))
            raise ModelError(
                f"{self.model_name} version {self.version} in config.json is not supported; {known} "
                f"{'are' if len(self.known) > 1 else 'is'}.",
                f"Use a checkpoint of the layout of {self.example}.",
            )
        if not isinstance(self.vision_config, SiglipVisionConfig):
            given = {key: value for key, value in (self.vision_config or {}).items() if key != "model_type"}
            self.vision_config = SiglipVisionConfig(**((_FIRST_TOWER if name == _FIRST else {}) | given))
        super().__post_init__(**kwargs)
        for entry, value in self._entries(name).items():
            if getattr(self, entry, None) is None:
                setattr(self, entry, value)

    @property
    def facts(self) -> Version:
        """Return what distinguishes the version."""
        return VERSIONS[self._version_name()]

    def _version_name(self) -> str:
        if self.version is not None:
            return _name_of(self.version)
        if self.scale_depth is not None and self.slice_mode:
            return _FIRST
        # transformers makes a configuration without arguments to learn its defaults.
        return str(self.version) if self.vision_config is not None or self.scale_depth is not None else "2.6"

    def _entries(self, name: str) -> dict[str, Any]:
        """Return the entries of the text's class that config.json may lack."""
        made = dict(VERSIONS[name].entries)
        if VERSIONS[name].text != "Qwen2Model":
            made.setdefault("head_dim", self.hidden_size // self.num_attention_heads)
        if name == _FIRST:
            assert self.scale_depth is not None
            made["attention_multiplier"] = made["head_dim"] ** -0.5
            made["residual_multiplier"] = self.scale_depth / self.num_hidden_layers**0.5
            made["logits_scaling"] = self.hidden_size / (self.dim_model_base or self.hidden_size)
        return made
