"""The command line: `tokenmill generate`, `chat`, `batch`, `info` and `bench`.

Owns commands, printing and exit codes. What the flags of engine and sampling mean is decided where their
fields are; the command `batch` is in `batch/command.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from tokenmill import __version__, bench
from tokenmill.batch.command import add_command
from tokenmill.errors import InvalidArgument, RequestFailed
from tokenmill.flags import add_engine_flags, add_sampling_flags, given
from tokenmill.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tokenmill.engine import Engine

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # as a shell reports SIGINT
EXIT_BROKEN_PIPE = 141  # as a shell reports SIGPIPE

_CHAT_COMMANDS = "/reset starts a new conversation, /exit ends"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 wrong arguments, 130 interrupted.

    `arguments` are those after the program's name (default: of this process).
    """
    _open_closed_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(words, argparse.Namespace(arguments=words))
    try:
        code: int = options.command(options)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has gone. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except Exception as error:
        if getattr(options, "engine.log_level", None) == "debug":
            raise
        _complain(error)
        return EXIT_USAGE if isinstance(error, InvalidArgument) else EXIT_FAILURE


def _open_closed_streams() -> None:
    """Where the shell has closed one (`2>&-`), lead it nowhere, in processes started from here, too.

    Else the first file that is opened would have its number, and get what libraries print.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode))


def _complain(error: Exception) -> None:
    """One line on standard error; the name of the type helps where it is not an error of ours."""
    text = " ".join(str(error).split())
    if not isinstance(error, InvalidArgument):
        text = f"{type(error).__name__}: {text}"
    print(f"tokenmill: error: {text}", file=sys.stderr)


# ── flags ─────────────────────────────────────────────────────────────────────────────────────


class _Parser(argparse.ArgumentParser):
    """A parser whose complaint is one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="tokenmill", description="Offline inference for large language models.")
    parser.add_argument("--version", action="version", version=f"tokenmill {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command", parser_class=_Parser)

    generate = commands.add_parser(
        "generate",
        help="continue prompts",
        description="Continue prompts: the arguments, or else the lines of standard input (empty ones are "
        "skipped). Results come in the order of the prompts.",
    )
    generate.add_argument("prompts", nargs="*", metavar="prompt", help="text to continue")
    generate.add_argument("--stream", action="store_true", help="print text as it is generated")
    generate.add_argument("--json", action="store_true", help="print one JSON object per line")
    add_sampling_flags(generate)
    add_engine_flags(generate)
    generate.set_defaults(command=_generate)

    chat = commands.add_parser(
        "chat",
        help="talk with a model",
        description=f"Talk with a model, one message per line: {_CHAT_COMMANDS}. "
        "An answer is as long as the context allows unless --max-new-tokens is given.",
    )
    chat.add_argument("--system", help="system message that opens every conversation")
    add_sampling_flags(chat, without={"n"})
    add_engine_flags(chat)
    chat.set_defaults(command=_chat)

    add_command(commands)

    info = commands.add_parser(
        "info",
        help="load a model and print facts",
        description="Load a model and print what it is, where it runs, the memory it takes, and versions.",
    )
    info.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_flags(info)
    info.set_defaults(command=_info)

    measure = commands.add_parser(
        "bench",
        help="time fixed workloads",
        description="Time fixed workloads on a model: token ids in and out, no text. After a run that is not "
        "counted, the table shows medians. w6, from the constructor to the first token, is always there.",
    )
    _add_bench_flags(measure)
    add_engine_flags(measure)
    measure.set_defaults(command=_bench)
    return parser


def _add_bench_flags(parser: argparse.ArgumentParser) -> None:
    def add(name: str, help: str, **reading: Any) -> None:
        parser.add_argument(
            f"--{name}", dest=f"bench.{name}", default=argparse.SUPPRESS, help=help, **reading
        )

    titles = "; ".join(f"{name}: {workload.title}" for name, workload in bench.WORKLOADS.items())
    usual = " ".join(bench.DEFAULT_WORKLOADS)
    add("workloads", f"which ones (default: {usual}) {titles}", nargs="+", metavar="NAME")
    add("requests", "requests of each workload (default: its own number)", type=int, metavar="N")
    add("repeats", f"runs that are counted (default: {bench.Choice.repeats})", type=int, metavar="N")
    scale = f"factor for all lengths, up to 1 (default: 1, on a CPU {bench.CPU_SCALE:g})"
    add("scale", scale, type=float, metavar="N")
    parser.add_argument("--json", metavar="FILE", help="append one JSON object per run to this file")


def _open_engine(options: argparse.Namespace, **more: Any) -> Engine:
    from tokenmill.engine import Engine  # not needed for --help and wrong flags

    return Engine(**given(options, "engine"), **more)


# ── generate ──────────────────────────────────────────────────────────────────────────────────


def _generate(options: argparse.Namespace) -> int:
    sampling = SamplingParams(**given(options, "sampling"))  # wrong values end here, before any loading
    prompts = options.prompts or _lines_of(sys.stdin)
    if not prompts:
        raise InvalidArgument("there is no prompt: give prompts as arguments or as lines of standard input")
    write = _write_json if options.json else _TextWriter(several=len(prompts) * sampling.n > 1)
    with _open_engine(options) as engine:
        if options.stream:
            chunks = engine.generate(prompts, sampling, stream=True, on_error="raise")
            results: Iterable[Any] = _in_order(chunks, len(prompts) * sampling.n)
        else:
            results = enumerate(engine.generate(prompts, sampling))
        for index, result in results:
            write(index, prompts[index // sampling.n], result)
    return EXIT_OK


def _lines_of(stream: TextIO) -> list[str]:
    if stream.isatty():
        return []  # nobody knows that they should type now
    text = stream.read().removeprefix("\ufeff")  # the mark that some editors put before UTF-8
    return [line.rstrip("\r") for line in text.split("\n") if line.strip()]


def _in_order(chunks: Iterable[dict[str, Any]], count: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Chunks of a batch stream in the order of the batch; chunks of later items wait for their turn."""
    waiting: list[list[dict[str, Any]]] = [[] for _ in range(count)]
    current = 0
    for chunk in chunks:
        waiting[chunk["index"]].append(chunk)
        while current < count and waiting[current]:
            ready = waiting[current].pop(0)
            yield current, ready
            if ready["meta_info"]["finish_reason"] is not None:
                current += 1


def _write_json(index: int, prompt: str, result: Mapping[str, Any]) -> None:
    line = {**result, "index": index, "prompt": prompt}
    print(json.dumps(line, ensure_ascii=False), flush=True)


class _TextWriter:
    """Prints the text of results or of chunks; headed by its prompt where there are several."""

    def __init__(self, *, several: bool) -> None:
        self._several = several
        self._open: int | None = None

    def __call__(self, index: int, prompt: str, result: Mapping[str, Any]) -> None:
        if self._several and self._open != index:
            print(f"Prompt: {prompt}\nGenerated text: ", end="")
        self._open = index
        print(result["text"], end="", flush=True)
        if result["meta_info"]["finish_reason"] is not None:
            print("\n" if self._several else "", flush=True)


# ── chat ──────────────────────────────────────────────────────────────────────────────────────


def _chat(options: argparse.Namespace) -> int:
    sampling = SamplingParams(**{"max_new_tokens": None, **given(options, "sampling")})
    with _open_engine(options) as engine:
        if not (engine.config.chat_template or getattr(engine.get_tokenizer(), "chat_template", None)):
            raise InvalidArgument(
                "the tokenizer has no chat template; give one as --chat-template, or use `tokenmill generate`"
            )
        opening = [{"role": "system", "content": options.system}] if options.system else []
        messages = list(opening)
        if sys.stdin.isatty():
            print(_CHAT_COMMANDS, file=sys.stderr)
        for line in _typed_lines():
            if line == "/exit":
                break
            if line == "/reset":
                messages = list(opening)
            elif line.startswith("/"):
                print(f"unknown command {line.split()[0]}: {_CHAT_COMMANDS}", file=sys.stderr)
            else:
                messages = _turn(engine, messages, line, sampling=sampling)
    return EXIT_OK


def _typed_lines() -> Iterator[str]:
    """What the user sends, line by line, until the end of input."""
    if sys.stdin.isatty():
        # Gives input() its line editing; some builds of Python come without it.
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
    while True:
        try:
            line = input("> ") if sys.stdin.isatty() else input()
        except EOFError:
            return
        if line.strip():
            yield line.strip()


def _turn(
    engine: Engine, messages: list[dict[str, str]], line: str, *, sampling: SamplingParams
) -> list[dict[str, str]]:
    """Print the answer to one message; returns the conversation with both, or as it was if that failed."""
    asked = [*messages, {"role": "user", "content": line}]
    answer = ""
    try:
        for chunk in engine.chat(asked, sampling, stream=True, on_error="raise"):
            print(chunk["text"], end="", flush=True)
            answer += chunk["text"]
    except (InvalidArgument, RequestFailed) as error:  # the conversation has become too long, for example
        if answer:
            print(flush=True)
        _complain(error)
        print(f"this message was dropped; {_CHAT_COMMANDS}", file=sys.stderr)
        return messages
    print(flush=True)
    return [*asked, {"role": "assistant", "content": answer.strip()}]


# ── info ──────────────────────────────────────────────────────────────────────────────────────


# What the engine says of itself, by topic.
_FACTS = {
    "model": (
        "model_path",
        "architecture",
        "num_parameters",
        "num_layers",
        "hidden_size",
        "vocab_size",
        "context_length",
        "dtype",
    ),
    "device": ("device", "device_name", "attention_backend"),
    "memory": (
        "weight_bytes",
        "cache_bytes",
        "max_total_num_tokens",
        "page_size",
        "max_sequence_tokens",
        "max_running_requests",
        "load_seconds",
    ),
}


def _info(options: argparse.Namespace) -> int:
    with _open_engine(options) as engine:
        known = engine.get_server_info()
    facts = {topic: {name: known[name] for name in names} for topic, names in _FACTS.items()}
    facts |= {"host": _host(), "versions": _versions()}
    if options.json:
        print(json.dumps(facts))
    else:
        for topic, values in facts.items():
            print(topic)
            for name, value in values.items():
                print(f"  {name:<22} {_readable(name, value)}")
    return EXIT_OK


def _versions() -> dict[str, str | None]:
    packages = ("torch", "transformers", "tokenizers", "triton", "numpy")
    ours = {"tokenmill": __version__, "python": platform.python_version()}
    return {**ours, **{name: _version(name) for name in packages}}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _host() -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "cpu_cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def _readable(name: str, value: object) -> str:
    if value is None:
        return "-"
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"
    if name.endswith("_seconds") and isinstance(value, float):
        return f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


# ── bench ─────────────────────────────────────────────────────────────────────────────────────


def _bench(options: argparse.Namespace) -> int:
    choice = bench.Choice(**given(options, "bench"))  # wrong values end here, before any loading
    with contextlib.ExitStack() as stack:
        records = stack.enter_context(_append_to(options.json)) if options.json is not None else None
        start = time.perf_counter()
        engine = stack.enter_context(
            _open_engine(options, skip_tokenizer_init=bench.GRAMMAR not in choice.workloads)
        )
        bench.first_token(engine)
        started = {"requests": 1, "seconds": round(time.perf_counter() - start, 4)}
        known = engine.get_server_info()
        loads = bench.loads_of(choice, known)
        heading = _heading(known, options.arguments)

        def keep(workload: str, figures: bench.Figures) -> bench.Figures:
            if records is not None:
                print(json.dumps({**heading, "workload": workload, **figures}), file=records, flush=True)
            return figures

        print(f"{known['model_path']}, {known['dtype']}, {known['device_name']}")
        print(*bench.notes_on(choice, loads, known), bench.header(), sep="\n")
        print(bench.row(bench.START, [keep(bench.START, started)]), flush=True)
        report = bench.reporter(known["show_progress"])
        for load in loads:
            runs = bench.runs_of(engine, load, repeats=choice.repeats, report=report)
            print(bench.row(load.workload, [keep(load.workload, run) for run in runs]), flush=True)
    return EXIT_OK


def _append_to(path: str) -> TextIO:
    try:
        return open(path, "a", encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(
            f"json: {path!r} cannot be written ({error.strerror}); give a file in a folder that is there"
        ) from error


def _heading(known: Mapping[str, Any], arguments: Sequence[str]) -> dict[str, Any]:
    """What every record of a benchmark begins with."""
    return {
        "date": datetime.date.today().isoformat(),
        "engine": f"tokenmill {__version__}",
        "device": known["device_name"],
        "versions": _versions(),
        "command": shlex.join(["tokenmill", *arguments]),
        "model": known["model_path"],
        "dtype": known["dtype"],
    }


if __name__ == "__main__":
    sys.exit(main())
