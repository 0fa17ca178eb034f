"""Loads weights from safetensors through transformers' loader, or makes random ones of the right shapes ("dummy")."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch

from beheld.checkpoint.checks.safetensors import count_numbers
from beheld.checkpoint.convert import converted, family_of_config
from beheld.checkpoint.files import CONFIG, read_json
from beheld.checkpoint.quantized import stated
from beheld.checkpoint.weights import check_weights, has_weights, in_parts
from beheld.core.config import EngineConfig, ModelInfo, TokenCost
from beheld.core.errors import BeheldError, ConfigError, ModelError, first_line
from beheld.families import registry
from beheld.models import disabled_towers, out_of_memory, pooling_head, unread
from beheld.models.load_progress import shard_bar
from beheld.models.random_weights import random_model
from beheld.models.shard_weights import shard, sharded
from beheld.models.slices import joined_slices
from beheld.models.surgery.operation import Operation, Phase, Surgery, Target
from beheld.models.surgery.parts import text_part
from beheld.models.surgery.staged import AbsentPartError, bounds_of, empty_others, staged
from beheld.models.token_cost import token_cost
from beheld.parallel.group import RankGroup
from beheld.parallel.shard_plan import ShardPlan
from beheld.parallel.stages import StagePlan
from beheld.platform import host
from beheld.platform.registry import platform_of
from beheld.quant import file_types
from beheld.quant.method import QuantMethod, StorageTarget
from beheld.quant.registry import method_for
from beheld.quant.row_bytes import sources_of
from beheld.utils.hf_log import errors_only
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# Weights that are rounded on a device are read to it first if they take no more than this share of its memory.
_WHOLE_SHARE = 0.9
_GREATEST = 1e18
# Numbers that are looked at at a time.
_PIECE = 1 << 18
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def load_model(
    hf_config: Any,
    info: ModelInfo,
    config: EngineConfig,
    ranks: RankGroup | None = None,
    piped: RankGroup | None = None,
) -> Surgery:
    """Load the checkpoint's transformers model on the device, in the engine's dtype, ready for surgery.

    The modules that the quantization method inserts after loading are the surgery's first operation.

    Args:
        ranks: the ranks that share the model, each of which loads its part.
        piped: the stages of the pipeline, each of which loads its layers.

    Raises:
        ModelError: no such class, no weights, weights missing or of the wrong shape, or an unsupported quantization.
    """
    start = time.perf_counter()
    dtype: torch.dtype = getattr(torch, config.dtype)
    known_class = model_class_of(info, hf_config)
    limits = _limits(config, piped)
    model_class = _needed(known_class, info, limits)
    stage = None if piped is None else StagePlan(piped.rank, _bounds(known_class, hf_config, info, config))
    if config.load_format == "dummy":
        if quantization_of(hf_config, Path(info.path)) is not None:
            logger.warning("Random weights are not quantized: the model takes the memory of an unquantized one.")
        method = method_for(None, config.quantization, _quant_target(config))
        cut = None if ranks is None else _cutting(info, config, ranks, method)
        surgery = Surgery(Target(random_model(model_class, hf_config, dtype, config.device, cut), config))
        platform_of(config.device).empty_cache()
        if stage is not None:
            empty_others(surgery.target.model, stage)
        surgery.perform([_settling(method, model_class)])
    else:
        surgery = _from_files(model_class, hf_config, info, dtype, config, ranks, stage)
    model = surgery.target.model
    if stage is not None:
        surgery.target.stage = stage
    if ranks is not None:
        surgery.target.ranks, surgery.target.shards = ranks, model.shard_plan
        if ranks.rank == 0:
            _tell(model.shard_plan)
    # Without what cut it into parts or left parts out while it was made.
    model.__class__ = known_class
    if info.pooler is not None:
        pooling_head.give(model, info)
    if not all(limits.values()):
        logger.info("Modules of disabled media are not loaded: %s.", ", ".join(model.left_out) or "nothing")
    if getattr(model, "unread", ()):
        logger.info("%d modules that no answer needs are not loaded, as %s.", len(model.unread), model.unread[0])
    seconds = time.perf_counter() - start
    packed = sum(getattr(module, "packed_bytes", 0) for module in model.modules())
    gib = (packed + sum(p.numel() * p.element_size() for p in model.parameters())) / 2**30
    logger.info("Loading weights took %.2f seconds", seconds)
    logger.info("Model loading took %.4f GiB and %.6f seconds", gib, seconds)
    return surgery


def _needed(model_class: Any, info: ModelInfo, limits: Mapping[str, int]) -> Any:
    """Return the class of models that are made without the towers of disabled media, and without what is not read."""
    family = registry.model(info.family)
    return unread.without(disabled_towers.without(model_class, family.towers, limits), family.unread)


def _limits(config: EngineConfig, piped: RankGroup | None) -> Mapping[str, int]:
    """Return how many items a prompt may have of each kind; none where another stage runs the towers."""
    limits = config.limit_per_prompt
    return limits if piped is None or piped.rank == 0 else dict.fromkeys(limits, 0)


def _bounds(model_class: Any, hf_config: Any, info: ModelInfo, config: EngineConfig) -> tuple[int, ...]:
    """Return the bounds of a pipeline's stages, the same on all ranks."""
    needed = _needed(model_class, info, config.limit_per_prompt)
    with torch.device("meta"):
        whole = needed._from_config(hf_config, dtype=getattr(torch, config.dtype))
    return bounds_of(whole, info, config.pipeline_parallel_size)


def model_class_of(info: ModelInfo, hf_config: Any) -> Any:
    """Return the class of this configuration that generates text or pools: the family's, or transformers'.

    Raises:
        ModelError: there is no such class.
    """
    import transformers

    own = registry.own_class(info.family, "model")
    if own is not None:
        return own
    named = getattr(transformers, info.architecture, None)
    by_tokens = info.pooler is not None and info.pooler.scores == "tokens"
    if info.pooler is not None and info.pooler.scores == "head" and hasattr(named, "generate"):
        # config.json names a class that generates. The class that classifies is its configuration's, if there is one.
        named = transformers.AutoModelForSequenceClassification._model_mapping.get(type(hf_config), None)
    if named is not None and not by_tokens and (info.pooler is not None or hasattr(named, "generate")):
        return named
    for auto_name in ("AutoModelForImageTextToText", "AutoModelForCausalLM"):
        mapping = getattr(transformers, auto_name)._model_mapping
        if type(hf_config) in mapping:
            found = mapping[type(hf_config)]
            own_head = info.architecture in registry.facts(info.family).headed
            if not (by_tokens or own_head) and found.__name__ != info.architecture:
                logger.warning("transformers has no class %s; using %s.", info.architecture, found.__name__)
            return found
    raise ModelError(
        f"transformers has no class that generates text for the architecture {info.architecture!r}.",
        "Update transformers, or name another architecture with hf_overrides={'architectures': [...]}.",
    )


def _quant_target(config: EngineConfig) -> StorageTarget:
    return StorageTarget(config.device, getattr(torch, config.dtype), config.exact_weights)


def quantization_of(hf_config: Any, path: Path) -> Mapping[str, Any] | None:
    """Return the checkpoint's quantization_config; None if its weights are not quantized."""
    return getattr(hf_config, "quantization_config", None) or stated(read_json(path / CONFIG))


class SharedOut(TypedDict):
    """Arguments of `shard`."""

    whole_experts: bool
    towers: bool


@dataclass(frozen=True)
class Weights:
    """The size of a model's weights on the device.

    Attributes:
        num_parameters: the number of parameters.
        num_bytes: their approximate size.
        sizes: bytes of each parameter as transformers' loader makes it; empty if a quantization method stores them
            differently.
        shards: what of them one rank holds, if ranks share the model.
        stage: which layers it holds, if the model is cut into stages.
        cost: what of them a token is multiplied with; None if the weights are quantized, or of another form.
    """

    num_parameters: int
    num_bytes: int
    sizes: tuple[int, ...]
    shards: ShardPlan | None = None
    stage: StagePlan | None = None
    cost: TokenCost | None = None


def weigh(hf_config: Any, info: ModelInfo, config: EngineConfig) -> Weights:
    """Measure the weights of the model that this configuration describes, or one rank's, without disabled towers.

    Allocates no memory for them.

    Raises:
        ModelError: there is no such class.
    """
    dtype: torch.dtype = getattr(torch, config.dtype)
    model_class = _needed(model_class_of(info, hf_config), info, config.limit_per_prompt)
    path = Path(info.path)
    quantization = quantization_of(hf_config, path)
    folders = [path, *(Path(part.path) for part in info.secondary)]
    on_disk = config.load_format != "dummy" and all(has_weights(folder) for folder in folders)
    method: QuantMethod | None = None
    if quantization is None or on_disk:
        method = method_for(quantization, config.quantization, _quant_target(config))
    bounds = None
    if config.pipeline_parallel_size > 1:
        bounds = _bounds(model_class_of(info, hf_config), hf_config, info, config)
    stages: list[StagePlan | None] = [None]
    if bounds is not None:
        stages = [StagePlan(stage, bounds) for stage in range(len(bounds) - 1)]
    # A whole model's weights are read by the method itself.
    reading = None if quantization is None or config.num_ranks == 1 else method
    kept_as = None if method is None else method.kept_as
    size = config.tensor_parallel_size
    classes, weights = [], []
    for stage in stages:
        read = None if reading is None else reading.weights(path)
        own = model_class
        if size > 1:
            own = sharded(own, info, 0, size, read, kept_as=kept_as, **_shared_out(config))
        classes.append(own if stage is None else staged(own, stage))
        weights.append(read)
    try:
        with torch.device("meta"):
            made = [each._from_config(hf_config, dtype=dtype) for each in classes]
        # Of the largest stage.
        model = max(made, key=lambda each: sum(parameter.nbytes for parameter in each.parameters()))
    except BeheldError:
        raise
    except Exception as error:
        raise ModelError(
            f"config.json describes no model that {model_class.__name__} can be: "
            f"{type(error).__name__}: {first_line(error)}.",
            "Mend config.json, or fetch the checkpoint again.",
        ) from error
    stage = stages[made.index(model)]
    held = weights[made.index(model)]
    counts = [parameter.numel() for parameter in model.parameters()]
    sizes = tuple(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    shards: ShardPlan | None = getattr(model, "shard_plan", None)
    if quantization is None and on_disk and config.num_ranks == 1:
        _check_count(sum(counts), folders)
    cost = token_cost(model) if quantization is None and config.quantization is None else None
    if method is None:
        return Weights(sum(counts), sum(sizes), sizes, shards, stage)
    if held is not None:
        known = model.state_dict()
        targets, _ = sources_of(model, held)
        held = {name: held[name] for target, names in targets.items() if target in known for name in names}
    stored = method.stored_bytes(path, model, text_part, held)
    if stored is None and quantization is None:
        return Weights(sum(counts), sum(sizes), sizes, shards, stage, cost)
    return Weights(sum(counts), sum(sizes) if stored is None else stored, (), shards, stage)


def _check_count(wanted: int, folders: Sequence[Path]) -> None:
    """Refuse a configuration whose model has far more weights than the files, before memory is taken for them.

    Weights that are tied may be counted twice.

    Raises:
        ModelError: it is so.
    """
    stored = sum(count_numbers(folder) for folder in folders)
    if stored and wanted > 2 * stored:
        raise ModelError(
            f"config.json describes a model of {wanted} numbers, and the files of its weights hold {stored}.",
            "Check that config.json belongs to these weights, or fetch the checkpoint again.",
        )


def _cutting(
    info: ModelInfo, config: EngineConfig, ranks: RankGroup, method: QuantMethod
) -> Callable[[Any], ShardPlan]:
    """Return what cuts a model's weights to this rank's part."""

    def cut(model: Any) -> ShardPlan:
        return shard(model, info, ranks.rank, ranks.size, None, kept_as=method.kept_as, **_shared_out(config))

    return cut


def _shared_out(config: EngineConfig) -> SharedOut:
    """Return which parts of a model ranks share out, where that is the user's choice."""
    return {"whole_experts": config.expert_parallel, "towers": config.mm_encoder_tp_mode == "weights"}


def _tell(plan: ShardPlan) -> None:
    logger.info("%d ranks share the model; each holds a part of %d modules.", plan.ranks, len(plan.shards))
    if plan.whole:
        logger.warning("Every rank computes as a whole: %s.", ", ".join(plan.whole))


def _from_files(
    model_class: Any,
    hf_config: Any,
    info: ModelInfo,
    dtype: torch.dtype,
    config: EngineConfig,
    ranks: RankGroup | None,
    stage: StagePlan | None,
) -> Surgery:
    path = Path(info.path)
    check_weights(path, info.name)
    for part in info.secondary:
        check_weights(Path(part.path), part.name)
    shortages = out_of_memory.count()
    try:
        shares = platform_of(config.device).shares_host_memory
        streamed = not shares and _is_streamed(model_class, hf_config, config)
        options = {
            "dtype": dtype,
            "device_map": None if shares or streamed else config.device,
            "output_loading_info": True,
            "trust_remote_code": config.trust_remote_code,
        }
        method = method_for(quantization_of(hf_config, path), config.quantization, _quant_target(config))
        weights = method.weights(path)
        if weights is None:
            weights = _renamed_weights(path)
        if weights is None and (info.secondary or in_parts(path)):
            weights = joined_slices(path, info.secondary)
        if weights is None and (ranks is not None or stage is not None):
            weights = joined_slices(path, ())
        own = model_class
        if ranks is not None:
            assert weights is not None
            own = sharded(
                model_class, info, ranks.rank, ranks.size, weights, kept_as=method.kept_as, **_shared_out(config)
            )
        if stage is not None:
            own = staged(own, stage)
        loading = method.loading(own, weights or {})
        settled = loading
        if weights is None and (shares or streamed):
            loading = file_types.keeping(loading, file_types.type_by_shape(path, dtype), dtype)
        with errors_only(), shard_bar(path, shown=config.show_progress):
            model, report = loading.from_pretrained(
                info.path if weights is None else None, state_dict=weights, config=method.config(hf_config), **options
            )
        surgery = Surgery(Target(model, config))
        if loading is not settled:
            model.__class__ = settled
        surgery.perform([_settling(method, model_class)])
        file_types.cast(model, dtype)
        if streamed:
            model.to(config.device)
    except ModelError:
        raise
    except AbsentPartError as error:
        raise ConfigError(
            f"{model_class.__name__} cannot be cut into stages: {error}.",
            "Give pipeline_parallel_size=1.",
            param="pipeline_parallel_size",
        ) from error
    except Exception as error:
        if out_of_memory.is_out_of_memory(error, shortages):
            raise
        raise ModelError(
            f"The weights of {info.name!r} could not be loaded: {error}", "Fetch the checkpoint again."
        ) from error
    _check_finite(model, info.name)
    unneeded = () if info.pooler is None else pooling_head.unneeded(model, info)
    missing = sorted(key for key in report.get("missing_keys") or () if key not in unneeded)
    if missing:
        raise ModelError(
            f"The checkpoint {info.name!r} lacks {len(missing)} weights, for example {missing[0]!r}.",
            "Fetch it again, or check that config.json belongs to these weights.",
        )
    left_out = registry.model(info.family).unused_weights
    unexpected = list(report.get("unexpected_keys") or ())
    skipped = sum(key.startswith(left_out) for key in unexpected)
    if skipped:
        logger.info("%d weights of parts without a use here are left out (%s).", skipped, ", ".join(left_out))
    unexpected = [key for key in unexpected if not key.startswith(left_out)]
    absent = (*getattr(model, "left_out", ()), *getattr(model, "unread", ()))
    own = pooling_head.read_apart(info)
    unused = sorted(key for key in unexpected if not disabled_towers.belongs(key, absent) and not key.startswith(own))
    if unused and stage is None and not getattr(hf_config, "shortened", False):
        logger.warning("%d weights of the checkpoint are unused, for example %r.", len(unused), unused[0])
    return surgery


def _is_streamed(model_class: Any, hf_config: Any, config: EngineConfig) -> bool:
    """Return whether weights are read to the host's memory, from which each layer goes to the device and is rounded.

    It is so if they are rounded at load, and the device cannot hold them before, or this rank's share of them.
    """
    if config.quantization is None:
        return False
    with torch.device("meta"):
        whole = model_class._from_config(hf_config, dtype=getattr(torch, config.dtype))
    needed = sum(parameter.nbytes for parameter in whole.parameters()) // config.num_ranks
    free, total = platform_of(config.device).memory()
    room = int(_WHOLE_SHARE * min(free, config.memory_fraction * total))
    if needed <= room:
        return False
    logger.info(
        "Unrounded, the weights take %.2f GiB, and the device has room for %.2f: they are read to the host's memory, "
        "and moved and rounded layer by layer.",
        needed / 2**30,
        room / 2**30,
    )
    return True


def _check_finite(model: Any, name: str) -> None:
    """Refuse weights that are NaN, or so large that their squares are infinite; each is read once more for that.

    Raises:
        ModelError: it names one.
    """
    named = [(key, value) for key, value in model.named_parameters() if value.dtype in _FLOATS and value.numel()]
    pages = host.FilePages()
    greatest = torch.stack([_greatest(value.detach(), pages) for _, value in named])
    pages.end()
    wrong = [key for (key, _), finite in zip(named, (greatest < _GREATEST).tolist(), strict=True) if not finite]
    if wrong:
        raise ModelError(
            f"Of the weights of {name!r} {len(wrong)} hold NaN or infinity, or come near it, for example {wrong[0]!r}.",
            "Fetch the checkpoint again, or ask its publisher: no answer could be computed with them.",
        )


def _greatest(values: torch.Tensor, pages: host.FilePages) -> torch.Tensor:
    """Return the greatest absolute value: NaN if any number is one, and never out of range, as a sum may be."""
    if not platform_of(values.device).shares_host_memory or not values.is_contiguous():
        return torch.linalg.vector_norm(values, math.inf).float()
    # On a CPU, norms are slow, and so are absolute values in bfloat16.
    found = []
    for piece in values.view(-1).split(_PIECE):
        found.append(torch.stack(torch.aminmax(piece)))
        pages.read(piece.data_ptr(), piece.nbytes)
    return torch.stack(found).abs().amax().float()


def _settling(method: QuantMethod, model_class: Any) -> Operation:
    return Operation(
        "stored weights",
        Phase.SETTLE,
        needs=f"weights of the method {method.name!r}, loaded as stored or quantized now",
        replaces="linear layers and experts that hold such weights, by layers that multiply them",
        apply=lambda target, changes: method.settle(target.model, model_class, text_part, changes.replace),
    )


def converted_weights(hf_config: Any, info: ModelInfo) -> tuple[Any, dict[str, Any] | None, str]:
    """Return what transformers' loader needs on a CPU if it cannot read the checkpoint by itself.

    Returns:
        The configuration; name -> weight, or None if it reads the files itself; and what was converted, in words.
    """
    path = Path(info.path)
    raw = read_json(path / CONFIG)
    method = method_for(stated(raw), None, StorageTarget("cpu", torch.float32, exact=True))
    quantized = method.weights(path)
    if quantized is not None:
        return method.config(hf_config), quantized, method.converted
    weights = _renamed_weights(path)
    if weights is not None:
        return hf_config, weights, f"configuration and weights of the layout {raw.get('model_type')!r} converted"
    if info.secondary:
        names = " and ".join(part.name for part in info.secondary)
        return hf_config, joined_slices(path, info.secondary), f"weights of {names} joined with its own"
    words = "" if converted(raw) is None else f"the configuration of the layout {raw['model_type']!r} converted"
    return hf_config, None, words


def _renamed_weights(path: Path) -> dict[str, torch.Tensor] | None:
    """Return weights under transformers' names if the checkpoint's layout is unknown to transformers; else None.

    Reads all of them at once.
    """
    raw = read_json(path / CONFIG)
    # A publisher's layout holds models of several families.
    renamed = registry.model(family_of_config(raw)).renamed
    files = sorted(path.glob("*.safetensors"))
    # Names and configuration are of the same age; weights in the newer layout are not read here.
    if renamed is None or not files or converted(raw) is None:
        return None
    from safetensors.torch import load_file

    return renamed({key: tensor for file in files for key, tensor in load_file(file).items()}, raw)
