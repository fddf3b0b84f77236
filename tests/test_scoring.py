"""`score` against the probabilities of transformers, and what it computes only once."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tokenmill as sgl

pytestmark = pytest.mark.cpu

QUERY = list(range(40, 90))
ITEMS = [[7], [9, 200, 31], list(range(100, 120)), [9, 200]]
LABELS = [5, 299, 17, 5]


@pytest.fixture(scope="module")
def folder(make_model: Callable[..., Path]) -> Path:
    return make_model("llama")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[sgl.Engine]:
    with sgl.Engine(
        model_path=str(folder), device="cpu", dtype="float32", enable_metrics=True, random_seed=3
    ) as engine:
        yield engine


@cache
def transformers_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def expected(
    folder: Path,
    rows: Sequence[Sequence[int]],
    labels: Sequence[int],
    *,
    temperature: float = 1.0,
    softmax: bool = False,
) -> Any:
    """Probabilities of the labels after each row [rows, labels], from the definition."""
    with torch.inference_mode():
        last = [transformers_model(folder)(torch.tensor([list(row)])).logits[0, -1] for row in rows]
    logits = torch.stack(last) / temperature
    list_of_labels = list(labels)
    if softmax:
        return logits[:, list_of_labels].softmax(-1).numpy()
    return logits.softmax(-1)[:, list_of_labels].numpy()


@pytest.mark.parametrize("item_first", [False, True])
@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_scores_are_those_of_transformers(
    llm: sgl.Engine, folder: Path, item_first: bool, softmax: bool, temperature: float
) -> None:
    rows = [item + QUERY if item_first else QUERY + item for item in ITEMS]
    result = llm.score(QUERY, ITEMS, LABELS, softmax, item_first, temperature=temperature)
    wanted = expected(folder, rows, LABELS, temperature=temperature, softmax=softmax)
    np.testing.assert_allclose(result.scores, wanted, atol=1e-4)
    np.testing.assert_allclose(np.array(result.scores)[:, 0], np.array(result.scores)[:, 3])
    assert result.prompt_tokens == sum(map(len, rows))
    assert all(isinstance(score, float) for scores in result.scores for score in scores)


def test_texts_are_scored_as_the_text_they_make(tiny_engine: sgl.Engine) -> None:
    tiny = Path(sgl.__file__).parent / "tiny"
    tokenizer = tiny_engine.get_tokenizer()
    countries = ["France is", "Italy is"]
    labels = [tokenizer.encode(word)[0] for word in (" Paris", " Rome")]
    rows = [tokenizer.encode("The capital of " + country) for country in countries]
    result = tiny_engine.score("The capital of ", countries, labels)
    np.testing.assert_allclose(result.scores, expected(tiny, rows, labels), atol=1e-4)
    assert result.scores[0][0] > 0.9 < result.scores[1][1]
    turned = tiny_engine.score(" is", "The capital of France", labels, item_first=True)
    assert turned.scores[0] == pytest.approx(
        tiny_engine.score("The capital of France is", [""], labels).scores[0], abs=1e-6
    )
    assert asyncio.run(tiny_engine.async_score("The capital of ", countries, labels)).scores == (
        pytest.approx(np.array(result.scores), abs=1e-6)
    )


def test_the_query_is_computed_once(llm: sgl.Engine) -> None:
    def cached() -> float:
        counted = re.search(r"^tokenmill:cached_tokens_total\{.*\} (.+)$", llm.get_metrics(), re.MULTILINE)
        assert counted is not None
        return float(counted[1])

    query = list(range(200, 264))  # four pages
    items = [[item, 5] for item in range(8)]
    before = cached()
    llm.score(query, items, LABELS)
    assert cached() - before == 7 * len(query)


def test_nothing_to_score(llm: sgl.Engine) -> None:
    for query, items in (("", []), (QUERY, []), ("a", ())):
        result = llm.score(query, items, LABELS)
        assert (result.scores, result.prompt_tokens) == ([], 0)
    assert asyncio.run(llm.async_score("", items=[], label_token_ids=[3])).scores == []
    with pytest.raises(AttributeError):
        result.scores = [[1.0]]


def test_arrays_are_rows_and_a_query_may_be_empty(llm: sgl.Engine, folder: Path) -> None:
    rows = torch.tensor([[40, 41], [50, 51]])
    for items in (rows, rows.numpy(), rows.tolist()):
        result = llm.score([], items, np.array([3, 4]))
        np.testing.assert_allclose(result.scores, expected(folder, rows.tolist(), [3, 4]), atol=1e-4)


def test_scoring_leaves_later_draws_alone(folder: Path) -> None:
    def drawn(score: bool) -> list[int]:
        with sgl.Engine(model_path=str(folder), device="cpu", random_seed=11) as engine:
            if score:
                engine.score(QUERY, ITEMS, LABELS)
            output: list[int] = engine.generate(input_ids=QUERY, sampling_params={"max_new_tokens": 8})[
                "output_ids"
            ]
            return output

    assert drawn(score=True) == drawn(score=False)


def test_defaults_of_the_engine_change_no_score(folder: Path) -> None:
    preferred = {"temperature": 0.2, "top_k": 1, "n": 2, "logit_bias": {5: 9.0}, "max_new_tokens": 4}
    with sgl.Engine(model_path=str(folder), device="cpu", preferred_sampling_params=preferred) as engine:
        result = engine.score(QUERY, [[7]], LABELS)
    np.testing.assert_allclose(result.scores, expected(folder, [[*QUERY, 7]], LABELS), atol=1e-4)


def test_a_result_reads_as_the_list_of_its_scores(llm: sgl.Engine) -> None:
    result = llm.score(QUERY, ITEMS, LABELS, apply_softmax=True)
    assert [list(scores) for scores in result] == result.scores
    assert (len(result), result[0], result[-1]) == (len(ITEMS), result.scores[0], result.scores[-1])


def test_an_engine_without_temperatures_scores_without_one(folder: Path) -> None:
    with sgl.Engine(model_path=str(folder), device="cpu", logprobs_ignore_temperature=True) as engine:
        wanted = expected(folder, [[*QUERY, 7]], LABELS)
        np.testing.assert_allclose(engine.score(QUERY, [[7]], LABELS).scores, wanted, atol=1e-4)
        with pytest.raises(sgl.InvalidArgument, match=r"temperature is 2\.0, but .* leave temperature at 1"):
            engine.score(QUERY, [[7]], LABELS, temperature=2.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"query": None}, "query is None; give"),
        ({"items": None}, "items is None; give"),
        ({"items": 5}, "items must be a list of texts, or of rows of token ids, got 5"),
        ({"label_token_ids": None}, "label_token_ids is None; give the ids"),
        ({"label_token_ids": []}, "label_token_ids is empty; give at least one"),
        ({"label_token_ids": "ab"}, "label_token_ids must be a list of token ids, got 'ab'"),
        (
            {"label_token_ids": [3, 300]},
            r"label_token_ids\[1\] is 300 \(int\), but the vocabulary has 300 ids",
        ),
        (
            {"query": "a"},
            r"items\[0\] must be a text, as query is, got \[7\] \(list\); tokenize both or neither",
        ),
        ({"items": [[1], "b"]}, r"items\[1\] must be a list of token ids, as query is, got 'b'"),
        ({"items": [1, 2]}, r"items\[0\] must be a list of token ids, got 1"),
        ({"items": [[1], []]}, r"items\[1\] is empty"),
        ({"items": [[1, -1]]}, r"items\[0\]\[1\] is -1 \(int\), but the vocabulary"),
        ({"query": [300]}, r"query\[0\] is 300 \(int\), but the vocabulary"),
        ({"query": "", "items": ["a", ""]}, r"items\[1\] is empty"),
        ({"query": "\ud800", "items": ["a"]}, "query has half a surrogate pair at character 0"),
        ({"items": [[1] * 250]}, r"items\[0\] has 300 tokens, but a sequence has at most 256"),
        ({"apply_softmax": 1}, "apply_softmax must be True or False"),
        ({"item_first": "yes"}, "item_first must be True or False"),
        ({"temperature": 0}, "temperature must be a finite number above 0"),
        ({"return_pooled_hidden_states": True}, "return_pooled_hidden_states is not supported"),
        ({"aply_softmax": True}, r"score\(\) has no argument 'aply_softmax'. Did you mean 'apply_softmax'"),
    ],
)
def test_what_cannot_be_scored(llm: sgl.Engine, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(sgl.InvalidArgument, match=message):
        llm.score(**{"query": QUERY, "items": ITEMS, "label_token_ids": LABELS} | arguments)
    assert llm.score(QUERY, ITEMS, LABELS, return_pooled_hidden_states=False, temperature=1).scores


def test_without_a_tokenizer_only_ids_are_scored(folder: Path) -> None:
    with sgl.Engine(model_path=str(folder), device="cpu", skip_tokenizer_init=True) as engine:
        assert len(engine.score(QUERY, ITEMS, LABELS).scores) == len(ITEMS)
        with pytest.raises(sgl.InvalidArgument, match="query is a text, but this engine has no tokenizer"):
            engine.score("a", ["b"], LABELS)


def test_an_aborted_item_is_an_error(llm: sgl.Engine) -> None:
    llm.pause_generation("in_place")
    aborting = threading.Timer(0.3, lambda: (llm.abort(abort_all=True), llm.continue_generation()))
    aborting.start()
    with pytest.raises(sgl.RequestFailed, match=r"items\[0\] was aborted") as caught:
        llm.score(QUERY, ITEMS, LABELS)
    aborting.join()
    assert (caught.value.error_type, caught.value.status_code) == ("aborted", 499)
