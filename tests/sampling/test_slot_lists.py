"""Lists of slots on the device, against lists of Python."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.sampling.adjustments import Adjustments
from tokenmill.sampling.slot_lists import SlotLists

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
NUM_SLOTS = 5
LENGTHS = st.sampled_from([0, 1, 2, 3, 15, 16, 17, 32, 33, 64, 100, 700])


@settings(max_examples=80, deadline=None)
@given(
    changes=st.lists(
        st.tuples(st.booleans(), st.dictionaries(st.integers(0, NUM_SLOTS - 1), LENGTHS, min_size=1)),
        min_size=1,
        max_size=8,
    ),
    least=st.sampled_from([1, 16]),
)
def test_a_step_reads_what_its_slots_have_and_no_more(
    changes: list[tuple[bool, dict[int, int]]], least: int
) -> None:
    table = SlotLists(NUM_SLOTS, dtype=torch.int64, device=CPU)
    expected: list[list[int]] = [[] for _ in range(NUM_SLOTS)]
    number = 0
    for clears, lengths in changes:
        for slot, length in lengths.items():
            expected[slot] = [] if clears else list(range(number, number + length))
            number += length
        if clears:
            table.clear(list(lengths))
        else:
            table.set(list(lengths), [expected[slot] for slot in lengths])
        for slots in ([*range(NUM_SLOTS)], [*lengths], [0], [3, 1]):
            longest = max(len(expected[slot]) for slot in slots)
            width = table.width(np.array(slots), least=least)
            assert longest <= width <= max(2 * longest - 1, least)
            if width:
                found = table.gather(torch.tensor(slots), width).tolist()
                assert found == [expected[slot] + [0] * (width - len(expected[slot])) for slot in slots]


def test_what_a_captured_step_reads_stays_in_place() -> None:
    """It goes on reading the memory it was captured with, whatever longer lists came since."""
    table = SlotLists(4, dtype=torch.float32, device=CPU)
    table.set([0], [[0.5] * 20])
    read = [part.data_ptr() for part in table._blocks]
    table.set([1], [[0.25] * 500])
    table.set([0], [[0.75] * 3])
    assert [part.data_ptr() for part in table._blocks[: len(read)]] == read
    assert table.gather(torch.tensor([0, 1]), 4).tolist() == [[0.75, 0.75, 0.75, 0], [0.25] * 4]


def test_biases_of_one_row_leave_the_others_alone() -> None:
    rng = np.random.default_rng(4)
    adjustments = Adjustments(num_slots=8, vocab_size=400, device=CPU)
    biases: dict[int, dict[int, float]] = {}
    for _ in range(40):
        slots = rng.choice(8, size=3, replace=False).tolist()
        for slot in slots:
            count = int(rng.choice([0, 1, 5, 300]))
            ids = rng.choice(400, size=count, replace=False).tolist()
            biases[slot] = dict(zip(ids, rng.normal(size=count).tolist(), strict=True))
        adjustments.set_biases(slots, [list(biases[slot].items()) for slot in slots])
        rows = np.array(sorted(biases))
        logits = torch.randn(len(rows), 400)
        expected = logits.clone()
        for row, slot in zip(expected, rows.tolist(), strict=True):
            for token, bias in biases[slot].items():
                row[token] += bias
        if count := adjustments.num_biases(rows):
            logits = adjustments.add_biases(logits, torch.from_numpy(rows), count)
        torch.testing.assert_close(logits, expected)
