"""Text piece by piece against transformers' decoding of the whole; stop strings against a plain search."""

# ruff: noqa: RUF001 (other scripts are meant)

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.frontend.detokenizer import TextStream
from tokenmill.frontend.stops import Stops
from tokenmill.frontend.tokenizer import Tokenizer
from tokenmill.messages import Finish, Request

pytestmark = pytest.mark.cpu

KINDS = ["bytes", "byte level", "byte fallback", "word piece", "metaspace"]
LENGTH = Finish("length", length=1)
TEXTS = [
    "The fox.",
    "Hello  world, hello",
    "Grüße, où ça? señor",
    "你好，世界。日本語",
    "👩‍👩‍👧‍👦 🎉🎉 😀 👍🏽",
    "Привет Γειά مرحبا नमस्ते",
    "a\ufffdb\x00c\u200d\n\n d",
]


def in_chunks(rng: random.Random, ids: Sequence[int]) -> list[Sequence[int]]:
    chunks, start = [], 0
    while start < len(ids):
        end = start + rng.randint(1, 5)
        chunks.append(ids[start:end])
        start = end
    return chunks


def run(
    text: TextStream, chunks: Sequence[Sequence[int]], finish: Finish = LENGTH
) -> tuple[list[str], int, Finish]:
    """(pieces, number of tokens that belong to the output, why it ended)."""
    pieces, count = [], 0
    for index, chunk in enumerate(chunks):
        piece, taken, ended = text.push(chunk, finish if index == len(chunks) - 1 else None)
        pieces.append(piece)
        count += taken
        if ended is not None:
            return pieces, count, ended
    raise AssertionError("the output did not end")


def as_transformers_decodes(
    tokenizer: Tokenizer, prompt: list[int], ids: list[int], *, skip: bool
) -> tuple[str, bool]:
    """(decode(prompt + output) minus decode(prompt), whether all of it is valid Unicode)."""

    def decode(ids: list[int]) -> str:
        return tokenizer.get().decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)

    both, before = decode(prompt + ids), decode(prompt)
    same = len(os.path.commonprefix([both, before]))  # noqa: RUF071 (characters are meant)
    return both[same:], "\ufffd" not in both + before


@st.composite
def outputs(draw: st.DrawFn) -> tuple[list[float], list[float], str | None, bool, int]:
    """Places in a vocabulary for prompt and output, or a text; whether to skip special tokens; a seed."""
    places = st.floats(0, 1, exclude_max=True)
    prompt = draw(st.lists(places, min_size=1, max_size=12))
    ids = draw(st.lists(places, min_size=1, max_size=30))
    text = draw(st.one_of(st.none(), st.sampled_from(TEXTS), st.text(min_size=1, max_size=20)))
    return prompt, ids, text, draw(st.booleans()), draw(st.integers(0, 2**32))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(case=outputs())
def test_pieces_join_to_the_whole_and_to_what_transformers_decodes(
    kind: str,
    case: tuple[list[float], list[float], str | None, bool, int],
    tokenizers: dict[str, Tokenizer],
    make_request: Callable[..., Request],
) -> None:
    places, output_places, words, skip, seed = case
    tokenizer = tokenizers[kind]
    # A few more ids than the tokenizer has: models round their vocabulary up.
    prompt = [int(place * tokenizer.vocab_size) for place in places]
    if words is None or not (ids := tokenizer.encode_batch([words])[0]):
        ids = [int(place * (tokenizer.vocab_size + 5)) for place in output_places]
    request = make_request(prompt, skip_special_tokens=skip)

    pieces, count, _ = run(tokenizer.open_text(request), in_chunks(random.Random(seed), ids))
    [whole] = tokenizer.texts([(request, ids)])

    assert "".join(pieces) == whole
    assert count == len(ids)
    known = [token for token in ids if token < tokenizer.vocab_size]
    expected, valid = as_transformers_decodes(tokenizer, prompt, known, skip=skip)
    # With byte fallback, transformers turns all bytes of a word into U+FFFD when one of them is wrong.
    if valid or kind in ("bytes", "byte level"):
        assert whole == expected


@pytest.mark.parametrize("kind", ["bytes", "byte level", "byte fallback"])
@pytest.mark.parametrize("words", TEXTS)
def test_no_piece_has_half_a_character(
    kind: str, words: str, tokenizers: dict[str, Tokenizer], make_request: Callable[..., Request]
) -> None:
    tokenizer = tokenizers[kind]
    [ids] = tokenizer.encode_batch([words])
    pieces, _, _ = run(tokenizer.open_text(make_request()), [[token] for token in ids])
    assert "".join(pieces).strip() == words.strip()
    assert sum(piece.count("\ufffd") for piece in pieces) == words.count("\ufffd")
    assert len([piece for piece in pieces if piece]) > 1


@pytest.mark.parametrize("kind", ["bytes", "byte level", "byte fallback"])
@pytest.mark.parametrize("words", TEXTS)
def test_the_way_for_any_tokenizer_agrees(
    kind: str, words: str, tokenizers: dict[str, Tokenizer], make_request: Callable[..., Request]
) -> None:
    """Bytes are the fast path; the window works for these tokenizers, too."""
    tokenizer = tokenizers[kind]
    plain = Tokenizer(tokenizer.get())
    plain._pieces = {}
    prompt, ids = tokenizer.encode_batch(["The", words])
    request = make_request(prompt)
    pieces, _, _ = run(plain.open_text(request), [[token] for token in ids])
    expected = tokenizer.texts([(request, ids)])
    assert ["".join(pieces)] == expected
    assert plain.texts([(request, ids)]) == expected
    assert sum(piece.count("\ufffd") for piece in pieces) == words.count("\ufffd")


def test_an_incomplete_character_at_the_end_is_replaced(
    tokenizers: dict[str, Tokenizer], make_request: Callable[..., Request]
) -> None:
    smile = list("😀".encode())
    text = tokenizers["bytes"].open_text(make_request())
    assert text.push(smile[:3], None) == ("", 3, None)
    assert text.push((), LENGTH) == ("\ufffd", 0, LENGTH)


def test_a_character_that_begins_in_the_prompt(
    tokenizers: dict[str, Tokenizer], make_request: Callable[..., Request]
) -> None:
    smile = list("😀".encode())
    for kind in ("bytes", "byte fallback"):
        completed = tokenizers[kind].texts([(make_request([104, *smile[:2]]), [*smile[2:], 33])])
        assert completed == ["😀!"]
    broken = tokenizers["bytes"].texts([(make_request([104, *smile[:2]]), [33])])
    assert broken == ["!"]


def test_spaces_around_words(tokenizers: dict[str, Tokenizer], make_request: Callable[..., Request]) -> None:
    """A continuation keeps its leading space; without any word before it there is none."""
    tokenizer = tokenizers["byte fallback"]
    [words] = tokenizer.encode_batch(["for"])
    assert tokenizer.texts([(make_request(words), words)]) == [" for"]
    start = [tokenizer.get().bos_token_id]
    assert tokenizer.texts([(make_request(start), words)]) == ["for"]
    for count in (7, 8, 30):
        request = make_request([*words, *start * count])
        assert tokenizer.texts([(request, words)]) == [" for"]
        assert tokenizer.open_text(request).push(words, LENGTH)[0] == " for"
    bert = tokenizers["word piece"]
    vocab = bert.get().get_vocab()
    ids = [vocab[piece] for piece in ("hello", "##s", "world", ".", "[UNK]")]
    assert bert.texts([(make_request([vocab["un"]]), ids)]) == [" hellos world. [UNK]"]


def test_special_tokens(tokenizers: dict[str, Tokenizer], make_request: Callable[..., Request]) -> None:
    ids = [65, 258, 256, 66]
    assert tokenizers["bytes"].texts([(make_request(), ids)]) == ["AB"]
    assert tokenizers["bytes"].texts([(make_request(skip_special_tokens=False), ids)]) == ["A<pad><s>B"]


def test_spaces_between_special_tokens(
    tokenizers: dict[str, Tokenizer], make_request: Callable[..., Request]
) -> None:
    bert = tokenizers["word piece"]
    vocab = bert.get().get_vocab()
    ids = [vocab[piece] for piece in ("hello", "<s>", "</s>", "<pad>", "world")]
    for spaces, expected in [(True, " hello <s> </s> <pad> world"), (False, " hello <s></s><pad> world")]:
        request = make_request([vocab["un"]], skip_special_tokens=False, spaces_between_special_tokens=spaces)
        assert bert.texts([(request, ids)]) == [expected]
        pieces, _, _ = run(bert.open_text(request), [[token] for token in ids])
        assert "".join(pieces) == expected


def test_the_stop_token_is_left_out_of_the_text(
    tokenizers: dict[str, Tokenizer], make_request: Callable[..., Request]
) -> None:
    stop = Finish("stop", matched=66)
    for keep, expected in [(False, "A"), (True, "AB")]:
        text = tokenizers["bytes"].open_text(make_request(no_stop_trim=keep))
        assert text.push([65, 66], stop) == (expected, 2, stop)


# ── stop strings ──────────────────────────────────────────────────────────────────────────────


def search(tokens: Sequence[str], stops: Sequence[str], *, keep: bool) -> tuple[str, int, str | None]:
    """The plain way: after each token look through the whole text."""
    for count in range(1, len(tokens) + 1):
        text = "".join(tokens[:count])
        found = sorted((text.find(stop), -len(stop), stop) for stop in stops if stop in text)
        if found:
            place, _, stop = found[0]
            return text[: place + (len(stop) if keep else 0)], count, stop
    return "".join(tokens), len(tokens), None


@settings(max_examples=250, deadline=None)
@given(
    words=st.text("abAé😀", min_size=1, max_size=40),
    stops=st.lists(st.text("abAé😀", min_size=1, max_size=5), min_size=1, max_size=4),
    keep=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_stop_strings_against_a_plain_search(
    words: str,
    stops: list[str],
    keep: bool,
    seed: int,
    tokenizers: dict[str, Tokenizer],
    make_request: Callable[..., Request],
) -> None:
    """Tokens are bytes here, so characters and stop strings lie across tokens; chunks change nothing."""
    ids = list(words.encode())
    tokens = ["" for _ in ids]
    end = -1
    for character in words:  # a character's last byte brings it
        end += len(character.encode())
        tokens[end] = character
    expected_text, expected_count, expected_stop = search(tokens, stops, keep=keep)

    request = make_request(stop=stops, no_stop_trim=keep)
    text = tokenizers["bytes"].open_text(request)
    pieces, count, finish = run(text, in_chunks(random.Random(seed), ids))

    assert "".join(pieces) == expected_text
    assert count == expected_count
    assert finish == (LENGTH if expected_stop is None else Finish("stop", matched=expected_stop))


def test_the_start_of_a_stop_string_is_held_back_and_released() -> None:
    stops = Stops(["<end>", "nd"], keep=False)
    assert [stops.push(part) for part in ("a <", "e", "x", " <en")] == ["a ", "", "<ex", " "]
    assert stops.release() == "<en"
    assert stops.matched is None


@pytest.mark.parametrize(
    ("stops", "expected", "matched"),
    [
        (["world", "lo"], "hel", "lo"),  # the earliest in the text, not in the list
        (["lo", "lo w"], "hel", "lo w"),  # the longest of those that start together
    ],
)
def test_which_stop_string_wins(stops: list[str], expected: str, matched: str) -> None:
    watch = Stops(stops, keep=False)
    assert watch.push("hello world") == expected
    assert watch.matched == matched


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_stop_string_wins_over_a_later_stop_token(
    size: int, tokenizers: dict[str, Tokenizer], make_request: Callable[..., Request]
) -> None:
    """Whether both come in one chunk or not."""
    ids = [*b"one. two", 257]
    text = tokenizers["bytes"].open_text(make_request(stop="."))
    chunks = [ids[start : start + size] for start in range(0, len(ids), size)]
    pieces, count, finish = run(text, chunks, Finish("stop", matched=257))
    assert ("".join(pieces), count, finish) == ("one", 4, Finish("stop", matched="."))


def test_a_stop_string_that_spells_a_special_token(
    tokenizers: dict[str, Tokenizer], make_request: Callable[..., Request]
) -> None:
    """It ends the output although the text leaves special tokens out."""
    ids = [65, 66, 258, 67]
    stop = Finish("stop", matched="<pad>")
    for skip, keep, expected in [(True, False, "AB"), (True, True, "AB"), (False, True, "AB<pad>")]:
        request = make_request(stop="<pad>", skip_special_tokens=skip, no_stop_trim=keep)
        assert tokenizers["bytes"].open_text(request).push(ids, None) == (expected, 3, stop)


@pytest.mark.parametrize("stop", [{"stop": "b\ufffd"}, {"stop_regex": "b\ufffd"}], ids=str)
def test_a_stop_that_half_a_character_completes(
    stop: dict[str, Any], tokenizers: dict[str, Tokenizer], make_request: Callable[..., Request]
) -> None:
    """The output ends inside a character, which becomes U+FFFD. An abort stays an abort."""
    ids = [*b"ab\xe4\xbd"]
    for keep, expected in [(False, "a"), (True, "ab\ufffd")]:
        text = tokenizers["bytes"].open_text(make_request(no_stop_trim=keep, **stop))
        pieces, count, finish = run(text, [[token] for token in ids])
        assert ("".join(pieces), count, finish) == (expected, 4, Finish("stop", matched="b\ufffd"))
    timeout = Finish("abort", status_code=408, error_type="timeout")
    text = tokenizers["bytes"].open_text(make_request(**stop))
    assert text.push(ids, timeout) == ("ab\ufffd", 4, timeout)


def test_a_long_stop_string_costs_little() -> None:
    """A hostile one: the text looks like its start all the time."""
    watch = Stops(["a" * 5000 + "b"], keep=False)
    released = sum(len(watch.push("a" * 10)) for _ in range(2000))
    assert released == 20_000 - 5000
    assert len(watch.release()) == 5000


def test_nothing_is_decoded_twice(tokenizers: dict[str, Tokenizer], make_request: Any) -> None:
    """The window of a tokenizer without bytes stays short however long the text gets."""
    tokenizer = tokenizers["metaspace"]
    request = make_request(tokenizer.encode_batch(["the cat"])[0])
    lengths: list[int] = []
    original = tokenizer._decode

    def counting(token_ids: Sequence[int], *, skip: bool) -> str:
        lengths.append(len(token_ids))
        return original(token_ids, skip=skip)

    tokenizer._decode = counting  # type: ignore[method-assign]
    try:
        run(tokenizer.open_text(request), [[3]] * 500)
    finally:
        del tokenizer._decode
    assert len(lengths) < 1100
    assert max(lengths) < 12
