"""``specattn compare --html``: what the page says, and what a real browser makes of it."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from specattn.cli import loading
from tests import HANGS
from tests.cli.conftest import start

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
HOSTILE = '<script>document.title = "run"</script><img src=x onerror=alert(1)> "\'&amp;\x07\n'
METHODS = "plain,prompt_lookup:gamma=4,auto"
VOID = {"meta", "link", "img", "br"}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    path = tmp_path_factory.mktemp("<b>&") / "a<b>&.py"
    path.write_text("def add(left, right):\n    return left + right\n\n\n" * 10 + HOSTILE * 3)
    return path


@pytest.fixture(scope="module")
def written(hostile, tmp_path_factory):
    """Return the page of three methods, and what ``--json`` writes of the same runs."""
    folder = tmp_path_factory.mktemp("written")
    page, out = folder / "page.html", folder / "out.json"
    arguments = ["--prompt-file", hostile, "--max-new-tokens", 24, "--methods", METHODS]
    arguments += ["--html", page, "--json", out]
    with pytest.MonkeyPatch.context() as patch:
        assert not start(patch, "compare", *arguments)
    assert {path.name for path in folder.iterdir()} == {"page.html", "out.json"}
    return page.read_text(), json.loads(out.read_text())


class Elements(HTMLParser):
    """Collects tags with their attributes, and the text inside every ``pre``; checks nesting."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.texts, self.open = [], [], []
        self.spans = []  # class and text of spans in the texts
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "pre":
            self.texts.append("")
            self.spans.append([])
        if tag == "span" and "pre" in self.open:
            self.spans[-1].append([dict(attrs)["class"], ""])

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-2:] == ["pre", "span"]:
            self.texts[-1] += data
            self.spans[-1][-1][1] += data


def test_the_page_needs_nothing_but_itself(written):
    page, _ = written
    elements = Elements(page)
    assert {"script", "link", "img", "iframe", "object"}.isdisjoint(dict(elements.tags))
    for tag, attributes in elements.tags:
        assert not any(name.startswith("on") or name in ("src", "data") for name in attributes), tag
        assert attributes.get("href", "#").startswith("#")
    assert "url(" not in page
    assert "@import" not in page
    assert "prefers-color-scheme: dark" in page


def test_texts_are_shown_as_they_are_and_coloured_by_what_was_accepted(written, hostile):
    page, runs = written
    elements = Elements(page)
    assert len(elements.texts) == len(runs["runs"]) == 3
    for text, spans, run in zip(elements.texts, elements.spans, runs["runs"], strict=True):
        seen = "".join(part for kind, part in spans if kind != "prompt")
        assert seen == run["text"]
        assert text.removesuffix(seen).endswith(HOSTILE.replace("\x07", r"\x07"))
        figures = run["statistics"]
        drafted = [part for kind, part in spans if re.fullmatch(r"d\d", kind)]
        assert bool(drafted) == (figures["accepted"] > figures["discarded"])
        if run["method"]["name"] == "plain":
            assert {kind for kind, _ in spans} == {"prompt", "own"}
    assert hostile.name in re.sub("&lt;", "<", re.sub("&gt;", ">", re.sub("&amp;", "&", page)))


def test_nothing_is_cut_on_1200_pixels(written):
    """No browser is needed: tables scroll where they do not fit, and what is long may break."""
    page, _ = written
    elements = Elements(page)
    tables = [n for n, (tag, _) in enumerate(elements.tags) if tag == "table"]
    assert tables
    assert all(elements.tags[n - 1] == ("div", {"class": "wide", "tabindex": "0"}) for n in tables)
    style = page[page.index("<style>") : page.index("</style>")]
    rules = dict(re.findall(r"^([^{}@]+?) \{ (.*?)(?:\}|$)", style, re.MULTILINE))
    width = int(re.search(r"max-width: (\d+)rem", rules["body"])[1])
    assert 16 * width <= 1200
    assert "white-space: normal" in rules["th"]
    assert "overflow-wrap: anywhere" in rules["td:first-child"]
    # Digits and capitals are at most 0.65em wide; cells have 12 pixels beside them.
    summary = re.search(r"<tbody>(.*?)</tbody>", page, re.DOTALL)[1]
    heads = re.findall(r"<th>(.*?)</th>", page[: page.index("<tbody>")])
    for row in re.findall("<tr>(.*?)</tr>", summary):
        cells = re.findall("<td>([^<]*)</td>", row)
        words = [max(map(len, head.split())) for head in heads[1:]]
        needed = 8 * 16 + sum(
            12 + max(0.65 * 16 * len(cell), 0.65 * 14 * word)
            for cell, word in zip(cells, words, strict=True)
        )
        assert needed <= 16 * width - 32


def test_no_folder_of_the_user_is_on_the_page(written, hostile):
    page, content = written
    assert str(hostile.parent) not in page.replace("&lt;", "<").replace("&gt;", ">")
    assert content["model"]["path"] not in page
    assert f"continued by {content['model']['name']} (" in page


def test_figures_are_those_of_json(written):
    page, runs = written
    for run in runs["runs"]:
        figures = run["statistics"]
        assert f"<td>{figures['tokens_per_second']:.1f}</td>" in page
        assert f"{figures['passes']} passes in {figures['decode_seconds']:.2f} s" in page
        assert f"{figures['cache_bytes'] / 2**20:,.1f} MiB" in page
        assert f"{run['peak_bytes'] / 2**20:,.1f} MiB" in page
        for place, rate in enumerate(figures["position_rates"], start=1):
            assert f"position {place}: {rate:.0%} of all rounds" in page
    assert "token for token: " + '<span class="yes">yes</span>' in page


def test_every_text_of_a_batch_is_shown(specattn, prompt, hostile, tmp_path):
    page = tmp_path / "page.html"
    files = ("--prompt-file", prompt, "--prompt-file", hostile)
    options = ("--max-new-tokens", 6, "--methods", "plain,suffix")
    assert specattn("compare", *files, *options, "--html", page)[0] == 0
    assert len(Elements(page.read_text()).texts) == 4


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("-", "--html: expected a file, got -"),
        (".", "--html: . is a folder, and is not replaced"),
        ("none/page.html", "--html: folder "),
        ("/dev/null", "--html: /dev/null is no regular file"),
        ("{tmp}/./out.json", "out.json is the file of --json too"),
    ],
)
def test_where_no_page_can_be_written_nothing_is_loaded(
    refused, prompt, tmp_path, monkeypatch, file, reason
):
    monkeypatch.setattr(loading, "load_causal_model", None)
    files = ("--json", tmp_path / "out.json", "--html", file.format(tmp=tmp_path))
    refused(reason, "compare", "--prompt-file", prompt, *files)


def test_a_page_is_whole_or_not_there(specattn, prompt, tmp_path, monkeypatch):
    from specattn.cli import page as module

    page = tmp_path / "page.html"
    page.write_text("before")
    monkeypatch.setattr(module, "_summary", lambda runs: 1 / 0)
    options = ("--prompt-file", prompt, "--max-new-tokens", 2, "--html", page)
    assert "ZeroDivisionError" in specattn("compare", *options)[2]
    assert page.read_text() == "before"


MEASURE = """\
<!DOCTYPE html><body><script>
const frame = document.createElement("iframe");
frame.style = "border: 0; width: WIDTHpx; height: 900px";
frame.srcdoc = PAGE;
frame.onload = () => {
  const inside = frame.contentDocument, root = inside.documentElement;
  const scrolls = (node) => node.closest(".wide, pre");
  const outside = [...inside.querySelectorAll("body *")].filter(
    (node) => !scrolls(node.parentElement) && node.getBoundingClientRect().right > WIDTH + 1);
  const found = {
    width: root.clientWidth, scrolled: root.scrollWidth, scripts: inside.scripts.length,
    title: inside.title, pictures: inside.images.length,
    fetched: frame.contentWindow.performance.getEntriesByType("resource").length,
    outside: outside.map((node) => node.outerHTML.slice(0, 80)),
    lines: [...inside.querySelectorAll("svg.line")].map((svg) => svg.getBBox().width),
    drawn: [...inside.querySelectorAll("svg.line path")].every((path) => path.getTotalLength() > 0),
    body: document.title,
  };
  const said = document.createElement("pre");
  said.id = "found";
  said.textContent = JSON.stringify(found);
  document.body.replaceChildren(said);
};
document.body.append(frame);
</script>"""


@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_shows_it_whole(written, tmp_path, width):
    """The page in a frame of that width, beside which a script measures it."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"needs a browser: none of {', '.join(BROWSERS)} is installed")
    quoted = json.dumps(written[0]).replace("</", "<\\/").replace("<script", "<\\u0073cript")
    outer = tmp_path / "outer.html"
    outer.write_text(MEASURE.replace("WIDTH", str(width)).replace("PAGE", quoted))
    done = subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
            f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,1000",
            "--virtual-time-budget=10000", "--dump-dom", outer.as_uri(),
        ],
        capture_output=True, text=True, timeout=HANGS, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr, done.stderr
    (said,) = re.findall(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    found = json.loads(said.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert found["title"] == f"specattn compare: {METHODS.replace(',', ', ')}"
    assert (found["scripts"], found["pictures"], found["fetched"]) == (0, 0, 0)
    assert found["scrolled"] <= found["width"]
    assert found["outside"] == []
    assert len(found["lines"]) == 3
    assert found["drawn"]
    assert max(found["lines"]) == pytest.approx(1000, abs=5), "the longest run fills its line"
