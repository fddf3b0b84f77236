"""The page about a job that has ended: one HTML file, which loads nothing and runs nothing.

Owns what stands on the page and in which order. The summary of the job is all that it knows.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from tokenmill.batch import charts
from tokenmill.batch.charts import Format, Series
from tokenmill.batch.elements import Element, element, page_bytes, table
from tokenmill.batch.progress import clock, short

# A browser that keeps to it neither runs scripts nor loads anything, whatever stands on the page.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_MAX_PERIODS = 80  # in a plot over time


def write_report(summary: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write the page for a summary (`Figures.summary`, with `job` and `plan` where they are known).

    The file appears whole or not at all; one that is there is replaced. Raises OSError.
    """
    target = Path(path)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(page_bytes(_page(summary)))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def _umask() -> int:
    """Which permissions new files go without; it cannot be read without being set."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _page(summary: Mapping[str, Any]) -> Element:
    job = summary.get("job") or {}
    title = f"Batch job {job['input']}" if "input" in job else "Batch job"
    style = resources.files("tokenmill.batch").joinpath("report.css").read_text(encoding="utf-8")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="generator", content="tokenmill"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", style),
    )
    body = element(
        "body",
        element("header", element("h1", title), element("p", _state(summary))),
        _tiles(summary),
        element("main", *_sections(summary, job)),
    )
    return element("html", head, body, lang="en")


def _sections(summary: Mapping[str, Any], job: Mapping[str, Any]) -> list[Element]:
    return [
        _section("Over time", _charts(_over_time(summary))),
        _section("Rows", _charts(_rows(summary))),
        _section("Errors", *_errors(summary["errors"])),
        *([_section("Predicted and actual", _plan(summary["plan"]))] if summary.get("plan") else []),
        *([_section("The job", _facts(job))] if job else []),
    ]


def _section(title: str, *children: Element) -> Element:
    return element("section", element("h2", title), *children, id=title.lower().replace(" ", "-"))


def _charts(children: Sequence[Element]) -> Element:
    return element("div", *children, class_="charts")


def _missing(name: str, title: str, text: str) -> Element:
    """In the place of a plot for which there are no figures."""
    return element(
        "figure",
        element("figcaption", element("strong", title)),
        element("p", text, class_="missing"),
        id=name,
        class_="chart",
    )


# ── the head ──────────────────────────────────────────────────────────────────────────────────


def _state(summary: Mapping[str, Any]) -> str:
    rows = summary["rows"]
    is_complete = rows["total"] is not None and rows["done"] >= rows["total"]
    state = "Complete" if is_complete else "Not complete: the same command goes on with it"
    started = summary["started"].replace("T", " ").replace("+00:00", " UTC")
    return f"{state}. Started {started}, took {clock(summary['seconds'])}."


def _tiles(summary: Mapping[str, Any]) -> Element:
    rows, tokens, speed = summary["rows"], summary["tokens"], summary["throughput"]
    total = "" if rows["total"] is None else f"of {rows['total']:,}"
    kinds = [f"{rows[kind]:,} {kind}" for kind in ("replayed", "duplicates") if rows[kind]]
    idle = summary.get("idle_share")
    return element(
        "dl",
        _tile("rows", "Rows done", f"{rows['done']:,}", ", ".join([total, *kinds]).strip(", ")),
        _tile("failed", "Rows with errors", f"{rows['failed']:,}", "", is_bad=rows["failed"] > 0),
        _tile("prompt-tokens", "Prompt tokens", f"{tokens['prompt']:,}", _rate(speed, "prompt")),
        _tile("output-tokens", "Output tokens", f"{tokens['output']:,}", _rate(speed, "output")),
        _tile("cached", "From the cache", _percent(summary["cached_share"]), f"{tokens['cached']:,} tokens"),
        _tile(
            "idle",
            "Device idle",
            "?" if idle is None else _percent(idle),
            "not measured" if idle is None else "",
        ),
        class_="tiles",
    )


def _rate(speed: Mapping[str, float], kind: str) -> str:
    return f"{short(speed[f'{kind}_tokens_per_second'])} per second"


def _tile(name: str, title: str, value: str, note: str, *, is_bad: bool = False) -> Element:
    small = element("small", note) if note else None
    shown = element("dd", value, small, **({"class": "bad"} if is_bad else {}))
    return element("div", element("dt", title), shown, id=f"tile-{name}")


# ── plots ─────────────────────────────────────────────────────────────────────────────────────


def _over_time(summary: Mapping[str, Any]) -> list[Element]:
    timeline = summary["timeline"]
    ends, groups = _periods(timeline, summary["seconds"])
    lengths = [end - start for start, end in zip([0.0, *ends[:-1]], ends, strict=True)]

    def sums(name: str) -> list[float]:
        return [sum(timeline[name][first:last]) for first, last in groups]

    def rates(name: str) -> list[float | None]:
        return [value / length for value, length in zip(sums(name), lengths, strict=True)]

    cached = [
        cached / prompt if prompt else None
        for cached, prompt in zip(sums("cached_tokens"), sums("prompt_tokens"), strict=True)
    ]
    idle = [_mean(timeline["idle_share"][first:last]) for first, last in groups]
    speed = [
        Series("prompt", "first", rates("prompt_tokens")),
        Series("output", "second", rates("output_tokens")),
    ]
    rows = [Series("finished", "first", rates("rows")), Series("with errors", "bad", rates("errors"))]
    return [
        charts.line_chart("throughput", "Throughput", "tokens per second, as rows finish", speed, ends=ends),
        charts.line_chart("rows-finished", "Rows", "per second", rows, ends=ends, of=_three_digits),
        charts.line_chart(
            "cache",
            "Cache hits",
            "share of prompt tokens",
            [Series("cached", "first", cached)],
            ends=ends,
            of=_percent,
        ),
        _idle(idle, ends),
    ]


def _periods(timeline: Mapping[str, Any], seconds: float) -> tuple[list[float], list[tuple[int, int]]]:
    """At most 80 periods: the second in which each ends, and its buckets [first, last).

    The last one is cut short by the end of the job. If it is very short, it goes with the one before: the
    rate of an instant says nothing.
    """
    width, count = timeline["bucket_seconds"], len(timeline["rows"])
    size = -(-count // _MAX_PERIODS)
    groups = [(first, min(first + size, count)) for first in range(0, count, size)]
    if len(groups) > 1 and seconds - groups[-1][0] * width < size * width / 2:
        groups[-2:] = [(groups[-2][0], count)]
    ends = [last * width for _, last in groups]
    ends[-1] = max(seconds, groups[-1][0] * width + 1e-3)
    return ends, groups


def _mean(shares: Sequence[float | None]) -> float | None:
    known = [share for share in shares if share is not None]
    return sum(known) / len(known) if known else None


def _idle(shares: Sequence[float | None], ends: Sequence[float]) -> Element:
    if all(share is None for share in shares):
        return _missing(
            "idle",
            "Device idle",
            "Not measured: on this device the engine cannot tell when it has nothing to do.",
        )
    series = [Series("idle", "first", shares)]
    unit = "share of time without a step, though rows were there"
    return charts.line_chart("idle", "Device idle", unit, series, ends=ends, of=_percent)


def _rows(summary: Mapping[str, Any]) -> list[Element]:
    return [
        _histogram(
            "latency", "Latency", "seconds, waiting included", summary["latency_seconds"], _three_digits
        ),
        _histogram("prompt-length", "Prompt length", "tokens", summary["prompt_length"], short),
        _histogram("output-length", "Output length", "tokens", summary["output_length"], short),
        _finish_reasons(summary["finish_reasons"]),
    ]


def _histogram(name: str, title: str, unit: str, values: Mapping[str, Any], of: Format) -> Element:
    if not values["count"]:
        return _missing(name, title, "No row got that far.")
    told = ("p50", "half below"), ("p90", "90% below"), ("p99", "99% below"), ("max", "longest")
    note = ", ".join(f"{word} {of(values[key])}" for key, word in told)
    return charts.histogram(name, title, unit, values["bins"], note=note, of=of)


def _finish_reasons(reasons: Mapping[str, int]) -> Element:
    if not reasons:
        return _missing("finish-reasons", "Why outputs ended", "No row got that far.")
    items = sorted(reasons.items(), key=lambda item: -item[1])
    return charts.bars("finish-reasons", "Why outputs ended", items)


def _errors(errors: Sequence[Mapping[str, Any]]) -> list[Element]:
    if not errors:
        return [element("p", "None.", class_="missing")]
    plot = charts.bars("error-types", "Rows by type of error", [(e["type"], e["count"]) for e in errors])
    return [plot, *(part for error in errors for part in _examples(error))]


def _examples(error: Mapping[str, Any]) -> list[Element]:
    messages = [element("li", element("code", message)) for message in error["examples"]]
    return [
        element("p", element("strong", error["type"]), ", for example:"),
        element("ul", *messages, class_="examples"),
    ]


# ── tables ────────────────────────────────────────────────────────────────────────────────────


def _plan(plan: Mapping[str, Any]) -> Element:
    predicted, actual = plan["predicted"], plan["actual"]
    rows = []
    for key, value in actual.items():
        expected = predicted.get(key)
        if isinstance(value, int | float) and isinstance(expected, int | float):
            off = f"{(value - expected) / expected:+.0%}" if expected else ""
            rows.append([_spelled(key), _figure_text(key, expected), _figure_text(key, value), off])
    return table(["", "predicted", "actual", "actual is"], rows)


def _figure_text(key: str, value: float) -> str:
    if key.endswith("_share"):
        return _percent(value)
    if key.endswith("seconds"):
        return f"{_three_digits(value)} s" if value < 100 else clock(value)
    return f"{value:,.0f}"


def _facts(job: Mapping[str, Any]) -> Element:
    made = table(["", ""], [[_spelled(key), text] for key, text in _flat(job)])
    made.set("class", "scroll facts")
    return made


def _flat(facts: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    """Every fact in nested ones, with the names above its own."""
    flat: list[tuple[str, str]] = []
    for key, value in facts.items():
        if isinstance(value, Mapping):
            flat += _flat(value, f"{before}{key}: ")
        elif value is not None:
            flat.append((f"{before}{key}", f"{value:,}" if type(value) is int else str(value)))
    return flat


def _spelled(key: str) -> str:
    return key.replace("_", " ")


def _percent(share: float) -> str:
    return f"{share:.0%}" if share in (0, 1) or 0.1 <= share <= 0.99 else f"{share:.1%}"


def _three_digits(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
