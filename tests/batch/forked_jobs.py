"""Runs batch jobs in forked children: all of torch is imported once, and a child can be killed at any moment.

Reads the arguments of `batch.run` as a line of JSON, answers with the child's pid, and when it has ended with
its exit status; the child writes its summary to the path `summary`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Serve until standard input ends."""
    for line in sys.stdin:
        arguments = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _run(**arguments)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        _import_the_same(Path(arguments["summary"]))
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run(summary: str, **arguments: Any) -> None:
    code = 1
    try:
        from tokenmill import batch

        done = batch.run(**arguments)
        written = Path(f"{summary}.new")  # it may be killed in the middle of this, too
        written.write_text(json.dumps({**done, "modules": sorted(sys.modules)}))
        written.replace(summary)
        code = 0
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def _import_the_same(summary: Path) -> None:
    """What a child had to import, the next ones need not."""
    if summary.exists():
        for name in json.loads(summary.read_text())["modules"]:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


if __name__ == "__main__":
    main()
