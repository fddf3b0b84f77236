"""Log-probabilities, hidden states, penalties and biases against transformers and written-out formulas."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tokenmill as sgl

pytestmark = pytest.mark.cpu

PROMPTS = [
    list(range(40, 75)),
    [9, 200, 31, 7],
    [*range(40, 64), *range(90, 110)],
    [250],
]
GREEDY = {"temperature": 0, "max_new_tokens": 7, "ignore_eos": True}
VOCABULARY = 300  # ids of these models
# How the engine may cut, share and repeat work without anybody noticing.
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"chunked_prefill_size": 6},
    "crowded": {"chunked_prefill_size": 16, "max_total_tokens": 96, "page_size": 4},
    "no cache": {"disable_radix_cache": True, "max_running_requests": 2},
}


@pytest.fixture(scope="module")
def folder(make_model: Callable[..., Path]) -> Path:
    return make_model("qwen3", head_dim=16)


@cache
def transformers_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def reference(folder: Path, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits [tokens, vocabulary], hidden states after the final norm [tokens, hidden])"""
    with torch.inference_mode():
        output = transformers_model(folder)(torch.tensor([list(ids)]), output_hidden_states=True)
    return output.logits[0], output.hidden_states[-1][0]


@pytest.fixture(scope="module", params=SETTINGS, ids=str)
def engine(folder: Path, request: pytest.FixtureRequest) -> Iterator[sgl.Engine]:
    settings = {"context_length": 128, **SETTINGS[request.param]}
    with sgl.Engine(model_path=str(folder), device="cpu", dtype="float32", **settings) as engine:
        yield engine


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[sgl.Engine]:
    with sgl.Engine(model_path=str(folder), device="cpu", dtype="float32") as engine:
        yield engine


# ── log-probabilities ──


def test_a_prompt_may_take_all_the_room(engine: sgl.Engine, folder: Path) -> None:
    """As windows of evaluations do: what follows it is drawn, or only scored, and needs no place."""
    most = engine.get_server_info()["max_req_input_len"] + 1
    rng = np.random.default_rng(3)
    windows = [rng.integers(0, 256, most).tolist() for _ in range(3)]
    for length in (0, 1, 1):  # the last time from the cache
        results = engine.generate(
            input_ids=[*windows, PROMPTS[0]],
            sampling_params={"temperature": 0, "max_new_tokens": length},
            return_logprob=True,
            logprob_start_len=0,
        )
        for window, result in zip(windows, results, strict=False):
            logits, _ = reference(folder, window)
            logprobs = logits.log_softmax(1)
            expected = [logprobs[place, token].item() for place, token in enumerate(window[1:])]
            found = [value for value, *_ in result["meta_info"]["input_token_logprobs"][1:]]
            assert found == pytest.approx(expected, abs=1e-4)
            assert result["output_ids"] == [int(logits[-1].argmax())] * length
            assert result["meta_info"]["finish_reason"] == {"type": "length", "length": length}
    for length in (None, 2):
        with pytest.raises(sgl.InvalidArgument, match=f"{most} tokens"):
            engine.generate(input_ids=windows[0], sampling_params={"max_new_tokens": length})
    with pytest.raises(sgl.InvalidArgument, match=f"{most + 1} tokens"):
        engine.generate(input_ids=[*windows[0], 1], sampling_params={"max_new_tokens": 0})


def test_logprobs_are_those_of_transformers(engine: sgl.Engine, folder: Path) -> None:
    for starts in ([0, 0, 0, 0], [12, 4, 30, -1], [0, 1, 43, 1]):
        results = engine.generate(
            input_ids=PROMPTS,
            sampling_params=GREEDY,
            return_logprob=True,
            logprob_start_len=starts,
            top_logprobs_num=3,
            token_ids_logprob=[5, 299, 5],
        )
        for prompt, start, result in zip(PROMPTS, starts, results, strict=True):
            check_logprobs(folder, prompt, len(prompt) if start == -1 else start, result)


def test_the_whole_vocabulary_can_be_told_and_no_more(engine: sgl.Engine, folder: Path) -> None:
    """Beside rows that ask for little, and before some more of them."""
    few = {"top_logprobs_num": 1, "token_ids_logprob": [7]}
    asked = [few, {"top_logprobs_num": VOCABULARY, "token_ids_logprob": list(range(VOCABULARY))}, few, few]
    wishes = {name: [each[name] for each in asked] for name in few}
    for wanted in (wishes, few):
        results = engine.generate(
            input_ids=PROMPTS, sampling_params=GREEDY, return_logprob=True, logprob_start_len=0, **wanted
        )
        for index, (prompt, result) in enumerate(zip(PROMPTS, results, strict=True)):
            logprobs = reference(folder, prompt + result["output_ids"][:-1])[0].log_softmax(1)
            meta = result["meta_info"]
            is_whole = wanted is wishes and index == 1
            tops = meta["input_top_logprobs"][1:] + meta["output_top_logprobs"]
            given = meta["input_token_ids_logprobs"][1:] + meta["output_token_ids_logprobs"]
            assert len(tops) == len(given) == len(logprobs)
            for row, top, told in zip(logprobs, tops, given, strict=True):
                best = row.sort(descending=True).values[: VOCABULARY if is_whole else 1]
                assert [value for value, *_ in top] == pytest.approx(best.tolist(), abs=1e-4)
                assert [token for _, token, _ in told] == (list(range(VOCABULARY)) if is_whole else [7])
                expected = row.tolist() if is_whole else [row[7].item()]
                assert [value for value, *_ in told] == pytest.approx(expected, abs=1e-4)
    with pytest.raises(
        sgl.InvalidArgument, match=r"top_logprobs_num must be between 0 and 300, got 301; the"
    ):
        engine.generate(input_ids=PROMPTS[0], return_logprob=True, top_logprobs_num=VOCABULARY + 1)
    with pytest.raises(sgl.InvalidArgument, match=r"token_ids_logprob has 301 token ids, but the vocabulary"):
        engine.generate(input_ids=PROMPTS[0], return_logprob=True, token_ids_logprob=[3] * 301)


def check_logprobs(folder: Path, prompt: list[int], start: int, result: dict[str, Any]) -> None:
    meta, output = result["meta_info"], result["output_ids"]
    logits, _ = reference(folder, prompt + output)
    expected = logits.log_softmax(-1)
    sides = {"input": (start, len(prompt)), "output": (len(prompt), len(prompt + output))}
    assert meta["output_token_logprobs_length"] == len(output)
    for side, (first, end) in sides.items():
        tokens = meta[f"{side}_token_logprobs"]
        assert [token for _, token, _ in tokens] == (prompt + output)[first:end]
        assert len(meta[f"{side}_top_logprobs"]) == len(meta[f"{side}_token_ids_logprobs"]) == end - first
        for place, position in enumerate(range(first, end)):
            if position == 0:
                assert tokens[0] == (None, prompt[0], None)
                assert meta["input_top_logprobs"][0] is None
                assert meta["input_token_ids_logprobs"][0] is None
                continue
            row = expected[position - 1]
            assert tokens[place][0] == pytest.approx(float(row[(prompt + output)[position]]), abs=1e-4)
            best = row.topk(3)
            top = meta[f"{side}_top_logprobs"][place]
            assert [token for _, token, _ in top] == best.indices.tolist()
            assert [value for value, _, _ in top] == pytest.approx(best.values.tolist(), abs=1e-4)
            given = meta[f"{side}_token_ids_logprobs"][place]
            assert [token for _, token, _ in given] == [5, 299, 5]
            assert [value for value, _, _ in given] == pytest.approx(row[[5, 299, 5]].tolist(), abs=1e-4)


@pytest.mark.parametrize("ignored", [False, True])
def test_output_logprobs_follow_temperature_and_changes_of_the_logits(folder: Path, ignored: bool) -> None:
    """At the temperature of the draw, or as if that were 1; penalties and biases count in either case."""
    prompt = PROMPTS[0]
    params = {"temperature": 0.7, "top_k": 4, "max_new_tokens": 5, "ignore_eos": True, "sampling_seed": 3}
    params |= {"logit_bias": {"11": 2.5, "70": -1.0}, "presence_penalty": 1.5}
    with sgl.Engine(
        model_path=str(folder), device="cpu", dtype="float32", logprobs_ignore_temperature=ignored
    ) as engine:
        result = engine.generate(input_ids=prompt, sampling_params=params, return_logprob=True)
    output = result["output_ids"]
    temperature = 1.0 if ignored else 0.7
    logits, _ = reference(folder, prompt + output)
    for place, (value, token, _) in enumerate(result["meta_info"]["output_token_logprobs"]):
        changed = logits[len(prompt) + place - 1].clone()
        changed[list(set(output[:place]))] -= 1.5
        changed[11] += 2.5
        changed[70] -= 1.0
        assert token == output[place]
        assert value == pytest.approx(float((changed / temperature).log_softmax(-1)[token]), abs=1e-4)


def test_a_prompt_can_be_scored_without_an_output(llm: sgl.Engine, folder: Path) -> None:
    for params in ({"max_new_tokens": 0}, {"max_new_tokens": 0, "temperature": 0}):
        results = llm.generate(
            input_ids=PROMPTS, sampling_params=params, return_logprob=True, token_ids_logprob=[3, 4]
        )
        for prompt, result in zip(PROMPTS, results, strict=True):
            assert (result["output_ids"], result["meta_info"]["completion_tokens"]) == ([], 0)
            expected = reference(folder, prompt)[0][-1].log_softmax(-1)
            [given] = result["meta_info"]["output_token_ids_logprobs"]
            assert [value for value, _, _ in given] == pytest.approx(expected[[3, 4]].tolist(), abs=1e-4)
            [(value, token, _)] = result["meta_info"]["output_token_logprobs"]
            assert value == pytest.approx(float(expected[token]), abs=1e-4)


def test_tokens_can_be_read_and_stop_strings_cut_the_lists(llm: sgl.Engine) -> None:
    whole = llm.generate("ab", GREEDY, return_logprob=True, return_text_in_logprobs=True)
    texts = [text for _, _, text in whole["meta_info"]["output_token_logprobs"]]
    assert all(isinstance(text, str) for text in texts)
    # Byte tokens above 127 are no characters; one below is a stop string of its own.
    place = next((i for i, text in enumerate(texts) if text.isascii()), None)
    if place is not None:
        cut = llm.generate("ab", {**GREEDY, "stop": texts[place]}, return_logprob=True)
        assert len(cut["meta_info"]["output_token_logprobs"]) == len(cut["output_ids"]) <= place + 1


@pytest.mark.parametrize("cumulative", [False, True])
def test_streams_give_the_same_lists(folder: Path, cumulative: bool) -> None:
    wishes: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 2, "return_hidden_states": True}
    with sgl.Engine(
        model_path=str(folder), device="cpu", dtype="float32", cumulative_stream=cumulative
    ) as engine:
        whole = engine.generate(input_ids=PROMPTS[0], sampling_params=GREEDY, **wishes)["meta_info"]
        chunks = list(engine.generate(input_ids=PROMPTS[0], sampling_params=GREEDY, stream=True, **wishes))
    metas = [chunk["meta_info"] for chunk in chunks]
    assert all(meta["input_token_logprobs"] == whole["input_token_logprobs"] for meta in metas)
    if cumulative:
        assert metas[-1]["output_token_logprobs"] == whole["output_token_logprobs"]
        hidden = metas[-1]["hidden_states"]
    else:
        assert [entry for meta in metas for entry in meta["output_token_logprobs"]] == (
            whole["output_token_logprobs"]
        )
        hidden = [entry for meta in metas for entry in meta["hidden_states"]]
    assert len(hidden) == len(whole["hidden_states"]) == 7
    for ours, theirs in zip(hidden, whole["hidden_states"], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_samples_of_a_prompt_share_its_logprobs(llm: sgl.Engine) -> None:
    """The first sample is told of the prompt, which keeps it from the cache; the others need not be."""
    wishes: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    params = {"max_new_tokens": 3, "ignore_eos": True}
    alone = llm.generate(input_ids=PROMPTS, sampling_params=params, **wishes)
    results = llm.generate(
        input_ids=PROMPTS, sampling_params={**params, "n": 3}, token_ids_logprob=[4], **wishes
    )
    for index, result in enumerate(results):
        meta, first = result["meta_info"], results[index - index % 3]["meta_info"]
        wanted = alone[index // 3]["meta_info"]["input_token_logprobs"]
        assert [token for _, token, _ in meta["input_token_logprobs"]] == [token for _, token, _ in wanted]
        for (ours, _, _), (theirs, _, _) in zip(meta["input_token_logprobs"][1:], wanted[1:], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)
        for key in ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs"):
            assert meta[key] == first[key]
            assert len(meta[key]) == meta["prompt_tokens"]
            assert index % 3 == 0 or meta[key] is not first[key]
        assert len(meta["output_token_logprobs"]) == 3
        assert meta["cached_tokens"] == (0 if index % 3 == 0 else (meta["prompt_tokens"] - 1) // 16 * 16)


def test_long_outputs_are_the_same_however_they_are_asked_for(llm: sgl.Engine) -> None:
    """Results are made piece by piece while others run: of a batch, of one prompt, in an event loop."""
    params = [{**GREEDY, "max_new_tokens": count} for count in (64, 200, 1, 129)]
    wishes: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 3, "logprob_start_len": 0}
    wishes["token_ids_logprob"] = [[4, 8], [], [9], [1, 2, 3]]
    batch = llm.generate(input_ids=PROMPTS, sampling_params=params, **wishes)
    in_loop = asyncio.run(llm.async_generate(input_ids=PROMPTS, sampling_params=params, **wishes))
    for index, (result, other) in enumerate(zip(batch, in_loop, strict=True)):
        mine = {**wishes, "token_ids_logprob": wishes["token_ids_logprob"][index]}
        chunks = llm.generate(input_ids=PROMPTS[index], sampling_params=params[index], stream=True, **mine)
        metas = [chunk["meta_info"] for chunk in chunks]
        meta = result["meta_info"]
        assert len(meta["output_token_logprobs"]) == params[index]["max_new_tokens"]
        for key in [key for key in meta if "logprobs" in key]:
            same_entries(meta[key], other["meta_info"][key])
            if key.startswith("input"):
                same_entries(meta[key], metas[-1][key])
            elif key != "output_token_logprobs_length":
                same_entries(meta[key], [entry for chunk in metas for entry in chunk[key]])


def same_entries(found: Any, expected: Any) -> None:
    """The same tokens in the same lists, and values that differ only as batches do."""
    assert type(found) is type(expected)
    if isinstance(found, float):
        assert found == pytest.approx(expected, abs=1e-4)
    elif isinstance(found, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same_entries(one, other)
    else:
        assert found == expected


def test_what_cannot_be_asked_for(llm: sgl.Engine) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"logprob_start_len": 5}, r"logprob_start_len is 5, but input_ids has only 4 tokens"),
        ({"logprob_start_len": -2}, "logprob_start_len must be at least -1"),
        ({"top_logprobs_num": -1}, "top_logprobs_num must be between 0 and"),
        ({"token_ids_logprob": [300]}, r"token_ids_logprob\[0\] must be between 0 and 299"),
        ({"token_ids_logprob": [[1], [2]]}, "one prompt"),
        ({"token_ids_logprob": "5"}, "token_ids_logprob must be a list"),
        ({"return_logprob": 1}, "return_logprob must be True or False"),
        ({"return_logprob": [True]}, "there is one prompt"),
        ({"return_hidden_states": "first"}, "'last' or 'all'"),
    ]
    for wishes, message in cases:
        with pytest.raises(ValueError, match=message):
            llm.generate(input_ids=PROMPTS[1], **{"return_logprob": True, **wishes})
    for value in (
        {300: 1.0},
        {-1: 1.0},
        {"x": 1.0},
        {1: "a"},
        {1: float("nan")},
        {"5": 1.0, "05": 2.0},
        {"\u0665": 1.0},
        [1.0],
        3,
    ):
        with pytest.raises(ValueError, match="logit_bias"):
            llm.generate(input_ids=PROMPTS[1], sampling_params={"logit_bias": value})


def test_samples_have_the_logprobs_of_their_prompt_though_the_first_fails(llm: sgl.Engine) -> None:
    def fail_first(logits: torch.Tensor, custom_param_list: list[dict[str, Any]]) -> torch.Tensor:
        if any(params["__req__"].rid == "mine_0" for params in custom_param_list):
            raise ValueError("for the test")
        return logits

    wishes: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
    results = llm.generate(
        input_ids=PROMPTS[1],
        sampling_params={"max_new_tokens": 2, "n": 3},
        rid="mine",
        custom_logit_processor=fail_first,
        on_error="return",
        **wishes,
    )
    assert [result["error"] is None for result in results] == [False, True, True]
    for result in results:
        assert len(result["meta_info"]["input_token_logprobs"]) == len(PROMPTS[1])
        assert len(result["meta_info"]["input_top_logprobs"]) == len(PROMPTS[1])


def test_of_a_prompt_that_never_ran_nothing_is_shown(llm: sgl.Engine) -> None:
    llm.pause_generation("in_place")
    try:
        results = llm.generate(
            input_ids=PROMPTS,
            return_logprob=True,
            logprob_start_len=[0, 0, 2, 0],
            top_logprobs_num=2,
            token_ids_logprob=[5],
            timeout=0.05,
        )
    finally:
        llm.continue_generation()
    for result in results:
        for name in ("token", "top", "token_ids"):
            assert result["meta_info"][f"input_{name}_logprobs"] == []
            assert result["meta_info"][f"output_{name}_logprobs"] == []


def test_of_a_prompt_that_was_cut_short_nothing_is_shown(folder: Path) -> None:
    """The single token of the one prompt is drawn when six tokens of the other are computed."""

    def abort_other(logits: torch.Tensor, custom_param_list: list[dict[str, Any]]) -> torch.Tensor:
        engine.abort("long")
        return logits

    wishes: dict[str, Any] = {"logprob_start_len": 0, "top_logprobs_num": 2, "token_ids_logprob": [5]}
    chunks = {"chunked_prefill_size": 7, "max_running_requests": 2}
    with sgl.Engine(model_path=str(folder), device="cpu", **chunks) as engine:
        _, result = engine.generate(
            input_ids=[PROMPTS[3], PROMPTS[0]],
            sampling_params=GREEDY,
            rid=["short", "long"],
            custom_logit_processor=[abort_other, None],
            return_logprob=True,
            return_hidden_states=True,
            **wishes,
        )
    meta = result["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert meta["hidden_states"] == []
    for name in ("token", "top", "token_ids"):
        assert meta[f"input_{name}_logprobs"] == []


# ── hidden states ──


def test_hidden_states_are_those_of_transformers(engine: sgl.Engine, folder: Path) -> None:
    wishes = [True, False, "all", "last"]
    for _ in range(2):  # the second time with everything in the prefix cache
        results = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY, return_hidden_states=wishes)
        for prompt, wish, result in zip(PROMPTS, wishes, results, strict=True):
            if not wish:
                assert "hidden_states" not in result["meta_info"]
                continue
            given = result["meta_info"]["hidden_states"]
            _, expected = reference(folder, prompt + result["output_ids"][:-1])
            if wish == "last":
                np.testing.assert_allclose(given, expected[-1], atol=1e-4)
                continue
            assert len(given) == len(result["output_ids"])
            assert np.shape(given[0]) == (len(prompt), expected.shape[1])
            np.testing.assert_allclose(np.concatenate([given[0], given[1:]]), expected, atol=1e-4)


@pytest.mark.parametrize("settings", [{}, {"cumulative_stream": True}], ids=str)
def test_the_last_hidden_state_is_that_of_the_last_token_before_a_stop(settings: dict[str, bool]) -> None:
    """The text is looked at every few tokens only; what was computed past the stop must not be shown."""
    prompt = "The capital of France is"
    with sgl.Engine("tiny", device="cpu", dtype="float32", **settings) as engine:
        whole = engine.generate(prompt, {**GREEDY, "max_new_tokens": 9}, return_hidden_states=True)
        states = whole["meta_info"]["hidden_states"]
        states = [states[0][-1], *states[1:]]
        text = engine.get_tokenizer().decode
        for place, token in enumerate(whole["output_ids"][:3]):
            stops: list[dict[str, Any]] = [{"stop": text([token])}, {"stop_regex": text([token])}]
            for stop, most in zip(stops * 2, (place + 1, place + 2, 8, 9), strict=True):
                params = {**GREEDY, **stop, "max_new_tokens": most}
                wish = {"return_hidden_states": "last"}
                results = [
                    engine.generate(prompt, params, **wish),
                    *engine.generate([prompt], {**params, "n": 2}, **wish),
                    [*engine.generate(prompt, params, stream=True, **wish)][-1],
                    *engine.iter([prompt], params, **wish),
                ]
                for result in results:
                    assert result["meta_info"]["finish_reason"]["type"] == "stop"
                    num_tokens = result["meta_info"]["completion_tokens"]
                    given = result["meta_info"]["hidden_states"]
                    np.testing.assert_allclose(given, states[num_tokens - 1], atol=1e-4)


def test_the_last_hidden_state_of_a_prompt_without_an_output(llm: sgl.Engine, folder: Path) -> None:
    params = {"max_new_tokens": 0}
    for more in ({}, {"return_logprob": True}, {"return_logprob": True, "logprob_start_len": 0}):
        results = llm.generate(input_ids=PROMPTS, sampling_params=params, return_hidden_states="last", **more)
        for prompt, result in zip(PROMPTS, results, strict=True):
            assert result["output_ids"] == []
            expected = reference(folder, prompt)[1][-1]
            np.testing.assert_allclose(result["meta_info"]["hidden_states"], expected, atol=1e-4)


@pytest.mark.parametrize("settings", [{}, {"cumulative_stream": True}, {"core_process": True}], ids=str)
def test_hidden_states_come_in_the_form_asked_for(folder: Path, settings: dict[str, bool]) -> None:
    """Of results and of streams: one entry for each token, the same numbers as in lists, free to change."""
    forms: dict[str, tuple[type, Any]] = {
        "numpy": (np.ndarray, np.float32),
        "torch": (torch.Tensor, torch.float32),
    }
    with sgl.Engine(model_path=str(folder), device="cpu", dtype="float32", **settings) as engine:

        def states(form: str | None, wish: bool | str = True, **more: Any) -> Any:
            results = engine.generate(
                input_ids=PROMPTS[0],
                sampling_params=GREEDY,
                return_hidden_states=wish,
                hidden_states_format=form,
                **more,
            )
            return [r["meta_info"]["hidden_states"] for r in (results if more else [results])]

        [wanted], [last] = states(None), states(None, "last")
        assert states("list") == [wanted]
        for form, (made, dtype) in forms.items():
            [given] = states(form)
            chunks = states(form, stream=True)
            pieces = chunks[-1:] if "cumulative_stream" in settings else chunks
            merged = [entry for piece in pieces for entry in piece]
            for entries in (given, merged):
                assert all(isinstance(entry, made) and entry.dtype == dtype for entry in entries)
                for ours, listed in zip(entries, wanted, strict=True):
                    np.testing.assert_allclose(np.asarray(ours), listed, atol=1e-5)
                entries[0][0] = 0
            [ours] = states(form, "last")
            assert isinstance(ours, made)
            np.testing.assert_allclose(np.asarray(ours), last, atol=1e-5)


def test_forms_that_hidden_states_do_not_have(llm: sgl.Engine) -> None:
    for form in ("tensor", True, ["numpy"]):
        with pytest.raises(ValueError, match="hidden_states_format must be 'list', 'numpy' or 'torch'"):
            llm.generate(input_ids=PROMPTS[1], return_hidden_states=True, hidden_states_format=form)


# ── penalties and biases ──

CHANGES: list[dict[str, Any]] = [
    {"frequency_penalty": 0.8},
    {"presence_penalty": 2.0},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.5, "frequency_penalty": -1.0},
    {"repetition_penalty": 1.9, "penalize_prompt": True},
    {"logit_bias": {17: 100.0}, "frequency_penalty": 2.0},
    {"logit_bias": {str(token): float(token % 7) - 3 for token in range(300)}},
    {"logit_bias": {17: float("inf"), 18: float("-inf")}},
    {},
]


def penalized_greedy(folder: Path, prompt: list[int], count: int, **params: Any) -> list[int]:
    """The formulas of each penalty, token by token."""
    output: list[int] = []
    for _ in range(count):
        logits = reference(folder, prompt + output)[0][-1].tolist()
        counts = Counter(output)
        seen = set(output) | (set(prompt) if params.get("penalize_prompt") else set())
        for token, number in counts.items():
            logits[token] -= params.get("frequency_penalty", 0) * number + params.get("presence_penalty", 0)
        for token in seen:
            factor = params.get("repetition_penalty", 1)
            logits[token] = logits[token] * factor if logits[token] < 0 else logits[token] / factor
        for key, bias in params.get("logit_bias", {}).items():
            logits[int(key)] += bias
        output.append(int(np.argmax(logits)))
    return output


def test_penalized_tokens_are_those_of_the_formulas(engine: sgl.Engine, folder: Path) -> None:
    """All in one batch, with a row that wants nothing; small pools push requests back and forth."""
    prompts = [PROMPTS[index % 3] for index in range(len(CHANGES))]
    params = [{**GREEDY, "max_new_tokens": 12, **changes} for changes in CHANGES]
    results = engine.generate(input_ids=prompts, sampling_params=params)
    for prompt, changes, result in zip(prompts, CHANGES, results, strict=True):
        assert result["output_ids"] == penalized_greedy(folder, prompt, 12, **changes), changes


def test_no_end_comes_too_early(llm: sgl.Engine) -> None:
    """Not even one that `ignore_eos` lets pass."""
    end = llm.get_tokenizer().eos_token_id
    for ignores in (False, True):
        params = {"temperature": 0, "max_new_tokens": 6, "min_new_tokens": 4, "ignore_eos": ignores}
        output = llm.generate(input_ids=PROMPTS[1], sampling_params={**params, "logit_bias": {end: 1000.0}})
        assert [token == end for token in output["output_ids"]] == [False] * 4 + [True] * (1 + ignores)


def test_requests_were_pushed_back(folder: Path) -> None:
    """The small pool of these tests does what it is there for."""
    with sgl.Engine(
        model_path=str(folder), device="cpu", dtype="float32", context_length=128, **SETTINGS["crowded"]
    ) as engine:
        results = engine.generate(
            input_ids=[PROMPTS[index % 3] for index in range(9)],
            sampling_params={**GREEDY, "max_new_tokens": 12},
        )
    assert max(result["meta_info"]["num_retractions"] for result in results) > 0


def test_wishes_of_one_row_leave_the_others_alone(llm: sgl.Engine) -> None:
    params = {"max_new_tokens": 9, "ignore_eos": True, "sampling_seed": 5, "temperature": 1.1, "top_p": 0.9}
    alone = [llm.generate(input_ids=prompt, sampling_params=params)["output_ids"] for prompt in PROMPTS]
    others = {"frequency_penalty": 1.0, "logit_bias": {3: 9.0}, "max_new_tokens": 30, "n": 1}
    results = llm.generate(
        input_ids=[*PROMPTS, PROMPTS[0], PROMPTS[1]],
        sampling_params=[params] * 4 + [{**params, **others}] * 2,
        return_logprob=[False] * 4 + [True, False],
        return_hidden_states=[False] * 5 + [True],
    )
    assert [result["output_ids"] for result in results[:4]] == alone


def test_a_batch_that_changes_its_mind(llm: sgl.Engine) -> None:
    """Rows with extras give way to plain ones in the same slots."""
    plain = llm.generate(input_ids=PROMPTS, sampling_params=GREEDY)["output_ids"]
    llm.generate(
        input_ids=PROMPTS * 4,
        sampling_params={**GREEDY, "repetition_penalty": 2.0, "logit_bias": {1: 50.0}},
        return_logprob=True,
    )
    assert llm.generate(input_ids=PROMPTS, sampling_params=GREEDY)["output_ids"] == plain


def test_rows_without_memory_for_their_counts_fail_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenmill.sampling import Adjustments

    def no_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("for the test")

    monkeypatch.setattr(Adjustments, "set_penalties", no_memory)
    with sgl.Engine(model_path=str(folder), device="cpu", dtype="float32") as engine:
        plain = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)["output_ids"]
        with pytest.raises(sgl.RequestFailed, match="no memory to count tokens"):
            engine.generate(
                input_ids=PROMPTS, sampling_params=[GREEDY] * 3 + [{**GREEDY, "frequency_penalty": 1.0}]
            )
        assert engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)["output_ids"] == plain


# ── prompts that are too long ──


def test_prompts_that_are_too_long_may_be_cut(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """To their first tokens, as SGLang does; neither prompts nor parameters of the caller change."""
    rng = np.random.default_rng(4)
    prompts = [rng.integers(0, 256, length).tolist() for length in (500, 30, 64, 60)]
    lengths = [50, 50, 1, 0]
    params = [{"temperature": 0, "max_new_tokens": length, "ignore_eos": True} for length in lengths]
    given = [list(prompt) for prompt in prompts], [dict(each) for each in params]
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "context_length": 64}
    with sgl.Engine(str(folder), allow_auto_truncate=True, log_level="warning", **settings) as cutting:
        cut = cutting.generate(input_ids=prompts, sampling_params=params)
        rest = list(cutting.iter({"input_ids": prompt} for prompt in prompts))
        for start, count in ((61, 2), (63, 0), (499, 0), (500, 0), (-1, 0)):
            told = cutting.generate(
                input_ids=prompts[0],
                sampling_params={"max_new_tokens": 2},
                return_logprob=True,
                logprob_start_len=start,
            )
            assert len(told["meta_info"]["input_token_logprobs"]) == count
        with pytest.raises(sgl.InvalidArgument, match="501, but input_ids has only 500 tokens"):
            cutting.generate(input_ids=prompts[0], return_logprob=True, logprob_start_len=501)
    assert (prompts, params) == given
    assert "input_ids[0] has 500 tokens and is cut to its first 63 (allow_auto_truncate)" in caplog.messages
    with sgl.Engine(str(folder), **settings) as llm:
        expected = llm.generate(
            input_ids=[prompts[0][:63], *prompts[1:]],
            sampling_params=[
                {**each, "max_new_tokens": length} for each, length in zip(params, [1, 34, 1, 0], strict=True)
            ],
        )
        with pytest.raises(sgl.InvalidArgument, match=r"input_ids\[0\] has 500 tokens"):
            llm.generate(input_ids=prompts, sampling_params=params)
    assert [result["output_ids"] for result in cut] == [result["output_ids"] for result in expected]
    assert [r["meta_info"]["prompt_tokens"] for r in cut] == [63, 30, 64, 60]
    assert sorted(r["meta_info"]["prompt_tokens"] for r in rest) == [30, 60, 63, 63]
