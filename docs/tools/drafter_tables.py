"""Tables of the fields in folders of drafters, from what `specattn.drafters.layouts` reads."""

from __future__ import annotations

import json
from collections.abc import Callable

from records import TABLES, markdown

from specattn.drafters import layouts
from specattn.drafters.fields import MEANINGLESS, Field, Fields

NESTED = "transformer_layer_config."
COPIED = "dflash_config."
MAKERS = {
    "layer": layouts.LAYER,
    "speculators": layouts.SPECULATORS,
    "eagle3": layouts.EAGLE3,
    "eagle3-speculators": layouts.SPECULATORS_EAGLE3,
    "eagle-speculators": layouts.SPECULATORS_EAGLE,
    "dflash": layouts.DFLASH,
    "dflash-speculators": layouts.SPECULATORS_DFLASH,
}


def described(field: Field) -> tuple[str, str, str]:
    """Return what a field must be, what of it is served, and what its absence means."""
    if field == layouts.NEVER:
        return "", "refused unless null", ""
    served = " or ".join(f"`{json.dumps(one)}`" for one in field.served)
    absent = field.absent or ("" if field.default is None else f"`{json.dumps(field.default)}`")
    return field.kind.said, served or "read", "refused" if field.needed else absent or "none"


def own(name: str, fields: Fields) -> Fields:
    """Return a layout's fields without those that the tables of all layouts have."""
    if name in ("layer", "speculators"):
        return fields
    kept = {}
    for key, field in fields.items():
        common = layouts.LAYER.get(key.removeprefix(NESTED))
        if name.endswith("speculators") and not key.startswith(NESTED):
            common = layouts.SPECULATORS.get(key)
        copied = key.startswith(COPIED) and field == fields.get(key.removeprefix(COPIED))
        if field != common and not copied:
            kept[key] = field
    return kept


def fields_of(name: str) -> Callable[[], str]:
    """Return what writes the table of a layout, fields of one description in one line."""

    def write() -> str:
        lines: dict[tuple[str, str, str], list[str]] = {}
        for key, field in own(name, MAKERS[name]).items():
            lines.setdefault(described(field), []).append(f"`{key}`")
        header = ("field", "must be", "served", "null or missing")
        return markdown(header, ([", ".join(keys), *said] for said, keys in lines.items()))

    return write


for maker in MAKERS:
    TABLES[f"fields-{maker}"] = fields_of(maker)
TABLES["fields-ignored"] = lambda: ", ".join(f"`{name}`" for name in sorted(MEANINGLESS))
