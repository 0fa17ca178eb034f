"""Puts special kernels for a single row, on a GPU, in the place of linear layers, experts and routers."""

from __future__ import annotations

from torch import nn

from beheld.models.one_row import OneRowLinear, one_row_form
from beheld.models.surgery.linears import replace_children, replace_linears
from beheld.models.surgery.operation import Changes, Target
from beheld.models.surgery.parts import text_model
from beheld.models.surgery.rank_trial import RankTrial
from beheld.utils import env
from beheld.utils.log import get_logger

logger = get_logger(__name__)


def use_linears(target: Target, changes: Changes) -> None:
    """Replace the text model's linear layers and the head."""
    model = target.model
    replace_linears(text_model(model), OneRowLinear, target.dtype, changes)
    if env.FLOAT8_ONE_ROW():
        replace_children(text_model(model), one_row_form, changes)
    head = model.get_output_embeddings()
    if type(head) is nn.Linear:
        model.set_output_embeddings(OneRowLinear(head))
        changes.undo_with(lambda: model.set_output_embeddings(model.get_output_embeddings().restored()))


def use_experts(target: Target, changes: Changes) -> None:
    """Replace the products of a single row with experts."""
    # Only here, as below: on a CPU a start would import what it never uses, with a dozen operators to register.
    from beheld.models.surgery.expert_row import use_expert_rows

    found = use_expert_rows(text_model(target.model), changes, RankTrial(target.ranks))
    logger.debug("%d modules of experts have a single-row form.", found)


def use_routers(target: Target, changes: Changes) -> None:
    """Replace the choice of experts for a single row."""
    from beheld.models.surgery.route_row import use_row_routers

    found = use_row_routers(text_model(target.model), target.dtype, changes, RankTrial(target.ranks))
    logger.debug("%d routers have a single-row form.", found)
