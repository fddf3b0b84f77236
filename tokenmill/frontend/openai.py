"""OpenAI's bodies: a request's body to items of the engine, and results back to the body of an answer.

Owns the names, defaults and shapes of `/v1/chat/completions` and `/v1/completions`. Files and HTTP around the
bodies belong to others, and so do the values of parameters that both sides share. Pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenmill.errors import InvalidArgument, RowError, UnknownArgument, WrongType, did_you_mean
from tokenmill.frontend.detokenizer import REPLACEMENT
from tokenmill.logit_processors import check_registered
from tokenmill.sampling_params import check_flag, check_whole, show

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
# Their answers carry no date: the same request has the same answer, byte for byte, whenever it runs.
CREATED = 0

_DEFAULT_COMPLETION_TOKENS = 16
_MOST_PROMPTS = 65_536
# Sampling parameters under the same name on both sides, with those of ours that OpenAI has not.
_SAME = {
    *("temperature", "top_p", "n", "stop", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("top_k", "min_p", "repetition_penalty", "regex", "ebnf", "json_schema", "structural_tag"),
    *("ignore_eos", "stop_token_ids", "stop_regex", "no_stop_trim", "skip_special_tokens"),
    *("spaces_between_special_tokens", "penalize_prompt", "custom_params"),
}
_RENAMED = {
    "seed": "sampling_seed",
    "min_tokens": "min_new_tokens",
    "include_stop_str_in_output": "no_stop_trim",
}
# Keywords of `generate` and `chat` that a body may hold as they are.
_OPTIONS = {"priority", "custom_logit_processor", "cache_salt", "timeout"}
_CHAT_OPTIONS = {"chat_template_kwargs", "add_generation_prompt", "continue_final_message"}
# About the caller, the bill, or where it runs: nothing that an answer depends on.
_WITHOUT_EFFECT = {
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "prediction"),
}
# What OpenAI's API has and we cannot do, with the values that ask for nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "stream_options": (),
    "functions": ([],),
    "function_call": ("none",),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "moderation": (),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "chat_template": (),
}
_REMEDIES = {
    "stream": "results of a batch come at once; leave it out",
    "functions": "give them as tools",
    "function_call": "give tool_choice",
    "best_of": "give n to get all samples",
    # A template is a program: one that never ends would hold up all other bodies.
    "chat_template": "give it to the engine, for all",
}
_FOR_CHAT = {
    *("messages", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "response_format"),
    *("tools", "tool_choice", "reasoning_effort"),
}
_FOR_COMPLETIONS = {"prompt", "max_tokens", "logprobs", "response_format"}


# ── requests ──────────────────────────────────────────────────────────────────────────────────


def read_chat(body: Any, *, defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The item of a body of `/v1/chat/completions`; `defaults` are sampling parameters it may override.

    Raises `InvalidArgument` for what no answer can honour, and `UnknownArgument` for names nobody knows.
    """
    given = _read_names(body, _FOR_CHAT | _CHAT_OPTIONS)
    if "messages" not in given:
        raise InvalidArgument("body has no messages; give a list of them")
    params = {"max_new_tokens": None, **(defaults or {}), **_params(given)}
    limits = {name for name in ("max_tokens", "max_completion_tokens") if name in given}
    if len({given[name] for name in limits if type(given[name]) is int}) > 1:
        raise InvalidArgument("max_tokens and max_completion_tokens differ; give one of them")
    for name in limits:
        params["max_new_tokens"] = check_whole(name, given[name], minimum=0)
    item = {"messages": _messages(given["messages"]), "sampling_params": params, **_options(given)}
    item |= {name: given[name] for name in _CHAT_OPTIONS if name in given}
    item |= _tools(given)
    if "reasoning_effort" in given:  # the models that know it are told by a variable of their template
        variables = given.get("chat_template_kwargs") or {}
        if not isinstance(variables, Mapping):
            raise WrongType(f"chat_template_kwargs must be an object, got {show(variables)}")
        item["chat_template_kwargs"] = {"reasoning_effort": given["reasoning_effort"], **variables}
    num_top = check_whole("top_logprobs", given.get("top_logprobs", 0), minimum=0)
    if check_flag("logprobs", given.get("logprobs", False)):
        return item | _logprobs(num_top)
    if "top_logprobs" in given:
        raise InvalidArgument(f"top_logprobs is {num_top}, but logprobs is not true; set it, too")
    return item


def read_completions(body: Any, *, defaults: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """The items of a body of `/v1/completions`, one for each of its prompts; see `read_chat`."""
    given = _read_names(body, _FOR_COMPLETIONS)
    if "prompt" not in given:
        raise InvalidArgument("body has no prompt; give a text or token ids")
    params = {"max_new_tokens": _DEFAULT_COMPLETION_TOKENS, **(defaults or {}), **_params(given)}
    if "max_tokens" in given:
        params["max_new_tokens"] = check_whole("max_tokens", given["max_tokens"], minimum=0)
    item: dict[str, Any] = {"sampling_params": params, **_options(given)}
    if "logprobs" in given:
        item |= _logprobs(check_whole("logprobs", given["logprobs"], minimum=0))
    return [{**prompt, **item} for prompt in read_prompts(given["prompt"])]


def _read_names(body: Any, own: set[str]) -> dict[str, Any]:
    """What a body asks for, without nulls; raises for names that are unknown or cannot be honoured."""
    if not isinstance(body, Mapping):
        raise WrongType(f"body must be a JSON object, got {show(body)}")
    known = own | _SAME | _RENAMED.keys() | _OPTIONS | _WITHOUT_EFFECT
    given = {}
    for name, value in body.items():
        if value is None or name in _WITHOUT_EFFECT:
            continue
        if name in _REFUSED:
            # Equal is not enough: 1 == True.
            if not any(type(value) is type(off) and value == off for off in _REFUSED[name]):
                remedy = _REMEDIES.get(name, "leave it out")
                raise InvalidArgument(f"{name} is not supported, got {show(value)}; {remedy}")
        elif name in known:
            given[name] = value
        else:
            raise UnknownArgument(
                f"body has no parameter {name!r}.{did_you_mean(str(name), sorted(known | _REFUSED.keys()))}"
            )
    return given


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of `generate`. A processor's text is a program, which a body is not trusted with."""
    if "custom_logit_processor" in given:
        check_registered("custom_logit_processor", given["custom_logit_processor"])
    return {name: given[name] for name in _OPTIONS if name in given}


def _params(given: Mapping[str, Any]) -> dict[str, Any]:
    params = {name: value for name, value in given.items() if name in _SAME}
    renamed = {theirs: (ours, given[theirs]) for theirs, ours in _RENAMED.items() if theirs in given}
    if "response_format" in given:
        schema = _schema(given["response_format"])
        if schema is not None:
            renamed["response_format"] = ("json_schema", schema)
    for theirs, (ours, value) in renamed.items():
        if ours in params:
            raise InvalidArgument(f"{theirs} and {ours} say the same thing; give one of them")
        params[ours] = value
    return params


def _schema(value: Any) -> Any:
    """The JSON schema that a `response_format` asks for; None: any text."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    match kind:
        case "text":
            return None
        case "json_object":
            return {"type": "object"}
        case "json_schema":
            inner = value.get("json_schema")
            schema = inner.get("schema") if isinstance(inner, Mapping) else None
            if isinstance(schema, Mapping | bool):
                return schema
            raise WrongType(
                f"response_format.json_schema must be an object with schema, a JSON schema, got {show(inner)}"
            )
    raise InvalidArgument(
        f"response_format must have a type text, json_object or json_schema, got {show(value)}"
    )


def _messages(value: Any) -> Any:
    """Messages under the roles that chat templates know: a developer is what used to be the system."""
    if not isinstance(value, list):
        raise WrongType(f"messages must be a list, got {show(value)}")
    for place, message in enumerate(value):
        if not isinstance(message, Mapping):
            raise WrongType(f"messages[{place}] must be an object, got {show(message)}")
    return [
        {**message, "role": "system"} if message.get("role") == "developer" else message for message in value
    ]


def _tools(given: Mapping[str, Any]) -> dict[str, Any]:
    choice = given.get("tool_choice", "auto")
    if choice not in ("none", "auto"):
        raise InvalidArgument(f"tool_choice must be 'none' or 'auto', got {show(choice)}; leave it out")
    if "tools" in given and not isinstance(given["tools"], list):
        raise WrongType(f"tools must be a list of functions, got {show(given['tools'])}")
    return {"tools": given["tools"]} if given.get("tools") else {}


def _logprobs(num_top: int) -> dict[str, Any]:
    return {"return_logprob": True, "top_logprobs_num": num_top, "return_text_in_logprobs": True}


def read_prompts(value: Any) -> list[dict[str, Any]]:
    """The prompts of a body: a text, a list of texts, token ids, or a list of lists of them.

    Raises `InvalidArgument` for anything else, also where the items of a list differ.
    """
    if isinstance(value, str):
        return [{"prompt": value}]
    if isinstance(value, list) and value:
        kinds = set(map(type, value))
        if kinds == {int}:
            return [{"input_ids": value}]
        if len(value) > _MOST_PROMPTS:
            raise InvalidArgument(f"prompt has {len(value)} prompts; at most {_MOST_PROMPTS} are allowed")
        if kinds == {str}:
            return [{"prompt": text} for text in value]
        if kinds == {list} and all({*map(type, ids)} == {int} for ids in value):
            return [{"input_ids": ids} for ids in value]
    raise WrongType(
        f"prompt must be a text, a list of texts, token ids, or a list of lists of them, got {show(value)}"
    )


# ── answers ───────────────────────────────────────────────────────────────────────────────────


def chat_completion(results: Sequence[Mapping[str, Any]], *, id: str, model: str) -> dict[str, Any]:
    """The answer to a chat request: a choice for each result, none of which has failed."""
    return {
        "id": f"chatcmpl-{id}",
        "object": "chat.completion",
        "created": CREATED,
        "model": model,
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": result["text"], "refusal": None},
                "logprobs": _shown_logprobs(result, _chat_logprobs),
                "finish_reason": _finish_reason(result),
            }
            for index, result in enumerate(results)
        ],
        "usage": _usage(results, num_prompts=1),
    }


def text_completion(
    results: Sequence[Mapping[str, Any]], *, id: str, model: str, num_prompts: int = 1
) -> dict[str, Any]:
    """The answer to a completions request; `results` stand prompt by prompt, none of them has failed."""
    return {
        "id": f"cmpl-{id}",
        "object": "text_completion",
        "created": CREATED,
        "model": model,
        "choices": [
            {
                "text": result["text"],
                "index": index,
                "logprobs": _shown_logprobs(result, _completion_logprobs),
                "finish_reason": _finish_reason(result),
            }
            for index, result in enumerate(results)
        ],
        "usage": _usage(results, num_prompts=num_prompts),
    }


def error_body(error: RowError) -> dict[str, Any]:
    """The body of an answer that is an error."""
    kind = "invalid_request_error" if 400 <= error["status_code"] < 500 else "server_error"
    return {"error": {"message": error["message"], "type": kind, "param": None, "code": error["type"]}}


def _finish_reason(result: Mapping[str, Any]) -> str:
    """ "stop" or "length": the API knows no outputs that were cut because they go round in circles."""
    kind: str = result["meta_info"]["finish_reason"]["type"]
    return "length" if kind == "repetition" else kind


def _usage(results: Sequence[Mapping[str, Any]], *, num_prompts: int) -> dict[str, int]:
    """Tokens of each prompt, once, and of all outputs.

    Not how many prompt tokens were cached: that depends on what ran before, and answers must not.
    """
    facts = [result["meta_info"] for result in results]
    num_samples = max(1, len(results) // num_prompts)
    num_prompt = sum(each["prompt_tokens"] for each in facts[::num_samples])
    num_output = sum(each["completion_tokens"] for each in facts)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
    }


# ── log-probabilities ─────────────────────────────────────────────────────────────────────────

_Entry = Sequence[Any]  # log-probability, token id, text
# A token that is shown, the likeliest in its place, and where in the text it begins.
_Shown = tuple[_Entry, Sequence[_Entry], int]


def _shown_logprobs(
    result: Mapping[str, Any], shape: Callable[[list[_Shown]], dict[str, Any]]
) -> dict[str, Any] | None:
    """The log-probabilities of a result's text in one of OpenAI's shapes; None if nobody asked for them."""
    facts = result["meta_info"]
    tokens = facts.get("output_token_logprobs")
    if tokens is None:
        return None
    tokens = tokens[: facts["completion_tokens"]]  # one was drawn although none was wanted
    text, matched = result["text"], facts["finish_reason"].get("matched")
    spans = _spans(text, [own for _, _, own in tokens], is_cut=isinstance(matched, str))
    # The token that ended the text is part of it only if the request wants that, and what a stop string cut
    # off is not.
    count = len(tokens)
    if type(matched) is int:
        begin, end = spans[-1]
        count -= not begin < end == len(text)
    elif isinstance(matched, str):
        count = sum(begin < len(text) for begin, _ in spans)
    tops = facts.get("output_top_logprobs") or [()] * len(tokens)
    begins = (begin for begin, _ in spans[:count])
    return shape(list(zip(tokens[:count], tops[:count], begins, strict=True)))


def _spans(text: str, texts: Sequence[str], *, is_cut: bool) -> list[tuple[int, int]]:
    """Where each token of an output begins and ends in its text, which may have been cut.

    What a token adds may differ from its own text: words of SentencePiece get a space before them, a part of
    a character adds nothing before the others are there, special tokens may be left out. What has no text of
    its own there begins and ends where the token before it ends; the next ones are looked for behind it.
    """
    spans: list[tuple[int, int]] = []
    place, room = 0, 0  # the end of what was found, and how far behind it the next token may begin
    for own in texts:
        begin, found, whole = place, place, own
        if not _goes_on(text, own, place, is_cut):
            whole = own.strip(REPLACEMENT)
            last = place + (room or text.startswith(" ", place))
            found = next((at for at in range(place, last + 1) if _goes_on(text, whole, at, is_cut)), -1)
        if found < 0:
            room += len(own) + 1
        else:
            begin = found if room else place
            place = min(found + len(whole), len(text))
            room = own.count(REPLACEMENT) if whole != own else 0
        spans.append((begin, place))
    return spans


def _goes_on(text: str, own: str, place: int, is_cut: bool) -> bool:
    """Whether a text goes on with a token's own one, or, if it was cut, ends within it."""
    rest = text[place : place + len(own)]
    is_whole = len(rest) == len(own) or (is_cut and place + len(rest) == len(text))
    return bool(rest) and is_whole and own.startswith(rest)


def _chat_logprobs(shown: list[_Shown]) -> dict[str, Any]:
    return {
        "content": [
            {**_chat_entry(token), "top_logprobs": [_chat_entry(each) for each in top]}
            for token, top, _ in shown
        ],
        "refusal": None,
    }


def _chat_entry(entry: _Entry) -> dict[str, Any]:
    logprob, _, text = entry
    # Half a character has no text of its own, and its bytes cannot be told from the replacement.
    raw = None if "\ufffd" in text else list(text.encode(errors="surrogatepass"))
    return {"token": text, "logprob": logprob, "bytes": raw}


def _completion_logprobs(shown: list[_Shown]) -> dict[str, Any]:
    """Offsets count from the beginning of the output."""
    return {
        "tokens": [text for (_, _, text), _, _ in shown],
        "token_logprobs": [logprob for (logprob, _, _), _, _ in shown],
        "top_logprobs": [_by_text([*top, token]) for token, top, _ in shown]
        if any(top for _, top, _ in shown)
        else None,
        "text_offset": [begin for _, _, begin in shown],
    }


def _by_text(entries: Sequence[_Entry]) -> dict[str, float]:
    """Likeliest first; of several tokens with one text, the likeliest stands for it."""
    shown: dict[str, float] = {}
    for logprob, _, text in entries:
        shown.setdefault(text, logprob)
    return shown
