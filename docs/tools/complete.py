"""A hook of mkdocs: every public name stands in the reference, with a docstring."""

from __future__ import annotations

import re
from pathlib import Path

import griffe
from mkdocs.exceptions import Abort
from public import MODULES

ELSEWHERE = {  # what is imported from where reading the source does not find it
    "specattn.backends": "specattn.backends.select.backends",
    "specattn.integrations.vllm.Auto": "specattn.integrations.vllm.auto.Auto",
    "specattn.integrations.vllm.PromptLookup": "specattn.integrations.vllm.lookup.PromptLookup",
    "specattn.integrations.vllm.Suffix": "specattn.integrations.vllm.lookup.Suffix",
    "specattn.integrations.vllm.Vegas": "specattn.integrations.vllm.vegas.Vegas",
}


def on_post_build(config):
    """End the build where a public name is missing or says nothing."""
    folder = Path(config.site_dir, "reference")
    shown = set()
    for page in folder.rglob("*.html"):
        shown.update(re.findall(r'id="(specattn[\w.]*)"', page.read_text()))
    missing = [name for name, place in public_names().items() if place not in shown]
    if missing:
        raise Abort(f"not in the reference, or without a docstring: {', '.join(missing)}")


def public_names():
    """Return the names that the public modules export, and where the reference must show them.

    That is the name itself, but for functions whose module has their name: there reading the source
    finds the module, as importing does not. Nothing is imported.
    """
    package = griffe.load("specattn", search_paths=[Path(__file__).parents[2] / "python"])
    places = {}
    for path in MODULES:
        module = package[path.removeprefix("specattn.") if path != "specattn" else "_public"]
        exports = [name for name in module.exports or () if isinstance(name, str)]
        if path == "specattn":  # whose `_public` adds all of `ops`
            exports += package["ops"].exports
        if not exports:
            raise Abort(f"{path} has no __all__")
        for name in exports:
            full, found = f"{path}.{name}", module.members.get(name)
            hidden = found is not None and found.is_module and name in found.members
            place = f"{found.canonical_path}.{name}" if hidden else full
            places[full] = ELSEWHERE.get(full, place)
    return places
