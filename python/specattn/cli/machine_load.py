"""How much of the processors other programs had while something was timed."""

from __future__ import annotations

import os
import time
from pathlib import Path

STAT = Path("/proc/stat")
NOTICED = 0.1  # share of the processors' time from which times are not to be trusted

_WAITING = (3, 4)  # fields of a line of /proc/stat: idle, and idle while a disk answers
_COUNTED_TWICE = slice(8, None)  # time of guests, which is part of that of users


class OtherLoad:
    """What other programs take of the processors from here on."""

    def __init__(self) -> None:
        self._start = self._now()

    def share(self) -> float | None:
        """Return their share of all processors' time so far; None where it is not known."""
        now = self._now()
        if self._start is None or now is None:
            return None
        busy, whole, own = (after - before for before, after in zip(self._start, now, strict=True))
        return max(0.0, busy - own) / whole if whole > 0 else None

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """Return busy and whole seconds of all processors, and busy ones of this process."""
        try:
            fields = STAT.read_text(encoding="ascii").partition("\n")[0].split()[1:]
            seconds = [int(field) / os.sysconf("SC_CLK_TCK") for field in fields]
        except (OSError, ValueError):
            return None
        whole = sum(seconds) - sum(seconds[_COUNTED_TWICE])
        return whole - sum(seconds[n] for n in _WAITING), whole, time.process_time()


def warning(load: OtherLoad) -> str | None:
    """Return what to say of `load` beside times, if anything."""
    share = load.share()
    if share is None or share < NOTICED:
        return None
    return f"warning: other programs used {share:.0%} of the processors meanwhile; times say little"
