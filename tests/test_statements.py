"""Statements in which pages used to contradict each other are made in one place, or checked."""

import json
import re

import pytest

from specattn.decoding import Vegas
from specattn.planning.rounds import CANDIDATES
from tests.pages import PAGES, ROOT, each, prose

NEWEST = [page for page in PAGES if page.name not in ("CHANGELOG.md", "log.md")]  # not of what was
STATE = json.loads((ROOT / "docs/tools/state.json").read_text())
TABLE = re.compile(r"^<!-- table .*?^<!-- end -->", re.MULTILINE | re.DOTALL)
DEVICES = r"(GPUs?|H100|H200|AMD|NVIDIA|Hopper|NCCL|AMX|AVX|CUDA|Triton)"
RAN = (
    r"(never (ran|run)|not (been )?(run|executed|timed|tested)\b|n't run|(nobody|no GPU) has run"
    r"|ha(s|ve) not run|still to be run|ran once|nowhere else"
    r"|(tested|executed) on (a|the) (CPU|GPU)|runs? on no GPU|right on an H100|ran there"
    r"|no figure of a GPU|No GPU figure|not yet (on|run)|only (been )?compiled"
    r"|compiled for (AVX|AMX))"
)


def sentences(text):
    """Return the sentences, cells of tables and items of lists of a page's prose."""
    text = TABLE.sub("", text)
    text = re.sub(r"\n(?=[*|#]|\d+\. )|\n\n|\|", "\0", text).replace("\n", " ")
    return [one.strip() for part in text.split("\0") for one in re.split(r"(?<=[.:]) ", part)]


def says_what_ran(sentence):
    """Whether a sentence says that something ran, or did not, on a device."""
    return re.search(DEVICES, sentence) and re.search(RAN, sentence) and "#state" not in sentence


@pytest.mark.parametrize(
    "sentence",
    [
        "| GPUs | right on an H100 |",
        "They are for CPUs, and have had a Triton kernel since, which no GPU has run.",
        "Executed: on a CPU, with Triton and nowhere else.",
        "The kernels compile for gfx942, and never ran on an AMD GPU.",
        "With AMX these kernels were compiled, and not run.",
        "Run on stand-ins on a CPU by the libraries' signatures, not yet on a GPU.",
        "| C++ | everything; run with AVX2, compiled for AVX-512 and AMX |",
        "They have only been compiled for Hopper.",
        "No GPU figure exists yet.",
    ],
)
def test_such_sentences_are_found(sentence):
    assert any(map(says_what_ran, sentences(sentence)))


@each([page for page in NEWEST if page.parts[-2] != "ptx"])  # which says what its emulator ran
def test_what_ran_on_which_device_is_said_by_the_state_alone(page):
    """docs/tools/state.json says it; other sentences lead there."""
    assert [one for one in sentences(prose(page)) if says_what_ran(one)] == []


def test_every_backend_of_the_state_says_all():
    assert all(list(row) == ["backend", "run on", "tested", "timed"] for row in STATE["backends"])
    assert all(value for row in STATE["backends"] for value in row.values())


@each(PAGES)
def test_t_is_the_temperature(page):
    """Numbers of rows are called rows; that the reference's shapes have T the glossary says."""
    text = prose(page)
    for value in re.findall(r"\bT ?= ?(\d+(?:\.\d+)?)", text):
        assert float(value) <= 2, f"T={value}"
    assert not re.findall(r"\bT rows\b|\bT [x*] |[x·] ?T\b(?! =)", text)


@each([*ROOT.glob("bench/**/*.py"), *ROOT.glob("python/specattn/gpu_checks/*.py")])
def test_t_is_the_temperature_in_what_programs_print(page):
    assert re.findall(r"\bT=(?:\{[^}]*(?:rows|count)|\d\d)|chain of T\b", page.read_text()) == []


@each([page for page in NEWEST if page.parts[-2] != "ptx" and page.name != "glossary.md"])
def test_every_page_leads_to_the_glossary(page):
    assert "glossary.md)" in page.read_text()


@each(NEWEST)
def test_what_the_plan_predicts_is_what_it_has_acceptance_for(page):
    known = {"Vegas", "LongSpec", "PosS", "TokenSwift"}
    assert {name.lower() for name in known} == set(CANDIDATES)
    text = " ".join(prose(page).split())
    for listed in re.findall(r"speed-up of plain decoding, ([\w, ]+?),? (?:on|and says)", text):
        assert set(re.findall(r"[A-Z]\w+", listed)) == known


@each(NEWEST)
def test_the_share_of_the_cache_that_vegas_reads_is_its_default(page):
    for share in re.findall(r"[Vv]egas\W[^.|]{0,40}? (\d+)% of (?:it|the cache)", prose(page)):
        assert int(share) == round(100 * Vegas().ratio)
