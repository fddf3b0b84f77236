"""The page about a job, as a browser shows it."""

from __future__ import annotations

import os
import stat
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tokenmill.batch.charts import nice_ceiling
from tokenmill.batch.figures import Figures
from tokenmill.batch.report import write_report

pytestmark = pytest.mark.unit

HOSTILE = "</code><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>&amp;\"'"
LOGGED = ("SEVERE", "WARNING")


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Any:
    """`show(summary)` writes the page and opens it, as wide as a desktop's window."""

    def open_page(summary: dict[str, Any]) -> Any:
        path = tmp_path / "report.html"
        write_report(summary, path)
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        browser.get(path.as_uri())
        return browser

    return open_page


def texts(browser: Any, selector: str) -> list[str]:
    found = browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)", selector
    )
    return list(found)


def complaints(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in LOGGED]


def test_the_page_says_what_the_summary_says(show: Any, summary: dict[str, Any]) -> None:
    browser = show(summary)
    assert complaints(browser) == []
    assert browser.title == "Batch job in.jsonl"
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    tokens, rows = summary["tokens"], summary["rows"]
    tiles = {
        name: texts(browser, f"#tile-{name} dd")[0]
        for name in ("rows", "failed", "prompt-tokens", "output-tokens", "cached", "idle")
    }
    assert tiles["rows"].startswith(f"{rows['done']:,}of {rows['total']:,}")
    assert tiles["failed"] == "9"
    assert tiles["prompt-tokens"].startswith(f"{tokens['prompt']:,}")
    assert tiles["output-tokens"].startswith(f"{tokens['output']:,}")
    assert f"{tokens['cached']:,} tokens" in tiles["cached"]
    assert tiles["idle"] == f"{summary['idle_share']:.1%}"
    assert texts(browser, "#error-types .label") == ["too_long", "timeout"]
    assert texts(browser, "#error-types .count") == ["5", "4"]
    assert texts(browser, ".examples code")[:3] == [f"row {row}: message {row}" for row in (7, 207, 407)]
    plan = texts(browser, "#predicted-and-actual td")
    assert plan[:2] == ["90,000", f"{tokens['output']:,}"]
    assert texts(browser, "#the-job td") == ["in.jsonl", "tiny", "0.5"]


def test_plots_have_a_mark_for_every_figure(show: Any, summary: dict[str, Any]) -> None:
    browser = show(summary)
    for name, key in (
        ("latency", "latency_seconds"),
        ("prompt-length", "prompt_length"),
        ("output-length", "output_length"),
    ):
        bins = summary[key]["bins"]
        bars = browser.execute_script(
            "return [...document.querySelectorAll(arguments[0])].map(e => e.getBoundingClientRect().height)",
            f"#{name} svg .bar",
        )
        assert len(bars) == len(bins)
        tallest = max(count for *_, count in bins)
        for height, (*_, count) in zip(bars, bins, strict=True):
            assert height == pytest.approx(max(bars) * count / tallest, abs=1.0)
        counts = texts(browser, f"#{name} tbody td")
        assert counts == [f"{count:,}" for *_, count in bins]
    for name, num_lines in (("throughput", 2), ("rows-finished", 2), ("cache", 1), ("idle", 1)):
        lines = browser.execute_script(
            "return [...document.querySelectorAll(arguments[0])].map(e => e.points.length)",
            f"#{name} svg polyline",
        )
        num_periods = len(texts(browser, f"#{name} tbody tr"))
        assert lines == [2 * num_periods] * num_lines
        assert 30 <= num_periods <= 80
        assert len(texts(browser, f"#{name} svg .hover title")) == num_periods


def test_lines_add_up_to_the_totals(show: Any, summary: dict[str, Any]) -> None:
    """Height times width of every step of the throughput, read off the drawing."""
    browser = show(summary)
    areas = browser.execute_script(
        """
        return [...document.querySelectorAll("#throughput polyline")].map(line => {
            let area = 0;
            for (let i = 0; i < line.points.length; i += 2)
                area += (line.points[i + 1].x - line.points[i].x) * (200 - line.points[i].y);
            return area;
        })"""
    )
    top = texts(browser, "#throughput .at-0")[0]
    highest = float(top.rstrip("k")) * (1000 if top.endswith("k") else 1)
    for area, kind in zip(areas, ("prompt", "output"), strict=True):
        total = area / 1000 * summary["seconds"] / 200 * highest
        assert total == pytest.approx(summary["tokens"][kind], rel=0.02)


@pytest.mark.parametrize("width", [400, 1200])
def test_nothing_overflows(show: Any, summary: dict[str, Any], width: int) -> None:
    summary["errors"][0]["examples"] = ["x" * 500, "long words " * 40]
    summary["job"]["input"] = "folder/" * 40 + "in.jsonl"
    browser = show(summary)
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    assert browser.execute_script("return innerWidth") == width
    browser.execute_script("document.querySelectorAll('details').forEach(each => { each.open = true })")
    inside = browser.execute_script("return document.documentElement.clientWidth")
    assert width - 20 < inside <= width  # less a scroll bar
    assert browser.execute_script("return document.documentElement.scrollWidth") == inside
    outside = browser.execute_script(
        """
        return [...document.querySelectorAll("body *")].filter(
            each => !each.closest(".scroll *") && each.getBoundingClientRect().right > arguments[0] + 0.5
        ).map(each => each.outerHTML.slice(0, 100))""",
        inside,
    )
    assert outside == []
    assert browser.execute_script(
        "return document.querySelector('#latency svg').getBoundingClientRect().width"
    ) > (250 if width == 400 else 350)


def test_it_is_light_or_dark_as_the_reader_likes(show: Any, summary: dict[str, Any]) -> None:
    browser = show(summary)
    shades = {}
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        colours = browser.execute_script(
            "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]"
        )
        shades[scheme] = [sum(map(int, colour[4:-1].split(","))) for colour in colours]
    assert shades["light"][0] > 600 > 200 > shades["light"][1]
    assert shades["dark"][1] > 600 > 200 > shades["dark"][0]


def test_hostile_text_stays_text(show: Any, summary: dict[str, Any]) -> None:
    summary["errors"][0] |= {"type": HOSTILE, "examples": [HOSTILE]}
    summary["job"] = {"input": HOSTILE, HOSTILE: HOSTILE, "nested": {HOSTILE: "\ud800 \x00 \x1b[2J"}}
    summary["finish_reasons"] = {HOSTILE: 3}
    browser = show(summary)
    assert browser.execute_script("return window.hacked") is None
    assert texts(browser, "script, img, iframe, link") == []
    assert texts(browser, ".examples code")[0] == HOSTILE
    assert texts(browser, "#error-types .label")[0] == HOSTILE
    assert texts(browser, "#finish-reasons .label") == [HOSTILE]
    assert texts(browser, "#the-job td")[:2] == [HOSTILE, HOSTILE]
    assert browser.title == " ".join(f"Batch job {HOSTILE}".split())
    assert complaints(browser) == []


def test_plots_have_titles_and_tables_have_heads(show: Any, summary: dict[str, Any]) -> None:
    browser = show(summary)
    assert browser.execute_script("return document.documentElement.lang") == "en"
    assert all(texts(browser, "svg[role=img] > title"))
    assert len(texts(browser, "svg")) == len(texts(browser, "svg[role=img] > title:first-child")) == 7
    assert len(texts(browser, "figure.chart figcaption")) == len(texts(browser, "figure.chart"))
    assert len(texts(browser, "figure details table")) == 7
    assert not texts(browser, "tbody th:not([scope=row]), thead th:not([scope=col])")


def test_a_job_without_rows_has_a_page_too(show: Any) -> None:
    figures = Figures()
    figures.started(num_rows=0)
    browser = show(figures.summary())
    assert complaints(browser) == []
    assert texts(browser, "#tile-rows dd")[0].startswith("0")
    assert texts(browser, "#tile-idle dd") == ["?not measured"]
    assert "No row got that far." in texts(browser, "#latency .missing")
    assert texts(browser, "#errors .missing") == ["None."]


# ── without a browser ─────────────────────────────────────────────────────────────────────────


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


def test_the_page_loads_and_runs_nothing(summary: dict[str, Any], tmp_path: Path) -> None:
    summary["errors"][0]["examples"] = [HOSTILE]
    write_report(summary, tmp_path / "report.html")
    tags = Tags()
    tags.feed((tmp_path / "report.html").read_text())
    assert {"svg", "polyline", "rect", "table"} <= {tag for tag, _ in tags.seen}
    for tag, attributes in tags.seen:
        assert tag not in {"script", "link", "img", "iframe", "object", "base"}
        assert not [name for name in attributes if name in {"src", "href"} or name.startswith("on")]


def test_the_file_is_there_as_a_whole_or_not_at_all(
    summary: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    path.write_text("older")

    def fail(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space"):
            write_report(summary, path)
    assert path.read_text() == "older"
    assert os.listdir(tmp_path) == ["report.html"]
    write_report(summary, path)
    assert path.read_text().startswith("<!doctype html>")
    plain = tmp_path / "plain"
    plain.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_axes_end_at_round_numbers() -> None:
    assert [nice_ceiling(v) for v in (0, 0.03, 1, 1.01, 24, 26, 99, 1000, 1001)] == [
        1, 0.05, 1, 2, 25, 50, 100, 1000, 2000,
    ]  # fmt: skip
    assert [nice_ceiling(v, whole=True) for v in (1, 2.1, 21)] == [1, 3, 25]
