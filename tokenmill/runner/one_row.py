"""Forward passes of one decoding row on a CPU: recorded once as calls of kernels, then made in one call.

The host would take as long for these calls one by one as the kernels take. A model or a backend that does
something else than call kernels is left alone.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from tokenmill.attention.base import Backend, Step, StepLayout
from tokenmill.kernels.tape import NotRecordable, Tape, recording
from tokenmill.models import Model

_log = logging.getLogger("tokenmill")


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A recorded pass: its own inputs, and what it makes."""

    tape: Tape
    token_ids_T: torch.Tensor
    layout: StepLayout
    hidden_TD: torch.Tensor

    @property
    def num_columns(self) -> int:
        """Pages that a row may have."""
        return self.layout.page_table_RP[0].shape[1]


class OneRow:
    """Passes of one row through a model and an attention backend, whose tensors must stay where they are."""

    def __init__(self, model: Model, attention: Backend) -> None:
        self._model = model
        self._attention = attention
        self._recorded: _Recorded | None = None
        self._is_possible = True

    def forward(self, token_ids_T: torch.Tensor, layout: StepLayout) -> torch.Tensor | None:
        """Hidden states [1, D] of a step of one row that decodes; None: it must be computed otherwise."""
        if not self._is_possible or token_ids_T.is_cuda or len(token_ids_T) != 1 or layout.num_decodes != 1:
            return None
        recorded = self._recorded
        if recorded is not None and recorded.num_columns >= layout.page_table_RP[0].shape[1]:
            _copy(layout, recorded.layout)
            recorded.token_ids_T.copy_(token_ids_T)
            recorded.tape.replay()
            return recorded.hidden_TD.clone()
        self._recorded = self._record(token_ids_T, layout)
        return None if self._recorded is None else self._recorded.hidden_TD.clone()

    def _record(self, token_ids_T: torch.Tensor, layout: StepLayout) -> _Recorded | None:
        """Compute the step on tensors of its own, with room for rows that are twice as long."""
        token_ids_T, layout = token_ids_T.clone(), _with_room(layout)
        self._attention.plan(layout)
        try:
            with recording() as tape:
                hidden_TD = self._model.forward(token_ids_T, Step(layout.positions_T, self._attention))
        except NotRecordable as error:
            _log.debug("steps of one row are not recorded, because of %s", error)
            self._is_possible = False
            return None
        return _Recorded(tape, token_ids_T, layout, hidden_TD)


def _with_room(layout: StepLayout) -> StepLayout:
    """The same step on tensors of its own."""
    tables = [table.new_zeros((1, 2 * table.shape[1])) for table in layout.page_table_RP]
    roomy = StepLayout(
        positions_T=layout.positions_T.clone(),
        slot_mapping_T=tuple(slots.clone() for slots in layout.slot_mapping_T),
        page_table_RP=tuple(tables),
        query_starts=layout.query_starts.clone(),
        lengths_R=layout.lengths_R.clone(),
        num_decodes=1,
        host_query_lengths=[1],
        host_lengths=list(layout.host_lengths),
    )
    _copy(layout, roomy)
    return roomy


def _copy(source: StepLayout, target: StepLayout) -> None:
    """What differs between two steps of one row; the target's page tables may be wider."""
    target.positions_T.copy_(source.positions_T)
    target.lengths_R.copy_(source.lengths_R)
    for ours, theirs in zip(target.slot_mapping_T, source.slot_mapping_T, strict=True):
        ours.copy_(theirs)
    for ours, theirs in zip(target.page_table_RP, source.page_table_RP, strict=True):
        ours[:, : theirs.shape[1]].copy_(theirs)
