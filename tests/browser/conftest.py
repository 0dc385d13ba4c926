"""A real ComfyUI and a headless browser on its editor; skipped with one line where one of them is missing.

The host is found as in tests/host. The browser is the system's Chromium, or the one Playwright installed.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1] / "host")]

from comfy_server import ROOT, Server, host_or_skip, running_server

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SHOTS = ROOT / "out" / "browser"
KNOWN_USER = {"Comfy.TutorialCompleted": True}  # else the template browser opens by itself


@pytest.fixture(scope="session")
def browser() -> Iterator:
    reason = 'no Playwright: pip install -e ".[browser]"'
    api = pytest.importorskip("playwright.sync_api", reason=reason)
    with api.sync_playwright() as driver:
        found = next(filter(None, map(shutil.which, BROWSERS)), driver.chromium.executable_path)
        if not Path(found).exists():
            pytest.skip("no browser: install the package chromium, or run `playwright install chromium`")
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server(browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    base = tmp_path_factory.mktemp("server") / "base"
    user = base / "user" / "default"
    user.mkdir(parents=True)
    (user / "comfy.settings.json").write_text(json.dumps(KNOWN_USER))
    with running_server(host_or_skip(), base) as server:
        yield server


@pytest.fixture(scope="session")
def editor(browser, server: Server) -> Iterator:
    """The editor in one page, which the tests share: it takes long to load."""
    from editor import Editor

    SHOTS.mkdir(parents=True, exist_ok=True)
    context = browser.new_context(viewport={"width": 1600, "height": 1000})
    context.set_default_timeout(60_000)
    yield Editor(context.new_page(), f"http://127.0.0.1:{server.port}", SHOTS)
    context.close()
