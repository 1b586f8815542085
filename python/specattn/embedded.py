"""Where the embedded target is: a small model with its drafters, so that nothing is fetched."""

from pathlib import Path

_HERE = Path(__file__).resolve().parent
_PLACES = (_HERE.parents[1] / "examples" / "tiny", _HERE / "embedded" / "tiny")

EMBEDDED_TARGET = next((x for x in _PLACES if (x / "config.json").is_file()), _PLACES[-1])
"""A folder in Hugging Face layout: of the checkout, or of the installed package."""

EMBEDDED = {"tiny": EMBEDDED_TARGET, "tiny-hybrid": EMBEDDED_TARGET / "hybrid"}
"""Embedded models by the names that commands know them by."""
