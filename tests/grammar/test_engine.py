"""Structured output as a user sees it: the bundled model's finished outputs are always right."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

import tokenmill as sgl
from tests.grammar.conftest import CROWDED
from tokenmill.errors import InvalidArgument, InvalidRequest, RequestFailed
from tokenmill.grammar import llguidance_backend

pytestmark = pytest.mark.cpu

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
PHONE = r"\d{3}-\d{3}-\d{4}"
# Greedy text is likely to finish; so is what a low temperature draws.
CALM = {"temperature": 0.5, "max_new_tokens": 120}


@pytest.fixture(
    scope="module",
    params=[
        {},
        {"grammar_backend": "xgrammar"},
        {"core_process": True},
        {"steps_in_flight": 1, "disable_radix_cache": True},
        {"max_total_tokens": 160, "page_size": 4, "max_running_requests": 8, "chunked_prefill_size": 16},
    ],
    ids=["default", "xgrammar", "process", "one step in flight", "small pool"],
)
def llm(request: pytest.FixtureRequest) -> Iterator[Any]:
    if "xgrammar" in request.param.values():
        pytest.importorskip("xgrammar")
    with sgl.Engine(model_path="tiny", random_seed=1, **request.param) as engine:
        yield engine


def is_finished(output: dict[str, Any]) -> bool:
    return output["meta_info"]["finish_reason"]["type"] == "stop"


def check_person(output: dict[str, Any]) -> None:
    assert is_finished(output), output
    jsonschema.validate(json.loads(output["text"]), PERSON)


def test_all_kinds_in_one_batch(llm: Any) -> None:
    tag = {"structures": [{"begin": "<n>", "schema": {"type": "integer"}, "end": "</n>"}], "triggers": ["<n"]}
    params = [
        {"json_schema": PERSON},
        {"regex": PHONE},
        {"ebnf": 'root ::= ("yes" | "no") "!"+ | "(" root ")"'},
        {"structural_tag": tag},
        {},
    ]
    person, phone, answer, tagged, free = llm.generate(
        ["A person named John:"] * 5, [{**CALM, **each} for each in params]
    )
    check_person(person)
    assert re.fullmatch(PHONE, phone["text"])
    assert is_finished(phone)
    if is_finished(answer):
        assert re.fullmatch(r"\(*(yes|no)!+\)*", answer["text"])
    assert all(re.match(r"n>\s*-?\d+\s*</n>", rest) for rest in tagged["text"].split("<n")[1:])
    assert free["text"]


def test_samples_and_streams(llm: Any) -> None:
    outputs = llm.generate("A person named John:", {**CALM, "json_schema": PERSON, "n": 4})
    for output in outputs:
        check_person(output)
    texts: dict[int, str] = {}
    for chunk in llm.generate(["Call me:"] * 3, {**CALM, "regex": PHONE}, stream=True):
        texts[chunk["index"]] = texts.get(chunk["index"], "") + chunk["text"]
    assert all(re.fullmatch(PHONE, text) for text in texts.values())


def test_many_rows_with_a_pattern_each(llm: Any) -> None:
    """In the small pool rows are preempted; their outputs go on where they stood."""
    patterns = [rf"{index}:( \d){{24}}" for index in range(12)]
    outputs = llm.generate(
        ["Some numbers:"] * 12, [{"max_new_tokens": 120, "regex": pattern} for pattern in patterns]
    )
    for output, pattern in zip(outputs, patterns, strict=True):
        assert is_finished(output)
        assert re.fullmatch(pattern, output["text"])
    if llm.config.max_total_tokens:
        assert any(output["meta_info"]["num_retractions"] for output in outputs)


def test_too_few_tokens(llm: Any) -> None:
    output = llm.generate("A person:", {"json_schema": PERSON, "max_new_tokens": 3, "temperature": 0})
    assert output["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    assert '{"name":'.startswith(re.sub(r"\s", "", output["text"])[:8])


def test_bad_grammar_fails_alone(llm: Any) -> None:
    async def both() -> list[Any]:
        good = llm.async_generate("Call me:", {**CALM, "regex": PHONE})
        bad = llm.async_generate("Call me:", {"regex": "(?=a)b"})
        return await asyncio.gather(good, bad, return_exceptions=True)

    good, bad = asyncio.run(both())
    assert re.fullmatch(PHONE, good["text"])
    assert isinstance(bad, InvalidRequest)
    assert isinstance(bad, ValueError)
    assert (bad.error_type, bad.status_code) == ("bad_grammar", 400)
    assert "regex" in str(bad)
    assert "look-ahead" in str(bad)


@pytest.fixture(scope="module")
def plain() -> Iterator[Any]:
    with sgl.Engine(model_path="tiny", random_seed=1) as engine:
        yield engine


def test_end_of_text_and_other_stops(plain: Any) -> None:
    (stop,) = plain.get_tokenizer().encode("!")
    eos = plain.get_tokenizer().eos_token_id
    output = plain.generate("Hello", {"regex": "ab?c?", "max_new_tokens": 9, "stop_token_ids": [stop]})
    assert re.fullmatch("ab?c?", output["text"])
    assert output["meta_info"]["finish_reason"]["matched"] in (stop, eos)
    # A stop token that the grammar allows in the middle would end an incomplete output.
    params = {"regex": "[a!]{4}", "max_new_tokens": 9, "stop_token_ids": [stop], "temperature": 2}
    output = plain.generate("Hello", params)
    assert re.fullmatch("[a!]{4}", output["text"])


def test_ignore_eos_goes_on_with_ends_of_text(plain: Any) -> None:
    params = {"regex": "(yes|no)", "max_new_tokens": 8, "ignore_eos": True}
    output = plain.generate("Well,", params)
    assert output["text"] in ("yes", "no")
    assert output["meta_info"]["finish_reason"] == {"type": "length", "length": 8}
    # Any of the model's ends of text, as the draw will have it.
    assert output["output_ids"][-1] in plain.get_server_info()["eos_token_ids"]


def test_more_tokens_than_the_grammar_has(plain: Any) -> None:
    with pytest.raises(RequestFailed, match="min_new_tokens is 50"):
        plain.generate("Well,", {"regex": "yes", "min_new_tokens": 50, "max_new_tokens": 60})
    output = plain.generate("Well,", {"regex": "a+", "min_new_tokens": 5, "max_new_tokens": 200})
    assert output["meta_info"]["completion_tokens"] >= 5


def test_ends_that_do_not_end_the_output_are_held_back_too(plain: Any) -> None:
    """With `ignore_eos`, while the grammar has something else."""
    ends = plain.get_server_info()["eos_token_ids"]
    params = {"min_new_tokens": 5, "max_new_tokens": 8, "ignore_eos": True, "temperature": 0}
    params["logit_bias"] = dict.fromkeys(map(str, ends), 50.0)
    first, other = plain.generate(
        ["Well,"] * 2, [{**params, "regex": each} for each in ("(a|b)*", "[ab]{3}")]
    )
    assert re.fullmatch("[ab]+", first["text"])
    assert [token in ends for token in first["output_ids"]] == [False] * 5 + [True] * 3
    assert re.fullmatch("[ab]{3}", other["text"])
    assert len(other["output_ids"]) == 8
    assert set(other["output_ids"][3:]) <= set(ends)


def test_a_bad_row_of_a_stream_says_why(plain: Any) -> None:
    chunks = list(plain.generate("x", {"ebnf": "root ::= other"}, stream=True))
    reason = chunks[-1]["meta_info"]["finish_reason"]
    assert reason["type"] == "abort"
    assert "other" in reason["message"]


def test_a_grammar_is_followed_after_the_cache_is_flushed(plain: Any) -> None:
    assert plain.generate("x", {"regex": "a"})["text"] == "a"
    with pytest.raises(RequestFailed, match="other"):
        plain.generate("x", {"ebnf": "root ::= other"})
    assert plain.flush_cache().success
    assert plain.generate("x", {"regex": "a"})["text"] == "a"
    with pytest.raises(RequestFailed, match="other"):
        plain.generate("x", {"ebnf": "root ::= other"})


def test_a_used_up_grammar_is_compiled_anew_for_the_requests_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llguidance_backend, "_MAX_LEXER_STATES", 300)
    monkeypatch.setattr(llguidance_backend, "_RENEWAL_SECONDS", 0.0)  # as if compiling it took long
    crowd = {"regex": CROWDED, "max_new_tokens": 25, "temperature": 1.5}
    with sgl.Engine(model_path="tiny", device="cpu") as engine:
        seeded = [{**crowd, "sampling_seed": index} for index in range(40)]
        first = engine.generate("Hello", seeded[0])
        results = engine.generate(["Hello"] * 40, seeded, on_error="return")
        assert any(result["meta_info"]["finish_reason"]["type"] == "abort" for result in results)
        assert engine.generate("Hello", seeded[0])["text"] == first["text"]


def test_many_outputs_do_not_use_up_what_one_grammar_may_take(
    monkeypatch: pytest.MonkeyPatch, compiled: list[str]
) -> None:
    """Matchers share what they find out, of which there is a limit that each of these outputs keeps."""

    def run(limit: int, pattern: str, count: int) -> list[Any]:
        monkeypatch.setattr(llguidance_backend, "_MAX_LEXER_STATES", limit)
        params = [
            {"regex": pattern, "max_new_tokens": 25, "temperature": 1.5, "sampling_seed": index}
            for index in range(count)
        ]
        with sgl.Engine(model_path="tiny", device="cpu") as engine:
            results = engine.generate(["Hello"] * count, params, on_error="return")
        return [(result["text"], result["meta_info"]["finish_reason"]) for result in results]

    expected = run(llguidance_backend._MAX_LEXER_STATES, CROWDED, 40)
    compiled.clear()
    assert run(300, CROWDED, 40) == expected
    assert len(compiled) > 2
    hopeless = "([a-z ]*a[a-z ]{9}q)|([a-z ]*b[a-z ]{9}z)"
    assert all("too complex" in finish.get("message", "") for _, finish in run(250, hopeless, 4))


def test_grammar_and_log_probabilities(plain: Any) -> None:
    output = plain.generate("Call me:", {**CALM, "regex": PHONE}, return_logprob=True)
    scores = [score for score, *_ in output["meta_info"]["output_token_logprobs"]]
    assert len(scores) == len(output["output_ids"])
    assert all(-200 < score <= 0 for score in scores)


def test_needs_a_tokenizer_and_a_backend() -> None:
    with (
        sgl.Engine(model_path="tiny", skip_tokenizer_init=True) as engine,
        pytest.raises(InvalidArgument, match="tokenizer"),
    ):
        engine.generate(input_ids=[1], sampling_params={"regex": "a"})
    with (
        sgl.Engine(model_path="tiny", grammar_backend="none") as engine,
        pytest.raises(InvalidArgument, match="grammar_backend='none'"),
    ):
        engine.generate("x", {"regex": "a"})
