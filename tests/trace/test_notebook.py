"""What notebooks show of a save, a load and a checkpoint, and timings as plain values."""

from __future__ import annotations

import json
import threading
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint import telemetry
from bytecheckpoint.errors import BytecheckpointError
from bytecheckpoint.telemetry.trace import html_table
from bytecheckpoint.testing import time_limit


class _Reader(HTMLParser):
    """Collects the cells of a table by row, and the title."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.title, self._tags = "", list[str]()
        self.feed(html)
        assert self._tags == [], "every tag is closed"

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self._tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._tags.pop() == tag

    def handle_data(self, data: str) -> None:
        if "strong" in self._tags:
            self.title += data
        else:
            self.rows[-1][-1] += data


def _state() -> dict[str, Any]:
    return {"model": {"w": torch.ones(1000, 1000)}, "extra_state": {"step": 3}}


def test_a_save_a_load_and_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "a<b>"
    handle = bcp.save(path, _state(), step=7)
    saved = _Reader(handle._repr_html_())
    assert saved.title == f"Save of {path}: committed"
    assert saved.rows[0] == ["step", "ms", "MB"]
    assert [row[0] for row in saved.rows[1:]] == [*handle.timings.seconds]
    assert {row[0]: row[2] for row in saved.rows}["write"] == "4.0"
    report = bcp.load(path, _state())
    assert _Reader(report._repr_html_()).title == f"Load of {report}"
    found = _Reader(bcp.open(path)._repr_html_())
    assert found.title.startswith(f"{path}: step 7, saved 20")
    assert found.title.endswith(" UTC by 1 rank(s)")
    assert found.rows[1:] == [["extra_state", "tree", "0", "0.0"], ["model", "tree", "1", "4.0"]]


def test_a_save_in_progress_and_one_that_failed(tmp_path: Path) -> None:
    shown = threading.Event()

    def fail(name: str, event: str) -> None:
        if (name, event) == ("save.write", "enter"):
            assert shown.wait(time_limit(60))
            raise OSError("disk <full>")

    stop = telemetry.observe(fail)
    try:
        handle = bcp.save(tmp_path / "a", _state(), async_save=True)
        title = _Reader(handle._repr_html_()).title
        shown.set()
        with pytest.raises((OSError, BytecheckpointError)):
            handle.result()
    finally:
        stop()
    assert title == f"Save of {tmp_path / 'a'}: staged, in progress"
    assert _Reader(handle._repr_html_()).title.endswith(": failed: disk <full>")


def test_passwords_are_hidden_and_names_escaped() -> None:
    shown = html_table("http://user:secret@host/<i>", ("a",), [["http://user:secret@host/a"], [1234]])
    assert "secret" not in shown
    assert "<i>" not in shown
    assert "1,234" in shown


def test_timings_as_plain_values(tmp_path: Path) -> None:
    handle = bcp.save(tmp_path, _state())
    found = json.loads(json.dumps(handle.timings.to_dict()))
    assert found["seconds"] == handle.timings.seconds
    assert found["bytes"]["write"] == handle.timings.nbytes["write"] > 4_000_000
    assert found["work"]["write"]["bytes"] == handle.timings.work["write"].nbytes
    assert (found["operation"], found["rank"], found["pipelined"]) == ("save", 0, handle.timings.pipelined)
