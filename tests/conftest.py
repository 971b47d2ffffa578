from __future__ import annotations

import faulthandler
import gc
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import sampling

from bytecheckpoint.testing import time_limit

pytest_plugins = ["session_plugin", "certificates", "s3_server"]

_TEST_S = 1200 if sampling.is_full() else 300  # the full set draws many examples
_LONG_S = 20
# Just before pytest-timeout fails the test: the stacks that it prints are lost in the workers of xdist.
_STACKS_S = _TEST_S - 10

_STDERR = pytest.StashKey[int]()

# Ranks are forked from a process that has imported this. tests/engines needs another one in its environments.
os.environ.setdefault("BCP_TEST_PRELOAD", str(Path(__file__).parent / "support" / "preload_clients.py"))


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Accept the settings of pytest-timeout where it is not installed, as on a bare machine with a GPU."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addoption("--timeout", type=float, help="has no effect without pytest-timeout")
        parser.addini("timeout_method", "has no effect without pytest-timeout")


def pytest_configure(config: pytest.Config) -> None:
    with suppress(ImportError):  # on a bare machine with a GPU
        from hypothesis import settings

        settings.register_profile("any machine", deadline=None)
        settings.load_profile("any machine")
    if config.getoption("timeout") is None:
        config.option.timeout = time_limit(_TEST_S)
    # In the environment, so that all workers choose the same sample without asking git again.
    os.environ.setdefault("BCP_TEST_SEED", str(sampling.seed()))
    # pytest replaces standard error while tests run.
    config.stash[_STDERR] = os.dup(2)


def pytest_report_header() -> str:
    return (
        "every case runs" if sampling.is_full() else f"BCP_TEST_SEED: {sampling.seed()} (sample of large combinations)"
    )


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_STDERR])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector from visiting torch, the tests and what they import, again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what runs in the full set only."""
    left_out = sampling.left_out(items)
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if not getattr(getattr(item, "obj", None), "__doc__", None):
        report.user_properties.append(("has no docstring", True))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the tests that take long and do not say why. It is no failure: on a busy machine, every test takes long."""
    limit_s = time_limit(_LONG_S)
    for report in terminalreporter.getreports("passed"):
        if report.when == "call" and report.duration > limit_s and ("has no docstring", True) in report.user_properties:
            terminalreporter.write_line(f"{report.nodeid} took {report.duration:.0f} s; its docstring must say why")


@pytest.fixture(scope="session", autouse=True)
def _state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep journals of copies between stores out of the home directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    faulthandler.dump_traceback_later(time_limit(_STACKS_S), file=item.config.stash[_STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
