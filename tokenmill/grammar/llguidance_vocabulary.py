"""A tokenizer as llguidance needs it: special tokens are no text, and all others are.

The library takes every added token in angle brackets for special, `<tool_call>` as well as `<|endoftext|>`,
and lets it stand for no text. So special tokens get names that nobody writes, and other added tokens in
brackets become plain ones.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

_PRIVATE = "\U0010fffd"  # of no script
_UNLIKELY = -1e6  # a piece that no text is cut into


def rename_added_tokens(document: dict[str, Any]) -> str:
    """The tokenizer.json of such a tokenizer, with the same ids; the content given is used up."""
    model, added = document["model"], document.get("added_tokens") or []
    kept = []
    for token in sorted(added, key=lambda token: token["id"]):
        text = token["content"]
        if token.get("special"):
            token["content"] = f"<{_PRIVATE}{token['id']}>"
            kept.append(token)
        elif text.startswith("<") and text.endswith(">"):
            token["content"] = _as_piece(text, document.get("decoder") or {})
        else:
            kept.append(token)
        # With its place in the vocabulary, it has the same id whatever happens to those before it.
        _place(model, token["id"], text, token["content"])
    document["added_tokens"] = kept
    return json.dumps(document)


def _as_piece(text: str, decoder: dict[str, Any]) -> str:
    """How the vocabulary writes a text."""
    steps = decoder.get("decoders", [decoder])
    if any(step.get("type") == "ByteLevel" for step in steps):
        alphabet = ByteLevel(add_prefix_space=False, use_regex=False)
        return "".join(piece for piece, _ in alphabet.pre_tokenize_str(text))
    for step in steps:
        if step.get("type") == "Replace" and step.get("content") == " ":
            return text.replace(" ", step["pattern"].get("String", " "))
    return text


def _place(model: dict[str, Any], token_id: int, text: str, name: str) -> None:
    """Write a token into the model's vocabulary, where it may have been by its text."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        vocabulary.pop(text, None)
        vocabulary[name] = token_id
    else:
        for index in range(len(vocabulary), token_id + 1):
            vocabulary.append([f"<{_PRIVATE}unused{index}>", _UNLIKELY])
        vocabulary[token_id][0] = name
    if model.get("unk_token") == text:
        model["unk_token"] = name
