"""What is said of a name that is not among those that are known."""

from collections.abc import Collection
from difflib import get_close_matches

_NEAR = 0.8  # of difflib: a letter or two of a word
_MANY = 8  # names that nobody wants to read for a slip of one letter


def unknown(given: str, known: Collection[str]) -> str:
    """Return what was expected, and the one known name that is nearly the given one."""
    near = get_close_matches(given, known, n=1, cutoff=_NEAR)
    if near and len(known) > _MANY:
        return f"there is no {given!r}: did you mean {near[0]!r}?"
    meant = f"; did you mean {near[0]!r}?" if near else ""
    return f"expected one of {', '.join(known)}, got {given!r}{meant}"
