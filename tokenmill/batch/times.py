"""Times as text, ISO 8601 throughout: those that Python has not, because they are too fine or too far away.

Owns the form of durations and what becomes of a time of Arrow without a counterpart; all others are told by
their own `isoformat`.
"""

from __future__ import annotations

import contextlib
import datetime
import re
from typing import Any

_IN_NANOSECONDS = {"s": 10**9, "ms": 10**6, "us": 1000, "ns": 1}
_MILLISECONDS_OF_DAY = 24 * 60 * 60 * 1000


def duration_text(nanoseconds: int) -> str:
    """A duration in seconds: `PT1.5S`."""
    seconds, fraction = divmod(abs(nanoseconds), 10**9)
    digits = f".{fraction:09d}".rstrip("0").rstrip(".")
    return f"{'-' if nanoseconds < 0 else ''}PT{seconds}{digits}S"


def timedelta_text(value: datetime.timedelta) -> str:
    """The same of Python's durations, and of those of pandas, which are finer."""
    microseconds = value // datetime.timedelta(microseconds=1)
    return duration_text(1000 * microseconds + getattr(value, "nanoseconds", 0))


def arrow_time(scalar: Any) -> Any:
    """A time, date or duration of Arrow as Python has it; else as text, to its last digit."""
    import pyarrow

    kind, types = scalar.type, pyarrow.types
    value, rest = scalar, 0
    if getattr(kind, "unit", None) == "ns":  # pyarrow's own objects for these are pandas'
        microseconds, rest = divmod(scalar.value, 1000)
        value = pyarrow.scalar(microseconds, _in_microseconds(kind))
    if not rest:
        with contextlib.suppress(ValueError, OverflowError, KeyError):
            return value.as_py()
    if types.is_timestamp(kind):
        return _timestamp_text(scalar.value, kind.unit, kind.tz)
    if types.is_duration(kind):
        return duration_text(scalar.value * _IN_NANOSECONDS[kind.unit])
    if types.is_time(kind):
        return _fine_text(scalar.value, kind, len("12:00:00.000000"))
    if types.is_date(kind):
        return _far_text(scalar.value // (1 if types.is_date32(kind) else _MILLISECONDS_OF_DAY), "D")
    return scalar.as_py()


def _in_microseconds(kind: Any) -> Any:
    """The type of the same times in microseconds."""
    import pyarrow

    if pyarrow.types.is_timestamp(kind):
        return pyarrow.timestamp("us", kind.tz)
    return pyarrow.duration("us") if pyarrow.types.is_duration(kind) else pyarrow.time64("us")


def _timestamp_text(value: int, unit: str, zone: str | None) -> str:
    """In its time zone, or in UTC beyond the years that Python has in it, and where it does not know it."""
    if zone is None:
        return _far_text(value, unit)
    import pyarrow

    if unit == "ns":
        with contextlib.suppress(ValueError, KeyError):
            return _fine_text(value, pyarrow.timestamp(unit, zone), len("2026-03-01T12:00:00.000000"))
    return f"{_far_text(value, unit)}+00:00"


def _fine_text(nanoseconds: int, kind: Any, digits_end: int) -> str:
    """A time in nanoseconds, by its type and the place where the digits of its microseconds end."""
    import pyarrow

    microseconds, rest = divmod(nanoseconds, 1000)
    text: str = (
        pyarrow.scalar(microseconds, _in_microseconds(kind)).as_py().isoformat(timespec="microseconds")
    )
    return f"{text[:digits_end]}{rest:03d}{text[digits_end:]}"


def _far_text(value: int, unit: Any) -> str:
    """A time in a year of any length: at least four digits, and with more of them a sign, as in ISO 8601."""
    import numpy as np

    text = re.sub(r"\.0+$", "", str(np.datetime64(value, unit)))  # no fraction of nothing, as in Python
    minus, year, rest = re.split(r"(\d+)", text, maxsplit=1)
    sign = minus or ("+" if len(year) > 4 else "")
    return f"{sign}{year.zfill(4)}{rest}"
