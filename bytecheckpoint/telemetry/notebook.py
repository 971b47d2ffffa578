"""Tables in HTML, which notebooks show for objects with ``_repr_html_``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from ..errors import without_userinfo
from .trace import Timings


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a title and a table, without passwords of URLs."""
    head = "".join(f"<th>{_text(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div><strong>{_text(title)}</strong>{table if body else ''}</div>"


def timings_table(title: str, timings: Timings) -> str:
    """Return a table of the steps that have ended."""
    seconds = dict(timings.seconds)  # another thread may add one
    rows = [(step, f"{took * 1e3:,.1f}", f"{timings.nbytes.get(step, 0) / 1e6:,.1f}") for step, took in seconds.items()]
    return html_table(title, ("step", "ms", "MB"), rows)


def _cell(value: object) -> str:
    return f"<td>{_text(f'{value:,}' if isinstance(value, int) else value)}</td>"


def _text(value: object) -> str:
    return escape(without_userinfo(str(value)))
