"""Which parts of a model are compiled: the text model's layers and what is around them, and the blocks of towers."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from beheld.models.cross import crosses
from beheld.models.recurrent import compiles, recurs
from beheld.models.surgery.compiled import compile_layers
from beheld.models.surgery.conditions import has_row_kernels
from beheld.models.surgery.one_row_layer import Form, OneRowLayer, layers_of_forms, one_row_norm, usual_form
from beheld.models.surgery.operation import Changes, Target
from beheld.models.surgery.parts import text_model, tower_blocks
from beheld.models.surgery.rank_trial import RankTrial
from beheld.utils import env
from beheld.utils.log import get_logger

logger = get_logger(__name__)


def compile_text(target: Target, changes: Changes) -> None:
    """Compile the decoder's layers, its last norm and its rotary embedding."""
    text = text_model(target.model)
    # Cross-attention and most recurrent layers read their states from the forward context, which the compiler does not
    # trace into.
    layers = [layer for layer in text.layers if not crosses(layer) and not recurs(layer)]
    recurrent = [layer for layer in text.layers if not crosses(layer) and recurs(layer) and compiles(layer)]
    fits = has_row_kernels(target)
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


def _forms() -> list[Form]:
    # Only here: on a CPU a start would import what it never uses, with a dozen operators to register.
    from beheld.models.surgery.gated_row_layer import delta_form, gated_attention_form
    from beheld.models.surgery.latent_row_layer import latent_form

    forms: list[Form] = [usual_form(OneRowLayer)]
    if env.LATENT_ROWS():
        forms.append(latent_form)
    if env.GATED_ROWS():
        forms += [delta_form, gated_attention_form]
    return forms


def compile_towers(target: Target, changes: Changes) -> None:
    """Compile the stacks of equal blocks outside the text model."""
    text = text_model(target.model)
    # BART's encoder inspects its values in float16, which no graph can hold.
    for blocks in () if crosses(text) else tower_blocks(target.model, text):
        compile_layers(list(blocks), changes)
