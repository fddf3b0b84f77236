"""Elements of a page, as a tree: text and attributes are escaped when it is written, whatever they hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.etree import ElementTree

Element = ElementTree.Element
Child = Element | str | None


def element(tag: str, *children: Child, **attributes: str) -> Element:
    """An element; None among the children is left out. `class_` is `class`, and `_` in names is `-`."""
    names = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
    made = ElementTree.Element(tag, names)
    for child in children:
        add(made, child)
    return made


def add(parent: Element, child: Child) -> None:
    """Put text or an element behind what is in there."""
    if isinstance(child, ElementTree.Element):
        parent.append(child)
    elif child and len(parent):
        parent[-1].tail = (parent[-1].tail or "") + child
    elif child:
        parent.text = (parent.text or "") + child


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Element:
    """A table whose first column names its rows; it scrolls by itself where it is too wide."""
    body = [
        element("tr", *(element("td" if i else "th", cell, **_scope(i)) for i, cell in enumerate(row)))
        for row in rows
    ]
    header = element("thead", element("tr", *(element("th", name, scope="col") for name in head)))
    made = element("table", header if any(head) else None, element("tbody", *body))
    return element("div", made, class_="scroll")


def _scope(column: int) -> dict[str, str]:
    return {} if column else {"scope": "row"}


def page_bytes(html: Element) -> bytes:
    """The whole page in UTF-8. Halves of surrogate pairs, which no file can hold, become question marks."""
    text = ElementTree.tostring(html, encoding="unicode", method="html")
    return f"<!doctype html>\n{text}\n".encode(errors="replace")
