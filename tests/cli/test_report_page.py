"""The page of ``bcp report`` in a real browser. Skipped where there is no Chromium."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.browser import MISSING, Browser, find_browser
from benchmarks.report_pages import READY, make_page
from bytecheckpoint.testing import time_limit

pytestmark = pytest.mark.skipif(find_browser() is None, reason=MISSING)

_AXE = Path(__file__).resolve().parents[1] / "support" / "axe.min.js"
_DRAWN = """
[...document.querySelectorAll("canvas")].filter(one => {
  const data = one.getContext("2d").getImageData(0, 0, one.width, one.height).data;
  return data.some(value => value);
}).map(one => one.closest("figure").querySelector("[id$=chart]").id)
"""
_PAINTED = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))))"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of 130 ranks, which are three groups."""
    return make_page(tmp_path_factory.mktemp("page"), ranks=130, checkpoints=3)


@pytest.fixture(scope="module")
def shared_browser() -> Iterator[Browser]:
    with Browser(timeout_s=time_limit(15)) as found:
        yield found


@pytest.fixture
def browser(shared_browser: Browser, page: Path) -> Iterator[Browser]:
    """The page in a window of a usual size. No test may leave an error in the console, or make a request."""
    shared_browser.show(width=1280, height=900)
    shared_browser.open(page, READY)
    yield shared_browser
    assert shared_browser.problems == []
    assert shared_browser.requests == [page.as_uri()]


def _choose(browser: Browser, element: str, value: object) -> None:
    browser.evaluate(f"""(() => {{
        const one = document.getElementById({json.dumps(element)});
        one.value = {json.dumps(str(value))};
        one.dispatchEvent(new Event("change"));
    }})()""")
    browser.evaluate(_PAINTED)


def _option(browser: Browser, chart: str, path: str) -> Any:
    return browser.evaluate(f"echarts.getInstanceByDom(document.getElementById('{chart}')).getOption().{path}")


def test_it_draws_all_charts(browser: Browser) -> None:
    browser.evaluate(_PAINTED)
    charts = {"size-chart", "time-chart", "heat-chart", "timeline-chart", "box-chart"}
    assert charts == set(browser.evaluate(_DRAWN))
    assert _option(browser, "heat-chart", "yAxis[0].data") == ["0-63", "64-127", "128-129"]


def test_a_click_on_a_group_shows_its_ranks(browser: Browser) -> None:
    browser.evaluate("document.getElementById('heat-chart').scrollIntoView({block: 'center'})")
    browser.evaluate(_PAINTED)
    x, y = browser.evaluate("""(() => {
        const element = document.getElementById("heat-chart"), box = element.getBoundingClientRect();
        const [x, y] = echarts.getInstanceByDom(element).convertToPixel({xAxisIndex: 0, yAxisIndex: 0}, [2, 2]);
        return [box.left + x, box.top + y];
    })()""")
    browser.click(x, y)
    browser.wait("document.getElementById('group').value === '128'")
    assert _option(browser, "heat-chart", "yAxis[0].data") == ["128", "129"]
    assert _option(browser, "timeline-chart", "yAxis[0].data") == ["128", "129"]


def test_the_keyboard_chooses_another_save(browser: Browser) -> None:
    visible = "[...document.querySelectorAll('.tables')].filter(one => !one.hidden).map(one => one.innerText)"
    title = "document.getElementById('timeline-title').textContent"
    [text] = browser.evaluate(visible)
    assert text.startswith("load of step-6000")
    assert re.search(r"tier\t[\d.]+ GiB\t88%\t114\t", text), "where the bytes came from"
    assert browser.evaluate(title) == "Timeline"
    browser.evaluate("document.getElementById('operation').focus()")
    for _ in range(2):
        browser.press("ArrowDown")
    browser.wait("document.getElementById('operation').value === '2'")
    [text] = browser.evaluate(visible)
    assert text.startswith("save of step-1500")
    assert "43" in text, "the rank that writes slowly"
    assert browser.evaluate(title) == "Steps, end to end", "there is no trace of it"


def test_colors_by_bytes_and_over_the_median(browser: Browser) -> None:
    def cells(measure: str) -> dict[tuple[int, int], float]:
        _choose(browser, "measure", measure)
        return {
            (one[0], one[1]): one[2] for one in _option(browser, "heat-chart", "series[0].data.map(one => one.value)")
        }

    _choose(browser, "operation", 2)
    seconds, over = cells("seconds"), cells("over")
    write = 5
    assert seconds[write, 0] > 2 * seconds[write, 1], "rank 43 is in the first group"
    assert 0 < over[write, 0] < seconds[write, 0]
    assert {at for at, _ in cells("bytes")} == {write}
    _choose(browser, "operation", 0)
    read, store, tier = 4, 7, 8
    assert _option(browser, "heat-chart", "xAxis[0].data")[store:] == ["from store", "from tier"]
    found = cells("bytes")
    assert {at for at, _ in found} == {read, store, tier}
    assert (found[store, 0], found[store, 2], found[tier, 2]) == (4e8, 0, 4e8), "the first ranks have no tier"


def test_the_timeline_zooms(browser: Browser) -> None:
    browser.evaluate("document.getElementById('timeline-chart').scrollIntoView({block: 'center'})")
    box = browser.evaluate("document.getElementById('timeline-chart').getBoundingClientRect().toJSON()")
    control = 2
    wheel = {"type": "mouseWheel", "x": box["x"] + box["width"] / 2, "y": box["y"] + 60, "deltaX": 0, "deltaY": -240}
    browser.call("Input.dispatchMouseEvent", **wheel, modifiers=control)
    browser.wait(
        "echarts.getInstanceByDom(document.getElementById('timeline-chart')).getOption().dataZoom[0].end < 100"
    )


def test_a_tensor_and_its_boxes(browser: Browser) -> None:
    _choose(browser, "tensor", "model.layers.3.mlp.up")
    note = browser.evaluate("document.getElementById('tensor-note').textContent")
    assert note == "bfloat16, shape 8192 x 8192, 128 MiB: 130 boxes in 130 files of 130 ranks."
    rows = browser.evaluate("[...document.querySelectorAll('#boxes tbody tr')].map(one => one.innerText)")
    assert len(rows) == 130
    assert rows[1].split("\t") == ["[63:126, 0:8192]", "1", "model-00001.safetensors"]
    assert len(_option(browser, "box-chart", "series[0].data")) == 130


@pytest.mark.parametrize(("width", "is_dark"), [(1280, False), (1280, True), (390, False)])
def test_it_is_accessible(browser: Browser, width: int, is_dark: bool) -> None:
    browser.show(width=width, height=900, is_dark=is_dark)
    browser.evaluate(_PAINTED)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width, "the page is wider than the window"
    browser.evaluate(_AXE.read_text(encoding="utf-8") + ";0")
    found = browser.evaluate("axe.run().then(found => found.violations.map(({id, impact, nodes}) => "
                             "[id, impact, nodes.map(one => one.html).slice(0, 3)]))")  # fmt: skip
    assert [one for one in found if one[1] in ("serious", "critical")] == []


def test_the_color_scheme_may_change_while_it_is_open(browser: Browser) -> None:
    def color() -> str:
        browser.evaluate(_PAINTED)
        return str(_option(browser, "size-chart", "series[0].itemStyle.color"))

    light = color()
    browser.show(width=1280, height=900, is_dark=True)
    assert color() != light


def test_tables_need_no_scripts(browser: Browser, page: Path) -> None:
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(page)
        text = browser.evaluate("document.body.innerText")
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
    assert "step-1500" in text
    assert text.count("Times the median") == 5, "a table of each save and load"
    assert "The charts need scripts" in text
    assert "Layout of a tensor" not in text


@pytest.mark.full
def test_a_page_of_4096_ranks(shared_browser: Browser, tmp_path: Path) -> None:
    page = make_page(tmp_path, ranks=4096, checkpoints=8)
    assert page.stat().st_size < 3e6
    shared_browser.open(page, READY)
    rows = _option(shared_browser, "heat-chart", "yAxis[0].data")
    assert (len(rows), rows[0], rows[-1]) == (64, "0-63", "4032-4095")
    assert shared_browser.problems == []
    assert shared_browser.requests == [page.as_uri()]
