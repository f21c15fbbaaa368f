"""A real Chromium for tests of pages: without a network, and with a list of everything that went wrong in it.

    with browser.page() as page:
        page.goto(path.as_uri())
        ...
        assert page.errors == []

`page.errors` collects messages of errors and warnings on the console, exceptions, requests that failed, and requests to
anywhere but files, data and the loopback, which are refused. Fixtures: `chromium` for a module, opened once.
"""

import os
import shutil
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest

from helpers.files import require

NAMES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = ["--no-sandbox", "--disable-gpu", "--autoplay-policy=no-user-gesture-required"]


def executable():
    """The system's browser; without one the test is skipped, or with CLEANRL_REQUIRE_ALL=1 fails."""
    require("playwright")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        message = "not installed: chromium"
        pytest.fail(message) if os.environ.get("CLEANRL_REQUIRE_ALL") == "1" else pytest.skip(message)
    return path


@contextmanager
def launch():
    path = executable()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=OPTIONS)
        yield browser
        browser.close()


@contextmanager
def open_page(browser, width=1280, height=900, **options):
    """A page in a fresh profile. `options` are those of a context, such as color_scheme="dark" or has_touch=True."""
    context = browser.new_context(viewport={"width": width, "height": height}, accept_downloads=True, **options)
    context.set_default_timeout(10_000)
    page = context.new_page()
    page.errors = []

    def guard(route):
        address = urlsplit(route.request.url)
        if address.scheme in ("file", "data", "blob", "about") or address.hostname in ("127.0.0.1", "localhost"):
            return route.continue_()
        page.errors.append(f"asked for {route.request.url}")
        return route.abort()

    context.route("**/*", guard)
    page.on("pageerror", lambda error: page.errors.append(f"exception: {error}"))
    page.on("requestfailed", lambda request: page.errors.append(f"failed: {request.url} {request.failure}"))
    page.on(
        "console",
        lambda message: page.errors.append(message.text) if message.type in ("error", "warning") else None,
    )
    yield page
    context.close()


@contextmanager
def page(**options):
    """A page in a browser of its own."""
    with launch() as browser, open_page(browser, **options) as opened:
        yield opened


@pytest.fixture(scope="module")
def chromium():
    """One browser for the tests of a module: `with browser.open_page(chromium) as page`."""
    with launch() as browser:
        yield browser
