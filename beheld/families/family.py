"""The facts of a model family, known before any of its code is loaded.

A family is a folder of `families/` with three sections, each loaded on first use:

    __init__.py   FAMILY: Family         facts: names, checkpoints, how config.json is read; imports no torch
    inputs.py     INPUTS: FamilyInputs   prompts and processors: see families/inputs.py
    model.py      MODEL: FamilyModel     towers, layers, weights: see families/model.py

Every field has a default that means "as transformers does it". A folder has only the files that it needs; a model
without a folder runs with the defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from beheld.core.config import KVGroup, StateShape
from beheld.core.grounding import Grounding
from beheld.core.pooling import PoolerInfo

TOLERANCE = 1e-4
"""The largest difference of log-probabilities from transformers', unless a checkpoint sets another."""

IMAGE = ("image",)
VIDEO = ("video",)
IMAGE_AND_VIDEO = ("image", "video")
AUDIO = ("audio",)
IMAGE_AND_AUDIO = ("image", "audio")
ALL = ("image", "video", "audio")


@dataclass(frozen=True)
class KnownCheckpoint:
    """A checkpoint layout of the family whose answers the tests compare with transformers'.

    A test checks each of these entries.

    Attributes:
        name: its name in the tests.
        architecture: the class name in config.json.
        example: a public checkpoint in this layout.
        modalities: the media that it accepts.
        note: what is special about it.
        one_image: whether it accepts one image per prompt.
        whole_prompts: whether its prompts are computed in one step and never shared.
        joined: whether transformers' generate() refuses images and a video in one prompt. For both together it then
            receives the embeddings that its towers compute for each item.
        on_gpu: whether its tokens are also compared on a GPU, with graphs and compiled layers.
        tolerance: the largest difference of log-probabilities.
        by_census: whether only the census compares it, with less than the others (tests/census_media.py).
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
    by_census: bool = False


@dataclass(frozen=True)
class ShortName:
    """A name by which users may call a public checkpoint of the family.

    Attributes:
        name: in lower case, without a slash.
        repository: owner/name on the hub.
        layout: the name of its KnownCheckpoint.
        licence: as the repository's card states it.
        billions: of parameters, towers included.
        good_at: what to choose it for.
        embedding_billions: of parameters in embeddings, where these are a large part of the model.
        expert_billions: of parameters in experts.
    """

    name: str
    repository: str
    layout: str
    licence: str
    billions: float
    good_at: str
    embedding_billions: float = 0.0
    expert_billions: float = 0.0


@dataclass(frozen=True)
class Definition:
    """The family's own classes, for a model that transformers does not define.

    Each is "module:Class", the module relative to the family's folder.

    Attributes:
        config: a PreTrainedConfig.
        model: a PreTrainedModel with GenerationMixin that supports transformers' interfaces: AttentionInterface,
            get_image_features (and so on), get_output_embeddings. `beheld verify` compares with its generate().
    """

    config: str
    model: str


@dataclass(frozen=True)
class SecondaryCheckpoint:
    """Another checkpoint that holds a part of the model; see checkpoint/secondary.py.

    Attributes:
        named_by: the entry of config.json that names it; without that entry, the model's own checkpoint has the part.
        described_in: the entry of config.json in whose place the other's config.json is read.
        prefix: stands before the names of its weights in the model.
        root: stands before them in the other checkpoint; weights there without it are not read.
    """

    named_by: str
    described_in: str
    prefix: str
    root: str = ""


@dataclass(frozen=True)
class ReferenceOptions:
    """How to run transformers so that its answers can be compared with beheld's.

    Attributes:
        attention: the implementation that computes the model correctly; None leaves the choice to transformers.
        merges_inside: whether its decoder receives ids and images and merges them itself.
        completed_later: modalities whose get_*_features returns embeddings that are projected or padded before they
            enter the prompt.
        joins_media: whether its generate() refuses images and a video in one prompt; see tools/verify/mixed_prompts.py.
        adds_to_placeholder: whether the tower's output is added to its placeholder's embedding.
        text_model_alone: whether its language model answers prompts without media, because its generate() requires an
            image.
        rewrites: whether prompts have a spelling that only the repository's code reads, so that they are rewritten
            first.
        wants_frame_rate: whether its processor assumes a rate of the sampled frames unless it receives one.
        lists_images: whether its processor takes a prompt's images as a flat list, and no prompt without an image.
        nests_videos: whether its processor, before transformers 5.23, counts the entries of a prompt's list.
        asks_of_text: entries that the whole model reads from the output of its language model, which has none of them
            in some versions of transformers.
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
    asks_of_text: tuple[str, ...] = ()


@dataclass(frozen=True)
class GGUFLayout:
    """How GGUF files of a family's text models are read and written; see checkpoint/gguf.

    Attributes:
        architecture: the files' `general.architecture`.
        also: architectures that are the same for a text, and have positions of several axes with a vision part.
        model_class: transformers' class.
        biases: an entry of config.json -> the tensor whose presence makes it true.
        permuted: a layer's matrix -> the entry of config.json with its number of heads, if the files have the two
            numbers that are rotated together next to each other.
        parts: the files' names of a layer's parts -> transformers', where checkpoint/gguf/names.py has others.
        added: entries of config.json that all such models have.
        entries: an entry of config.json -> the file's entry, without the architecture before it; left out where the
            file does not have it, or a window that is 0.
        adapt: "module:function", the module relative to the family's folder; takes the content of config.json and the
            file's entries without the architecture before them, and changes the content. None if nothing is left to
            change.
        norms_plus_one: whether the files have 1 added to the weights of norms.
        written_from: further model types whose text models are written as this one, if nothing else differs.
        adapted_from: "module:function", the reverse of `adapt`: from the content of config.json, returns the content
            that `adapt` takes, and the file's entries that it reads. None if there is no `adapt`.
    """

    architecture: str
    model_class: str
    also: tuple[str, ...] = ()
    biases: Mapping[str, str] = field(default_factory=dict)
    permuted: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)
    added: Mapping[str, Any] = field(default_factory=dict)
    entries: Mapping[str, str] = field(default_factory=dict)
    adapt: str | None = None
    norms_plus_one: bool = False
    written_from: tuple[str, ...] = ()
    adapted_from: str | None = None


@dataclass(frozen=True)
class GGUFProjector:
    """How a GGUF file with a model's vision part (mmproj) is read, next to the one with its text model.

    Attributes:
        projector: the file's `clip.projector_type`.
        files: "module:function", the module relative to the family's folder; makes the checkpoint's files of
            checkpoint/gguf/projector.py's ProjectorFile.
        names: the file's names of weights -> transformers', both without "weight" or "bias", or both whole; "{}" is a
            number. Weights with one name of transformers' are joined along their first dimension, in this order.
        text_prefix: what transformers' names of the text model's weights begin with.
        listed: entries of the file, lists of truths, by what `names` begins with: their "{}" numbers the true ones.
        stacked: names whose weights the file holds in slices along this dimension, the further ones with numbers.
        plus_one: names of norms to whose weights the files have 1 added.
        stand_ins: transformers' names of weights that no answer depends on and the files may lack -> others of the same
            shape, which are read in their place.
    """

    projector: str
    files: str
    names: Mapping[str, str]
    text_prefix: str
    listed: Mapping[str, str] = field(default_factory=dict)
    stacked: Mapping[str, int] = field(default_factory=dict)
    plus_one: tuple[str, ...] = ()
    stand_ins: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class OldestTransformers:
    """The oldest transformers whose own classes compute a family's answers correctly.

    Attributes:
        version: its first two numbers, as in "5.23".
        flaw: what older versions do, as a half sentence whose subject they are.
    """

    version: str
    flaw: str


UNDEFINED = "does not define them"
"""The flaw of versions without the classes."""


# Content of config.json -> model type and content for the class of transformers or the family; None if it is already in
# that layout.
Convert = Callable[[Mapping[str, Any]], tuple[str, dict[str, Any]] | None]


@dataclass(frozen=True)
class PublisherLayout:
    """A layout of files in which a publisher stores models, without transformers' config.json.

    Attributes:
        name: what options call it, such as `config_format`.
        file: the file that stands for config.json.
        weights: the pattern of its files of weights.
        describe: "module:function" in the family's folder. The function is given a checkpoint's folder and returns the
            files of a folder that is read in its place, by their names: a text, what becomes JSON, or the path of a
            file that a link leads to. Its config.json has a model type that the family converts.
    """

    name: str
    file: str
    weights: str
    describe: str


@dataclass(frozen=True)
class Family:
    """The facts of one family.

    Attributes:
        model_types: its values of model_type in config.json.
        architectures: class names that distinguish it from other families with the same model type.
        processors: processor class names, in the checkpoint's files, that distinguish it from them as well.
        tested: its checkpoint layouts in the tests.
        short_names: names for some of its public checkpoints.
        refused: why it cannot run, as a half sentence; empty if it can.
        definition: the family's own classes.
        secondary: further checkpoints that hold parts of the model.
        package: a package that transformers' model requires and beheld does not.
        oldest: the oldest transformers that runs it, if that is newer than the oldest that beheld takes.
        convert: model type in config.json -> a function that converts a configuration of another layout with this type.
        reads_by: for a model that also speaks, the class of the part that reads and writes (`thinker_config`).
        placeholders: reads modality -> placeholder id from the configuration, if they are not at its top level under
            the common names.
        placeholder_tokens: modality -> the token that marks one embedding's place, if the configuration does not name
            its id; the tokenizer's files do. Of several, the first that the tokenizer has.
        videos_as_images: whether a video's frames use the placeholders of images.
        encoder_reads: for an encoder-decoder, what its encoder reads: "prompt", with its media, or the modality of the
            one item of each prompt, which is the decoder's; empty for other models.
        encodes: whether it is an encoder alone: it generates nothing, and its prompts are pooled.
        first_position: reads the position of a prompt's first token from the configuration, if it is not 0.
        pools: reads from the configuration how a model pools, if its class gives only vectors.
        headed: architectures that transformers does not define, whose head of classes has two layers and a ReLU between
            them (`score.0`, `score.2`) -> how they pool.
        late: architectures for late interaction -> the class of the family that each of them wraps.
        pools_for_classes: reads from the configuration how hidden states are pooled for its classes, if not as usual.
        kv_groups: reads the KV groups of its decoder layers, if the configuration describes them in a special form.
        state: reads the shape of a recurrent layer's state from the text configuration, if it has such layers.
        dense_up_to: reads from the text configuration how many positions a sequence may have for an indexer to pick all
            of them. Up to there its layers run as if they had none; longer sequences are refused.
        head_size: reads how many tokens the head rates from the configuration, if not `vocab_size`.
        cross_group: reads the group of layers that attend to media from the configuration; None if there are none.
        both_ways: where attention also looks ahead; see ModelInfo.both_ways.
        joint_tokens: the tokens that see each other, if `both_ways` is "joint".
        plain_attention: see ModelInfo.
        ends: reads tokens that end answers from the configuration and generation_config.json's content, where
            eos_token_id does not name them.
        adapters: pairs (modality, folder) of LoRA adapters in the checkpoint, the most important first.
        gguf: how GGUF files of its first model type are read; None if they are not.
        gguf_projector: how GGUF files of its vision part are read; None if they are not.
        calls: the formats in which its models write tool calls, keys of text.tools.FORMATS. The first that a
            checkpoint's chat template teaches is read.
        reasoning: the formats of their reasoning, keys of text.reasoning.FORMATS, chosen likewise.
        grounding: how its models point at places in images; None if no notation is known of them.
        deeper: config -> how many tower layers' features an image's embeddings bring into later layers of the text
            model; None if a user's embeddings have one vector a position, or are refused.
        layout: the publisher's own layout of its models and of families like it; None if there is none.
        reference: how to run transformers.
    """

    model_types: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    processors: tuple[str, ...] = ()
    tested: tuple[KnownCheckpoint, ...] = ()
    short_names: tuple[ShortName, ...] = ()
    refused: str = ""
    definition: Definition | None = None
    secondary: tuple[SecondaryCheckpoint, ...] = ()
    package: str = ""
    oldest: OldestTransformers | None = None
    convert: Mapping[str, Convert] = field(default_factory=dict)
    reads_by: str = ""
    placeholders: Callable[[Any], dict[str, int]] | None = None
    placeholder_tokens: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    videos_as_images: bool = False
    encoder_reads: str = ""
    encodes: bool = False
    first_position: Callable[[Any], int] | None = None
    pools: Callable[[Any], PoolerInfo] | None = None
    headed: Mapping[str, PoolerInfo] = field(default_factory=dict)
    late: Mapping[str, str] = field(default_factory=dict)
    pools_for_classes: Callable[[Any], str] | None = None
    kv_groups: Callable[[Any], tuple[KVGroup, ...]] | None = None
    state: Callable[[Any], StateShape] | None = None
    dense_up_to: Callable[[Any], int] | None = None
    head_size: Callable[[Any], int] | None = None
    cross_group: Callable[[Any], KVGroup | None] | None = None
    both_ways: str = "nowhere"
    joint_tokens: tuple[str, ...] = ()
    plain_attention: str = ""
    ends: Callable[[Any, Mapping[str, Any]], tuple[int, ...]] | None = None
    adapters: tuple[tuple[str, str], ...] = ()
    gguf: GGUFLayout | None = None
    gguf_projector: GGUFProjector | None = None
    calls: tuple[str, ...] = ()
    reasoning: tuple[str, ...] = ()
    grounding: Grounding | None = None
    deeper: Callable[[Any], int] | None = None
    layout: PublisherLayout | None = None
    reference: ReferenceOptions = field(default_factory=ReferenceOptions)


def decoder_group(config: Any, kind: str, num_states: int = 0) -> KVGroup:
    """Return all layers of an encoder-decoder's decoder as one group of this kind.

    Its configuration has BART's names, which tell encoder and decoder apart, or those of a decoder alone.
    """
    if hasattr(config, "decoder_layers"):
        layers, heads, kept = config.decoder_layers, *(config.decoder_attention_heads,) * 2
        width = getattr(config, "d_model", None) or config.hidden_size
    else:
        layers, heads, width = config.num_hidden_layers, config.num_attention_heads, config.hidden_size
        kept = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or width // heads
    return KVGroup(kind, tuple(range(layers)), kept, head_dim, head_dim, num_states=num_states)
