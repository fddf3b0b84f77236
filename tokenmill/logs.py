"""Where log lines go in a program that has set up no logging: to standard error."""

from __future__ import annotations

import logging
import sys
from functools import cache

_log = logging.getLogger("tokenmill")
# Tells of arguments that change nothing. `log_level` is about what an engine does, and comes too late: most
# are told of before it is set, or by the second engine of a process.
_arguments = logging.getLogger("tokenmill.arguments")
_arguments.setLevel(logging.WARNING)


class _StandardError(logging.Handler):
    """Whatever standard error is at the moment, until the program sets up a handler of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is None or any(each is not self for each in (*_log.handlers, *_log.root.handlers)):
            return
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


_standard_error = _StandardError()
_standard_error.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))


@cache
def warn_once(name: str, message: str) -> None:
    """Tell of an argument that changes nothing, the first time that the process meets it so."""
    _arguments.warning(message)


def show() -> None:
    """Let all lines that loggers of ours let through be seen: without this Python shows warnings only."""
    if not _log.hasHandlers():
        _log.addHandler(_standard_error)


def set_level(level: str) -> None:
    """Say from which level on our lines are wanted, in lower case; who wants more than warnings sees them."""
    _log.setLevel(level.upper())
    if _log.level < logging.WARNING:
        show()
