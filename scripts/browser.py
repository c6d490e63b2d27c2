"""Drive a headless Chromium over its DevTools pipe: what a page draws, prints on its console and requests from the
network.

with Browser() as browser:
    page = browser.open("report.html", width=390, dark=True)
    page.wait("document.body.dataset.drawn")
    page.screenshot("report.png")
    assert page.problems == [] and page.requests == []

Uses only the standard library. The pipe needs no port. Protocol: https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_FLAGS = (
    "--headless=new", "--no-sandbox", "--remote-debugging-pipe", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
)  # fmt: skip


def find_chromium() -> str | None:
    """Return the path of the browser, or None if none is installed."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One Chromium with a profile of its own. `close` ends it and every process that it started."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        program = find_chromium()
        if program is None:
            raise FileNotFoundError("no chromium: apt-get install chromium")
        self.timeout_s = timeout_s
        self._profile = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # Chromium reads commands from descriptor 3 and answers on 4. A shell moves our descriptors there; they are
        # above both.
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (to_browser, from_browser)]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{ends[0]} 4>&{ends[1]}', "bash", program, *_FLAGS, f"--user-data-dir={self._profile.name}"],
            pass_fds=ends, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        for fd in (to_browser, from_browser, *ends):
            os.close(fd)
        self._buffer = b""
        self._number = 0
        self.on_event: Callable[[dict[str, Any]], None] = lambda message: None

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the browser and wait for it."""
        for fd in (self._write, self._read):
            os.close(fd)
        try:
            self._process.wait(5)  # it exits when its pipe closes
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._profile.cleanup()

    def open(self, path: str | Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        """Load a file or URL into a new page that is `width` CSS pixels wide. Below 600 pixels it emulates a phone
        with a touch screen."""
        url = str(path) if "://" in str(path) else Path(path).resolve().as_uri()
        return Page(self, url, width, height, dark)

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Call `method` and return its result. Raises RuntimeError with the error of the browser."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + self.timeout_s
        while True:
            answer = self.receive(deadline)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return dict(answer["result"])

    def receive(self, deadline: float) -> dict[str, Any]:
        """Return the next message. Pass an event to `on_event` first."""
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._read, 1 << 20) if ready else b""
            if not data:
                raise TimeoutError("the browser ended" if ready else "the browser does not answer")
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self.on_event(message)
        return message


class Page:
    """One tab. `problems` holds errors and warnings of its console, `requests` the URLs that it requested besides
    its own file."""

    def __init__(self, browser: Browser, url: str, width: int, height: int, dark: bool) -> None:
        self._browser = browser
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._url = url
        target = browser.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = browser.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        browser.on_event = self._hear
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")
        self._send("Performance.enable", timeDomain="threadTicks")
        is_phone = width < 600
        self._send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )
        self._send("Emulation.setTouchEmulationEnabled", enabled=is_phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._send("Emulation.setEmulatedMedia", features=[scheme])
        self._send("Page.navigate", url=url)

    def _send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.send(method, self._session, **parameters)

    def _hear(self, message: dict[str, Any]) -> None:
        method, content = message["method"], message["params"]
        if method == "Runtime.exceptionThrown":
            details = content["exceptionDetails"]
            self.problems.append(str(details.get("exception", {}).get("description", details["text"])))
        elif method == "Runtime.consoleAPICalled" and content["type"] in ("error", "warning", "assert"):
            self.problems.append(" ".join(str(each.get("value", each.get("description"))) for each in content["args"]))
        elif method == "Log.entryAdded" and content["entry"]["level"] in ("error", "warning"):
            self.problems.append(content["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            url = content["request"]["url"]
            if url != self._url and not url.startswith(("data:", "blob:")):
                self.requests.append(url)

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression. If it is a promise, wait for it."""
        answer = self._send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"].get("exception", {}).get("description")))
        return answer["result"].get("value")

    def wait(self, script: str) -> Any:
        """Wait until the expression is true and return its value. The page checks it every 20 ms. Raises
        TimeoutError."""
        expression = f"""new Promise((done, fail) => {{
            const end = performance.now() + {self._browser.timeout_s * 900};
            const look = () => {{
                const value = document.readyState === "complete" && ({script});
                if (value) done(value); else if (performance.now() > end) fail(new Error("time is up"));
                else setTimeout(look, 20);
            }};
            look();
        }})"""
        try:
            return self.evaluate(expression)
        except RuntimeError as error:
            raise TimeoutError(f"{script}: {error}; console: {self.problems}") from None

    def screenshot(self, path: str | Path, selector: str | None = None) -> Path:
        """Save the whole page, including what is below the screen, or the first element that matches a CSS selector,
        as PNG."""
        self.evaluate(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )  # the page has been painted after two frames
        if selector is None:
            size = self._send("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        else:
            clip = self.evaluate(f"""(() => {{
                const box = document.querySelector({json.dumps(selector)}).getBoundingClientRect();
                return {{x: box.x + scrollX, y: box.y + scrollY, width: box.width, height: box.height, scale: 1}};
            }})()""")
        answer = self._send("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        Path(path).write_bytes(base64.b64decode(answer["data"]))
        return Path(path)

    def cpu_s(self) -> float:
        """Return the processor time in seconds of the page's main thread since it began to load."""
        metrics = {each["name"]: each["value"] for each in self._send("Performance.getMetrics")["metrics"]}
        return float(metrics["TaskDuration"])
