"""The list of operations that beheld applies to a loaded transformers model, in order."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from beheld.attention.op import number_layers
from beheld.core.config import ModelInfo
from beheld.families import registry
from beheld.models.cross import crosses
from beheld.models.one_row import OneRowLinear, one_row_form
from beheld.models.recurrent import compiles, recurs
from beheld.models.surgery.compiled import compile_layers, settings
from beheld.models.surgery.cpu_layer import compute_layers
from beheld.models.surgery.elus import replace_elus
from beheld.models.surgery.experts import replace_experts
from beheld.models.surgery.fused_norms import fuse_norms
from beheld.models.surgery.joined import fuse_linears
from beheld.models.surgery.latent import pass_latents_on
from beheld.models.surgery.linears import (
    PackedLinear,
    PaddedLinear,
    SmallBatchLinear,
    can_pack,
    pad_mlps,
    replace_children,
    replace_linears,
    replace_patch_convolutions,
    take_conv1ds,
)
from beheld.models.surgery.longrope import replace_two_scales
from beheld.models.surgery.lora_attach import attach
from beheld.models.surgery.one_row_layer import Form, OneRowLayer, layers_of_forms, one_row_norm, usual_form
from beheld.models.surgery.operation import Changes, Operation, Stage, Surgery, Target
from beheld.models.surgery.parts import text_model, tower_blocks
from beheld.models.surgery.patches import pack_patch_convolutions
from beheld.models.surgery.rank_trial import RankTrial
from beheld.models.surgery.sharded import resize, sum_up
from beheld.models.surgery.vector_linear import VectorLinear, can_multiply
from beheld.platform import jit
from beheld.platform.registry import platform_of
from beheld.quant.grouped_linear import GroupedLinear
from beheld.utils import allocator, env
from beheld.utils.log import get_logger

logger = get_logger(__name__)


def prepare(surgery: Surgery, info: ModelInfo) -> None:
    """Make a loaded transformers model fast on its device, and able to carry adapters if requested.

    Raises:
        ConfigError: adapters are requested, but no layer can carry one.
    """
    encodes = info.pooler is not None and info.pooler.encodes
    surgery.perform([_family(info.family), *(op for op in OPERATIONS if not encodes or op.name in _OF_ENCODERS)])


def _family(family: str) -> Operation:
    adapt = registry.model(family).adapt
    return Operation(
        f"family {family}",
        Stage.ADAPT,
        needs="a family with modules that cannot compute batches in the engine's layout, or cannot be captured",
        replaces="these modules or their methods; see the family's model.py",
        apply=lambda target, changes: None if adapt is None else adapt(target.model, changes),
        suits=lambda target: adapt is not None,
    )


# Operations that need no decoder.
_OF_ENCODERS = frozenset({"exact float32", "packed linears", "padded rows"})


# ---------------------------------------------------------------------- when


def _on_cpu(target: Target) -> bool:
    return platform_of(target.config.device).packs_linears and not target.config.enforce_eager


def _on_gpu(target: Target) -> bool:
    return not platform_of(target.config.device).packs_linears and not target.config.enforce_eager


def _shared(target: Target) -> bool:
    return target.ranks is not None


def _float32(target: Target) -> bool:
    return bool(target.config.dtype == "float32")


def _dtype(target: Target) -> torch.dtype:
    found: torch.dtype = getattr(torch, target.config.dtype)
    return found


def _packs(target: Target) -> bool:
    """Return whether linear layers are replaced by ones with their weights in a better order."""
    if not _on_cpu(target):
        return False
    in_hardware = target.config.dtype == "bfloat16" and platform_of(target.config.device).bfloat16_products
    return _float32(target) or (in_hardware and can_pack())


def _fuses_on_gpu(target: Target) -> bool:
    return _on_gpu(target) and env.FUSE()


def _has_row_kernels(target: Target) -> bool:
    return _fuses_on_gpu(target) and not _float32(target) and platform_of(target.config.device).one_row_kernels


def _compiles(target: Target) -> bool:
    return platform_of(target.config.device).compiles_layers and not target.config.enforce_eager and env.COMPILE()


# ---------------------------------------------------------------------- what


def _counted(words: str, change: Callable[[Target, Changes], int]) -> Callable[[Target, Changes], None]:
    """Return an operation's `apply` that logs how often it found what it changes."""
    return lambda target, changes: logger.debug(words, change(target, changes))


def _exact_float32(target: Target, changes: Changes) -> None:
    target.around.append(platform_of(target.config.device).exact_float32)
    changes.undo_with(target.around.pop)


def _two_scales(target: Target, changes: Changes) -> None:
    model = target.model
    replace_two_scales(model.get_decoder() if hasattr(model, "get_decoder") else model, changes)


def _pack(target: Target, changes: Changes) -> None:
    packed = PackedLinear if can_pack() else SmallBatchLinear
    compiles = can_multiply()

    def kind(linear: nn.Linear) -> nn.Module:
        return VectorLinear(linear) if compiles and VectorLinear.fits(linear) else packed(linear)

    # A head that shares the embeddings' weights keeps a separate packed copy from now on.
    changes.undo_with(target.model.tie_weights)
    found = replace_linears(target.model, kind, _dtype(target), changes)
    allocator.give_back_freed()
    logger.debug("Replaced %d linear layers by %s.", found, "VectorLinear" if compiles else packed.__name__)


def _use_pages(target: Target, changes: Changes) -> None:
    for module in target.model.modules():
        if isinstance(module, GroupedLinear):
            module.use_pages()
    allocator.give_back_freed()


def _pad_mlps(target: Target, changes: Changes) -> None:
    spared = text_model(target.model) if target.config.max_loras else None
    logger.debug("Padded %d MLPs.", pad_mlps(target.model, changes, spared))


def _one_row_linears(target: Target, changes: Changes) -> None:
    model = target.model
    replace_linears(text_model(model), OneRowLinear, _dtype(target), changes)
    if env.FLOAT8_ONE_ROW():
        replace_children(text_model(model), one_row_form, changes)
    head = model.get_output_embeddings()
    if type(head) is nn.Linear:
        model.set_output_embeddings(OneRowLinear(head))
        changes.undo_with(lambda: model.set_output_embeddings(model.get_output_embeddings().restored()))


def _one_row_experts(target: Target, changes: Changes) -> None:
    # Only here, as below: on a CPU a start would import what it never uses, with a dozen operators to register.
    from beheld.models.surgery.expert_row import use_expert_rows

    found = use_expert_rows(text_model(target.model), changes, RankTrial(target.ranks))
    logger.debug("%d modules of experts have a single-row form.", found)


def _row_routers(target: Target, changes: Changes) -> None:
    from beheld.models.surgery.route_row import use_row_routers

    found = use_row_routers(text_model(target.model), _dtype(target), changes, RankTrial(target.ranks))
    logger.debug("%d routers have a single-row form.", found)


def _attach_lora(target: Target, changes: Changes) -> None:
    target.slots = attach(target.model, text_model(target.model), target.config, changes, target.shards)


def _number_layers(target: Target, changes: Changes) -> None:
    number_layers(text_model(target.model), changes.set)


def _cpu_layers(target: Target, changes: Changes) -> None:
    text = text_model(target.model)
    logger.debug(
        "%d of %d layers are computed in two calls.", compute_layers(text, changes, target.ranks), len(text.layers)
    )


def _forms() -> list[Form]:
    # Only here, as above.
    from beheld.models.surgery.gated_row_layer import delta_form, gated_attention_form
    from beheld.models.surgery.latent_row_layer import latent_form

    forms: list[Form] = [usual_form(OneRowLayer)]
    if env.LATENT_ROWS():
        forms.append(latent_form)
    if env.GATED_ROWS():
        forms += [delta_form, gated_attention_form]
    return forms


def _compile_text(target: Target, changes: Changes) -> None:
    text = text_model(target.model)
    # Cross-attention and most recurrent layers read their states from the forward context, which the compiler does not
    # trace into.
    layers = [layer for layer in text.layers if not crosses(layer) and not recurs(layer)]
    recurrent = [layer for layer in text.layers if not crosses(layer) and recurs(layer) and compiles(layer)]
    fits = _has_row_kernels(target)
    trial = RankTrial(target.ranks)
    one_row = layers_of_forms(text, _forms(), trial, states=env.GATED_ROWS()) if fits else {}
    logger.debug("%d of %d layers have a single-row form.", len(one_row), len(layers) + len(recurrent))
    compile_layers(layers, changes, one_row=one_row)
    compile_layers(recurrent, changes, one_row=one_row)
    # What most text models compute before and after their layers: about ten kernels each, of a microsecond or two. With
    # many rows they matter little, and each memory layout of positions would compile separately.
    for name in ("rotary_emb", "norm"):
        around: Any = getattr(text, name, None)
        if isinstance(around, nn.Module):
            tried = bool(one_row) and name == "norm"
            made = one_row_norm(around) if tried else None
            # Ranks normalize the same row, and must get the same bits.
            own = {around: made} if tried and trial.agreed(made is not None) and made is not None else {}
            compile_layers([around], changes, for_many=False, level=logging.DEBUG, one_row=own)


def _compile_towers(target: Target, changes: Changes) -> None:
    text = text_model(target.model)
    # BART's encoder inspects its values in float16, which no graph can hold.
    for blocks in () if crosses(text) else tower_blocks(target.model, text):
        compile_layers(list(blocks), changes)


def _compile_within(target: Target, changes: Changes) -> None:
    target.around.append(settings)
    changes.undo_with(target.around.pop)


OPERATIONS = (
    Operation(
        "exact float32",
        Stage.ADAPT,
        needs="float32",
        replaces="nothing in the model; during passes no library rounds operands",
        apply=_exact_float32,
        suits=_float32,
    ),
    Operation(
        "two scales",
        Stage.ADAPT,
        needs="a rotary embedding of the type longrope",
        replaces="it, by one that chooses its scale per sequence",
        apply=_two_scales,
    ),
    Operation(
        "latents",
        Stage.ADAPT,
        needs="layers of latent attention: with kv_a_proj_with_mqa, kv_b_proj and expand_kv",
        replaces="kv_b_proj and expand_kv, so that attention gets latents",
        apply=_counted(
            "%d layers pass latents on.", lambda target, changes: pass_latents_on(text_model(target.model), changes)
        ),
    ),
    Operation(
        "parts of ranks",
        Stage.SHARD,
        needs="ranks that share the model",
        replaces="attention's configurations, by ones with its heads; the embedding's forward, by one of its own rows",
        apply=resize,
        suits=_shared,
    ),
    Operation(
        "fused linears",
        Stage.FUSE,
        needs="a CPU and float32, or bfloat16 in hardware; text layers with q, k and v, gate and up, or the like, of "
        "one input",
        replaces="each group by one product, where the outputs stay the same",
        # Only in the text model: towers process many rows at once, so the number of calls does not matter.
        apply=_counted(
            "Fused %d groups of linear layers.",
            lambda target, changes: fuse_linears(text_model(target.model), changes),
        ),
        suits=lambda target: _packs(target) and env.FUSE(),
    ),
    Operation(
        "Conv1Ds as linears",
        Stage.FUSE,
        needs="a CPU and float32, or bfloat16 in hardware; transformers' Conv1D, as GPT-2 has it",
        replaces="them, by linear layers",
        apply=_counted("Replaced %d Conv1Ds.", lambda target, changes: take_conv1ds(target.model, changes)),
        suits=_packs,
    ),
    Operation(
        "fused norms",
        Stage.FUSE,
        needs="a CPU with bfloat16 in hardware, and llvmlite; RMS norms of the text model in bfloat16",
        replaces="them, by functions compiled for this CPU, which round as they do",
        apply=_counted(
            "Replaced %d norms by compiled ones.",
            lambda target, changes: fuse_norms(text_model(target.model), changes),
        ),
        suits=lambda target: _packs(target) and not _float32(target) and jit.available() and env.FUSE(),
    ),
    Operation(
        "experts as layers",
        Stage.FUSE,
        needs="a CPU and float32, or bfloat16 in hardware; experts of the usual form",
        replaces="them, by layers that compute only the rows that chose them",
        apply=_counted(
            "Replaced %d sets of experts by linear layers.",
            lambda target, changes: replace_experts(target.model, _dtype(target), changes),
        ),
        suits=_packs,
    ),
    Operation(
        "packed convolutions",
        Stage.FUSE,
        needs="a CPU with oneDNN and float32, or bfloat16 in hardware; convolutions that see each patch once",
        replaces="them, by matrix products with packed weights",
        apply=_counted(
            "Replaced %d convolutions by matrix products.",
            lambda target, changes: pack_patch_convolutions(target.model, _dtype(target), changes),
        ),
        suits=lambda target: _packs(target) and can_pack(),
    ),
    Operation(
        "ELUs by tanh",
        Stage.FUSE,
        needs="a CPU; ELUs, as audio codecs have them",
        replaces="them, by functions that the CPU computes with vectors in float32",
        apply=_counted("Replaced %d ELUs.", lambda target, changes: replace_elus(target.model, changes)),
        suits=lambda target: _on_cpu(target) and env.FUSE(),
    ),
    Operation(
        "packed linears",
        Stage.FUSE,
        needs="a CPU and float32, or bfloat16 in hardware",
        replaces="linear layers, by ones with weights in the order of products compiled for this CPU (bfloat16, with "
        "llvmlite), in oneDNN's order, or, without oneDNN, with tiled outputs",
        apply=_pack,
        suits=_packs,
    ),
    Operation(
        "weights in huge pages",
        Stage.FUSE,
        needs="a CPU, and weights of few bits that it multiplies as they are",
        replaces="nothing in the model; weights that were not joined move to memory that is read faster",
        apply=_use_pages,
        suits=_on_cpu,
    ),
    Operation(
        "padded rows",
        Stage.FUSE,
        needs="a CPU and 16 bits that it does not multiply in hardware",
        replaces="linear layers, by ones that pad rows to few distinct numbers",
        apply=_counted(
            "Padded %d linear layers.",
            lambda target, changes: replace_linears(target.model, PaddedLinear, _dtype(target), changes),
        ),
        suits=lambda target: _on_cpu(target) and not _packs(target),
    ),
    Operation(
        "padded MLPs",
        Stage.FUSE,
        needs="a GPU; gated MLPs of an odd inner size",
        replaces="their weights, by ones with extra units of zero weight",
        apply=_pad_mlps,
        suits=_fuses_on_gpu,
    ),
    Operation(
        "patch products",
        Stage.FUSE,
        needs="a GPU; convolutions over time and space that see each patch once",
        replaces="them, by matrix products",
        apply=_counted(
            "Replaced %d convolutions.",
            lambda target, changes: replace_patch_convolutions(target.model, changes),
        ),
        suits=_fuses_on_gpu,
    ),
    Operation(
        "fused linears",
        Stage.FUSE,
        needs="a GPU; layers with q, k and v, gate and up, or the like, of one input",
        replaces="each group by one product, where the outputs stay the same",
        apply=_counted(
            "Fused %d groups of linear layers.", lambda target, changes: fuse_linears(target.model, changes)
        ),
        suits=_fuses_on_gpu,
    ),
    Operation(
        "single-row linears",
        Stage.FUSE,
        needs="a GPU and 16 bits; the text model's linear layers and the head",
        replaces="them, by ones with a special kernel for a single row",
        apply=_one_row_linears,
        suits=lambda target: _fuses_on_gpu(target) and not _float32(target),
    ),
    Operation(
        "single-row experts",
        Stage.FUSE,
        needs="a GPU and 16 bits; gated experts with an output's inputs side by side, or of MXFP4 numbers",
        replaces="their products of a single row, by kernels that read chosen experts alone, if a trial agrees",
        apply=_one_row_experts,
        suits=_has_row_kernels,
    ),
    Operation(
        "single-row routers",
        Stage.FUSE,
        needs="a GPU and 16 bits; routers by softmax or sigmoid, with corrections and groups or without",
        replaces="their choice for a single row, by two kernels, if a trial agrees",
        apply=_row_routers,
        suits=_has_row_kernels,
    ),
    Operation(
        "LoRA",
        Stage.LORA,
        needs="max_loras; the decoder's linear layers",
        replaces="them, by ones that add the adapters of a step's tokens",
        apply=_attach_lora,
        suits=lambda target: target.config.max_loras > 0,
    ),
    Operation(
        "sums over ranks",
        Stage.SUM,
        needs="ranks that share the model",
        replaces="modules of which each rank computes a part of every output, and the head, by ones that add or join",
        apply=sum_up,
        suits=_shared,
    ),
    Operation(
        "layers in two calls",
        Stage.COMPILE,
        needs="a CPU, and weights of few bits or bfloat16 that it multiplies so; decoder layers of the usual form",
        replaces="their forward: functions compiled for this CPU compute all but attention",
        apply=_cpu_layers,
        suits=lambda target: _on_cpu(target) and env.FUSE(),
    ),
    Operation(
        "layer numbers",
        Stage.COMPILE,
        needs="a GPU; modules with a layer index",
        replaces="nothing; they get the index as a tensor, for compiled code",
        apply=_number_layers,
        suits=_compiles,
    ),
    Operation(
        "compiled text",
        Stage.COMPILE,
        needs="a GPU; the decoder's layers, its last norm and its rotary embedding",
        replaces="their forward, by a compiled one; for a single row by our kernels, where they have that form",
        apply=_compile_text,
        suits=_compiles,
    ),
    Operation(
        "compiled towers",
        Stage.COMPILE,
        needs="a GPU; stacks of equal blocks outside the text model",
        replaces="their forward, by a compiled one",
        apply=_compile_towers,
        suits=_compiles,
    ),
    Operation(
        "compiler settings",
        Stage.COMPILE,
        needs="a GPU",
        replaces="nothing in the model; passes run with the compiler settings that compiled layers need",
        apply=_compile_within,
        suits=_compiles,
    ),
)
