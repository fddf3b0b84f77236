"""The command `tokenmill batch`: its flags, what it prints, its exit codes, and what signals do to it."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

from tokenmill import logs
from tokenmill.batch.config import JobConfig
from tokenmill.flags import (
    NO_COMMAND_FLAG,
    add_engine_flags,
    add_flags,
    add_hidden_engine_flags,
    add_sampling_flags,
    given,
)

EXIT_OK = 0
EXIT_SOME_FAILED = 3  # every row has its line, some of them an error
EXIT_INTERRUPTED = 130  # as a shell reports SIGINT
EXIT_TERMINATED = 143  # as a shell reports SIGTERM

_NO_FLAG = {"sampling_params", "options"}
# A job streams nothing, and gives its rows their seeds: whoever gives the second is told of --seed.
_NO_ENGINE_FLAG = {*NO_COMMAND_FLAG, "stream_interval", "random_seed"}
# What is otherwise for a job than for an engine.
_ENGINE_HELPS = {
    "core_process": "run the core in a process of its own instead of a thread (default: on)",
    "schedule_policy": "order of waiting requests (default: lpm, those with the same beginning together; "
    "with priorities fcfs)",
    "log_level": "level of the 'tokenmill' logger (default: error, but info for how far the job is)",
}
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_AGAIN_SECONDS = 0.01  # until a signal is sent again
_Handler = Callable[[int, FrameType | None], None]
# Too long for a line to be read; the report shows them.
_NOT_PRINTED = {"timeline", "latency_seconds", "prompt_length", "output_length"}


def add_command(commands: Any) -> None:
    """Add the command to the subparsers of the command line."""
    parser = commands.add_parser(
        "batch",
        help="answer a file of prompts",
        description="Answer every row of a file: JSONL, CSV, Parquet, a saved data set, or a file of "
        "OpenAI's batch API. Finished rows are in the output at once, and in input order at the end. "
        "Whatever ends the command, the same command goes on. At the end one JSON object says what was done. "
        "Exit code 0: all rows are answered; 3: some rows have errors; 1, 2: failed; 130, 143: interrupted.",
    )
    parser.add_argument("input", help="file of rows, or folder of a saved data set")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help=".jsonl, .csv, .tsv or .parquet (default: INPUT with .out)"
    )
    parser.add_argument("--plan", action="store_true", help="tell what the job will take, and run nothing")
    add_flags(parser.add_argument_group("job"), JobConfig, "job", without=_NO_FLAG)
    add_sampling_flags(parser)
    add_engine_flags(parser, without=_NO_ENGINE_FLAG, helps=_ENGINE_HELPS)
    add_hidden_engine_flags(parser, {"random_seed": (0,)}, lists=())
    parser.set_defaults(command=run_command)


def run_command(options: argparse.Namespace) -> int:
    """Run the job and print its summary; returns the exit code."""
    with warnings.catch_warnings():
        warnings.showwarning = _tell_warning
        return _run(options)


def _tell_warning(message: Warning | str, *where: object, **rest: object) -> None:
    """As errors are told: whoever runs a command has no use for a line of our source."""
    print(f"tokenmill: warning: {message}", file=sys.stderr)


def _run(options: argparse.Namespace) -> int:
    from tokenmill.batch.job import BatchJob  # brings the engine along, which --help does not need

    job = BatchJob(
        options.input,
        options.output,
        sampling_params=given(options, "sampling"),
        **given(options, "job"),
        **given(options, "engine"),
    )
    if options.plan:
        print(job.plan())
        return EXIT_OK
    if "log_level" not in given(options, "engine"):
        logging.getLogger("tokenmill.batch").setLevel(logging.INFO)  # how far the job is
    logs.show()
    code = EXIT_OK
    with _signals():
        try:
            job.run()
        except KeyboardInterrupt as interrupt:
            code = EXIT_TERMINATED if isinstance(interrupt, _Terminated) else EXIT_INTERRUPTED
    summary = job.summary()
    _show({name: value for name, value in summary.items() if name not in _NOT_PRINTED})
    if code:
        print("interrupted; what is finished is kept, and the same command goes on", file=sys.stderr)
    return code or (EXIT_SOME_FAILED if summary["errors"] else EXIT_OK)


def _show(summary: dict[str, Any]) -> None:
    """Print a summary; what is no longer read or has no room for it does not make the work undone."""
    try:
        print(json.dumps(summary), flush=True)
    except OSError as error:
        with contextlib.suppress(OSError):
            _tell_warning(f"the summary cannot be printed: {error.strerror}; all else is done")
        # Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which asks for the same as Ctrl-C."""


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the job in good order, and a second one of them at once."""
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    # What a shell has made its background jobs ignore stays ignored.
    before = {number: handler for number, handler in handlers.items() if handler != signal.SIG_IGN}
    for number in before:
        signal.signal(number, _interrupt)
    hook = sys.unraisablehook
    sys.unraisablehook = partial(_interrupt_again, hook)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    _let(_leave, follow=_interrupt)
    raise KeyboardInterrupt if number == signal.SIGINT else _Terminated


def _interrupt_again(hook: Callable[[Any], object], ignored: Any) -> None:
    """Where Python ignores errors (in a destructor, in a callback of its collector) a signal would be lost:
    it is sent again. `ignored` is what `sys.unraisablehook` is told of, and `hook` the one for all else."""
    if not isinstance(ignored.exc_value, KeyboardInterrupt):
        hook(ignored)
        return
    _let(_interrupt, follow=_leave)
    number = signal.SIGTERM if isinstance(ignored.exc_value, _Terminated) else signal.SIGINT
    again = threading.Timer(_AGAIN_SECONDS, signal.pthread_kill, (threading.main_thread().ident, number))
    again.daemon = True
    again.start()


def _let(handler: _Handler, *, follow: _Handler) -> None:
    """Handle what was handled by `follow` so from now on."""
    for number in _SIGNALS:
        if signal.getsignal(number) == follow:
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    """Nothing is waited for: what the journal has is whole at every moment."""
    os._exit(EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_TERMINATED)
