"""The built site in a real browser: it fits, it is quiet, its search finds, it asks nobody else."""

import functools
import http.server
import threading
from pathlib import Path

import pytest

from tests.site.browser import CHROMIUM, Browser

SITE = Path(__file__).parents[2] / "build/site"
PAGES = sorted(page.parent.relative_to(SITE).as_posix() for page in SITE.rglob("index.html"))
pytestmark = [
    pytest.mark.skipif(not PAGES, reason="`make docs` builds the site"),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
]


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A server of files that does not log."""

    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture(scope="module")
def address():
    handler = functools.partial(Quiet, directory=SITE)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


def open_page(browser, address, page):
    browser.open(address if page == "." else f"{address}{page}/")


@pytest.mark.parametrize("width", [400, 1280])
def test_pages_fit_and_are_quiet(browser, address, width):
    browser.size(width)
    too_wide = {}
    for page in PAGES:
        browser.faults.clear()
        open_page(browser, address, page)
        found = browser.evaluate("document.documentElement.scrollWidth")
        pictures = "[...document.images].filter(x => x.complete && !x.naturalWidth).map(x => x.src)"
        assert browser.evaluate(pictures) == [], page
        assert browser.faults == [], page
        if found > width:
            too_wide[page] = found
    assert too_wide == {}


def test_nothing_comes_from_elsewhere(browser, address):
    browser.requested.clear()
    for page in (".", "notebooks/acceptance", "reference/primitives"):
        open_page(browser, address, page)
    asked = [url for url in browser.requested if not url.startswith("data:")]
    assert len(asked) > 5
    assert [url for url in asked if not url.startswith(address)] == []


@pytest.mark.parametrize(
    ("words", "page"), [("tree mask", "how/tree-mask/"), ("merge_state", "reference/primitives/")]
)
def test_the_search_finds(browser, address, words, page):
    browser.size(1280)
    browser.faults.clear()
    open_page(browser, address, ".")
    browser.evaluate("document.querySelector('[data-md-component=search-query]').focus()")
    browser.send("Input.insertText", text=words)
    browser.wait("document.querySelectorAll('.md-search-result__link').length > 0")
    links = browser.evaluate(
        "[...document.querySelectorAll('.md-search-result__link')].map(x => x.pathname)"
    )
    assert any(link.endswith(page) for link in links), links
    assert browser.faults == []
