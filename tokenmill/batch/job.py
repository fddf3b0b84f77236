"""A batch job from its arguments to its summary: opens files and engine, and closes what it opened.

Owns the order in which that happens: every fault that can be seen beforehand is told before any work.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.batch.commits import Commits
from tokenmill.batch.config import JobConfig
from tokenmill.batch.engine_facts import engine_facts, look_at_device
from tokenmill.batch.figures import Figures
from tokenmill.batch.files import JobFiles
from tokenmill.batch.journal import Journal
from tokenmill.batch.json_text import in_short
from tokenmill.batch.keys import Keys, fingerprint
from tokenmill.batch.ledger import Ledger
from tokenmill.batch.line_file import LineFile
from tokenmill.batch.openai_format import OpenAIOutput, OpenAIRows, is_batch_file
from tokenmill.batch.openai_parts import PromptRows
from tokenmill.batch.outputs import OutputFormat, RowOutput
from tokenmill.batch.planning import (
    plan_job,
    predicted_and_actual,
    save_plan,
    saved_plan,
    subject_of,
)
from tokenmill.batch.progress import Progress
from tokenmill.batch.report import write_report
from tokenmill.batch.row_count import RowCount
from tokenmill.batch.rows import ColumnRows, RowForm, RowMaker
from tokenmill.batch.sources import open_source
from tokenmill.batch.table_output import TableOutput
from tokenmill.batch.work import Work
from tokenmill.config import EngineConfig
from tokenmill.errors import InvalidArgument, JobStopped, UnknownArgument, WrongType, did_you_mean
from tokenmill.frontend.planning import Plan
from tokenmill.sampling_params import SamplingParams, show

if TYPE_CHECKING:
    from tokenmill.engine import Engine

_JOB_ARGUMENTS = {field.name for field in dataclasses.fields(JobConfig)}
# Those that say how a prompt is made of columns.
_FORM_ARGUMENTS = tuple(field.name for field in dataclasses.fields(RowForm))

# Options that say what results show, which OpenAI's bodies ask for in their own way.
_SHAPING_OPTIONS = {
    *("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob"),
    *("return_text_in_logprobs", "return_hidden_states", "hidden_states_format"),
}


def run(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    engine: Engine | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """Answer every row of a file, into another file; goes on where an earlier run of the job was ended.

    `arguments` are the fields of `JobConfig`, and, without an `engine`, those of `Engine`. An engine that is
    given stays open. Without `output` the name of the source gets `.out` before its end.

    Rows that fail have their error in the output. Returns the figures of the run; docs/batch.md has its keys.
    Raises `InvalidArgument` before any work, `JobStopped` for a full disk or a journal in use, `EngineDead`,
    `EngineClosed`. Whatever ends a job, also Ctrl-C, leaves what was finished in the journal and the output.
    """
    job = BatchJob(source, output, engine=engine, **arguments)
    job.run()
    return job.summary()


class BatchJob:
    """One job. Whatever ended `run`, `summary` tells what was done by then."""

    def __init__(
        self,
        source: str | os.PathLike[str],
        output: str | os.PathLike[str] | None = None,
        *,
        engine: Engine | None = None,
        **arguments: Any,
    ) -> None:
        """As `run`. Looks at arguments and source, and changes nothing yet."""
        if engine is not None:
            _check_engine(engine)
        ours, self._engine_arguments = _shared_out(arguments, has_engine=engine is not None)
        self._config = config = JobConfig(**ours)
        self._engine = engine
        SamplingParams.from_value(config.sampling_params)
        if config.timeout is not None and "timeout" in config.options:
            raise InvalidArgument("timeout is given, and so is options['timeout']; give one of them")
        opened = open_source(source, format=config.format, split=config.split)
        has_columns = any((config.prompt_column, config.messages_column, config.template))
        self._is_openai = is_batch_file(opened, has_columns=has_columns)
        self._source = PromptRows(opened) if self._is_openai else opened
        form = RowForm(**{name: getattr(config, name) for name in _FORM_ARGUMENTS})
        self._columns = None if self._is_openai else ColumnRows(form, self._source)
        self.files = JobFiles.of(Path(source), output, config, has_error_file=self._is_openai)
        self._check_form(form)
        self.resumed = False
        self._facts: dict[str, Any] = {}
        self._saved_plan: dict[str, Any] | None = None
        self.figures = Figures()

    def run(self) -> None:
        """Do the work. Raises as the function `run`."""
        with contextlib.ExitStack() as stack:
            is_first = not self.files.journal.exists()
            journal, foreign = self.files.open_journal(overwrite=self._config.overwrite)
            stack.callback(journal.close)
            self.resumed = not is_first
            there = self.files.there
            try:
                engine = self._engine or stack.enter_context(_new_engine(self._engine_arguments))
                form = self._output_format(engine)
                self._check_arguments(engine)
                for path in self.files.appeared(there):
                    raise JobStopped(
                        f"another job has written {str(path)!r} while this one started; give each its own"
                    )
                outputs = self._open_outputs(stack, form)
                self.files.claim(journal)
                for each in outputs:
                    if each is not None and each.path in foreign:
                        each.replace_foreign()
            except BaseException:
                if is_first:  # nothing was done, and no output is this job's
                    self.files.journal.unlink(missing_ok=True)
                raise
            self._facts = engine_facts(engine)
            keys = self._keys(engine)
            self._saved_plan = saved_plan(self._subject(engine, keys), self.files.plan)
            self.figures.started(num_rows=self._source.num_rows, plan=self._saved_plan)
            stack.enter_context(RowCount(self._source, self.figures))
            look = partial(look_at_device, engine, self.figures)
            look()  # what the device did before the job does not count
            stack.enter_context(Progress(self.figures, wanted=engine.config.show_progress, look=look))
            try:
                self._answer(engine, keys, journal, form, outputs)
            except BaseException:
                with contextlib.suppress(Exception):  # where warnings are errors
                    self._write_report()  # of what was done by then
                raise
        self._write_report()

    def _check_arguments(self, engine: Engine) -> None:
        """Raise `InvalidArgument` for what the engine would refuse for every row."""
        self._row_maker(engine)
        engine.open_rows().read([], sampling_params=self._row_params, options=self._options())

    def plan(self) -> Plan:
        """What the job would take, if nothing of it was done before.

        Runs nothing of it, but keeps the plan in a file, so that the summary of the run says how it compares.
        """
        with contextlib.ExitStack() as stack:
            engine = self._engine or stack.enter_context(_new_engine(self._engine_arguments))
            keys = self._keys(engine)
            made = plan_job(
                self._source,
                self._row_maker(engine),
                engine,
                sampling_params=self._row_params,
                options=self._options(),
                keys=keys,
            )
            subject = self._subject(engine, keys)
        with _warning_of_disk(self.files.plan):
            save_plan(made, subject, self.files.plan)
        return made

    def summary(self) -> dict[str, Any]:
        """What was done until now, as plain JSON."""
        told = self.figures.summary()
        plan = self._saved_plan
        return {
            "job": {
                **self.files.to_dict(),
                "resumed": self.resumed,
                "engine": self._facts,
                "sampling_params": {
                    name: in_short(each) for name, each in self._config.sampling_params.items()
                },
            },
            **told,
            **({} if plan is None else {"plan": predicted_and_actual(plan, told)}),
        }

    def _write_report(self) -> None:
        if self.files.report is not None:
            with _warning_of_disk(self.files.report):
                write_report(self.summary(), self.files.report)

    @property
    def _row_params(self) -> Mapping[str, Any]:
        """Sampling parameters that the engine is given for all rows."""
        return {} if self._is_openai else self._config.sampling_params

    def _open_outputs(
        self, stack: contextlib.ExitStack, form: OutputFormat
    ) -> tuple[LineFile, LineFile | None]:
        """Where rows go, and where errors go; `stack` closes them."""
        if isinstance(form, TableOutput):
            output = _opened(stack, form.lines_path, output=self.files.output)
            # Whatever ends the job, the next run has these from the journal.
            stack.callback(form.lines_path.unlink, missing_ok=True)
        else:
            output = _opened(stack, self.files.output)
        errors = self.files.error_file
        return output, None if errors is None else _opened(stack, errors)

    def _answer(
        self,
        engine: Engine,
        keys: Keys,
        journal: Journal,
        form: OutputFormat,
        outputs: tuple[LineFile, LineFile | None],
    ) -> None:
        """Fill the outputs: rows as they finish, and at the end in their order."""
        output, errors = outputs
        source_before = self._source.fingerprint()
        with Commits(journal, [each for each in outputs if each is not None]) as commits:
            work = Work(
                self._source,
                self._row_maker(engine),
                form,
                runner=engine.open_rows(),
                keys=keys,
                ledger=Ledger(journal),
                figures=self.figures,
                output=output,
                errors=errors,
                commits=commits,
                params=self._row_params,
                options=self._options(),
            )
            work.run()
        self.figures.started(num_rows=work.num_rows)
        if errors is not None:
            errors.finish()
        if isinstance(form, TableOutput):
            form.write(output)
        else:
            output.finish()
            self._tell_of_change(source_before)

    def _tell_of_change(self, source_before: str) -> None:
        """Warn of rows that were read from a file that somebody wrote meanwhile."""
        with contextlib.suppress(FileNotFoundError):  # what was only removed was read to its end
            if self._source.fingerprint() != source_before:
                warnings.warn(
                    f"the input {str(self.files.input)!r} changed while the job ran, so that rows may be "
                    "missing or torn; start the same job again: the journal has what was finished",
                    stacklevel=2,
                )

    def _row_maker(self, engine: Engine) -> RowMaker:
        if self._columns is not None:
            return self._columns
        return OpenAIRows(
            model=_name_of(engine),
            sampling_params=self._config.sampling_params,
            has_tokenizer=not engine.config.skip_tokenizer_init,
        )

    def _output_format(self, engine: Engine) -> OutputFormat:
        if self._is_openai:
            return OpenAIOutput(model=_name_of(engine))
        rows = RowOutput(self._source, output_ids=self._config.output_ids)
        if self.files.table_format is None:
            return rows
        return TableOutput(self.files.output, rows, self._source, format=self.files.table_format)

    def _keys(self, engine: Engine) -> Keys:
        rows = engine.open_rows()
        model = fingerprint(engine.config, dtype=rows.facts.dtype, tensor_update=rows.tensor_update)
        return Keys(model, seed=self._config.seed)

    def _subject(self, engine: Engine, keys: Keys) -> str:
        """What a plan of this job is about."""
        asked = {
            name: getattr(self._config, name) for name in (*_FORM_ARGUMENTS, "sampling_params", "options")
        }
        asked["template"] = None if self._columns is None else self._columns.template_text
        asked |= {"model": keys.model, "chat_template": engine.config.chat_template}
        return subject_of(self._source, asked | {"tokenmill": engine_facts(engine)["tokenmill"]})

    def _options(self) -> dict[str, Any]:
        timeout = {} if self._config.timeout is None else {"timeout": self._config.timeout}
        return {**timeout, **self._config.options}

    def _check_form(self, form: RowForm) -> None:
        """Raise for arguments that the kind of the input has no use for."""
        if not self._is_openai:
            if self._config.error_file is not None:
                raise InvalidArgument(
                    "error_file is for OpenAI's batch files; of other rows, errors stand in the output; "
                    "leave it out"
                )
            return
        self._check_openai()
        for field in dataclasses.fields(RowForm):
            if getattr(form, field.name) != field.default:
                raise InvalidArgument(
                    f"{field.name} says how prompts are made of columns, but the input is a file of OpenAI's "
                    "batch API, whose rows say it themselves; leave it out"
                )

    def _check_openai(self) -> None:
        """Raise for arguments that would change what OpenAI's answers look like."""
        if self._config.output_ids:
            raise InvalidArgument("output_ids: answers of OpenAI's batch API have no token ids; leave it out")
        for name in sorted(_SHAPING_OPTIONS & self._config.options.keys()):
            raise InvalidArgument(
                f"options: {name} says what results show, but rows of OpenAI's batch API say it themselves "
                "(logprobs, top_logprobs); leave it out"
            )
        if self.files.table_format is not None:
            raise InvalidArgument(
                f"output: {str(self.files.output)!r} is a file of columns, but answers of OpenAI's batch API "
                "are lines of JSON; name a .jsonl"
            )


@contextlib.contextmanager
def _warning_of_disk(path: Path) -> Iterator[None]:
    """A block that writes what is not the work itself, which a full disk must not make look undone."""
    try:
        yield
    except OSError as error:
        warnings.warn(
            f"{str(path)!r} cannot be written: {error.strerror or error}; the rest is not affected",
            stacklevel=4,
        )


def _opened(stack: contextlib.ExitStack, path: Path, *, output: Path | None = None) -> LineFile:
    file = LineFile(path, output=output)
    stack.callback(file.close)
    return file


def _name_of(engine: Engine) -> str:
    return str(engine.config.served_model_name)


def _check_engine(value: object) -> None:
    from tokenmill.engine import Engine  # whoever has one has imported it

    if not isinstance(value, Engine):
        raise WrongType(f"engine must be an Engine, got {show(value)}; name a model as model_path")


@contextlib.contextmanager
def _new_engine(arguments: dict[str, Any]) -> Iterator[Engine]:
    from tokenmill.engine import Engine  # not needed for faults that are seen before

    # A core that dies is replaced, and the work on rows does not hold it up.
    preferred: dict[str, Any] = {"core_process": True}
    if not arguments.get("enable_priority_scheduling"):  # where priorities count, they decide
        preferred["schedule_policy"] = "lpm"  # prompts with the same beginning go together
    with Engine(**{**preferred, **arguments}) as engine:
        yield engine


def _shared_out(arguments: dict[str, Any], *, has_engine: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of the job, and those of the engine."""
    ours = {name: value for name, value in arguments.items() if name in _JOB_ARGUMENTS}
    rest = {name: value for name, value in arguments.items() if name not in _JOB_ARGUMENTS}
    if rest and has_engine:
        name = next(iter(rest))
        raise UnknownArgument(
            f"{name!r} is no argument of a job whose engine is given.{did_you_mean(name, _JOB_ARGUMENTS)}"
        )
    engines = {field.name for field in dataclasses.fields(EngineConfig)}
    if rest.get("random_seed") is not None:
        raise InvalidArgument(
            "random_seed has no effect on the rows of a job, whose seeds come from what they are; give seed "
            "(--seed) to have others"
        )
    for name in rest:
        hint = did_you_mean(name, _JOB_ARGUMENTS)
        if name not in engines and hint and not did_you_mean(name, engines):
            raise UnknownArgument(f"{name!r} is no argument of a job or an engine.{hint}")
    return ours, rest
