"""A hook of mkdocs: every public name stands in the reference, with a docstring."""

from __future__ import annotations

import re
from pathlib import Path

import griffe
from mkdocs.exceptions import Abort
from public import MODULES

ELSEWHERE = {  # what reading the source does not find, or finds a module of the same name for
    "specattn.backends": "specattn.backends.select.backends",
    "specattn.integrations.vllm.PromptLookup": "specattn.integrations.vllm.lookup.PromptLookup",
    "specattn.integrations.vllm.Suffix": "specattn.integrations.vllm.lookup.Suffix",
    "specattn.integrations.vllm.Vegas": "specattn.integrations.vllm.vegas.Vegas",
    "specattn.planning.predict": "specattn.planning.predict.predict",
}


def on_post_build(config):
    """End the build where a public name is missing or says nothing."""
    folder = Path(config.site_dir, "reference")
    shown = set()
    for page in folder.rglob("*.html"):
        shown.update(re.findall(r'id="(specattn[\w.]*)"', page.read_text()))
    missing = [name for name in public_names() if not shown & {name, _defined(name)}]
    if missing:
        raise Abort(f"not in the reference, or without a docstring: {', '.join(missing)}")


def public_names():
    """Return the names that the public modules export, with their modules', without importing."""
    package = griffe.load("specattn", search_paths=[Path(__file__).parents[2] / "python"])
    names = []
    for path in MODULES:
        module = package if path == "specattn" else package[path.removeprefix("specattn.")]
        exports = [getattr(name, "name", name) for name in module.exports or ()]
        if not exports:
            raise Abort(f"{path} has no __all__")
        names += [f"{path}.{name}" for name in exports]
    return names


def _defined(name):
    """Return where the reference shows a name if not where it is imported from."""
    last = name.rpartition(".")[2]
    return ELSEWHERE.get(name, f"specattn.ops.{last}.{last}")
