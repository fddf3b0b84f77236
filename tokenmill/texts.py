"""Texts as callers give them: of any class that is a `str`, and perhaps with what no text has.

`str()` is not asked for them: of a member of `class Word(str, Enum)` it tells the name and not the text.
"""

from __future__ import annotations

from tokenmill.errors import InvalidArgument


def plain_text(text: str) -> str:
    """The text as one of Python's own class, which prints alike everywhere and is known in every process."""
    return text if type(text) is str else str.__str__(text)


def check_encodable(text: str, place: str) -> None:
    """Raise for what is a Python string, but no text. `place` is what the message calls it."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"{place} has half a surrogate pair at character {error.start}, which is no text; remove it"
        ) from None
