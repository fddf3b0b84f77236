"""Thousands of calls with arguments that nobody should pass: each is answered or refused, and nothing ends.

`TOKENMILL_HOSTILE_CALLS` sets their number, `TOKENMILL_HOSTILE_SEED` what they are, for longer hunts.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import json
import os
import random
import reprlib
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import tokenmill as sgl
from tests import hostile
from tokenmill.frontend.options import GenerateOptions
from tokenmill.frontend.outputs import FlushResult
from tokenmill.sampling_params import SamplingParams

pytestmark = pytest.mark.cpu

NUM_CALLS = int(os.environ.get("TOKENMILL_HOSTILE_CALLS", "4000"))
SEED = int(os.environ.get("TOKENMILL_HOSTILE_SEED", "1"))
BLOCK = 500
MOST_SECONDS = 20
MOST_CHARACTERS = 2000
GREEDY = {"max_new_tokens": 8, "temperature": 0}
CHEAP = {"max_new_tokens": 2}
PROMPT = "The cat"
OPTIONS = sorted(set(GenerateOptions.__annotations__) | {"image_data", "audio_data", "video_data"})
SCORE_ARGUMENTS = ["label_token_ids", "apply_softmax", "item_first", "temperature", "unheard_of"]
FIELDS = sorted(SamplingParams.__dataclass_fields__)
PATTERNS = [
    "(a*)*b", "(?:a|aa)+$", "(?:|){40}c", "(?:(?:(?:|a){1000}){1000}){1000}", "(?:" + "a" * 900 + "){99999}",
    "(" * 400 + "a" + ")" * 400, "(?i)" + "ſ" * 100, "(?P<a>.)(?P=a){30}", "[", "(?", "a{2,1}", "(?<=a+)b",
    r"\p{L}", "a{1000000}", "(.*)*(.*)*(.*)*x", "(?:.*.*){20}x", r"(\w+\s?)*$", "(?=(a+))a*b\\1", "x*", "^", "a++b",
    r"(?s:.)\Z", "\\", "[[:alpha:]]", "(?#", "{e}", "(?:the){e<=3}", "\\" * 9, "a|" * 300 + "b",
]  # fmt: skip


def _schema_chain(length: int) -> dict[str, Any]:
    names = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(length)
    }
    return {"$defs": {**names, f"d{length}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def _schema_tower(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def _wide_schema(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"name{i}": {"type": "string"} for i in range(count)}}


# ruff: noqa: E501, RUF001 (tables of oddities)
# Constraints that are huge, endless, contradictory, broken or none at all.
GRAMMARS: dict[str, list[Callable[[], Any]]] = {
    "json_schema": [
        lambda: "{" * 100_000,
        lambda: json.dumps(_wide_schema(30_000)),
        lambda: _wide_schema(300),
        lambda: _schema_chain(300),
        lambda: _schema_tower(50),
        lambda: _schema_tower(120),
        lambda: _schema_tower(3_000),
        lambda: {"$ref": "#"},
        lambda: {"$ref": "#/$defs/x"},
        lambda: {"$ref": "http://example.com/x.json"},
        lambda: {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        lambda: {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 20}}, "$ref": "#/$defs/a"},
        lambda: {"allOf": [{"type": "string"}, {"type": "integer"}]},
        lambda: {"not": {}},
        lambda: {"enum": []},
        lambda: {"enum": ["x" * 20_000] * 20},
        lambda: {"const": "\ud800"},
        lambda: {"type": "string", "pattern": "(a*)*" * 60},
        lambda: {"type": "string", "pattern": "("},
        lambda: {"type": "string", "pattern": "[^"},
        lambda: {"type": "string", "minLength": 10**9},
        lambda: {"type": "string", "minLength": 5, "maxLength": 1},
        lambda: {"type": "array", "minItems": 10**6, "items": {}},
        lambda: {"type": "array", "minItems": -1},
        lambda: {"type": "array", "uniqueItems": True, "items": {"type": "boolean"}, "minItems": 5},
        lambda: {"type": "integer", "minimum": 10**400},
        lambda: {"type": "integer", "minimum": 5, "maximum": 1},
        lambda: {"type": "number", "multipleOf": 0},
        lambda: {"type": "number", "minimum": float("nan")},
        lambda: {"type": "hot"},
        lambda: {"type": ["string", "string", None]},
        lambda: {"oneOf": [{"type": "object", "properties": {"a": {}}}] * 50},
        lambda: {"type": "object", "required": ["a"], "additionalProperties": False},
        lambda: {"type": "object", "patternProperties": {"(": {}}},
        lambda: {"type": "object", "properties": 5},
        lambda: {"format": "no-such-format", "type": "string"},
        lambda: True,
        lambda: False,
        lambda: "null",
        lambda: "$$ANY$$",
        lambda: hostile.loop_dict(),
    ],
    "regex": [
        lambda: "(a*)*" * 500,
        lambda: "(?:a|b|ab)*c" * 500,
        lambda: "(((a{100}){100}){100}){100}",
        lambda: "a{1000000}",
        lambda: "(?:a?){500}a{500}",
        lambda: "[a-z]*[b-z]*" * 200 + "q",
        lambda: "(.*a.{20})",
        lambda: "(" * 2_000 + ")" * 2_000,
        lambda: "x" * 200_000,
        lambda: "|".join(f"word{i}" for i in range(5_000)),
        lambda: "[^\\s\\S]",
        lambda: "(?!)",
        lambda: "a(?=b)c",
        lambda: "\\bfoo\\b",
        lambda: "(a)\\1",
        lambda: "\\p{Lu}\\p{Greek}+",
        lambda: "[\U00010000-\U0010ffff]+",
        lambda: "(?i)\u0130\u00df\ufb03",
        lambda: "\ud800",
        lambda: "^$",
        lambda: "[",
        lambda: "\0",
    ],
    "ebnf": [
        lambda: "root ::= root",
        lambda: "root ::= root | root root",
        lambda: 'root ::= root "a" | "b"',
        lambda: "root ::= a\na ::= b\nb ::= a",
        lambda: 'root ::= "',
        lambda: "root ::= (",
        lambda: "root ::= [",
        lambda: "root ::= [^",
        lambda: "root ::= undefined",
        lambda: "root ::=",
        lambda: 'root ::= ""',
        lambda: 'root ::= "a"{1000000}',
        lambda: 'root ::= ((("a"*)*)*)*',
        lambda: "root ::= " + "(" * 5_000 + '"a"' + ")" * 5_000,
        lambda: "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(60)) + 'r60 ::= "a"',
        lambda: "root ::= " + " | ".join(f'"w{i}"' for i in range(20_000)),
        lambda: "root ::= [\U00010000-\U0010ffff]+ [\\u00e9]",
        lambda: "root ::= [z-a]",
        lambda: 'root ::= "\\xZZ"',
        lambda: 'root ::= "a"\nroot ::= "b"',
        lambda: "%import common\nstart: /a/",
        lambda: 'start: "a"',
    ],
    "structural_tag": [
        lambda: {"structures": [], "triggers": []},
        lambda: {"structures": [{"begin": "", "schema": {}, "end": ""}], "triggers": [""]},
        lambda: {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<b"]},
        lambda: {"structures": [{"begin": "<a>", "schema": _schema_chain(200), "end": "</a>"}], "triggers": ["<a"]},
        lambda: {"structures": [{"begin": 1}], "triggers": 5},
        lambda: {"structures": None, "triggers": None},
        lambda: {"type": "structural_tag", "format": None},
        lambda: {"type": "structural_tag", "format": {"type": "regex", "pattern": "("}},
        lambda: {"type": "structural_tag", "format": {"type": "sequence", "elements": []}},
        lambda: {"type": "structural_tag", "format": {"type": "no_such_type"}},
        lambda: {"type": "structural_tag", "format": {"type": "const_string", "value": "The"}},
        lambda: "[]",
        lambda: "{",
    ],
}  # fmt: skip


class Hang(BaseException):
    """A call took too long."""


@dataclass
class Call:
    """One call: what it is, and the words of which a refusal must hold one."""

    title: str
    run: Callable[[], Any]
    words: tuple[str, ...] = ()
    given: tuple[Any, ...] = ()
    check: Callable[[Any], bool] = field(default=lambda result: True)


# ── what a result must look like ──────────────────────────────────────────────────────────────


def is_result(result: Any) -> bool:
    if isinstance(result, list):
        return all(map(is_result, result))
    info = result["meta_info"]
    return (
        isinstance(result["text"], str)
        and all(type(token) is int for token in result["output_ids"])
        and info["completion_tokens"] == len(result["output_ids"])
        and isinstance(info["id"], str)
        and info["finish_reason"]["type"] in ("stop", "length", "abort")
    )


def _no_stream(result: Any) -> Any:
    """A hostile `stream` may be as good as True; letting go of the stream ends it."""
    return result if isinstance(result, dict | list) else []


def is_nothing(result: Any) -> bool:
    return result is None


# ── calls ─────────────────────────────────────────────────────────────────────────────────────


class Caller:
    """Makes calls of one engine, from one seed."""

    def __init__(self, engine: sgl.Engine, rng: random.Random, folder: Path) -> None:
        self.engine = engine
        self.rng = rng
        self.folder = folder
        self.loop = asyncio.new_event_loop()
        self.norm = torch.tensor(engine.get_weights_by_name("model.norm.weight", 10_000))
        self._kinds = [
            (20, self.options), (20, self.sampling), (12, self.inputs), (2, self.patterns), (6, self.processors),
            (8, self.chat), (5, self.session), (5, self.continuing), (3, self.valid), (3, self.aborting),
            (6, self.control), (3, self.profile), (4, self.weights), (2, self.memory), (3, self.several),
            (4, self.score),
            (2, self.grammars),
        ]  # fmt: skip

    def next(self) -> Call:
        weights = [weight for weight, _ in self._kinds]
        return self.rng.choices([make for _, make in self._kinds], weights)[0]()

    def generate(self, words: tuple[str, ...], title: str = "", **arguments: Any) -> Call:
        """A call of generate in one of its forms."""
        method = self.rng.choice([self._plain] * 4 + [self._stream, self._async, self._async_stream])
        given = tuple(arguments.items())
        return Call(
            f"{method.__name__} {title or words}", lambda: method(arguments), words, given, check=is_result
        )

    def _plain(self, arguments: dict[str, Any]) -> Any:
        return _no_stream(self.engine.generate(**arguments))

    def _stream(self, arguments: dict[str, Any]) -> Any:
        stream = self.engine.generate(**{"stream": True, **arguments})
        if isinstance(stream, dict | list):
            return stream
        for _ in zip(range(self.rng.randrange(4)), stream, strict=False):
            pass
        if self.rng.random() < 0.7:
            stream.close()
        return []

    def _async(self, arguments: dict[str, Any]) -> Any:
        return _no_stream(self.loop.run_until_complete(self.engine.async_generate(**arguments)))

    def _async_stream(self, arguments: dict[str, Any]) -> Any:
        async def look() -> Any:
            stream = await self.engine.async_generate(**{"stream": True, **arguments})
            if isinstance(stream, dict | list):
                return stream
            count = self.rng.randrange(4)
            async for _ in stream:
                if (count := count - 1) < 0:
                    break
            await stream.aclose()
            return []

        return self.loop.run_until_complete(look())

    # ── of generate ──

    def options(self) -> Call:
        name, value = self.rng.choice(OPTIONS), hostile.value(self.rng)
        if self.rng.random() < 0.3:
            prompt: Any = [PROMPT, "A dog"]
            value = [value, None] if self.rng.random() < 0.5 else value
        else:
            prompt = PROMPT
        extra = {"return_logprob": True} if "logprob" in name and name != "return_logprob" else {}
        words = ("logit processor", name) if name == "custom_logit_processor" else (name,)
        return self.generate(words, name, prompt=prompt, sampling_params=CHEAP, **{**extra, name: value})

    def sampling(self) -> Call:
        name, value = self.rng.choice(FIELDS), hostile.value(self.rng)
        params: Any = {**CHEAP, name: value}
        words = (name, "max_new_tokens") if name == "min_new_tokens" else (name,)
        if self.rng.random() < 0.2:
            return self.generate(
                words, name, prompt=[PROMPT] * 2, sampling_params=[CHEAP, params] if name != "n" else params
            )
        return self.generate(words, name, prompt=PROMPT, sampling_params=params)

    def inputs(self) -> Call:
        name = self.rng.choice(["prompt", "input_ids", "sampling_params", "rid", "stream", "unheard_of"])
        arguments: dict[str, Any] = {
            "prompt": PROMPT,
            "sampling_params": CHEAP,
            name: hostile.value(self.rng),
        }
        if name == "input_ids" and self.rng.random() < 0.8:
            del arguments["prompt"]
        words = (name, "prompt", "input_ids") if name in ("prompt", "input_ids") else (name,)
        return self.generate(words, name, **arguments)

    def patterns(self) -> Call:
        pattern = self.rng.choice(PATTERNS)
        if self.rng.random() < 0.3:
            pattern = "".join(self.rng.choices(r"ab.*+?()[]{}|\^$19,dw:=!<>P#\n ", k=self.rng.randrange(40)))
        params = {"stop_regex": pattern, "max_new_tokens": self.rng.choice((2, 20))}
        prompt = "a" * 60 if self.rng.random() < 0.5 else PROMPT
        return self.generate(("stop_regex",), repr(pattern)[:60], prompt=prompt, sampling_params=params)

    def processors(self) -> Call:
        name, processor = self.rng.choice(PROCESSORS)
        prompt = PROMPT if self.rng.random() < 0.5 else [PROMPT, "A dog"]
        params = {**CHEAP, "temperature": self.rng.choice((0, 1)), "custom_params": {"token_ids": [1, 2]}}
        many = {"return_logprob": True, "top_logprobs_num": 3} if self.rng.random() < 0.3 else {}
        return self.generate(
            ("custom_logit_processor", "logit processor"), name, prompt=prompt, sampling_params=params,
            custom_logit_processor=processor, **many,
        )  # fmt: skip

    def several(self) -> Call:
        """Many wrong things at once."""
        names = self.rng.sample([*OPTIONS, "prompt", "input_ids", "sampling_params", "rid", "stream"], 5)
        arguments = {"prompt": PROMPT, "sampling_params": CHEAP}
        arguments |= {name: hostile.value(self.rng) for name in names}
        return self.generate((), "several", **arguments)

    def valid(self) -> Call:
        n = self.rng.choice((1, 1, 2))
        params = {"max_new_tokens": self.rng.randrange(6), "n": n, "temperature": self.rng.choice((0, 0.8))}
        arguments = {"prompt": [PROMPT, "One day"] if self.rng.random() < 0.5 else PROMPT}
        return self.generate(("nothing is wrong",), "valid", **arguments, sampling_params=params)

    def grammars(self) -> Call:
        kind = self.rng.choice(sorted(GRAMMARS))
        text = self.rng.choice(GRAMMARS[kind])()
        if isinstance(text, str) and self.rng.random() < 0.3:  # cut somewhere
            text = text[: self.rng.randrange(1, len(text) + 1)]
        params = {
            kind: text,
            "max_new_tokens": self.rng.choice((2, 12)),
            "temperature": self.rng.choice((0, 1)),
        }
        words = (kind, "grammar", "schema")
        return self.generate(words, f"{kind} {reprlib.repr(text)}", prompt=PROMPT, sampling_params=params)

    # ── conversations ──

    def chat(self) -> Call:
        message: Any = {"role": "user", "content": "Hi"}
        value = hostile.value(self.rng)
        arguments: dict[str, Any] = {"messages": [message], "sampling_params": CHEAP}
        name = self.rng.choice(
            ["messages", "message", "role", "content", "part", "tool_calls", "tools", "chat_template",
             "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "call", "stray"]
        )  # fmt: skip
        words = (name,)
        if name == "messages":
            arguments["messages"] = value
        elif name == "message":
            words, arguments["messages"] = ("messages",), [message, value]
        elif name in ("role", "content", "tool_calls", "stray"):
            words, arguments["messages"] = ("messages",), [{**message, name: value}]
        elif name == "part":
            words = ("messages",)
            arguments["messages"] = [{"role": "user", "content": [{"type": "text", "text": value}]}]
        elif name == "call":
            words = ("messages",)
            function = {"name": "f", "arguments": value}
            arguments["messages"] = [{"role": "assistant", "tool_calls": [{"function": function}]}]
        else:
            arguments[name] = [value] if name == "tools" and self.rng.random() < 0.5 else value
        words += ("chat template", "messages has")
        return Call(
            f"chat {name}",
            lambda: self.engine.chat(**arguments),
            words,
            (arguments["messages"], value),
            is_result,
        )

    def score(self) -> Call:
        name, value = self.rng.choice(["query", "items", "item", *SCORE_ARGUMENTS]), hostile.value(self.rng)
        arguments: dict[str, Any] = {"query": "The", "items": [" cat", " dog"], "label_token_ids": [5, 6]}
        arguments["items" if name == "item" else name] = [" cat", value] if name == "item" else value
        words = ("items", "query") if name in ("query", "items", "item") else (name,)
        if self.rng.random() < 0.7:
            run: Callable[[], Any] = lambda: self.engine.score(**arguments)  # noqa: E731
        else:
            run = lambda: self.loop.run_until_complete(self.engine.async_score(**arguments))  # noqa: E731
        return Call(f"score {name}", run, words, (value,), lambda result: isinstance(result.scores, list))

    def session(self) -> Call:
        name = self.rng.choice(["capacity_of_str_len", "session_id", "streaming", "timeout"])
        arguments = {"capacity_of_str_len": 50, name: hostile.value(self.rng)}
        if self.rng.random() < 0.2:
            return Call(
                "close_session",
                lambda: self.engine.close_session(arguments[name]),
                ("session_id",),
                (arguments[name],),
                is_nothing,
            )

        def run() -> Any:
            opened = self.engine.open_session(**arguments)
            if opened is not None:
                self.engine.close_session(opened)
            return opened

        return Call(
            f"open_session {name}", run, (name,), (arguments,), lambda result: isinstance(result, str)
        )

    def continuing(self) -> Call:
        key = self.rng.choice(
            ["id", "session_id", "rid", "offset", "replace", "drop_previous_output", "other"]
        )
        value = hostile.value(self.rng)

        def run() -> Any:
            opened = self.engine.open_session(1000)
            try:
                wish = {"id": opened, key: value} if self.rng.random() < 0.9 else value
                return self.engine.generate(PROMPT, CHEAP, session_params=wish)
            finally:
                self.engine.close_session(opened)

        return Call(f"session_params {key}", run, ("session",), (value,), is_result)

    # ── the rest ──

    def aborting(self) -> Call:
        value = hostile.value(self.rng)
        name = self.rng.choice(["rid", "abort_all"])
        return Call(
            f"abort {name}", lambda: self.engine.abort(**{name: value}), (name,), (value,), is_nothing
        )

    def control(self) -> Call:
        value, engine = hostile.value(self.rng), self.engine

        def pause() -> None:
            with contextlib.ExitStack() as stack:
                stack.callback(engine.continue_generation)
                engine.pause_generation(value)

        async def manage() -> None:
            with contextlib.ExitStack() as stack:
                stack.callback(engine.continue_generation)
                await engine.tokenizer_manager.pause_generation(value)

        name, run, check = self.rng.choice([
            ("mode", pause, is_nothing),
            ("request", lambda: self.loop.run_until_complete(manage()), is_nothing),
            ("on_error", lambda: engine.flush_cache(on_error=value), lambda r: isinstance(r, FlushResult)),
            ("name", lambda: engine.get_weights_by_name(value), lambda r: r is None or isinstance(r, list)),
            ("truncate_size", lambda: engine.get_weights_by_name("model.norm.weight", value),
             lambda r: isinstance(r, list)),
            ("selector", lambda: engine.begin_weight_update(value), lambda r: r[0] is True),
            ("rid", lambda: engine.tokenizer_manager.abort_request(value), is_nothing),
        ])  # fmt: skip
        words = ("mode", "request") if name == "request" else (name,)
        return Call(f"control {name}", run, words, (value,), check)

    def profile(self) -> Call:
        name = self.rng.choice(
            ["output_dir", "start_step", "num_steps", "activities", "profile_by_stage", "with_stack", "profile_id",
             "record_shapes", "profile_prefix", "merge_profiles", "profile_dir", "nonsense"]
        )  # fmt: skip
        value = hostile.value(self.rng)
        if value is None or name == "with_stack":
            return self.control()

        def run() -> Any:
            os.chdir(self.folder)
            folder = {} if name in ("output_dir", "profile_dir") else {"output_dir": str(self.folder)}
            with contextlib.suppress(sgl.WrongState):
                self.engine.start_profile(**{**folder, "start_step": 10**9, name: value})
                self.engine.stop_profile()

        return Call(f"start_profile {name}", run, (name, "trace", "output_dir"), (value,), is_nothing)

    def weights(self) -> Call:
        value, norm = hostile.value(self.rng), "model.norm.weight"
        tensors: Any = {norm: self.norm}
        name, arguments = self.rng.choice([
            ("named_tensors", {"named_tensors": value}),
            ("named_tensors", {"named_tensors": [(norm, value)]}),
            ("named_tensors", {"named_tensors": [value]}),
            ("load_format", {"named_tensors": tensors, "load_format": value}),
            ("flush_cache", {"named_tensors": tensors, "flush_cache": value}),
            ("on_error", {"named_tensors": tensors, "on_error": value}),
            ("weight_version", {"named_tensors": tensors, "weight_version": value}),
            ("model_path", {"model_path": value}),
        ])  # fmt: skip
        if name == "model_path":
            return Call(
                name, lambda: self.engine.update_weights_from_disk(value), (name,), (value,), is_answer
            )
        update = self.engine.update_weights_from_tensor
        return Call(f"weights {name}", lambda: update(**arguments), (name,), (value,), is_answer)

    def memory(self) -> Call:
        value = hostile.value(self.rng)

        def run() -> None:
            self.wait_idle()
            self.engine.release_memory_occupation(value)
            self.engine.resume_memory_occupation()

        return Call("release_memory_occupation", run, ("tags",), (value,), is_nothing)

    def wait_idle(self) -> None:
        """Streams that were let go of end a moment later."""
        state: dict[str, Any] = {}
        for _ in range(1000):
            state = self.engine.get_server_info()["internal_states"][0]
            if not state["num_running_requests"] and not state["num_waiting_requests"]:
                return
        raise AssertionError(f"requests are left: {state}")


def is_answer(result: Any) -> bool:
    return type(result[0]) is bool and type(result[1]) is str and len(result[1]) < MOST_CHARACTERS


# ── processors ────────────────────────────────────────────────────────────────────────────────


def _raiser(make: Callable[[], BaseException]) -> Callable[..., Any]:
    def process(logits: Any, params: Any) -> Any:
        raise make()

    return process


def _spoil(logits: Any, params: Any) -> Any:
    for row in params:
        row["__req__"].origin_input_ids.clear()
        row["__req__"].rid = None
        row.clear()
    return logits.resize_(0)


def _recurse(logits: Any, params: Any) -> Any:
    return _recurse(logits, params)


class NeedsArguments:
    def __init__(self, needed: Any) -> None:
        pass


class Sly:
    """Says that it takes any arguments."""

    @property
    def __signature__(self) -> Any:
        raise KeyError("none")

    def __call__(self, logits: Any, params: Any) -> Any:
        return logits


PROCESSORS: list[tuple[str, Any]] = [
    *((type(error()).__name__, _raiser(error)) for error in hostile.ERRORS),
    ("SystemExit", _raiser(SystemExit)),
    ("KeyboardInterrupt", _raiser(KeyboardInterrupt)),
    ("GeneratorExit", _raiser(GeneratorExit)),
    ("nan", lambda logits, params: logits * float("nan")),
    ("inf", lambda logits, params: logits * 0 + float("inf")),
    ("-inf", lambda logits, params: logits * 0 - float("inf")),
    ("half nan", lambda logits, params: logits.log()),
    ("huge", lambda logits, params: logits * 1e38),
    ("none", lambda logits, params: None),
    ("list", lambda logits, params: logits.tolist()),
    ("row too many", lambda logits, params: torch.cat([logits, logits])),
    ("narrow", lambda logits, params: logits[:, :3]),
    ("flat", lambda logits, params: logits.flatten()),
    ("empty", lambda logits, params: logits[:0]),
    ("meta", lambda logits, params: logits.to("meta")),
    ("sparse", lambda logits, params: logits.to_sparse()),
    ("complex", lambda logits, params: logits.to(torch.complex64)),
    ("bool", lambda logits, params: logits > 0),
    ("strided", lambda logits, params: logits.t().contiguous().t()),
    ("in place", lambda logits, params: logits.fill_(float("nan"))),
    ("grad", lambda logits, params: torch.zeros(logits.shape, requires_grad=True)),
    ("subclass", lambda logits, params: torch.nn.Parameter(logits.clone(), requires_grad=False)),
    ("spoil", _spoil),
    ("recurse", _recurse),
    ("class with arguments", NeedsArguments),
    ("sly", Sly()),
    ("one argument", lambda logits: logits),
    ("unknown name", "no_such_processor"),
    ("bad text", '{"callable": "zz"}'),
    ("bad pickle", '{"callable": "80"}'),
    ("deep text", '{"callable":' + "[" * 100_000),
    ("number", 5),
    ("known", "allowed_tokens"),
]


# ── the proof ─────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    """Raise `Hang` in a call that takes too long; a call that cannot even be interrupted ends the test."""

    def stop(number: int, frame: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    faulthandler.dump_traceback_later(3 * MOST_SECONDS, exit=True)
    signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


def complaint_about(call: Call) -> str | None:
    """What is wrong about how the engine takes this call; None: nothing."""
    before = hostile.print_of(call.given)
    try:
        with time_limit():
            result = call.run()
    except (sgl.InvalidArgument, sgl.RequestFailed) as error:
        text = str(error)
        if len(text) >= MOST_CHARACTERS:
            return f"a message of {len(text)} characters: {text[:200]}"
        if call.words and not any(word in text for word in call.words):
            return f"a message without {call.words}: {text[:300]}"
        if isinstance(error, sgl.InvalidArgument) and hostile.print_of(call.given) != before:
            return f"an argument was changed, and then refused: {text[:300]}"
        return None
    except Hang:
        return "it hangs"
    except BaseException as error:
        return f"{type(error).__mro__[:3]} {ascii(hostile_text(error))[:300]}"
    return None if call.check(result) else f"an odd result: {ascii(result)[:300]}"


def hostile_text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(no text)"


@pytest.fixture(scope="module")
def llm() -> Iterator[sgl.Engine]:
    limits: Any = {"max_total_tokens": 4096, "preferred_sampling_params": {"max_new_tokens": 4}}
    # One layer, whose numbers mean nothing: words do not matter here, and time does.
    small: Any = {"load_format": "dummy", "json_model_override_args": {"num_hidden_layers": 1}}
    with sgl.Engine(model_path="tiny", log_level="critical", **limits, **small) as engine:
        yield engine


@pytest.mark.slow
@pytest.mark.timeout(0)  # each call has its own
@pytest.mark.filterwarnings("ignore")
def test_no_call_ends_the_engine(
    llm: sgl.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", logger="tokenmill")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    answer = llm.generate(PROMPT, GREEDY)["output_ids"]
    caller = Caller(llm, random.Random(SEED), tmp_path)
    complaints: dict[str, int] = {}
    for number in range(NUM_CALLS):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call = caller.next()
            complaint = complaint_about(call)
        if complaint is not None:
            complaint = f"{call.title}: {complaint}"
            complaints[complaint] = complaints.get(complaint, 0) + 1
        if number % BLOCK == BLOCK - 1 or "EngineDead" in str(complaint):
            assert llm.generate(PROMPT, GREEDY)["output_ids"] == answer, complaints
            caller.wait_idle()
            assert llm.flush_cache(), complaints
            llm._client._core.call("check")
            assert not llm._client._flying
    # Their finalizers are not to run in the middle of somebody else's test.
    del caller, call
    gc.collect()
    assert not complaints, "\n".join(f"{count} x {text}" for text, count in complaints.items())
