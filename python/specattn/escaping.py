"""Texts without what would steer a terminal."""

import re

# Controls but newline and tab, what overrides the direction of text, and bytes that are no text.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def escaped(text: str) -> str:
    """Return a text without what would steer a terminal, which is shown as Python writes it."""
    return _STEERING.sub(lambda found: ascii(found[0])[1:-1], text)
