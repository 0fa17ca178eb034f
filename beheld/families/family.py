"""Facts about a model family that are known before anything of it is loaded.

A family is a folder of `families/`. It answers in three sections, each loaded when it is first asked for:

    __init__.py   FAMILY: Family         facts: names, checkpoints, how config.json is read; imports no torch
    inputs.py     INPUTS: FamilyInputs   prompts and processors: see families/inputs.py
    model.py      MODEL: FamilyModel     towers, layers, weights: see families/model.py

Every field has a default, which means "as transformers does it". A folder has only the files that it needs; a model
without a folder is run by the defaults alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from beheld.core.config import KVGroup

TOLERANCE = 1e-4
"""By how much log-probabilities may differ from transformers', unless a checkpoint says otherwise."""

IMAGE = ("image",)
IMAGE_AND_VIDEO = ("image", "video")
AUDIO = ("audio",)
IMAGE_AND_AUDIO = ("image", "audio")
ALL = ("image", "video", "audio")


@dataclass(frozen=True)
class KnownCheckpoint:
    """A checkpoint layout of the family whose answers the tests compare with transformers'.

    A test keeps each of these entries true.

    Attributes:
        name: as the tests call it.
        architecture: the class name in config.json.
        example: a public checkpoint of it.
        modalities: what it accepts besides text.
        note: what is peculiar to it.
        one_image: it takes one image per prompt.
        whole_prompts: its prompts are computed in one step and never shared.
        joined: transformers' generate() refuses images and a video in one prompt. For both together it is given the
            embeddings that its own towers make of each item.
        on_gpu: its tokens are also compared on a GPU, with graphs and compiled layers.
        tolerance: by how much log-probabilities may differ.
    """

    name: str
    architecture: str
    example: str
    modalities: tuple[str, ...] = ()
    note: str = ""
    one_image: bool = False
    whole_prompts: bool = False
    joined: bool = False
    on_gpu: bool = False
    tolerance: float = TOLERANCE


@dataclass(frozen=True)
class Undefined:
    """A published model that has no definition yet, neither in transformers nor here.

    Attributes:
        name: the class that vLLM has for it, which scripts name in hf_overrides.
        example: a public checkpoint of it.
        needs: what its definition would hold.
        also: a checkpoint of the same class that documents name for another use; empty if there is none.
        entry: the entry of config.json that text models of the same model type lack; empty if there are none.
    """

    name: str
    example: str
    needs: str
    also: str = ""
    entry: str = ""


@dataclass(frozen=True)
class Definition:
    """Classes of the family's own, for a model that transformers does not define.

    Each is written "module:Class", the module relative to the family's folder.

    Attributes:
        config: a PreTrainedConfig.
        model: a PreTrainedModel with GenerationMixin that keeps transformers' interfaces: AttentionInterface,
            get_image_features (and so on), logits_to_keep. Its own generate() is what `beheld verify` compares with.
    """

    config: str
    model: str


@dataclass(frozen=True)
class ReferenceOptions:
    """How transformers itself must be asked so that its answers can be compared with beheld's.

    Attributes:
        attention: the implementation that computes the model right; None leaves the choice to transformers.
        merges_inside: its decoder is given ids and images, and merges them itself.
        completed_later: kinds of media whose get_*_features gives what is projected or filled up before it enters the
            prompt.
        joins_media: its generate() refuses images and a video in one prompt; see verify/joined.py.
        adds_to_placeholder: what the tower gives is added to the embedding of its placeholder.
        text_model_alone: without media, its language model answers alone, since its own generate() wants an image.
        rewrites: prompts have a spelling that only the repository's own code reads, so they are rewritten first.
        wants_frame_rate: its processor takes a rate of its own for that of the chosen frames unless it is given one.
        lists_images: its processor takes the images of a prompt as a plain list, and no prompt without one.
        nests_videos: its processor, before transformers 5.23, counts what lies in the list of a prompt.
    """

    attention: str | None = "sdpa"
    merges_inside: bool = False
    completed_later: frozenset[str] = frozenset()
    joins_media: bool = False
    adds_to_placeholder: bool = False
    text_model_alone: bool = False
    rewrites: bool = False
    wants_frame_rate: bool = False
    lists_images: bool = False
    nests_videos: bool = False


# Content of config.json -> model type and content of the class that transformers (or the family) has for it; None if it
# is in that layout already.
Convert = Callable[[Mapping[str, Any]], tuple[str, dict[str, Any]] | None]


@dataclass(frozen=True)
class Family:
    """The facts of one family.

    Attributes:
        model_types: what config.json names as its model_type.
        architectures: class names that tell it from other families with the same model type.
        processors: names of processor classes, in the checkpoint's files, that tell it from them too.
        tested: its checkpoint layouts in the tests.
        refused: why it cannot be run, as a half sentence; empty if it can.
        undefined: what is missing, for a model that has no definition yet.
        definition: classes of its own.
        package: a package that transformers' model needs and that beheld does not bring.
        convert: model type in config.json -> what reads a configuration of another layout under this type.
        reads_by: of a model that also speaks, the class that runs its part for reading alone (`thinker_config`).
        placeholders: reads modality -> placeholder id from the configuration, where they do not stand at its top under
            the common names.
        videos_as_images: a video's frames take the placeholders of images.
        is_encoder_decoder: its encoder reads the prompt; the engine can run it.
        kv_groups: reads the groups of its decoder layers, where the configuration says them in a form of its own.
        cross_group: reads the group of layers that attend to media, of the configuration; None if there are none.
        both_ways: where attention also looks ahead; see ModelInfo.both_ways.
        joint_tokens: the tokens that see each other, where `both_ways` is "joint".
        adapters: pairs (modality, folder) of LoRA adapters that the checkpoint brings, the most important first.
        reference: how transformers itself is asked.
    """

    model_types: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    processors: tuple[str, ...] = ()
    tested: tuple[KnownCheckpoint, ...] = ()
    refused: str = ""
    undefined: Undefined | None = None
    definition: Definition | None = None
    package: str = ""
    convert: Mapping[str, Convert] = field(default_factory=dict)
    reads_by: str = ""
    placeholders: Callable[[Any], dict[str, int]] | None = None
    videos_as_images: bool = False
    is_encoder_decoder: bool = False
    kv_groups: Callable[[Any], tuple[KVGroup, ...]] | None = None
    cross_group: Callable[[Any], KVGroup | None] | None = None
    both_ways: str = "nowhere"
    joint_tokens: tuple[str, ...] = ()
    adapters: tuple[tuple[str, str], ...] = ()
    reference: ReferenceOptions = field(default_factory=ReferenceOptions)
