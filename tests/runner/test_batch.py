"""A plan's columns become the tensors of a step: hand-computed layouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tokenmill.kernels.sharing import SharingCosts
from tokenmill.messages import RowStarts, StepPlan
from tokenmill.runner.batch import Rows, StepInputs
from tokenmill.runner.forest import Found


def ints(*values: int) -> Any:
    return np.asarray(values, dtype=np.int32)


def row_starts(*slots: int, **columns: Any) -> RowStarts:
    count = len(slots)
    defaults: dict[str, Any] = {
        "prompt_lengths": ints(*[4] * count),
        "temperatures": np.zeros(count, np.float32),
        "top_ks": ints(*[-1] * count),
        "top_ps": np.ones(count, np.float32),
        "min_ps": np.zeros(count, np.float32),
        "seeds": np.zeros(count, np.uint64),
        "min_new_tokens": ints(*[0] * count),
        "held_ids": ((),) * count,
    }
    return RowStarts(slots=ints(*slots), **(defaults | columns))


def plan(**columns: Any) -> StepPlan:
    nothing = ints()
    defaults: dict[str, Any] = {
        "token_ids": nothing,
        "page_slots": nothing,
        "page_groups": nothing,
        "page_columns": nothing,
        "page_ids": nothing,
        "num_decodes": 0,
    }
    columns["samples"] = np.asarray(columns["samples"], dtype=np.bool_)
    return StepPlan(**(defaults | columns))


@pytest.fixture
def rows() -> Rows:
    return Rows(
        num_slots=6,
        num_columns=8,
        num_groups=1,
        page_size=4,
        spare_page=9,
        vocab_size=50,
        device=torch.device("cpu"),
    )


def stage(rows: Rows, step: StepPlan) -> StepInputs:
    rows.update(step)
    rows.write_pages(step)
    return rows.stage(step)


def test_prefill_and_decode_in_one_step(rows: Rows) -> None:
    stage(
        rows,
        plan(
            slots=ints(3),
            starts=ints(0),
            counts=ints(5),
            samples=[True],
            token_ids=ints(10, 11, 12, 13, 14),
            page_slots=ints(3, 3),
            page_groups=ints(0, 0),
            page_columns=ints(0, 1),
            page_ids=ints(7, 2),
            new_rows=row_starts(3),
        ),
    )
    rows.state.last_token_S[3] = 99
    step = stage(
        rows,
        plan(
            slots=ints(3, 1),
            starts=ints(5, 4),
            counts=ints(1, 3),
            samples=[True, False],
            num_decodes=1,
            token_ids=ints(20, 21, 22),
            page_slots=ints(1, 1),
            page_groups=ints(0, 0),
            page_columns=ints(0, 1),
            page_ids=ints(5, 0),
            new_rows=row_starts(1),
        ),
    )
    assert step.token_ids_T.tolist() == [99, 20, 21, 22]
    layout = step.layout
    assert layout.positions_T.tolist() == [5, 4, 5, 6]
    assert layout.slot_mapping_T[0].tolist() == [2 * 4 + 1, 0, 1, 2]
    assert layout.page_table_RP[0].tolist() == [[7, 2], [5, 0]]
    assert layout.query_starts.tolist() == [0, 1, 4]
    assert layout.lengths_R.tolist() == [6, 7]
    assert (layout.host_query_lengths, layout.host_lengths) == ([1, 3], [6, 7])


def test_sampling_inputs_name_the_rows_that_draw(rows: Rows) -> None:
    step = plan(
        slots=ints(2, 0, 4),
        starts=ints(9, 0, 6),
        counts=ints(1, 4, 2),
        samples=[True, False, True],
        num_decodes=1,
        token_ids=ints(1, 2, 3, 4, 5, 6),
        new_rows=row_starts(
            2,
            0,
            4,
            temperatures=np.asarray([0.5, 1.0, 0.0], np.float32),
            top_ks=ints(5, -1, -1),
            seeds=np.asarray([2**64 - 1, 0, 7], np.uint64),
        ),
    )
    stage(rows, step)
    inputs = rows.sampling_inputs(step)
    assert inputs is not None
    assert inputs.slots_Q.tolist() == [2, 4]
    assert inputs.last_tokens_Q.tolist() == [0, 6]
    assert inputs.columns.temperatures_R.tolist() == [0.5, 0.0]
    assert inputs.columns.positions_R.tolist() == [10, 8]
    assert inputs.columns.seeds_R.tolist() == [-1, 7]
    assert (inputs.needs.random, inputs.needs.filters) == (True, True)
    assert inputs.masked_stop_ids_QK is None


def test_a_step_of_greedy_rows_needs_no_randomness(rows: Rows) -> None:
    step = plan(
        slots=ints(0, 1),
        starts=ints(0, 0),
        counts=ints(1, 1),
        samples=[True, True],
        token_ids=ints(1, 2),
        new_rows=row_starts(0, 1, temperatures=np.asarray([0.0, 0.7], np.float32), top_ks=ints(20, 1)),
    )
    stage(rows, step)
    inputs = rows.sampling_inputs(step)
    assert inputs is not None
    assert (inputs.needs.random, inputs.needs.filters) == (False, False)


def test_stop_ids_are_masked_until_enough_tokens_are_out(rows: Rows) -> None:
    def step(start: int) -> StepPlan:
        return plan(
            slots=ints(0, 1),
            starts=ints(start, start),
            counts=ints(1, 1),
            samples=[True, True],
            token_ids=ints(1, 2),
            new_rows=row_starts(0, 1, min_new_tokens=ints(2, 0), held_ids=((8, 9), (8,))),
        )

    for start, masked in ((3, [[8, 9], [-1, -1]]), (4, [[8, 9], [-1, -1]]), (5, None)):
        stage(rows, step(start))
        inputs = rows.sampling_inputs(step(start))
        assert inputs is not None
        ids = inputs.masked_stop_ids_QK
        assert (None if ids is None else ids.tolist()) == masked


def test_nothing_is_drawn_in_the_middle_of_a_prompt(rows: Rows) -> None:
    step = plan(slots=ints(0), starts=ints(0), counts=ints(2), samples=[False], token_ids=ints(1, 2))
    assert rows.sampling_inputs(step) is None


def test_a_decode_layout_from_the_device_equals_the_one_from_the_host(rows: Rows) -> None:
    pages = {"page_slots": ints(2, 2, 5), "page_groups": ints(0, 0, 0)}
    stage(
        rows,
        plan(
            slots=ints(2, 5),
            starts=ints(0, 0),
            counts=ints(5, 2),
            samples=[True, True],
            token_ids=ints(1, 2, 3, 4, 5, 6, 7),
            page_columns=ints(0, 1, 0),
            page_ids=ints(7, 3, 1),
            new_rows=row_starts(2, 5),
            **pages,
        ),
    )
    host = stage(
        rows,
        plan(slots=ints(2, 5), starts=ints(5, 2), counts=ints(1, 1), samples=[True, True], num_decodes=2),
    ).layout
    device = rows.decode_layout(
        rows.read(torch.tensor([[2, 5, rows.spare_slot], [5, 2, 0], [-1] * 3, [-1] * 3], dtype=torch.int32))
    )
    assert device.positions_T.tolist() == [*host.positions_T.tolist(), 0]
    assert device.slot_mapping_T[0].tolist() == [*host.slot_mapping_T[0].tolist(), 9 * 4]
    assert device.lengths_R.tolist() == [*host.lengths_R.tolist(), 1]
    assert device.query_starts.tolist() == [*host.query_starts.tolist(), 3]
    assert device.page_table_RP[0][0, :2].tolist() == host.page_table_RP[0][0].tolist()
    assert device.num_decodes == 3


def test_a_captured_layout_follows_what_rows_share() -> None:
    costs = SharingCosts(
        rows_per_item=4,
        key_heads=1,
        programs=4,
        shortest_split=4,
        piece_keys=0,
        worthwhile_keys=0,
    )
    rows = Rows(
        num_slots=6,
        num_columns=8,
        num_groups=1,
        page_size=4,
        spare_page=9,
        vocab_size=50,
        device=torch.device("cpu"),
        sharing=costs,
    )
    slots, positions = ints(2, 5), ints(9, 6)

    def enter(*second_row: int) -> None:
        rows.update(
            plan(
                slots=slots,
                starts=ints(0, 0),
                counts=ints(1, 1),
                samples=[True, True],
                page_slots=ints(2, 2, 2, 5, 5),
                page_groups=ints(0, 0, 0, 0, 0),
                page_columns=ints(0, 1, 2, 0, 1),
                page_ids=ints(7, 3, 4, *second_row),
                new_rows=row_starts(2, 5),
            )
        )

    enter(7, 1)
    # The first row reads its keys 4 to 9 alone.
    assert rows.find_shared(slots, positions) == Found(longest_own=6, max_pieces=64)
    inputs_F4 = torch.tensor([[2, 5, 6, 6], [9, 6, 0, 0], [-1] * 4, [-1] * 4], dtype=torch.int32)
    layout = rows.decode_layout(rows.read(inputs_F4), longest=8, max_pieces=16)
    assert layout.shared is not None
    assert (layout.shared.longest_own, layout.shared.max_pieces) == (8, 16)
    assert layout.host_lengths == [32] * 4
    assert layout.shared.own_starts_R.tolist() == [4, 4, 0, 0]
    assert layout.shared.num_pieces_R.tolist() == [1, 1, 0, 0]
    enter(2, 1)  # other requests in the same slots
    assert rows.find_shared(slots, positions) is None
    layout = rows.decode_layout(rows.read(inputs_F4[:, :2].contiguous()), longest=512)
    assert layout.shared is None
    assert layout.host_lengths == [32, 32]


def test_the_inputs_of_a_step_carry_its_new_pages(rows: Rows) -> None:
    step = plan(
        slots=ints(4, 1, 3),
        starts=ints(8, 3, 12),
        counts=ints(1, 1, 1),
        samples=[True] * 3,
        num_decodes=3,
        page_slots=ints(3, 4),
        page_groups=ints(0, 0),
        page_columns=ints(3, 2),
        page_ids=ints(5, 8),
    )
    rows.update(step)
    inputs = rows.decode_inputs(step, size=4)
    assert inputs.tolist() == [[4, 1, 3, 6], [8, 3, 12, 0], [2, -1, 3, -1], [8, -1, 5, -1]]
    read = rows.read(torch.from_numpy(inputs))
    assert read.cache_slot_GB.tolist() == [[8 * 4, 9 * 4 + 3, 5 * 4, 9 * 4]]
    assert rows.state.page_table_GSC[0, 4, 2] == 8
    assert rows.state.page_table_GSC[0, 3, 3] == 5
