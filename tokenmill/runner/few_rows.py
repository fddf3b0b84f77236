"""Forward passes of few decoding rows on a CPU: recorded once as calls of kernels, then made in one call.

The host would take a good part of the time of such a step for making these calls one by one. A model or a
backend that does something else than call kernels is left alone.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from tokenmill.attention.base import Backend, Step, StepLayout
from tokenmill.kernels.tape import NotRecordable, Tape, TapeMemory, recording
from tokenmill.models import Model

_log = logging.getLogger("tokenmill")
# As many as all products are by kernels for (kernels/packed.py); with more the calls matter little.
_MOST_ROWS = 64


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A recorded pass: its own inputs, and what it makes."""

    tape: Tape
    token_ids_R: torch.Tensor
    layout: StepLayout
    hidden_RD: torch.Tensor

    @property
    def num_columns(self) -> int:
        """Pages that a row may have."""
        return self.layout.page_table_RP[0].shape[1]


class FewRows:
    """Passes through a model. R rows of a step, D hidden size."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.forget()

    def forget(self) -> None:
        """Weights, keys or values lie, or will lie, elsewhere: what was or could not be recorded is void."""
        self._most_rows = _MOST_ROWS
        self._memory = TapeMemory()
        self._recorded: dict[int, _Recorded] = {}  # by number of rows

    def forward(
        self,
        token_ids_R: torch.Tensor,
        layout: StepLayout,
        attention: Backend,
        needed_N: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """As `Executor.forward`, for a step whose rows all decode; None: it must be computed otherwise."""
        num_rows = len(token_ids_R)
        if token_ids_R.is_cuda or num_rows != layout.num_decodes or not 0 < num_rows <= self._most_rows:
            return None
        recorded = self._recorded.get(num_rows)
        if recorded is not None and recorded.num_columns >= layout.page_table_RP[0].shape[1]:
            _copy(layout, recorded.layout)
            recorded.token_ids_R.copy_(token_ids_R)
            recorded.tape.replay()
        else:
            recorded = self._record(token_ids_R, layout, attention)
            if recorded is None:
                return None
            self._recorded[num_rows] = recorded
        hidden_RD = recorded.hidden_RD
        return hidden_RD.clone() if needed_N is None else hidden_RD.index_select(0, needed_N)

    def _record(self, token_ids_R: torch.Tensor, layout: StepLayout, attention: Backend) -> _Recorded | None:
        """Compute the step on tensors of its own, with room for rows that are twice as long."""
        token_ids_R, layout = token_ids_R.clone(), _with_room(layout)
        attention.plan(layout)
        try:
            with recording(self._memory) as tape:
                hidden_RD = self._model.forward(token_ids_R, Step(layout.positions_T, attention))
        except NotRecordable as error:
            _log.debug("steps of %d rows are not recorded, because of %s", len(token_ids_R), error)
            self._most_rows = len(token_ids_R) // 2  # fewer rows may have kernels that more have not
            return None
        return _Recorded(tape, token_ids_R, layout, hidden_RD)


def _with_room(layout: StepLayout) -> StepLayout:
    """The same step on tensors of its own."""
    tables = [table.new_zeros((len(table), 2 * table.shape[1])) for table in layout.page_table_RP]
    roomy = StepLayout(
        positions_T=torch.empty_like(layout.positions_T),
        slot_mapping_T=tuple(torch.empty_like(slots) for slots in layout.slot_mapping_T),
        page_table_RP=tuple(tables),
        query_starts=layout.query_starts.clone(),
        lengths_R=torch.empty_like(layout.lengths_R),
        num_decodes=layout.num_decodes,
        host_query_lengths=list(layout.host_query_lengths),
        host_lengths=list(layout.host_lengths),
    )
    _copy(layout, roomy)
    return roomy


def _copy(source: StepLayout, target: StepLayout) -> None:
    """What differs between two steps of as many decoding rows; the target's page tables may be wider."""
    target.positions_T.copy_(source.positions_T)
    target.lengths_R.copy_(source.lengths_R)
    for ours, theirs in zip(target.slot_mapping_T, source.slot_mapping_T, strict=True):
        ours.copy_(theirs)
    for ours, theirs in zip(target.page_table_RP, source.page_table_RP, strict=True):
        ours[:, : theirs.shape[1]].copy_(theirs)
