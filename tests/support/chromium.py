"""A headless Chromium for tests of pages, driven over its debugging pipe: no library and no port.

    with open_browser() as browser:
        page = browser.open_page("file:///tmp/report.html", width=360, height=740, is_dark=True)
        page.wait_for("document.querySelector('h1')")
        assert page.evaluate("document.title") == "…"
        page.screenshot(tmp_path / "phone.png")
        assert page.problems == [] and page.requests == ["file:///tmp/report.html"]

The protocol: https://chromedevtools.github.io/devtools-protocol/. Debian's package is `chromium`.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DEADLINE_S = 120.0  # what waits for nothing but a browser takes long on a busy machine
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_OPTIONS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # tests may run as root, in a container
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-component-update",
    "--disable-background-networking",
    "--disable-sync",
    "--disable-default-apps",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
    "--mute-audio",
    "--font-render-hinting=none",
    # A page that asks for anything but this machine fails, and `Page.requests` shows it.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
)
# Chromium reads commands from file descriptor 3 and writes to 4.
_ON_PIPES = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); "
    "os.execv(sys.argv[3], sys.argv[3:])"
)
_KEY_CODES = {"Enter": 13, "Tab": 9, "Escape": 27, "Space": 32, "ArrowDown": 40, "ArrowUp": 38}


def find_chromium() -> str | None:
    """The path of a Chromium, or None."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    """A browser with a profile of its own; skips the test where none is installed."""
    path = find_chromium()
    if path is None:
        pytest.skip("there is no Chromium: install Debian's `chromium`, or one of another name")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(path, profile)
        try:
            yield browser
        finally:
            browser.close()


class Browser:
    """One Chromium process."""

    def __init__(self, path: str, profile: str) -> None:
        theirs_in, ours_out = _high_pipe()
        ours_in, theirs_out = _high_pipe()
        self._log = Path(profile) / "stderr.txt"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-S", "-c", _ON_PIPES, str(theirs_in), str(theirs_out)),
                    *(path, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"),
                ],
                pass_fds=(theirs_in, theirs_out),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = ours_in, ours_out
        self._buffer = bytearray()
        self._last_id = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._pages: dict[str, Page] = {}

    def open_page(
        self,
        url: str = "about:blank",
        *,
        width: int = 1280,
        height: int = 800,
        is_mobile: bool = False,
        is_dark: bool = False,
        reduced_motion: bool = True,
    ) -> Page:
        """A page in a context of its own (no cookies or storage of others), loaded from `url`."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        options = {"url": "about:blank", "browserContextId": context}
        target = self.call("Target.createTarget", **options)["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        page = Page(self, attached["sessionId"], target)
        self._pages[attached["sessionId"]] = page
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.resize(width, height, is_mobile=is_mobile)
        page.emulate_media(is_dark=is_dark, reduced_motion=reduced_motion)
        if url != "about:blank":
            page.go(url)
        return page

    def call(self, method: str, session: str | None = None, /, **params: Any) -> dict[str, Any]:
        """Sends a command and returns its result; fails the test with what Chromium refuses."""
        self._last_id += 1
        number = self._last_id
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        end = time.monotonic() + DEADLINE_S
        while number not in self._answers:
            self.receive(end - time.monotonic(), method)
        answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def receive(self, timeout_s: float, waiting_for: str) -> None:
        """Takes what has come, and waits for the first of it."""
        ready, _, _ = select.select([self._in], [], [], max(timeout_s, 0))
        data = os.read(self._in, 1 << 20) if ready else b""
        if not data:
            state = "it is silent" if not ready else "it has ended"
            log = self._log.read_text(errors="replace")[-2000:]
            raise AssertionError(f"Chromium did not answer {waiting_for}: {state}\n{log}")
        self._buffer += data
        *messages, rest = self._buffer.split(b"\0")
        self._buffer = bytearray(rest)
        for text in messages:
            message = json.loads(text)
            if "id" in message:
                self._answers[message["id"]] = message
            elif (page := self._pages.get(message.get("sessionId", ""))) is not None:
                page.take_event(message["method"], message["params"])

    def close(self) -> None:
        """Ends the browser and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)
        os.close(self._in)
        os.close(self._out)


class Page:
    """One page. `problems`: warnings and errors of its console and exceptions that nobody caught.
    `requests`: every address that it asked for, `data:` and `blob:` ones not."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser = browser
        self._session = session
        self._target = target
        self._loads = 0
        self.problems: list[str] = []
        self.requests: list[str] = []

    def call(self, method: str, /, **params: Any) -> dict[str, Any]:
        """A command of the protocol to this page."""
        return self._browser.call(method, self._session, **params)

    def go(self, url: str) -> None:
        """Loads `url` and returns when its load event has come."""
        before = self._loads
        result = self.call("Page.navigate", url=url)
        assert "errorText" not in result, f"{url}: {result['errorText']}"
        end = time.monotonic() + DEADLINE_S
        while self._loads == before:
            self._browser.receive(end - time.monotonic(), f"the load of {url}")

    def resize(self, width: int, height: int, *, is_mobile: bool = False) -> None:
        """The size of the window in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if is_mobile else 1,
            mobile=is_mobile,
        )

    def emulate_media(
        self, *, is_dark: bool = False, reduced_motion: bool = True, medium: str = ""
    ) -> None:
        """What the page's media queries see; `medium` "print" is paper."""
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if reduced_motion else ""},
        ]
        self.call("Emulation.setEmulatedMedia", media=medium, features=features)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, as JSON carries it; a promise is awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, f"{expression}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def wait_for(self, expression: str, timeout_s: float = DEADLINE_S) -> Any:
        """The first true value of the expression (True for an element); fails the test when there
        is none in time."""
        end = time.monotonic() + timeout_s
        # An element would come as an empty object, which is not true here.
        found = f"((found) => found instanceof Node || found)({expression})"
        while not (value := self.evaluate(found)):
            assert time.monotonic() < end, (
                f"not in {timeout_s:g} s: {expression}\n{self.text()[:3000]}\n{self.problems}"
            )
            time.sleep(0.05)
        return value

    def text(self) -> str:
        """What a reader sees of the page, as text."""
        return str(self.evaluate("document.body ? document.body.innerText : ''"))

    def screenshot(self, path: Path | str, *, full_page: bool = False) -> Path:
        """A PNG of the window, or of the whole page."""
        options: dict[str, Any] = {"format": "png"}
        if full_page:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
            options |= {"captureBeyondViewport": True, "clip": clip}
        data = base64.b64decode(self.call("Page.captureScreenshot", **options)["data"])
        Path(path).write_bytes(data)
        return Path(path)

    def type_text(self, text: str) -> None:
        """Text into what has the focus, as from a keyboard of any language."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, is_shift: bool = False) -> None:
        """A key: one letter, or "Enter", "Tab", "Escape", "Space", "ArrowDown", "ArrowUp"."""
        code = _KEY_CODES.get(key, ord(key[0].upper()))
        text = {"Enter": "\r", "Space": " "}.get(key, key if len(key) == 1 else "")
        common: dict[str, Any] = {
            "key": " " if key == "Space" else key,
            "code": key,
            "windowsVirtualKeyCode": code,
            "modifiers": 8 if is_shift else 0,
        }
        down = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
        self.call("Input.dispatchKeyEvent", **common, **down)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def click(self, selector: str) -> None:
        """A click with the mouse at the middle of the first element that matches."""
        found = json.dumps(selector)
        x, y = self.evaluate(
            f"(() => {{ const e = document.querySelector({found}); "
            "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect(); "
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def close(self) -> None:
        """Ends the page."""
        self._browser.call("Target.closeTarget", targetId=self._target)

    def take_event(self, method: str, params: dict[str, Any]) -> None:
        """Notes what tests ask about."""
        match method:
            case "Page.loadEventFired":
                self._loads += 1
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                thrown = details.get("exception", {}).get("description", details["text"])
                self.problems.append(f"exception: {thrown}")
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                shown = [str(a.get("value", a.get("description"))) for a in params["args"]]
                self.problems.append(f"console.{params['type']}: {' '.join(shown)}")
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                entry = params["entry"]
                self.problems.append(f"{entry['source']}: {entry['text']} {entry.get('url', '')}")
            case "Network.requestWillBeSent":
                url = params["request"]["url"]
                if not url.startswith(("data:", "blob:", "about:")):
                    self.requests.append(url)


def _high_pipe() -> tuple[int, int]:
    """A pipe whose ends are beyond 9, so that nothing of it is overwritten at 3 and 4."""
    low = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in low)
    for end in low:
        os.close(end)
    return high[0], high[1]
