"""Trains and writes the byte-level BPE tokenizer of the tiny family, with its chat template.

Run as `python -m tools.tiny.tokenizer`; the files land in the package folder. Digits are single tokens.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import PreTokenizer

from tools.tiny.recipe import PACKAGE_FOLDER, Shape
from tools.tiny.world import END_OF_TEXT, END_OF_TURN, START_OF_TURN, document

PAD = "<|pad|>"
IMAGE = "<|image|>"
SPECIAL_TOKENS = (
    END_OF_TEXT,
    START_OF_TURN,
    END_OF_TURN,
    PAD,
    IMAGE,
    "<|video|>",
    "<|reserved_0|>",
    "<|reserved_1|>",
    "<|reserved_2|>",
    "<|reserved_3|>",
)
"""In this order they are the first ids of the vocabulary."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SHIPPED_WORDS = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
"""How Qwen2 tokenizers split text; transformers insists on it for every model of type qwen2."""
_TRAINING_WORDS = rf"{_CONTRACTIONS}| ?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
"""A finer split to learn merges from. As no merge joins a mark with the letters or the line break after it, a
prompt has the same tokens alone and followed by its answer."""

CHAT_TEMPLATE = """\
{%- macro text_of(content) -%}
{%- if content is none -%}
{%- elif content is string -%}{{ content }}
{%- else -%}
{%- for part in content -%}
{%- if part.type == 'image' or part.type == 'image_url' -%}<|image|>
{%- elif part.type == 'text' -%}{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages[0].role == 'system' -%}{{ text_of(messages[0].content) + '\\n\\n' }}{%- endif -%}
{{- 'You may call these tools:' -}}
{%- for tool in tools -%}{{ '\\n' + (tool | tojson) }}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif messages[0].role == 'system' -%}
{{- '<|im_start|>system\\n' + text_of(messages[0].content) + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if not (loop.first and message.role == 'system') -%}
{{- '<|im_start|>' + message.role + '\\n' + text_of(message.content) -}}
{%- for call in message.tool_calls or [] -%}
{{- '\\n' + ((call.function if call.function is defined else call) | tojson) -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""


def documents(count: int, seed: int) -> Iterator[str]:
    """Documents of the world without special tokens, which the BPE must not see."""
    rng = random.Random(seed)
    for _ in range(count):
        text = "".join(segment for segment, _ in document(rng))
        for token in (END_OF_TEXT, START_OF_TURN, END_OF_TURN):
            text = text.replace(token, "\n")
        yield text


def _splitter(pattern: str) -> PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def train(*, vocab_size: int, num_documents: int = 60_000, seed: int = 7) -> Tokenizer:
    """A byte-level BPE tokenizer of `vocab_size` entries, special tokens included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _splitter(_TRAINING_WORDS)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents(num_documents, seed), trainer)
    tokenizer.pre_tokenizer = _splitter(_SHIPPED_WORDS)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, *, context_length: int) -> None:
    """Write the files that transformers' AutoTokenizer reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    specials = {
        "eos_token": END_OF_TEXT,
        "pad_token": PAD,
        "additional_special_tokens": [START_OF_TURN, END_OF_TURN, IMAGE],
    }
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "model_max_length": context_length,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": None,
        "unk_token": None,
        "add_prefix_space": False,
        **specials,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    (folder / "special_tokens_map.json").write_text(json.dumps(specials, indent=2) + "\n")


def main() -> None:
    """Train on the world and write into the package, or where `--out` says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PACKAGE_FOLDER)
    arguments = parser.parse_args()
    shape = Shape()
    save(train(vocab_size=shape.vocab_size), arguments.out, context_length=shape.context_length)


if __name__ == "__main__":
    main()
