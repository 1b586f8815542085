"""How much of the processors other programs had while something was timed."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

STAT = Path("/proc/stat")


def used_by(process: int) -> float:
    """Return the seconds of processors that a process has used; 0 where there is no /proc."""
    path = Path(f"/proc/{process}/stat")
    if not path.exists():
        return 0.0
    user, system = path.read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


class Others:
    """Cores that others keep busy from here on; None where there is no /proc/stat.

    What the host of a virtual machine took away (steal) counts as others too; processes that were
    started for the measurement, and still run, do not.
    """

    def __init__(self, own: Sequence[int] = ()) -> None:
        self._own = own
        self._last = self._read()

    def cores(self) -> float | None:
        """Return the mean number of cores that others kept busy since the last call."""
        before, self._last = self._last, self._read()
        if before is None or self._last is None or self._last[0] == before[0]:
            return None
        elapsed, busy = (now - then for now, then in zip(self._last, before, strict=True))
        return max(0.0, busy / elapsed)

    def _read(self) -> tuple[float, float] | None:
        """Return the clock, and the seconds that all cores worked for others than us."""
        try:
            fields = STAT.read_text(encoding="ascii").partition("\n")[0].split()[1:9]
            user, nice, system, _, _, irq, softirq, steal = map(int, fields)
        except (OSError, ValueError):
            return None
        total = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), total - sum(os.times()[:4]) - sum(map(used_by, self._own))
