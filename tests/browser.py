"""A real browser without a window, spoken to by its debugging protocol over two pipes."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (Debian: apt install chromium)")


class Page:
    """One tab; what it complains of and what it asks the network for is kept."""

    def __init__(self, send: Any, receive: Any) -> None:
        self._send, self._receive, self._last, self._session = send, receive, 0, None
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._send.write(json.dumps(message).encode() + b"\0")
        self._send.flush()
        while True:
            answer = self._hear()
            if answer.get("id") == self._last:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def open(self, file: Path) -> None:
        self.loaded = False
        self.call("Page.navigate", url=file.resolve().as_uri())
        while not self.loaded:
            self._hear()

    def value(self, expression: str) -> Any:
        """Of JavaScript."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def point_at(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        """Move the mouse to a place of an element, given as shares of its width and height."""
        box = self.value(f"(e => (e.scrollIntoView(), e.getBoundingClientRect().toJSON()))({_element(selector)})")
        at = {"x": box["x"] + x * box["width"], "y": box["y"] + y * box["height"]}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **at)

    def click(self, selector: str) -> None:
        self.value(f"{_element(selector)}.click()")

    def text(self, selector: str) -> str:
        return str(self.value(f"{_element(selector)}.textContent"))

    def _hear(self) -> dict[str, Any]:
        buffer = bytearray()
        while (byte := self._receive.read(1)) != b"\0":
            assert byte, "the browser is gone"
            buffer += byte
        message: dict[str, Any] = json.loads(buffer)
        method, about = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self.loaded = True
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(about["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(str(about["args"]))
        elif method == "Log.entryAdded":
            self.complaints.append(about["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        return message


def _element(selector: str) -> str:
    return f"document.querySelector({json.dumps(selector)})"


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A fresh one; its files go to `profile`."""
    hears, we_say = os.pipe()
    we_hear, says = os.pipe()
    # the browser listens on file descriptor 3 and speaks on 4
    command = f'exec 3<&{hears} 4>&{says}; exec "$0" "$@"'
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run",
               "--disable-background-networking", f"--user-data-dir={profile}", "--window-size=1280,1600")  # fmt: skip
    process = subprocess.Popen(
        ["bash", "-c", command, str(CHROMIUM), *options], pass_fds=(hears, says), stderr=subprocess.DEVNULL
    )
    os.close(hears)
    os.close(says)
    with os.fdopen(we_say, "wb") as send, os.fdopen(we_hear, "rb") as receive:
        try:
            yield Page(send, receive)
        finally:
            process.terminate()
            process.wait()
