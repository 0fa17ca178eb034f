"""What is made of a step that failed: an error for a row at fault, and a stand-in for its sequence."""

from __future__ import annotations

from beheld.core.errors import BeheldError, CulpritError, ParamsError, StepError
from beheld.core.plan import (
    NAN,
    STUCK,
    Admission,
    SeqSlice,
)
from beheld.core.sampling import Sampling
from beheld.scheduler.sequence import Sequence


def failure(reason: str, *, culprit: bool) -> BeheldError:
    """The error for a row that failed."""
    if reason == NAN:
        return StepError("The model produced NaN, or no finite logit, for this request.", stage=NAN)
    if reason == STUCK:
        return ParamsError(
            "The grammar allows no text after what was generated so far.",
            "Change the grammar.",
            param="structured_outputs",
        )
    return CulpritError(reason) if culprit else StepError(reason)


def stand_in(sequence: Sequence, piece: SeqSlice, admission: Admission | None) -> Admission:
    """A sequence of zeros that computes `piece`; `admission` is the row's own in the same plan, if it has one."""
    params = sequence.params
    if isinstance(params, Sampling):
        params = params.of_prompt_alone
    zeros = (0,) * max(sequence.num_prompt, piece.stop)
    if admission is not None:
        return admission._replace(token_ids=(0,) * len(admission.token_ids), spans=(), params=params)
    if piece.start >= sequence.num_prompt and piece.stop - piece.start == (len(piece.token_ids) or 1):
        # A token that the host does not know remains one.
        zeros = zeros[: piece.start]
    # Its block tables are on the device.
    blocks: tuple[tuple[int, ...], ...] = ((),) * len(piece.new_blocks)
    return Admission(piece.row, zeros, sequence.num_prompt, (), params, sequence.request.lora, piece.start, blocks)
