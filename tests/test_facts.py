"""What the pages state is what the code and the records say."""

import importlib
import inspect
import json
import os
import re
import sys
import tomllib
from contextlib import suppress
from dataclasses import fields
from functools import cache, reduce
from pathlib import Path
from pkgutil import resolve_name
from statistics import geometric_mean

import pytest
import typer

from specattn.cli import app
from specattn.decoding import (
    FAMILIES,
    METHODS,
    Cast,
    Medusa,
    PosS,
    Quest,
    Streaming,
    Suffix,
    TokenRecycling,
    TokenSwift,
    TriForce,
    Vegas,
    generate,
    parse_method,
)
from specattn.decoding.drafting.grown import MOST_TOKENS
from specattn.decoding.methods import longspec, prompt_lookup
from specattn.training.longspec import STAGES, Stage
from specattn.training.poss import VARIANTS
from tests import pages
from tests.pages import ROOT

sys.path.insert(0, str(ROOT / "docs/tools"))

import records  # noqa: E402
import tables  # noqa: E402
from decoding_tables import auto_gains  # noqa: E402

sys.path.pop(0)

PAGES = [page for page in pages.PAGES if page.name != "CHANGELOG.md"]  # which tells of what was
NUMBERS = {"one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "eight": 8, "ten": 10}
OF_TREES = "hybrid_tree_attention"
CLASSES = {cls.__name__: cls for cls in METHODS.values()}
each_page = pages.each(PAGES)


@pytest.mark.parametrize("page", tables.pages(), ids=lambda page: page.name)
def test_tables_are_what_the_records_give(page):
    text = page.read_text()
    assert text == tables.written(text), "run: python docs/tools/tables.py"


def test_every_table_stands_in_a_page():
    used = {
        name for page in tables.pages() for _, name, _ in tables.BLOCK.findall(page.read_text())
    }
    assert used == set(records.TABLES)


@cache
def _files():
    folders = [one for one in ROOT.glob("[a-z]*/") if one.name not in ("build", "dist")]
    found = [*ROOT.glob("*.*"), *(path for folder in folders for path in folder.rglob("*.*"))]
    return [f"/{path.relative_to(ROOT).as_posix()}" for path in found]


@each_page
def test_files_that_are_named_exist(page):
    """By the end of their path, or in Python's own library."""
    stdlib = Path(os.__file__).parent
    for name in re.findall(r"`([\w./-]+\.(?:py|h|cuh?|cpp|sh|jsonl|toml))`", pages.prose(page)):
        found = any(path.endswith(f"/{name}") for path in _files()) or (stdlib / name).exists()
        assert found or name == "llama.cpp", f"there is no {name}"


def locate(name):
    """Return what a dotted name means, a module where a function has the same name, too."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        with suppress(ImportError):
            found = importlib.import_module(".".join(parts[:count]))
            return reduce(lambda one, part: getattr(one, part, None), parts[count:], found)
    return None


@each_page
def test_public_names_exist(page):
    text = page.read_text()
    for name in set(re.findall(r"`(specattn(?:\.\w+)+)", pages.prose(page))) - {"specattn.h"}:
        resolve_name(name)
    for name in re.findall(r"^::: (specattn[\w.]*)$", text, re.M):  # of the reference
        if "vllm." not in name:  # which needs vLLM
            assert locate(name), name
    for module, names in re.findall(r"^\s*from (specattn[\w.]*) import ([\w, ]+)$", text, re.M):
        for name in names.split(","):
            resolve_name(f"{module}:{name.split(' as ')[0].strip()}")


@each_page
def test_options_of_methods_exist(page):
    """`Vegas(gamma=6)` in Python, `vegas:gamma=6` on the command line."""
    text = re.sub(r"Vegas\(\.\.\., name=", "Vegas(", tables.BLOCK.sub("", page.read_text()))
    for name, arguments in re.findall(rf"\b({'|'.join(CLASSES)})\(((?:[^()]|\([^()]*\))*)\)", text):
        known = {field.name for field in fields(CLASSES[name])}
        given = re.findall(r"(?:^|[\s,])(\w+)=", re.sub(r"\([^()]*\)|\[[^\]]*\]", "", arguments))
        assert set(given) <= known, f"{name}({arguments})"
    for given in re.findall(rf"`((?:{'|'.join(METHODS)}):\w+=[^`\s]+)`", text):
        if "[..." not in given:
            parse_method(given)


def _methods_of(page):
    """Return the methods whose names the page has in its Python code, or all."""
    text = page.read_text()
    return [cls for name, cls in CLASSES.items() if re.search(rf"\b{name}\(", text)]


def _stated(text):
    """Return what a page writes as a default, as the code would."""
    text = text.strip("` ").replace(",", "")
    if text.endswith("%"):
        return float(text[:-1]) / 100
    if text.lower() in ("none", "true", "false"):
        return {"none": None, "true": True, "false": False}[text.lower()]
    try:
        return float(text)
    except ValueError:
        return text


@each_page
def test_defaults_are_those_of_the_signatures(page):
    """Of tables with the columns option and default, and of "`min_tokens` (256)" in prose."""
    methods = _methods_of(page)
    defaults = {}
    for cls in methods:
        for field in fields(cls):
            defaults.setdefault(field.name, set()).add(field.default)
    text = pages.prose(page)
    stated = re.findall(r"`(\w+)`[^`|.()]{0,40}\(([\d,.]+%?)(?: by default[^)]*)?\)", text)
    for table in re.findall(r"^\| option \| default \|.*\n\|[-| ]+\n((?:\|.*\n)+)", text, re.M):
        for row in table.splitlines():
            cells = row.split("|")
            stated += [(name, cells[2]) for name in re.findall(r"`(\w+)`", cells[1])]
    for name, value in stated:
        if name in defaults:
            assert _stated(value) in defaults[name], f"{name} is {defaults[name]}, not {value}"


@cache
def _command_defaults():
    """Return the defaults of every option of every command, by name."""
    found, commands = {}, [typer.main.get_command(app)]
    while commands:
        command = commands.pop()
        commands += getattr(command, "commands", {}).values()
        for one in command.params:
            for name in one.opts:
                found.setdefault(name, set()).add(str(one.default).removesuffix(".0"))
    return found


@each_page
def test_defaults_are_those_of_the_command(page):
    """Of "`--rank-timeout` (300 s; ...)" and "`--text-field` (default `text`)"."""
    stated = r"`(--[a-z-]+)`[^`|.()]{0,30}\((?:default )?`?([a-z]*\d*)`?(?: s)?[;)]"
    for name, value in re.findall(stated, pages.prose(page)):
        if name in _command_defaults():
            assert value in _command_defaults()[name], f"{name} is {_command_defaults()[name]}"


@each_page
def test_python_versions_are_those_of_the_package(page):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = project["requires-python"].removeprefix(">=")
    listed = [re.search(r"3\.\d+$", one) for one in project["classifiers"] if "Python ::" in one]
    listed = sorted((one[0] for one in listed if one), key=lambda one: int(one[2:]))
    assert listed[0] == oldest
    for first, last in re.findall(r"Python (3\.\d+) to (3\.\d+)", page.read_text()):
        assert (first, last) == (oldest, listed[-1])
    for first in re.findall(r"Python (3\.\d+) (?:or newer|and newer|and later)", page.read_text()):
        assert first == oldest


@each_page
def test_what_stands_below_the_picture_of_auto_is_its_record(page):
    """The paragraph below it names texts, dates and factors of the file that it is drawn from."""
    path = ROOT / "bench/results/epyc-zen5-2core/auto.jsonl"
    run, *cells = map(json.loads, path.read_text().splitlines())
    gains = auto_gains()
    means = [geometric_mean(gains[kind]) for kind in ("greedy", "sampled", "best")]
    means += [geometric_mean(gains["greedy"] + gains["sampled"])]
    factors = [*means, *(edge(gains[kind]) for kind in gains for edge in (min, max))]
    peers = records.read("epyc-2core/decoding-peers.jsonl")
    factors += [row["speedup"].get("vllm", 0) for row in peers if row["method"] == "plain"]
    rounded = {f"{factor:.{digits}f}" for factor in factors for digits in (1, 2)}
    picture = r"\((?:docs/)?figures/results-auto\.svg\)\n\n(.+?)(?:\n\n|\Z)"
    found = re.findall(picture, page.read_text(), re.S)
    assert found or page.name != "auto.md"
    for below in found:
        for number in re.findall(r"\b(\w+) texts\b", below):
            texts = len({cell["text"] for cell in cells})
            assert NUMBERS.get(number.lower(), number) in (texts, str(texts)), below
        for number in re.findall(r"\b(\w+) cells\b", below):
            assert {"thirty": 30}.get(number.lower(), number) in (len(cells), str(len(cells))), (
                below
            )
        assert set(re.findall(r"20\d\d-\d\d-\d\d", below)) <= {run["time"][:10]}, below
        for factor in re.findall(
            r"(?<![\w.-])(\d+\.\d+)(?= times| to |\)| greedily| sampled)", below
        ):
            assert factor in rounded, f"{factor} is not in the records: {below}"


def test_what_readme_says_of_auto_is_what_tables_and_records_say():
    text = " ".join((ROOT / "README.md").read_text().split())
    rows = records.TABLES["headline"]().splitlines()[2:]
    table = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    ones = [float(row[-1]) for row in table if row[3] == "1"]
    low, high = (round(100 * (edge(ones) - 1)) for edge in (min, max))
    assert f"`auto` gains {low} to {high}% in the table" in text
    worst = min(min(gains) for kind, gains in auto_gains().items() if kind != "best")
    assert f"loses {round(100 * (1 - worst))}%](docs/auto.md#what-it-gained-here) at worst" in text


def test_where_vllm_is_ahead_is_said_beside_where_it_is_not():
    claim = " ".join((ROOT / "README.md").read_text().split())
    claim = claim[claim.index("Plain decoding of the embedded model") :].split(" SGLang ")[0]
    bars = {row["name"]: row["measured"] for row in records.read("xeon-2core/bars.jsonl", "bar")}
    one_row = bars["hybrid, 1 row, 32768 keys, against vllm"]
    assert ("vLLM's attention is faster for one row" in claim) == (one_row < 1)
    assert ("EPYC" in claim, "Xeon with AMX" in claim, "(7.7 M parameters" in claim) == (True,) * 3


def test_how_often_vllms_speed_readme_says_is_what_the_records_give():
    text = " ".join((ROOT / "README.md").read_text().split())
    peers = [
        row
        for folder in ("epyc-2core", "epyc-zen3-2core")
        for row in records.read(f"{folder}/decoding-peers.jsonl")
    ]
    gains = [r["speedup"]["vllm"] for r in peers if r["method"] == "plain" and not r["temperature"]]
    assert len(gains) > 1
    assert f"at {min(gains):.1f} to {max(gains):.1f} times vLLM's speed on two EPYCs" in text


def test_what_readme_begins_with_is_in_its_table():
    text = " ".join((ROOT / "README.md").read_text().split())
    table = [row.strip("| ").split(" | ") for row in records.TABLES["headline"]().splitlines()[2:]]
    greedy = [row for row in table if row[2].startswith("4k") and row[3] == "0"]
    on_cpus = [row[7].split() for row in greedy if row[0] == "EPYC (Zen 5), 2 cores"]
    (on_a_gpu,) = (row[7].split() for row in greedy if row[0] == "H100" and "at once" not in row[2])
    assert {name for _, name in on_cpus} == {"`suffix`"}  # which needs nothing trained
    assert on_a_gpu[1].startswith("`poss:")
    low, high = (edge(float(gain) for gain, _ in on_cpus) for edge in (min, max))
    told = f"{low:.1f} to {high:.1f} times as fast on two CPU cores with nothing trained, and"
    assert f"{told} {float(on_a_gpu[0]):.1f} times on an H100 with a trained drafter" in text


def test_what_readme_says_of_a_tree_on_an_h100_is_its_record():
    text = " ".join((ROOT / "README.md").read_text().split())
    rows = [row for row in records.read("h100/kernels.jsonl") if row["op"] == OF_TREES]
    place = {"variant": "contiguous", "rows": 16, "batch": 1, "context": 32768}
    (one,) = (row for row in rows if all(row[key] == value for key, value in place.items()))
    best = min(peer["ratio"] for peer in one["peers"].values())
    told = (
        f"{1e6 * one['time']['median']:.0f} us on an H100; the best of FlashInfer and torch takes"
    )
    assert f"(a tree of 16 rows over 32k keys: {told} {best:.1f} times that)" in text


def test_families_are_those_that_are_tested():
    text = (ROOT / "docs/models.md").read_text()
    table = text[text.index("| family |") :].split("\n\n")[0]
    rows = [row.split("|")[2] for row in table.splitlines()[2:]]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(FAMILIES)


def _rows(page, header):
    """Return the cells of a page's table that begins with this header."""
    text = (ROOT / "docs" / page).read_text()
    table = text[text.index(header) :].split("\n\n")[0]
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]


def test_stages_and_variants_are_the_recipes():
    for name, length, batch, rate, positions, _ in _rows("training.md", "| `--stage`"):
        shown = Stage(_first(length), _first(batch), float(rate), positions == "anchor-offset")
        assert STAGES[name.strip("`")] == shown
    listed = {}
    for names, layers, depth in _rows("training.md", "| `--variant`"):
        for name, count in zip(re.findall(r"`([\w-]+)`", names), layers.split(", "), strict=True):
            listed[name] = int(count), int(depth)
    for name, variant in VARIANTS.items():
        assert listed[name] == (variant.layers, variant.depth)


def test_the_largest_sizes_are_those_that_methods_take():
    rows = {names: most for names, _, most in _rows("auto.md", "| method | option | at most")}
    written = {
        "LongSpec": f"{_list(longspec.MOST_WIDTHS)}, in beams of 1, 4 or 16; {longspec.MOST_GAMMA}",
        "PosS, EAGLE-3, MTP": f"{MOST_TOKENS} of `width` {PosS().width}, `depth` {PosS().depth}, in"
        " beams of 1, 4 or 10",
        "Medusa, TokenSwift": f"{_list(Medusa.most_widths)}; {_list(TokenSwift.most_widths)} and"
        " n-grams",
        "Token Recycling, suffix": f"{Suffix().max_nodes - 1}",
        "prompt lookup": f"{prompt_lookup.MOST_GAMMA}",
        "Vegas, TriForce; cast; the other chains": f"{Vegas().max_gamma}; {Cast().max_gamma}; "
        f"{Streaming().max_gamma}",
    }
    assert rows == written
    assert TriForce().max_gamma == Vegas().max_gamma
    assert Quest().max_gamma == Streaming().max_gamma
    assert TokenRecycling().max_nodes == Suffix().max_nodes


def _first(text):
    return int(text.split()[0])


def _list(widths):
    return ", ".join(map(str, widths))


def test_vllm_is_the_version_that_the_plugin_is_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = project["optional-dependencies"]["vllm"]
    served = re.search(r">=(\d+\.\d+)", wanted)[1]
    for page in PAGES:
        for version in re.findall(r"\bv(?:LLM|llm-cpu) (\d+\.\d+)(?! ms)", page.read_text()):
            assert version == served, f"{page.name}: {version}"


def test_every_method_stands_where_methods_are_listed():
    reference = (ROOT / "docs/reference/methods.md").read_text()
    assert set(re.findall(r"specattn\.decoding\.(\w+)$", reference, re.M)) >= set(CLASSES)
    readme = (ROOT / "README.md").read_text()
    assert {name for name in METHODS if f"`{name}`" not in readme} <= {"plain"}


def test_the_default_method_is_auto():
    assert inspect.signature(generate).parameters["method"].default == "auto"
