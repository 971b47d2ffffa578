"""A headless Chromium that shows one page, driven through the DevTools protocol over a pipe."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome")
MISSING = "there is no Chromium; Debian's package is chromium"

_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--disable-default-apps", "--hide-scrollbars", "--force-color-profile=srgb", "--remote-debugging-pipe"),
)


def find_browser() -> str | None:
    """Return the path of a Chromium; None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A context manager that ends the browser and its processes.

    Attributes:
        problems: What pages have written to the console as a warning or an error, and exceptions.
        requests: The URLs that they have requested.
    """

    def __init__(self, *, timeout_s: float = 60) -> None:
        self._timeout_s, self._id, self._buffer = timeout_s, 0, b""
        self._is_loaded = False
        self.problems: list[str] = []
        self.requests: list[str] = []
        path = find_browser()
        if path is None:
            raise RuntimeError(MISSING)
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs, self._to = os.pipe()
        self._from, back = os.pipe()
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (theirs, back)]  # neither is 3 or 4
        # The browser reads descriptor 3 and writes 4.
        command = ["bash", "-c", f'exec "$@" 3<&{high[0]} 4>&{high[1]}', "bash", path]
        command += [f"--user-data-dir={self._profile.name}", *_FLAGS, "about:blank"]
        self._process = subprocess.Popen(
            command,
            pass_fds=high,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (theirs, back, *high):
            os.close(fd)
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._to)  # at which it ends
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait()
        os.close(self._from)
        self._profile.cleanup()

    def show(self, *, width: int, height: int, is_dark: bool = False, scale: float = 1) -> None:
        """Set the size of the window and the color scheme, of the page that is open, too."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}]
        self.call("Emulation.setEmulatedMedia", media="", features=scheme)

    def open(self, page: Path, until: str = "true") -> None:
        """Open a file, and wait until it is loaded and an expression in JavaScript is true."""
        self.problems.clear()
        self.requests.clear()
        self._is_loaded = False
        self.call("Page.navigate", url=page.resolve().as_uri())
        self._until(lambda: self._read([]) or self._is_loaded, f"load {page}")
        self.wait(until)

    def wait(self, expression: str) -> None:
        """Wait until an expression in JavaScript is true."""
        self.evaluate(
            f"new Promise(done => {{ (function look() {{ {expression} ? done() : setTimeout(look, 10) }})() }})"
        )

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in JavaScript, or of its promise."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression[:200]}: {_thrown(found['exceptionDetails'])}")
        return found["result"].get("value")

    def click(self, x: float, y: float) -> None:
        """Click at a position of the window."""
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def press(self, key: str) -> None:
        """Press a key such as ``ArrowDown`` or ``Tab``."""
        codes = {"Tab": 9, "Enter": 13, "Home": 36, "ArrowUp": 38, "ArrowDown": 40}
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key])

    def screenshot(self, path: Path, *, is_whole: bool = False) -> None:
        """Write an image of the window, or of the whole page; the name ends in .png or .webp."""
        kind = path.suffix[1:]
        quality = {"quality": 70} if kind == "webp" else {}
        found = self.call("Page.captureScreenshot", format=kind, captureBeyondViewport=is_whole, **quality)
        path.write_bytes(base64.b64decode(found["data"]))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol, and return its result."""
        self._id += 1
        message: dict[str, Any] = {"id": self._id, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        replies: list[dict[str, Any]] = []
        self._until(lambda: self._read(replies), method)
        if "error" in replies[0]:
            raise RuntimeError(f"{method}: {replies[0]['error']}")
        result: dict[str, Any] = replies[0]["result"]
        return result

    def _read(self, replies: list[dict[str, Any]]) -> bool:
        """Read a message; return whether it is the reply to the last call."""
        message, end, rest = self._buffer.partition(b"\0")
        if not end:
            if select.select([self._from], [], [], 0.1)[0]:
                got = os.read(self._from, 1 << 20)
                if not got:
                    raise RuntimeError("the browser has ended")
                self._buffer += got
            return False
        self._buffer = rest
        found = json.loads(message)
        self._note(found.get("method", ""), found.get("params", {}))
        if found.get("id") == self._id:
            replies.append(found)
        return bool(replies)

    def _note(self, method: str, parameters: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._is_loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(_thrown(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.problems.append(" ".join(str(one.get("value", one.get("description"))) for one in parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.problems.append(parameters["entry"]["text"])

    def _until(self, is_true: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + self._timeout_s
        while not is_true():
            if time.monotonic() > end:
                raise TimeoutError(f"after {self._timeout_s} s: {what}; problems: {self.problems}")


def _thrown(details: dict[str, Any]) -> str:
    return str(details.get("exception", {}).get("description", details["text"]))
