"""JSON as outputs are written: one line, the same bytes for the same value, and always valid.

Owns what becomes of values that files of columns hold and JSON has not.
"""

from __future__ import annotations

import base64
import datetime
import json
import math
from collections.abc import Callable
from json import encoder as json_encoder
from typing import Any

from tokenmill.batch.times import timedelta_text
from tokenmill.sampling_params import brief

_LONGEST_LINE = 200
# Line ends for `str.splitlines`, though not for JSON, which has them in texts only.
_LINE_ENDS = "\x85\u2028\u2029"


def prepared(encoder: json.JSONEncoder) -> Callable[[Any], str]:
    """What `encoder.encode` does, for values that do not hold themselves and encoders without indentation.

    That one makes its inner part anew for every value, which takes as long as a short value does.
    """
    make_inner = getattr(json_encoder, "c_make_encoder", None)
    if make_inner is None:  # no CPython
        return encoder.encode
    text_of = json_encoder.encode_basestring_ascii if encoder.ensure_ascii else json_encoder.encode_basestring
    separators = (encoder.key_separator, encoder.item_separator)
    flags = (encoder.sort_keys, encoder.skipkeys, encoder.allow_nan)
    parts_of = make_inner(None, encoder.default, text_of, None, *separators, *flags)
    return lambda value: "".join(parts_of(value, 0))


def json_line(value: Any) -> bytes:
    """The value as JSON with a line end."""
    return json_bytes(value) + b"\n"


def json_bytes(value: Any) -> bytes:
    """The value as JSON in UTF-8, readable where it is text at all.

    A number that is not finite becomes null, bytes become base64, times become ISO 8601, and whatever else
    becomes its text.
    """
    try:
        text = _encode(value)
    except ValueError:  # a float that JSON has not
        text = _encode(_finite(value))
    if not text.isascii():
        for mark in _LINE_ENDS:
            if mark in text:
                text = text.replace(mark, f"\\u{ord(mark):04x}")
    # Half a surrogate pair is written by its number, in the very form that JSON has for it.
    return text.encode(errors="backslashreplace")


def in_short(value: Any) -> Any:
    """The value as plain data, if that is not much more than a line; else the beginning of its text."""
    try:
        text = json_bytes(value).decode()
    except (TypeError, RecursionError):  # names that JSON has not, or values nested too deep
        return brief(value)
    return json.loads(text) if len(text) <= _LONGEST_LINE else f"{text[:_LONGEST_LINE]}..."


def _told(value: Any) -> Any:
    """What stands for a value that JSON has not."""
    if isinstance(value, bytes | bytearray):
        return base64.b64encode(value).decode()
    if callable(getattr(value, "tolist", None)):  # an array or tensor
        return _finite(value.tolist())
    if isinstance(value, datetime.timedelta):
        return timedelta_text(value)
    return value.isoformat() if callable(getattr(value, "isoformat", None)) else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_encode = prepared(json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=_told))
