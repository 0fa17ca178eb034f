"""The operations that beheld performs on a loaded transformers model, in order."""

from __future__ import annotations

from collections.abc import Callable

from beheld.attention.op import number_layers
from beheld.core.config import ModelInfo
from beheld.families import registry
from beheld.models.surgery import single_rows
from beheld.models.surgery.compiled import compile_within
from beheld.models.surgery.compiled_parts import compile_text, compile_towers
from beheld.models.surgery.conditions import (
    compiles,
    float32,
    fuses_on_gpu,
    has_row_kernels,
    on_cpu,
    packs,
    shared,
)
from beheld.models.surgery.cpu_layer import compute_text_layers
from beheld.models.surgery.elus import replace_elus
from beheld.models.surgery.exact_float32 import keep_float32_exact
from beheld.models.surgery.experts import replace_experts
from beheld.models.surgery.fused_norms import fuse_norms
from beheld.models.surgery.joined import fuse_linears
from beheld.models.surgery.latent import pass_latents_on
from beheld.models.surgery.linears import (
    PaddedLinear,
    can_pack,
    pad_mlps,
    replace_linears,
    replace_patch_convolutions,
    take_conv1ds,
)
from beheld.models.surgery.longrope import replace_two_scales
from beheld.models.surgery.lora_attach import attach_slots
from beheld.models.surgery.operation import Changes, Operation, Phase, Target
from beheld.models.surgery.packed_linears import pack_linears, use_pages
from beheld.models.surgery.parts import text_model
from beheld.models.surgery.patches import pack_patch_convolutions
from beheld.models.surgery.sharded import resize, sum_up
from beheld.platform import jit
from beheld.utils import env
from beheld.utils.log import get_logger

logger = get_logger(__name__)


def operations_of(info: ModelInfo) -> tuple[Operation, ...]:
    """Return what makes a model fast on its device, and able to carry adapters if requested; most suit few models.

    Adapters that no layer can carry raise a ConfigError when the operation is performed.
    """
    encodes = info.pooler is not None and info.pooler.encodes
    return _family(info.family), *(op for op in OPERATIONS if not encodes or op.name in _OF_ENCODERS)


def _family(family: str) -> Operation:
    adapt = registry.model(family).adapt
    return Operation(
        f"family {family}",
        Phase.ADAPT,
        needs="a family with modules that cannot compute batches in the engine's layout, or cannot be captured",
        replaces="these modules or their methods; see the family's model.py",
        apply=lambda target, changes: None if adapt is None else adapt(target.model, changes),
        suits=lambda target: adapt is not None,
    )


# Operations that need no decoder.
_OF_ENCODERS = frozenset({"exact float32", "packed linears", "padded rows"})


def _counted(words: str, change: Callable[[Target, Changes], int]) -> Callable[[Target, Changes], None]:
    """Return an operation's `apply` that logs how often it found what it changes."""
    return lambda target, changes: logger.debug(words, change(target, changes))


OPERATIONS = (
    Operation(
        "exact float32",
        Phase.ADAPT,
        needs="float32",
        replaces="nothing in the model; during passes no library rounds operands",
        apply=keep_float32_exact,
        suits=float32,
    ),
    Operation(
        "two scales",
        Phase.ADAPT,
        needs="a rotary embedding of the type longrope",
        replaces="it, by one that chooses its scale per sequence",
        apply=lambda target, changes: replace_two_scales(target.model, changes),
    ),
    Operation(
        "latents",
        Phase.ADAPT,
        needs="layers of latent attention: with kv_a_proj_with_mqa, kv_b_proj and expand_kv",
        replaces="kv_b_proj and expand_kv, so that attention gets latents",
        apply=_counted(
            "%d layers pass latents on.", lambda target, changes: pass_latents_on(text_model(target.model), changes)
        ),
    ),
    Operation(
        "parts of ranks",
        Phase.SHARD,
        needs="ranks that share the model",
        replaces="attention's configurations, by ones with its heads; the embedding's forward, by one of its own rows",
        apply=resize,
        suits=shared,
    ),
    Operation(
        "fused linears",
        Phase.FUSE,
        needs="a CPU and float32, or bfloat16 in hardware; text layers with q, k and v, gate and up, or the like, of "
        "one input",
        replaces="each group by one product, where the outputs stay the same",
        # Only in the text model: towers process many rows at once, so the number of calls does not matter.
        apply=_counted(
            "Fused %d groups of linear layers.",
            lambda target, changes: fuse_linears(text_model(target.model), changes),
        ),
        suits=lambda target: packs(target) and env.FUSE(),
    ),
    Operation(
        "Conv1Ds as linears",
        Phase.FUSE,
        needs="a CPU and float32, or bfloat16 in hardware; transformers' Conv1D, as GPT-2 has it",
        replaces="them, by linear layers",
        apply=_counted("Replaced %d Conv1Ds.", lambda target, changes: take_conv1ds(target.model, changes)),
        suits=packs,
    ),
    Operation(
        "fused norms",
        Phase.FUSE,
        needs="a CPU with bfloat16 in hardware, and llvmlite; RMS norms of the text model in bfloat16",
        replaces="them, by functions compiled for this CPU, which round as they do",
        apply=_counted(
            "Replaced %d norms by compiled ones.",
            lambda target, changes: fuse_norms(text_model(target.model), changes),
        ),
        suits=lambda target: packs(target) and not float32(target) and jit.available() and env.FUSE(),
    ),
    Operation(
        "experts as layers",
        Phase.FUSE,
        needs="a CPU and float32, or bfloat16 in hardware; experts of the usual form",
        replaces="them, by layers that compute only the rows that chose them",
        apply=_counted(
            "Replaced %d sets of experts by linear layers.",
            lambda target, changes: replace_experts(target.model, target.dtype, changes),
        ),
        suits=packs,
    ),
    Operation(
        "packed convolutions",
        Phase.FUSE,
        needs="a CPU with oneDNN and float32, or bfloat16 in hardware; convolutions that see each patch once",
        replaces="them, by matrix products with packed weights",
        apply=_counted(
            "Replaced %d convolutions by matrix products.",
            lambda target, changes: pack_patch_convolutions(target.model, target.dtype, changes),
        ),
        suits=lambda target: packs(target) and can_pack(),
    ),
    Operation(
        "ELUs by tanh",
        Phase.FUSE,
        needs="a CPU; ELUs, as audio codecs have them",
        replaces="them, by functions that the CPU computes with vectors in float32",
        apply=_counted("Replaced %d ELUs.", lambda target, changes: replace_elus(target.model, changes)),
        suits=lambda target: on_cpu(target) and env.FUSE(),
    ),
    Operation(
        "packed linears",
        Phase.FUSE,
        needs="a CPU and float32, or bfloat16 in hardware",
        replaces="linear layers, by ones with weights in the order of products compiled for this CPU (bfloat16, with "
        "llvmlite), in oneDNN's order, or, without oneDNN, with tiled outputs",
        apply=pack_linears,
        suits=packs,
    ),
    Operation(
        "weights in huge pages",
        Phase.FUSE,
        needs="a CPU, and weights of few bits that it multiplies as they are",
        replaces="nothing in the model; weights that were not joined move to memory that is read faster",
        apply=use_pages,
        suits=on_cpu,
    ),
    Operation(
        "padded rows",
        Phase.FUSE,
        needs="a CPU and 16 bits that it does not multiply in hardware",
        replaces="linear layers, by ones that pad rows to few distinct numbers",
        apply=_counted(
            "Padded %d linear layers.",
            lambda target, changes: replace_linears(target.model, PaddedLinear, target.dtype, changes),
        ),
        suits=lambda target: on_cpu(target) and not packs(target),
    ),
    Operation(
        "padded MLPs",
        Phase.FUSE,
        needs="a GPU; gated MLPs of an odd inner size",
        replaces="their weights, by ones with extra units of zero weight",
        apply=_counted(
            "Padded %d MLPs.",
            lambda target, changes: pad_mlps(
                target.model, changes, spared=text_model(target.model) if target.config.max_loras else None
            ),
        ),
        suits=fuses_on_gpu,
    ),
    Operation(
        "patch products",
        Phase.FUSE,
        needs="a GPU; convolutions over time and space that see each patch once",
        replaces="them, by matrix products",
        apply=_counted(
            "Replaced %d convolutions.",
            lambda target, changes: replace_patch_convolutions(target.model, changes),
        ),
        suits=fuses_on_gpu,
    ),
    Operation(
        "fused linears",
        Phase.FUSE,
        needs="a GPU; layers with q, k and v, gate and up, or the like, of one input",
        replaces="each group by one product, where the outputs stay the same",
        apply=_counted(
            "Fused %d groups of linear layers.", lambda target, changes: fuse_linears(target.model, changes)
        ),
        suits=fuses_on_gpu,
    ),
    Operation(
        "single-row linears",
        Phase.FUSE,
        needs="a GPU and 16 bits; the text model's linear layers and the head",
        replaces="them, by ones with a special kernel for a single row",
        apply=single_rows.use_linears,
        suits=lambda target: fuses_on_gpu(target) and not float32(target),
    ),
    Operation(
        "single-row experts",
        Phase.FUSE,
        needs="a GPU and 16 bits; gated experts with an output's inputs side by side, or of MXFP4 numbers",
        replaces="their products of a single row, by kernels that read chosen experts alone, if a trial agrees",
        apply=single_rows.use_experts,
        suits=has_row_kernels,
    ),
    Operation(
        "single-row routers",
        Phase.FUSE,
        needs="a GPU and 16 bits; routers by softmax or sigmoid, with corrections and groups or without",
        replaces="their choice for a single row, by two kernels, if a trial agrees",
        apply=single_rows.use_routers,
        suits=has_row_kernels,
    ),
    Operation(
        "LoRA",
        Phase.LORA,
        needs="max_loras; the decoder's linear layers",
        replaces="them, by ones that add the adapters of a step's tokens",
        apply=attach_slots,
        suits=lambda target: target.config.max_loras > 0,
    ),
    Operation(
        "sums over ranks",
        Phase.SUM,
        needs="ranks that share the model",
        replaces="modules of which each rank computes a part of every output, and the head, by ones that add or join",
        apply=sum_up,
        suits=shared,
    ),
    Operation(
        "layers in two calls",
        Phase.COMPILE,
        needs="a CPU, and weights of few bits or bfloat16 that it multiplies so; decoder layers of the usual form",
        replaces="their forward: functions compiled for this CPU compute all but attention",
        apply=compute_text_layers,
        suits=lambda target: on_cpu(target) and env.FUSE(),
    ),
    Operation(
        "layer numbers",
        Phase.COMPILE,
        needs="a GPU; modules with a layer index",
        replaces="nothing; they get the index as a tensor, for compiled code",
        apply=lambda target, changes: number_layers(text_model(target.model), changes.set),
        suits=compiles,
    ),
    Operation(
        "compiled text",
        Phase.COMPILE,
        needs="a GPU; the decoder's layers, its last norm and its rotary embedding",
        replaces="their forward, by a compiled one; for a single row by our kernels, where they have that form",
        apply=compile_text,
        suits=compiles,
    ),
    Operation(
        "compiled towers",
        Phase.COMPILE,
        needs="a GPU; stacks of equal blocks outside the text model",
        replaces="their forward, by a compiled one",
        apply=compile_towers,
        suits=compiles,
    ),
    Operation(
        "compiler settings",
        Phase.COMPILE,
        needs="a GPU",
        replaces="nothing in the model; passes run with the compiler settings that compiled layers need",
        apply=compile_within,
        suits=compiles,
    ),
)
