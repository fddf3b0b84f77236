"""What the engine is asked for a record: by column, by template, as a chat, with parameters of its own."""

from __future__ import annotations

import datetime
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.batch.input_record import Record, bad_parameters
from tokenmill.batch.rows import ColumnRows, RowForm
from tokenmill.errors import InvalidArgument

pytestmark = pytest.mark.unit

HELLO = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True)
class FakeSource:
    """A source of which nobody reads a row."""

    format: str = "jsonl"
    columns: tuple[str, ...] | None = None
    num_rows: int | None = None

    def __iter__(self) -> Any:
        raise AssertionError

    def fingerprint(self) -> str:
        raise AssertionError


def item(fields: dict[str, Any], *, source: FakeSource | None = None, **form: Any) -> dict[str, Any]:
    """The item of a row that has one."""
    made = ColumnRows(RowForm(**form), source or FakeSource()).item(Record(0, 1, fields, None))
    assert "status_code" not in made, made
    return dict(made)


def fault(fields: dict[str, Any], **form: Any) -> str:
    """The message of a row that cannot be asked."""
    made = ColumnRows(RowForm(**form), FakeSource()).item(Record(6, 9, fields, None))
    assert (made["type"], made["status_code"]) == ("bad_parameters", 400)
    assert made["message"].startswith("line 9: ")
    return str(made["message"])


# ── the prompt ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"prompt": "Hello", "messages": HELLO, "text": "x"}, {"prompt": "Hello"}),
        ({"prompt": None, "messages": HELLO, "input_ids": [1]}, {"messages": HELLO}),
        ({"input_ids": [1, 2], "text": "x"}, {"input_ids": [1, 2]}),
        ({"id": 7, "text": "x"}, {"prompt": "x"}),
        ({"prompt": HELLO}, {"messages": HELLO}),
        ({"prompt": [5, 6]}, {"input_ids": [5, 6]}),
        ({"messages": json.dumps(HELLO)}, {"messages": HELLO}),
        ({"input_ids": "[5, 6]"}, {"input_ids": [5, 6]}),
        ({"prompt": "[5, 6]"}, {"prompt": "[5, 6]"}),
        ({"prompt": ""}, {"prompt": ""}),
        ({"prompt": "", "messages": json.dumps(HELLO)}, {"messages": HELLO}),  # as CSV leaves one out
    ],
)
def test_the_first_of_the_usual_columns_is_the_prompt(
    fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert item(fields) == expected


def test_a_column_is_named() -> None:
    assert item({"prompt": "a", "question": "b"}, prompt_column="question") == {"prompt": "b"}
    assert item({"chat": json.dumps(HELLO)}, messages_column="chat") == {"messages": HELLO}
    assert item({"input_ids": "[5, 6]"}, prompt_column="input_ids") == {"input_ids": [5, 6]}
    assert item({"messages": json.dumps(HELLO)}, prompt_column="messages") == {"messages": HELLO}
    assert "there is no column ''" in fault({"prompt": "a"}, prompt_column="")


@pytest.mark.parametrize(
    ("fields", "form", "told"),
    [
        (
            {"question": "b"},
            {"prompt_column": "questoin"},
            "no column 'questoin', only 'question'. Did you mean",
        ),
        ({"question": "b"}, {}, "none of the columns prompt, messages, input_ids, text holds anything"),
        ({}, {}, "only no columns at all are there"),
        ({"prompt": 5}, {}, "prompt must be a text, a list of token ids or a list of messages, got 5 (int)"),
        ({"prompt": [1, "a"]}, {}, "prompt must be a text, a list of token ids or a list"),
        ({"prompt": [True]}, {}, "prompt must be a text"),
        ({"prompt": []}, {}, "got [] (list)"),
        ({"a": None}, {"prompt_column": "a"}, "a must be a text"),
        ({"messages": "Hello"}, {}, "messages: no valid JSON"),
        ({"prompt": [1]}, {"as_chat": True}, "token ids, which cannot be put into a chat"),
        ({"prompt": "a", "sampling_params": "{"}, {}, "sampling_params: no valid JSON"),
        ({"prompt": "a", "sampling_params": [1]}, {}, "sampling_params must be a dict"),
        ({"prompt": "a"}, {"params_column": "p"}, "no column 'p'"),
        ({"messages": HELLO, "tools": "{}"}, {}, "tools must be a list"),
        ({"messages": HELLO}, {"tools_column": "functions"}, "no column 'functions'"),
        (
            {"prompt": "a", "tools": [{"a": 1}]},
            {"tools_column": "tools"},
            "tools holds tools, which only a chat can use; give messages, or as_chat",
        ),
    ],
)
def test_a_row_that_cannot_be_asked_says_why(fields: dict[str, Any], form: dict[str, Any], told: str) -> None:
    assert told in fault(fields, **form)


def test_the_error_of_a_bad_line_goes_through() -> None:
    error = bad_parameters("line 3: no valid JSON")
    assert ColumnRows(RowForm(), FakeSource()).item(Record(2, 3, None, error)) == error


@pytest.mark.parametrize(
    ("form", "told"),
    [
        (
            {"prompt_column": "questoin"},
            "no column 'questoin', only 'question', 'answer'. Did you mean 'question'",
        ),
        ({"params_column": "params"}, "no column 'params'"),
        ({"tools_column": "tools"}, "no column 'tools'"),
        ({}, "there is no prompt"),
        ({"template": "{{ question }} {{ anwser }}"}, "no column 'anwser'.* Did you mean 'answer'"),
    ],
)
def test_columns_that_no_row_has_are_told_at_once(form: dict[str, Any], told: str) -> None:
    source = FakeSource("csv", ("question", "answer"))
    with pytest.raises(InvalidArgument, match=told):
        ColumnRows(RowForm(**form), source)


def test_two_ways_to_the_prompt_contradict_each_other() -> None:
    with pytest.raises(InvalidArgument, match="prompt_column and template are given together"):
        ColumnRows(RowForm(prompt_column="a", template="{{ a }}"), FakeSource())


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    )
)
def test_any_value_at_all_makes_an_item_or_an_error(value: Any) -> None:
    maker = ColumnRows(RowForm(system="Be brief."), FakeSource())
    made = maker.item(Record(0, 1, {"prompt": value, "tools": value, "sampling_params": value}, None))
    assert ("messages" in made) != (made.get("type") == "bad_parameters")


# ── chats ─────────────────────────────────────────────────────────────────────────────────────


def test_texts_become_chats() -> None:
    assert item({"prompt": "Hello"}, as_chat=True) == {"messages": HELLO}
    system = {"role": "system", "content": "Be brief."}
    assert item({"prompt": "Hello"}, system="Be brief.") == {"messages": [system, *HELLO]}
    assert item({"messages": HELLO}, system="Be brief.") == {"messages": [system, *HELLO]}
    own = [{"role": "system", "content": "Be long."}, *HELLO]
    assert item({"messages": own}, system="Be brief.") == {"messages": own}


def test_tools_go_with_messages() -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    expected = {"messages": HELLO, "tools": tools}
    assert item({"messages": HELLO, "tools": tools}) == expected
    assert item({"messages": HELLO, "tools": json.dumps(tools)}) == expected
    assert item({"prompt": "Hello", "tools": tools}) == {"prompt": "Hello"}
    assert item({"messages": HELLO, "tools": None}) == {"messages": HELLO}


def test_null_in_columns_of_one_type_says_that_a_row_has_no_such_key() -> None:
    message = {"role": "user", "content": "Hello", "name": None, "tool_calls": None}
    params = {"temperature": 0.5, "max_new_tokens": None}
    fields = {"messages": [message], "sampling_params": params}
    parquet = FakeSource("parquet", ("messages", "sampling_params"))
    assert item(fields, source=parquet) == {"messages": HELLO, "sampling_params": {"temperature": 0.5}}
    assert item(fields) == fields


def test_null_says_so_at_every_depth_but_not_in_lists() -> None:
    """A struct of a table has the fields of all rows."""
    city, zone = {"type": "string"}, None
    fields = {
        "messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": {"a": 1, "b": None}}}]}],
        "tools": [{"function": {"name": "f", "parameters": {"properties": {"city": city, "zone": zone}}}}],
        "sampling_params": {"json_schema": {"properties": {"x": None}, "enum": [1, None]}},
    }
    assert item(fields, source=FakeSource("parquet", tuple(fields))) == {
        "messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": {"a": 1}}}]}],
        "tools": [{"function": {"name": "f", "parameters": {"properties": {"city": city}}}}],
        "sampling_params": {"json_schema": {"properties": {}, "enum": [1, None]}},
    }
    assert item(fields) == fields


# ── parameters ────────────────────────────────────────────────────────────────────────────────


def test_parameters_of_a_row_may_be_json() -> None:
    expected = {"max_new_tokens": 2}
    assert item({"prompt": "a", "sampling_params": expected})["sampling_params"] == expected
    assert item({"prompt": "a", "sampling_params": '{"max_new_tokens": 2}'})["sampling_params"] == expected
    assert item({"prompt": "a", "sampling_params": ""}) == {"prompt": "a"}
    renamed = {"prompt": "a", "knobs": {"top_k": 3}}
    assert item(renamed, params_column="knobs")["sampling_params"] == {"top_k": 3}


# ── templates ─────────────────────────────────────────────────────────────────────────────────


def rendered(template: str, fields: dict[str, Any]) -> str:
    return str(item(fields, template=template)["prompt"])


def test_a_template_makes_one_text_of_columns(tmp_path: Path) -> None:
    fields = {"name": "Ada", "tags": ["a<b", "ü"], "my column": 3}
    assert rendered("{{ name }}: {{ tags | join(' & ') }}", fields) == "Ada: a<b & ü"
    assert rendered('{{ row["my column"] }}{{ tags | tojson }}', fields) == '3["a<b", "ü"]'
    assert rendered("{{ nick | default(name) }}{% if age is defined %}!{% endif %}", fields) == "Ada"
    (tmp_path / "template.jinja").write_text("Hello {{ name }}\n")
    assert rendered(str(tmp_path / "template.jinja"), fields) == "Hello Ada"
    assert item(fields, template="{{ name }}", as_chat=True)["messages"][0]["content"] == "Ada"


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ nam }}", "needs what the row has not: 'nam' is undefined. Did you mean 'name'?"),
        ("{{ name.first.second }}", "needs what the row has not"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ name.__class__.__mro__ }}", "SecurityError: access to attribute '__class__'"),
        ("{% for i in range(10**9) %}{{ i }}{% endfor %}", "Range too big"),
        ("{{ tags.append(1) }}", "SecurityError: access to attribute 'append'"),
        # Their text would be another one in each run.
        (
            "{{ counts.items }}",
            "it writes 'items', which is no data but a part of a program; a column of such a",
        ),
        ("{{ name.title }}", "'title', which is no data"),
        ("{{ tags | map('upper') }}", "'sync_do_map', which is no data"),
        ("{{ joiner() }}", "'Joiner', which is no data"),
        ("{{ range }}", "'safe_range', which is no data"),
        ("{{ counts.items | tojson }}", "'items', which is no data"),
        ("{{ tags | map('upper') | tojson }}", "which is no data"),
        ("{{ [counts.items] }}", "'items', which is no data"),
        ("{{ counts.items ~ '' }}", "'items', which is no data"),
        ("{{ counts.items | upper }}", "'items', which is no data"),
        ("{{ '{}'.format(counts.items) }}", "'items', which is no data"),
        ("{{ '{0.__class__}'.format(name) }}", "SecurityError"),
        ("{{ self }}", "'TemplateReference', which is no data"),
        # What is not there has no text, whoever writes it.
        ("{{ nobody | pprint }}", "'nobody' is undefined"),
        ("{{ counts.get('x') }}", "it writes a null, which has no text"),
    ],
)
def test_what_a_template_cannot_do_is_the_error_of_a_row(template: str, told: str) -> None:
    assert told in fault({"name": "Ada", "tags": ["a"], "counts": {"items": 3}}, template=template)


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ name }", "the template is faulty in line 1"),
        ("a\n{% if name %}", "the template is faulty in line 2"),
        ("{{ name | nothing }}", "the template is faulty"),
        ("{% include 'other' %}{{ name }}", "the template has {% include %}, but there are no others"),
        ("{% from 'other' import x %}{{ name }}", "{% from %}"),
        ("{{ name | random }}", "No filter named 'random'"),  # each time another prompt
        ("{% if name %}" * 120 + "{% endif %}" * 120, "the template is nested too deeply"),
        ("{% for i in name %}" * 25 + "{% endfor %}" * 25, "the template is nested too deeply"),
        ("{{ " + "(" * 150 + "name" + ")" * 150 + " }}", "the template is nested too deeply"),
        ("no-such-file.jinja", "the path of one, got 'no-such-file.jinja'.*No such file"),
    ],
)
def test_a_faulty_template_is_told_at_once(template: str, told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        ColumnRows(RowForm(template=template), FakeSource())


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("In {{ country }}", "the template needs what the row has not: 'country' is null"),
        ("{{ 'In ' ~ country }}", "'country' is null"),
        ("{{ country | upper }}", "'country' is null"),
        ("{{ country | pprint }}", "'country' is null"),
        ("{{ row['country'] }}", "'country' is null"),
        ("{{ meta.author }}", "'author' is null"),
        ("{% for tag in tags %}{{ tag }}{% endfor %}", "it writes a null, which has no text"),
    ],
)
def test_a_null_has_no_text(template: str, told: str) -> None:
    """It was the word None, in the midst of the prompt."""
    message = fault({"country": None, "meta": {"author": None}, "tags": [None]}, template=template)
    assert told in message
    assert "Did you mean" not in message


def test_a_template_may_ask_for_a_null() -> None:
    fields = {"country": None, "meta": {"author": None}}
    for template, text in (
        ("{{ country | default('?') }}{{ meta.author | default('-') }}", "?-"),
        ("{% if country is defined %}a{% elif country is none %}b{% endif %}", "b"),
        ("{{ 'a' if country else 'b' }}{{ country or 'c' }}", "bc"),
        ("{{ country == none }}{{ country != 'France' }}{{ country in ['France'] }}", "TrueTrueFalse"),
        ("{{ country | tojson }}{{ meta | tojson }}", 'null{"author": null}'),
        ("{{ {'in': [country]} | tojson }}", '{"in": [null]}'),
    ):
        assert rendered(template, fields) == text


def test_methods_of_data_can_be_called() -> None:
    fields = {"name": "Ada", "counts": {"a": 1, "b": 2}, "rows": [{"g": 1, "x": "p"}, {"g": 1, "x": "q"}]}
    for template, text in (
        ("{% for k, v in counts.items() %}{{ k }}{{ v }}{% endfor %}", "a1b2"),
        ("{{ name.upper() }}{{ 'x{}'.format(name) }}{{ '%s' % name }}", "ADAxAdaAda"),
        ("{% for k in counts %}{{ loop.cycle('x', 'y') }}{{ loop.changed(k) }}{% endfor %}", "xTrueyTrue"),
        (
            "{% for group in rows | groupby('g') %}{{ group.list | map(attribute='x') | join }}{% endfor %}",
            "pq",
        ),
        ("{{ (rows | groupby('g'))[0] }}", "(1, [{'g': 1, 'x': 'p'}, {'g': 1, 'x': 'q'}])"),
        ("{% macro m(x) %}<{{ x }}>{{ caller() }}{% endmacro %}{% call m(name) %}!{% endcall %}", "<Ada>!"),
        ("{% set n = namespace(x=1) %}{{ n.x }}{{ counts.values() | sum }}{{ rows | length }}", "132"),
        ("{{ nobody | default('-') }}{{ counts.get('c', 0) }}{{ counts['a'] }}", "-01"),
    ):
        assert rendered(template, fields) == text


def test_json_in_a_template_is_that_of_outputs() -> None:
    fields = {"at": datetime.datetime(2026, 3, 1, 12), "raw": b"ab", "share": math.nan, "text": "é\ud800"}
    expected = '{"at": "2026-03-01T12:00:00", "raw": "YWI=", "share": null, "text": "é\ud800"}'
    assert rendered("{{ row | tojson }}", fields) == expected
    assert rendered("{{ [1] | tojson(indent=1) }}{{ text }}", {"text": "a"}) == "[\n 1\n]a"


def test_a_template_file_without_columns_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_text("Hello")
    with pytest.raises(InvalidArgument, match="uses no column"):
        ColumnRows(RowForm(template=str(tmp_path / "plain.txt")), FakeSource())


def test_a_template_may_ask_for_a_column_that_is_not_there() -> None:
    source = FakeSource("csv", ("name",))
    template = (
        "{{ name }}{% if age is defined %}{{ age }}{% endif %}{{ row['x'] | default('') }}{{ range(2) }}"
    )
    ColumnRows(RowForm(template=template), source)
