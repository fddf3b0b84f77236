"""The progress bar of a batch, on standard error."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO

# A progress bar appears only after this long.
_QUIET_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Advance:
    """One row of a call got further."""

    finished: bool
    num_tokens: int
    chunk: dict[str, Any]  # empty unless the call streams


Report = Callable[[list[Advance]], None]


def open_progress(num_rows: int, *, wanted: bool | None) -> contextlib.AbstractContextManager[Report]:
    """Takes reports until the block ends. `wanted` None: there is a bar if somebody can see it."""
    stream = standard_error()
    shown = stream is not None and (stream.isatty() if wanted is None else wanted)
    return _bar(num_rows) if shown else contextlib.nullcontext(_no_report)


def standard_error() -> TextIO | None:
    """None where it is closed, as for a service without a terminal."""
    return None if getattr(sys.stderr, "closed", True) else sys.stderr


def _no_report(advanced: list[Advance]) -> None:
    """Nobody watches."""


@contextlib.contextmanager
def _bar(num_rows: int) -> Iterator[Report]:
    """A bar with rows done, their rate, the time left, and tokens per second."""
    from tqdm import tqdm

    # A class of its own, because tqdm's would start a thread that watches all bars.
    bar_class = type("ProgressBar", (tqdm,), {"monitor_interval": 0})
    started = time.perf_counter()
    num_tokens = 0
    with bar_class(
        total=num_rows, desc="generating", unit="row", delay=_QUIET_SECONDS, dynamic_ncols=True
    ) as bar:

        def report(advanced: list[Advance]) -> None:
            nonlocal num_tokens
            num_tokens += sum(advance.num_tokens for advance in advanced)
            rate = num_tokens / (time.perf_counter() - started)
            bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
            bar.update(sum(advance.finished for advance in advanced))

        yield report
