"""The page on what of SGLang's engine is missing names exactly what the tables of the code refuse."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from tokenmill import Engine
from tokenmill.frontend import control, options
from tokenmill.frontend.scoring import ScoreOptions
from tokenmill.sampling_params import SamplingParams

pytestmark = pytest.mark.cpu

PAGE = Path(__file__).parent.parent / "docs" / "sglang.md"


def rows_of(heading: str) -> dict[str, str]:
    """Each name in the first column of a section's table, with what stands in the second."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(f"\n### {heading}\n")
    assert rest, f"there is no section {heading!r}"
    section = re.split(r"^#", rest, maxsplit=1, flags=re.MULTILINE)[0]
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", section, re.MULTILINE)
    pairs = [(name, note) for names, note in rows for name in re.findall(r"`(\w+)`", names)]
    assert len(pairs) == len(dict(pairs)), "a name stands there twice"
    return dict(pairs)


def test_methods() -> None:
    assert rows_of("Methods of the engine") == control._LATER
    assert not [name for name in control._LATER if hasattr(Engine, name)]


def test_keywords_of_generate() -> None:
    assert set(rows_of("Keywords of generate")) == set(options._LATER)


def test_values_that_ask_for_nothing_stand_beside_their_names() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name, neutral in options._LATER.items():
        shown = re.search(rf"^\| .*`{name}`( \((\w+)\))?[, ]", text, re.MULTILINE)
        assert shown is not None
        assert shown[2] == (str(neutral[0]) if neutral else None), name


def test_sampling_parameters() -> None:
    unsupported = {f.name for f in dataclasses.fields(SamplingParams) if not f.metadata["supported"]}
    assert set(rows_of("Sampling parameters")) == unsupported


def test_keywords_of_other_methods() -> None:
    assert set(rows_of("Keywords of score")) == set(ScoreOptions.__annotations__) - {"temperature"}
    assert set(rows_of("Keywords of start_profile")) == set(control._NOT_OFFERED)
