"""A real browser for the pages that are written; the fixture of `tests/conftest.py`."""

import base64
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

import pytest

Ask = Callable[..., Any]
BROWSER = shutil.which("chromium")
OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --remote-debugging-pipe"
)
NARROW = 600
PROBLEMS = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
PROBE = """(() => {
  const all = [...document.images], seen = all.filter(image => image.offsetParent);
  const width = image => image.complete ? image.naturalWidth : 0;
  return {images: all.map(width), seen: seen.map(width),
  right: seen.map(image => image.getBoundingClientRect().right),
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  scripts: [...document.scripts].filter(script => script.type !== "application/json").length,
  width: innerWidth}; })()"""


@pytest.fixture
def show_page(tmp_path: Path) -> Callable[..., tuple[dict[str, Any], Path]]:
    """Shows a page in a window of some width; what a script in it found, and a screenshot.

    The script finds the widths of all images and of the visible ones, and where each of these ends. It also finds the
    window's width, by how much the page is wider, and the number of the page's scripts. Before that, it waits for a
    promise of the test's own (`acted` is its value). `problems` are the browser's messages, `fetched` addresses.
    """
    if BROWSER is None:
        pytest.skip("chromium is not installed")

    def show(
        page: str,
        width: int,
        *,
        height: int = 1000,
        screenshot: Path | None = None,
        is_ours: bool = True,
        has_scripts: bool = True,
        act: str = "null",
    ) -> tuple[Any, Path]:
        # The debugger's own script needs no permission of the page, so the page's policy stays as it is.
        assert "default-src 'none'" in page or not is_ours
        (shown := tmp_path / "shown.html").write_text(page)
        picture = screenshot or tmp_path / "page.png"
        events: list[dict[str, Any]] = []
        with browser(tmp_path / "profile", events) as ask:
            target = ask("Target.createTarget", {"url": "about:blank"})["targetId"]
            session = ask("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
            # A headless window is at least 500 pixels wide, a device may be narrower.
            device = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < NARROW}
            ask("Emulation.setDeviceMetricsOverride", device, session)
            ask("Emulation.setScriptExecutionDisabled", {"value": not has_scripts}, session)
            for domain in ("Page", "Log", "Network", "Runtime"):
                ask(f"{domain}.enable", {}, session)
            ask("Page.navigate", {"url": shown.as_uri()}, session, until="Page.loadEventFired")
            acted, found = (
                ask(
                    "Runtime.evaluate",
                    {"expression": expression, "awaitPromise": True, "returnByValue": True},
                    session,
                )["result"].get("value")
                for expression in (act, PROBE)
            )
            picture.write_bytes(base64.b64decode(ask("Page.captureScreenshot", {}, session)["data"]))
        sent = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
        found["problems"] = [event["params"] for event in events if event["method"] in PROBLEMS]
        found["fetched"] = [url for url in sent if url != shown.as_uri() and not url.startswith("data:")]
        return found | {"acted": acted}, picture

    return show


@pytest.fixture
def show_page_if_possible(request: pytest.FixtureRequest) -> Callable[..., tuple[dict[str, Any], Path]] | None:
    """The same where a browser is installed, for tests that show more without one; None elsewhere."""
    found: Callable[..., tuple[dict[str, Any], Path]] | None = (
        None if BROWSER is None else request.getfixturevalue("show_page")
    )
    return found


@contextmanager
def browser(profile: Path, events: list[dict[str, Any]]) -> Iterator[Ask]:
    """Start a browser that is asked by its debugging protocol: JSON over two pipes, each message ended by a zero.

    What it reports is appended to the events.
    """
    assert BROWSER is not None
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    command = [BROWSER, *OPTIONS.split(), f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", *command],
        pass_fds=(theirs_in, theirs_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    numbers = itertools.count(1)
    try:
        with os.fdopen(ours_in, "rb") as answers, os.fdopen(ours_out, "wb") as questions:
            messages = _messages(answers)

            def ask(method: str, parameters: dict[str, Any], session: str | None = None, *, until: str = "") -> Any:
                question = {"id": next(numbers), "method": method, "params": parameters}
                question |= {"sessionId": session} if session else {}
                questions.write(json.dumps(question).encode() + b"\0")
                questions.flush()
                answer, happened = None, not until
                while answer is None or not happened:
                    message = next(messages)
                    assert "error" not in message, message
                    happened |= message.get("method") == until
                    events.extend([message] if "method" in message else [])
                    answer = message["result"] if message.get("id") == question["id"] else answer
                return answer

            yield ask
    finally:
        process.kill()
        process.wait()


def _messages(stream: BufferedReader) -> Iterator[dict[str, Any]]:
    rest = b""
    while data := stream.read1(1 << 16):
        *whole, rest = (rest + data).split(b"\0")
        yield from map(json.loads, whole)
    raise AssertionError("the browser has ended")
