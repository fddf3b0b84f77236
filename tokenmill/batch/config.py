"""The arguments of a batch job besides those of the engine; the command line is made from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenmill.batch.sources import FORMATS
from tokenmill.errors import InvalidArgument, WrongType
from tokenmill.sampling_params import check_flag, check_real, check_text, check_whole, show

# Arguments of generate() that a job gives itself, row by row.
_NO_OPTIONS = {"prompt", "input_ids", "sampling_params", "rid", "stream", "on_error"}
_TEXTS = ("split", "prompt_column", "messages_column", "template", "system", "tools_column", "params_column")


def _arg(default: Any, help: str, choices: tuple[str, ...] | None = None) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """All arguments of `batch.run` besides source, output, and the engine's."""

    # What the rows ask for
    format: str | None = _arg(None, "format of the input (default: by its name)", FORMATS)
    split: str | None = _arg(None, "split of a saved DatasetDict")
    prompt_column: str | None = _arg(
        None, "column of the prompt: a text, token ids or messages (default: prompt, messages, ...)"
    )
    messages_column: str | None = _arg(None, "column of a conversation: a list of messages, or its JSON")
    template: str | None = _arg(None, "Jinja template of the columns that makes the prompt, or its file")
    system: str | None = _arg(None, "system message put before each conversation that has none")
    as_chat: bool = _arg(False, "send texts through the model's chat template, as a user's message")
    tools_column: str | None = _arg(None, "column of the tools of a conversation (default: tools)")
    params_column: str | None = _arg(
        None, "column with sampling parameters of the row (default: sampling_params)"
    )
    sampling_params: Mapping[str, Any] = field(
        default_factory=dict, metadata={"help": "sampling parameters of all rows", "choices": None}
    )
    options: Mapping[str, Any] = field(
        default_factory=dict, metadata={"help": "other keywords of generate() for all rows", "choices": None}
    )
    output_ids: bool = _arg(False, "write the token ids of answers, too")
    timeout: float | None = _arg(None, "seconds after which a row is given up, with an error in its place")
    seed: int = _arg(0, "seed from which rows without a sampling_seed get theirs")

    # Where it goes
    error_file: str | None = _arg(
        None, "of OpenAI's batch files: file of rows that failed (default: OUTPUT, but with .errors.jsonl)"
    )
    journal: str | None = _arg(None, "file that keeps what is finished (default: OUTPUT.journal)")
    overwrite: bool = _arg(False, "replace an output that this job did not make")
    report: str | None = _arg(None, "HTML page with plots, written at the end")

    def __post_init__(self) -> None:
        """Raise `InvalidArgument` for values of the wrong type; of paths, `files.py` does."""
        for name in _TEXTS:
            if getattr(self, name) is not None:
                check_text(name, getattr(self, name))
        for name in ("as_chat", "output_ids", "overwrite"):
            check_flag(name, getattr(self, name))
        for name in ("sampling_params", "options"):
            if not isinstance(getattr(self, name), Mapping):
                raise WrongType(f"{name} must be a dict, got {show(getattr(self, name))}")
        _check_options(self.options)
        if self.timeout not in (None, math.inf):
            check_real("timeout", self.timeout, minimum=0, above=True)
        check_whole("seed", self.seed, minimum=-(2**63), maximum=2**64 - 1)


def _check_options(options: Mapping[Any, Any]) -> None:
    """Raise for what would have no effect in a job, or that its files cannot hold."""
    for name in options:
        if not isinstance(name, str):
            raise WrongType(f"options: names must be strings, got {show(name)}")
        if name in _NO_OPTIONS:
            raise InvalidArgument(f"options: {name} is no keyword of all rows of a job; leave it out")
    states = options.get("hidden_states_format")
    if states not in (None, "list"):
        raise InvalidArgument(
            f"options: hidden_states_format must be 'list' in a job, got {show(states)}; files hold no arrays"
        )
