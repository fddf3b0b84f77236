"""The journal: what was committed is found again, whatever became of the file; and nobody else writes it."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import textwrap
import tracemalloc
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill.batch.journal import Journal, Kept
from tokenmill.batch.key_table import KeyTable
from tokenmill.errors import InvalidArgument, JobStopped

pytestmark = pytest.mark.unit

HEADER_BYTES = 64
ROOT = Path(__file__).parent.parent.parent


def key_of(number: int) -> bytes:
    return blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


def value_of(number: int) -> dict[str, Any]:
    """Some short, some long enough to be compressed."""
    return {
        "text": f"answer {number} \u00e4\U0001f600\ud800 " * (1 + number % 3 * 200),
        "output_ids": [number],
    }


def write(path: Path, numbers: range | list[int], *, per_commit: int = 3) -> list[int]:
    """A journal of these; gives where each commit ended."""
    path.unlink(missing_ok=True)
    journal = Journal(path)
    ends = [path.stat().st_size]
    for count, number in enumerate(numbers, 1):
        journal.add(key_of(number), value_of(number))
        if count % per_commit == 0 or count == len(numbers):
            journal.commit()
            ends.append(path.stat().st_size)
    journal.close()
    return ends


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl.journal"


def kept(path: Path, numbers: range) -> set[int]:
    """Which of these a fresh reader finds; each must be what was written."""
    journal = Journal(path)
    try:
        found = {number: journal.find(key_of(number)) for number in numbers}
    finally:
        journal.close()
    for number, entry in found.items():
        assert entry in (None, Kept(value_of(number), is_new=False))
    return {number for number, entry in found.items() if entry is not None}


# ── keeping ───────────────────────────────────────────────────────────────────────────────────


def test_finds_what_was_added_before_and_after_a_commit_and_in_the_next_process(path: Path) -> None:
    journal = Journal(path)
    journal.add(key_of(1), value_of(1))
    assert journal.find(key_of(1)) == Kept(value_of(1), is_new=True)
    journal.commit()
    assert journal.find(key_of(1)) == Kept(value_of(1), is_new=True)
    assert journal.find(key_of(2)) is None
    assert len(journal) == 1
    journal.close()
    assert kept(path, range(5)) == {1}


def test_what_was_not_committed_is_not_kept_and_harms_nothing(path: Path) -> None:
    write(path, range(4))
    journal = Journal(path)
    journal.add(key_of(9), value_of(9))
    journal.close()
    assert kept(path, range(10)) == {0, 1, 2, 3}


def test_appending_never_touches_what_is_there(path: Path) -> None:
    write(path, range(5))
    before = path.read_bytes()
    journal = Journal(path)
    journal.add(key_of(7), value_of(7))
    journal.commit()
    journal.close()
    assert path.read_bytes()[64 : len(before)] == before[64:]


@given(st.lists(st.binary(min_size=16, max_size=16), unique=True, max_size=60), st.integers(0, 3))
def test_the_table_finds_every_key_among_any_others(keys: list[bytes], num_alike: int) -> None:
    """Also of keys whose first halves are alike, which share a place."""
    keys = list(dict.fromkeys(keys + [b"same half" + bytes([n] * 7) for n in range(num_alike)]))
    table = KeyTable()
    for filler in range(700):
        table.add(key_of(filler), 10_000 + filler)
    for offset, key in enumerate(keys):
        table.add(key, offset)
    for filler in range(700, 1500):  # grows meanwhile
        table.add(key_of(filler), 10_000 + filler)
    assert len(table) == 1500 + len(keys)
    for offset, key in enumerate(keys):
        assert offset in list(table.offsets(key))
    assert all(10_000 + filler in list(table.offsets(key_of(filler))) for filler in range(1500))


def test_the_table_grows_within_its_bound() -> None:
    table = KeyTable()
    tracemalloc.start()
    try:
        for number in range(12_000):
            table.add(key_of(number), number)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 80 * 10_922, "when it last grew, it had so many entries"


# ── damage ────────────────────────────────────────────────────────────────────────────────────


def test_cut_at_every_byte_of_its_end_it_keeps_every_whole_record(path: Path) -> None:
    ends = write(path, [0, 3, 6, 9], per_commit=1)
    whole = path.read_bytes()
    for size in range(ends[1], len(whole) + 1):
        path.write_bytes(whole[:size])
        expected = {number for number, end in zip([0, 3, 6, 9], ends[1:], strict=True) if end <= size}
        assert kept(path, range(10)) == expected, size
        assert path.stat().st_size in ends  # the torn rest is gone, so that what comes next is found
    for size in range(ends[0]):
        path.write_bytes(whole[:size])
        assert kept(path, range(10)) == set(), size


DAMAGE = st.one_of(
    st.tuples(st.just("flip"), st.floats(0, 0.999), st.integers(1, 255)),
    st.tuples(st.just("remove"), st.floats(0, 0.999), st.integers(1, 400)),
    st.tuples(st.just("zeros"), st.floats(0, 0.999), st.integers(1, 400)),
    st.tuples(st.just("insert"), st.floats(0, 0.999), st.integers(1, 400)),
)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(damages=st.lists(DAMAGE, min_size=1, max_size=3), more=st.booleans())
def test_whatever_is_damaged_no_good_record_is_lost_and_no_bad_one_trusted(
    path: Path, damages: list[tuple[str, float, int]], more: bool
) -> None:
    ends = write(path, range(12), per_commit=1)
    data, places = bytearray(path.read_bytes()), list(range(ends[-1]))  # where each byte stood
    for kind, share, amount in damages:
        at = int(share * len(data))
        if kind in ("remove", "insert"):
            at = max(at, HEADER_BYTES)
        if kind == "flip":
            data[at] ^= amount
            places[at] = -1
        elif kind == "zeros":
            data[at : at + amount] = bytes(len(data[at : at + amount]))
            places[at : at + amount] = [-1] * len(places[at : at + amount])
        elif kind == "remove":
            del data[at : at + amount], places[at : at + amount]
        else:
            data[at:at], places[at:at] = os.urandom(amount), [-1] * amount
    path.write_bytes(data)
    intact = f",{','.join(map(str, places))},"
    untouched = {
        number
        for number in range(12)
        if f",{','.join(map(str, range(ends[number], ends[number + 1])))}," in intact
    }
    if not untouched and places[:HEADER_BYTES] != list(range(HEADER_BYTES)):
        return  # neither its title nor a record: nobody can tell that it was a journal
    assert kept(path, range(12)) >= untouched
    if more:
        journal = Journal(path)
        journal.add(key_of(99), value_of(99))
        journal.commit()
        journal.close()
        assert kept(path, range(100)) >= untouched | {99}


def test_says_how_much_was_damaged_and_cut(path: Path) -> None:
    ends = write(path, [0, 3, 6], per_commit=1)
    data = bytearray(path.read_bytes())
    data[ends[1] + 40] ^= 1  # in the second record
    path.write_bytes(data + b"torn")
    journal = Journal(path)
    assert (journal.damaged_bytes, journal.cut_bytes) == (ends[2] - ends[1], 4)
    journal.close()


@pytest.mark.parametrize(
    "content", [b'{"text": "an output"}\n', b"\x00\x01\x02" * 100, b"tokenmill journal 9 "]
)
def test_what_is_no_journal_is_refused_and_left_alone(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(InvalidArgument, match="no journal of this version"):
        Journal(path)
    assert path.read_bytes() == content


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"nowhere.*No such file"):
        Journal(tmp_path / "nowhere" / "journal")


# ── two processes ─────────────────────────────────────────────────────────────────────────────

HOLDER = """
import sys, time
from tokenmill.batch.journal import Journal
journal = Journal(sys.argv[1])
print("open", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", textwrap.dedent(HOLDER), str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_a_second_process_is_refused_until_the_first_one_is_gone(
    path: Path, holder: subprocess.Popen[str]
) -> None:
    before = path.read_bytes()
    with pytest.raises(JobStopped, match=f"{path.name}.*in use by another job .pid {holder.pid}"):
        Journal(path)
    assert path.read_bytes() == before
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    Journal(path).close()


def test_a_second_one_in_the_same_process_is_refused(path: Path) -> None:
    journal = Journal(path)
    with pytest.raises(JobStopped, match="in use"):
        Journal(path)
    journal.close()


# ── a full disk ───────────────────────────────────────────────────────────────────────────────


def test_a_full_disk_tears_nothing_and_the_journal_goes_on_afterwards(path: Path) -> None:
    write(path, range(3))
    journal = Journal(path)
    size = path.stat().st_size
    journal.add(key_of(7), value_of(7))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, limits[1]))  # the record does not fit
    try:
        with pytest.raises(JobStopped, match=f"{path.name}.*cannot be written.*MiB are free"):
            journal.commit()
        assert path.stat().st_size == size
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        journal.close()
    assert kept(path, range(8)) == {0, 1, 2}
    write_more = Journal(path)
    write_more.add(key_of(7), value_of(7))
    write_more.commit()
    write_more.close()
    assert kept(path, range(8)) == {0, 1, 2, 7}
