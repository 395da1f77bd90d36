"""The frame of every page: one self-contained file, readable in light and dark, on paper and on a phone. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files


def page(title: str, body: Iterable[str]) -> str:
    """A whole HTML document. `body` is HTML; `title` is text."""
    style = (files("ckptguard.report") / "page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # Nothing may be fetched, whatever a checkpoint's names contain.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{style}</style></head>\n<body><main>"
        + "\n".join(body)
        + "</main></body></html>\n"
    )


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], classes: Sequence[str] = ()) -> str:
    """A table of text cells. `classes` names a CSS class for each column ("" for none)."""
    marks = [f' class="{c}"' if c else "" for c in classes] or [""] * len(heads)
    head = "".join(f"<th{mark}>{escape(text)}</th>" for text, mark in zip(heads, marks, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f"<td{mark}>{escape(cell)}</td>" for cell, mark in zip(row, marks, strict=True))
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """A list of names and values."""
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="facts">{items}</dl>'
