"""A byte-level tokenizer of any size, for grammars over a vocabulary as large as a public model's.

Its tokens look like those of a trained one: all bytes, then words of syllables with and without a space in
front, numbers, punctuation and runs of white space. How it would cut a text does not matter here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CONSONANTS = [
    "b",
    "c",
    "d",
    "f",
    "g",
    "h",
    "j",
    "k",
    "l",
    "m",
    "n",
    "p",
    "r",
    "s",
    "t",
    "v",
    "w",
    "z",
    "br",
    "ch",
    "st",
    "th",
    "tr",
    "sh",
]
VOWELS = ["a", "e", "i", "o", "u", "ai", "ea", "ou"]
PUNCTUATION = [
    '"',
    '":',
    '",',
    '":"',
    '","',
    "{",
    "}",
    '{"',
    '"}',
    "[",
    "]",
    "],",
    "},",
    "()",
    "//",
    "->",
    "==",
]


def tokens(seed: int = 0) -> Iterator[str]:
    """Tokens beyond the bytes, without end; some come twice."""
    rng = random.Random(seed)
    yield from PUNCTUATION
    yield from (" " * count for count in range(2, 33))
    yield from ("\n" + " " * count for count in range(17))
    yield from (str(number) for number in range(1000))
    while True:
        syllables = [rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(rng.randint(1, 4))]
        word = "".join(syllables) + rng.choice(["", "n", "s", "r", "t"])
        yield rng.choice(["", " ", " ", "_"]) + rng.choice([word, word, word.capitalize()])


def made_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of `size` tokens; the last one is the end of a text."""
    # Byte-level BPE writes bytes as printable characters: printable ones as themselves, the rest from 256 on.
    characters = dict(pairs_of_bytes())
    vocabulary = {characters[byte]: byte for byte in range(256)}
    for token in tokens():
        if len(vocabulary) == size - 1:
            break
        written = "".join(characters[byte] for byte in token.encode())
        vocabulary.setdefault(written, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def pairs_of_bytes() -> Iterator[tuple[int, str]]:
    """Each byte with the character that stands for it."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (chr(256 + index) for index in range(256))
    for byte in range(256):
        yield byte, chr(byte) if byte in printable else next(others)


def write(folder: Path, size: int) -> None:
    """The files of such a tokenizer beside a model's."""
    made_tokenizer(size).save_pretrained(folder)
