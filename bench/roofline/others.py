"""How busy other programs kept the machine while something was measured."""

from __future__ import annotations

import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")


class Others:
    """Cores that others used since the last reading; None where there is no /proc/stat.

    What the host of a virtual machine took away (steal) counts as others too.
    """

    def __init__(self) -> None:
        self._last = self._read()

    def cores(self) -> float | None:
        """Return the mean number of cores that others kept busy since the last call."""
        before, self._last = self._last, self._read()
        if before is None or self._last is None or self._last[0] == before[0]:
            return None
        elapsed, busy = (now - then for now, then in zip(self._last, before, strict=True))
        return max(0.0, busy / elapsed)

    @staticmethod
    def _read() -> tuple[float, float] | None:
        """Return the clock, and the seconds that all cores worked for others than us."""
        if not _STAT.exists():
            return None
        user, nice, system, _, _, irq, softirq, steal = map(
            int, _STAT.read_text().split("\n", 1)[0].split()[1:9]
        )
        total = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), total - sum(os.times()[:4])
