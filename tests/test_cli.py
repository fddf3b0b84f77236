"""The command line: flags against a fake engine, and whole commands against the bundled model."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tokenmill
import tokenmill.engine
from tokenmill import EngineConfig, SamplingParams, cli
from tokenmill.cli import main

ROOT = Path(__file__).parent.parent


# ── a fake engine: records what it gets, answers `<prompt>!` ──────────────────────────────────


class FakeTokenizer:
    chat_template: str | None = "present"


class FakeEngine:
    """Stands in for `Engine`; the last one made is `FakeEngine.last`."""

    last: FakeEngine
    error: Exception | None = None
    tokenizer = FakeTokenizer()

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.config = EngineConfig(chat_template=arguments.get("chat_template"))
        self.calls: list[dict[str, Any]] = []
        self.closed = False
        FakeEngine.last = self

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.closed = True

    def get_tokenizer(self) -> FakeTokenizer:
        return self.tokenizer

    def get_server_info(self) -> dict[str, Any]:
        known = {name: None for names in cli._FACTS.values() for name in names}
        return {**known, "weight_bytes": 3 * 2**30, "cache_bytes": 2**20, "num_parameters": 12345678}

    def generate(
        self,
        prompt: list[str],
        sampling_params: Any = None,
        stream: bool = False,
        on_error: str | None = None,
    ) -> Any:
        self.calls.append({"prompt": prompt, "params": sampling_params})
        if self.error is not None:
            raise self.error
        flat = [p for p in prompt for _ in range(sampling_params.n)]
        if stream:
            return self.interleaved(flat)
        return [chunk(i, f" {p}!", done=True) for i, p in enumerate(flat)]

    def chat(
        self, messages: list[dict[str, str]], sampling_params: Any, *, stream: bool, on_error: str
    ) -> Any:
        conversation = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        self.calls.append({"conversation": conversation, "params": sampling_params})
        if self.error is not None:
            raise self.error
        assert stream
        return iter([chunk(0, "an "), chunk(0, "answer", done=True)])

    @staticmethod
    def interleaved(flat: list[str]) -> Iterator[dict[str, Any]]:
        """First and second half of every item, the last item first."""
        for i, p in reversed(list(enumerate(flat))):
            yield chunk(i, f" {p}")
        for i, _ in reversed(list(enumerate(flat))):
            yield chunk(i, "!", done=True)


def chunk(index: int, text: str, *, done: bool = False) -> dict[str, Any]:
    finish = {"type": "length", "length": 1} if done else None
    return {"text": text, "output_ids": [1], "index": index, "meta_info": {"finish_reason": finish}}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    monkeypatch.setattr(tokenmill.engine, "Engine", FakeEngine)
    monkeypatch.setattr(FakeEngine, "error", None)
    return FakeEngine


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts text on standard input."""
    return lambda text: monkeypatch.setattr("sys.stdin", io.StringIO(text))


def sampling_of(*arguments: str) -> SamplingParams:
    assert main(["generate", "x", *arguments]) == 0
    return FakeEngine.last.calls[0]["params"]


# ── flags ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.unit
def test_defaults_are_those_of_the_dataclasses(fake: type[FakeEngine]) -> None:
    assert sampling_of() == SamplingParams()
    assert fake.last.arguments == {}
    assert fake.last.closed


@pytest.mark.unit
def test_every_supported_sampling_parameter_has_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["generate", "--help"])
    shown = set(re.findall(r"--([a-z0-9-]+)", capsys.readouterr().out))
    for field in dataclasses.fields(SamplingParams):
        flag = field.name.replace("_", "-")
        has_flag = field.metadata["supported"] and flag != "custom-params"
        assert (flag in shown) == (has_flag or flag == "stream-interval"), flag
    hidden = {"skip-tokenizer-init", "cumulative-stream", "preferred-sampling-params"}
    hidden |= {"logprobs-ignore-temperature"}
    expected = {f.name.replace("_", "-") for f in dataclasses.fields(EngineConfig)} - hidden
    assert expected <= shown
    assert not hidden & shown


@pytest.mark.unit
def test_sampling_flags_reach_the_engine(fake: type[FakeEngine]) -> None:
    params = sampling_of(
        *("--temperature", "0.5", "--top-p", "0.9", "--top-k", "5", "--min-p", "0.1"),
        *("--max-new-tokens", "7", "--min-new-tokens", "2", "--sampling-seed", "-3"),
        *("--stop", "a b", "--stop", "c", "--stop-token-ids", "4", "--stop-token-ids", "5"),
        *("--ignore-eos", "--no-skip-special-tokens", "--no-spaces-between-special-tokens", "--no-stop-trim"),
    )
    assert params == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        max_new_tokens=7,
        min_new_tokens=2,
        sampling_seed=-3,
        stop=("a b", "c"),
        stop_token_ids=(4, 5),
        ignore_eos=True,
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        no_stop_trim=True,  # the field itself is called so
    )


@pytest.mark.unit
def test_a_dict_is_given_as_json(fake: type[FakeEngine]) -> None:
    assert sampling_of("--logit-bias", '{"5": -1.5, "6": -Infinity}').logit_bias == (
        SamplingParams(logit_bias={5: -1.5, 6: float("-inf")}).logit_bias
    )


@pytest.mark.unit
def test_none_means_up_to_the_context(fake: type[FakeEngine]) -> None:
    assert sampling_of("--max-new-tokens", "none").max_new_tokens is None


@pytest.mark.unit
def test_engine_flags_reach_the_engine(fake: type[FakeEngine]) -> None:
    flags = (
        "--model some/model --max-total-tokens 4096 --mem-fraction-static 0.5 --dtype float32 --core-process"
    )
    more = "--no-disable-radix-cache --no-show-progress --json-model-override-args {} --device cpu"
    assert main(["generate", "x", *flags.split(), *more.split()]) == 0
    assert fake.last.arguments == {
        "model_path": "some/model",
        "max_total_tokens": 4096,
        "mem_fraction_static": 0.5,
        "dtype": "float32",
        "core_process": True,
        "disable_radix_cache": False,
        "show_progress": False,
        "json_model_override_args": "{}",
        "device": "cpu",
    }


@pytest.mark.unit
@pytest.mark.parametrize("command", ["generate", "chat", "info"])
def test_model_path_is_the_same_flag(command: str, fake: type[FakeEngine], typed: Any) -> None:
    typed("x\n")
    assert main([command, "--model-path", "a"]) == 0
    assert fake.last.arguments == {"model_path": "a"}


@pytest.mark.unit
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["generate", "x", "--temperature", "hot"], "invalid float value: 'hot'"),
        (["generate", "x", "--top-k", "1.5"], "invalid int value: '1.5'"),
        (["generate", "x", "--max-new-tokens", "many"], "invalid int value: 'many'"),
        (["generate", "x", "--tempratur", "1"], "unrecognized arguments"),
        (["generate", "x", "--logit-bias", "{5}"], "invalid JSON value: '{5}'"),
        (["talk"], "invalid choice: 'talk'"),
        ([], "required"),
    ],
)
def test_wrong_flags_are_one_line_and_exit_2(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1
    assert error.startswith("tokenmill")


@pytest.mark.unit
def test_words_of_sglang_are_taken(fake: type[FakeEngine]) -> None:
    assert main(["generate", "x", "--dtype", "half", "--attention-backend", "fa3", "--device", "cuda:1"]) == 0
    assert fake.last.arguments == {"dtype": "half", "attention_backend": "fa3", "device": "cuda:1"}


@pytest.mark.unit
def test_words_that_nobody_knows_end_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "--dtype", "float8"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tokenmill: error: dtype must be one of 'auto', 'float32', ")
    assert error.count("\n") == 1


@pytest.mark.unit
def test_values_out_of_range_end_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tokenmill.engine, "Engine", None)  # making one would be a TypeError
    assert main(["generate", "x", "--temperature", "-1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tokenmill: error: temperature must be")
    assert error.count("\n") == 1


@pytest.mark.unit
@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (tokenmill.InvalidArgument("prompt is\ntoo long"), 2, "tokenmill: error: prompt is too long\n"),
        (tokenmill.EngineDead("the loop ended"), 1, "tokenmill: error: EngineDead: the loop ended\n"),
        (OSError("disk"), 1, "tokenmill: error: OSError: disk\n"),
    ],
)
def test_errors_are_one_line_with_their_exit_code(
    fake: type[FakeEngine],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
    shown: str,
) -> None:
    monkeypatch.setattr(fake, "error", error)
    assert main(["generate", "x"]) == code
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", shown)
    assert fake.last.closed


@pytest.mark.unit
def test_debug_shows_the_traceback(fake: type[FakeEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "error", OSError("disk"))
    with pytest.raises(OSError, match="disk"):
        main(["generate", "x", "--log-level", "debug"])


@pytest.mark.unit
def test_ctrl_c_closes_the_engine_and_exits_130(
    fake: type[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: FakeEngine, *arguments: Any, **more: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(fake, "generate", interrupted)
    assert main(["generate", "x"]) == 130
    assert fake.last.closed


# ── generate ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.unit
@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_one_prompt_prints_its_text_only(
    fake: type[FakeEngine], capsys: pytest.CaptureFixture[str], stream: list[str]
) -> None:
    assert main(["generate", "Hello", *stream]) == 0
    assert capsys.readouterr().out == " Hello!\n"


@pytest.mark.unit
@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_several_prompts_come_in_input_order(
    fake: type[FakeEngine], capsys: pytest.CaptureFixture[str], stream: list[str]
) -> None:
    assert main(["generate", "a", "b", "c", *stream]) == 0
    expected = "".join(f"Prompt: {p}\nGenerated text:  {p}!\n\n" for p in "abc")
    assert capsys.readouterr().out == expected


@pytest.mark.unit
def test_lines_of_standard_input_are_prompts(
    fake: type[FakeEngine], typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    typed("\ufefffirst \r\n\n  \nsecond")
    assert main(["generate", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["first ", "second"]


@pytest.mark.unit
def test_no_prompt_at_all_is_an_error(typed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    typed("\n")
    assert main(["generate"]) == 2
    assert "there is no prompt" in capsys.readouterr().err


@pytest.mark.unit
def test_json_is_one_object_per_line(fake: type[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "é\nx", "b", "--json", "--n", "2"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["index"], line["prompt"], line["text"]) for line in lines] == [
        (0, "é\nx", " é\nx!"),
        (1, "é\nx", " é\nx!"),
        (2, "b", " b!"),
        (3, "b", " b!"),
    ]
    assert lines[0]["meta_info"]["finish_reason"] == {"type": "length", "length": 1}


@pytest.mark.unit
def test_json_stream_has_one_object_per_chunk_in_input_order(
    fake: type[FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "a", "b", "--json", "--stream"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["index"], line["text"]) for line in lines] == [(0, " a"), (0, "!"), (1, " b"), (1, "!")]


# ── chat ──────────────────────────────────────────────────────────────────────────────────────


def conversations() -> list[str]:
    return [call["conversation"] for call in FakeEngine.last.calls]


@pytest.mark.unit
def test_chat_keeps_the_conversation(
    fake: type[FakeEngine], typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    typed("Hi\n\nAnd now?\n")
    assert main(["chat"]) == 0
    assert conversations() == ["<user>Hi", "<user>Hi<assistant>an answer<user>And now?"]
    assert capsys.readouterr().out == "an answer\nan answer\n"
    assert fake.last.calls[0]["params"].max_new_tokens is None


@pytest.mark.unit
def test_chat_commands(fake: type[FakeEngine], typed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    typed("one\n/reset\ntwo\n/help me\n/exit\nthree\n")
    assert main(["chat", "--system", "Be brief.", "--max-new-tokens", "5"]) == 0
    assert conversations() == ["<system>Be brief.<user>one", "<system>Be brief.<user>two"]
    assert fake.last.calls[0]["params"].max_new_tokens == 5
    assert capsys.readouterr().err.startswith("unknown command /help: /reset")


@pytest.mark.unit
def test_a_conversation_that_is_too_long_goes_on_after_a_reset(
    fake: type[FakeEngine], typed: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fake, "error", tokenmill.InvalidArgument("the prompt is too long"))
    typed("one\ntwo\n")
    assert main(["chat"]) == 0
    assert conversations() == ["<user>one", "<user>two"]
    assert capsys.readouterr().err.count("the prompt is too long") == 2


@pytest.mark.unit
def test_chat_needs_a_template(
    fake: type[FakeEngine], typed: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fake.tokenizer, "chat_template", None)
    typed("Hi\n")
    assert main(["chat"]) == 2
    assert "has no chat template" in capsys.readouterr().err
    typed("Hi\n")
    assert main(["chat", "--chat-template", "{{ messages[0].content }}"]) == 0
    assert conversations() == ["<user>Hi"]


# ── info and version ──────────────────────────────────────────────────────────────────────────


@pytest.mark.unit
def test_info(fake: type[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["memory"]["weight_bytes"] == 3 * 2**30
    assert facts["versions"]["tokenmill"] == tokenmill.__version__
    assert facts["host"]["memory_bytes"] > 2**20
    assert main(["info"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["weight_bytes", "3.00", "GiB"] in lines
    assert ["cache_bytes", "1.0", "MiB"] in lines
    assert ["num_parameters", "12,345,678"] in lines
    assert ["architecture", "-"] in lines


@pytest.mark.unit
def test_version_without_loading_anything() -> None:
    code = (
        "import sys; from tokenmill.cli import main\ntry: main(['--version'])\nfinally: print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    first, loaded = done.stdout.splitlines()
    assert first == f"tokenmill {tokenmill.__version__}"
    assert not {"torch", "transformers", "numpy", "tokenmill.engine"} & set(loaded.split())


# ── whole commands with the bundled model ─────────────────────────────────────────────────────


@pytest.mark.cpu
def test_a_job_runs_where_the_shell_has_closed_the_standard_streams(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "Hi"}\n')
    command = (
        f"{sys.executable} -m tokenmill.cli batch {tmp_path / 'in.jsonl'} --model tiny --max-new-tokens 2"
    )
    done = subprocess.run(f"{command} <&- >&- 2>&-", shell=True, cwd=ROOT, check=False)
    assert done.returncode == 0
    assert json.loads((tmp_path / "in.out.jsonl").read_text())["completion_tokens"] == 2


def tokenmill_process(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tokenmill", *arguments]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, text=True, **{**pipes, **options})


@pytest.mark.cpu
def test_streamed_and_whole_text_agree(capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "generate",
        "The capital of France is",
        "Hello",
        "--sampling-seed",
        "3",
        "--max-new-tokens",
        "12",
    ]
    assert main(command) == 0
    whole = capsys.readouterr().out
    assert main([*command, "--stream"]) == 0
    assert capsys.readouterr().out == whole
    assert whole.startswith("Prompt: The capital of France is\nGenerated text: ")


# What nobody sees before a grammar is compiled.
BAD_SCHEMA = ("--json-schema", '{"type": "object", "properties": 5}')


@pytest.mark.cpu
@pytest.mark.parametrize("how", [(), ("--stream",), ("--stream", "--json")])
def test_a_request_that_fails_while_it_runs_is_told(
    how: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "Hello", *BAD_SCHEMA, *how]) == 2
    printed = capsys.readouterr()
    assert "properties must be an object" in printed.err
    assert not printed.out


@pytest.mark.cpu
def test_a_message_that_fails_while_it_is_answered_is_dropped(
    typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    typed("Hello\nHello\n")
    assert main(["chat", *BAD_SCHEMA]) == 0
    printed = capsys.readouterr()
    assert printed.err.count("properties must be an object") == 2
    assert not printed.out


@pytest.mark.cpu
def test_a_pipe_stays_clean() -> None:
    """Nothing but the answer on standard output, nothing at all on standard error."""
    process = tokenmill_process("generate", "--json", "--max-new-tokens", "4")
    out, error = process.communicate("The capital of Italy is\nHello\n", timeout=60)
    assert (process.returncode, error) == (0, "")
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["The capital of Italy is", "Hello"]


@pytest.mark.cpu
def test_a_reader_that_goes_away_is_no_error_message() -> None:
    with tokenmill_process("generate", "Hello", "--stream", "--json", "--ignore-eos") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


@pytest.mark.cpu
def test_a_job_is_done_though_its_summary_has_no_room(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "Hello"}\n')
    command = ("batch", str(tmp_path / "in.jsonl"), "--max-new-tokens", "2", "--no-core-process")
    with open("/dev/full", "w") as full, tokenmill_process(*command, stdout=full) as process:
        assert process.stderr is not None
        error = process.stderr.read()
    assert "warning: the summary cannot be printed: No space left on device; all else is done" in error
    assert process.returncode == 0
    assert (tmp_path / "in.out.jsonl").exists()


@pytest.mark.cpu
def test_ctrl_c_ends_a_running_command_quietly() -> None:
    process = tokenmill_process("chat", "--ignore-eos", "--max-new-tokens", "1500")
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("Hello\n")
    process.stdin.flush()
    process.stdout.read(1)  # it is answering
    os.kill(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, "")
