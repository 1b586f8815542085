"""Seconds of an exchange between ranks: latency, and bytes over a link's bandwidth."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """How ranks are connected.

    Attributes
    ----------
    name : str
    bandwidth : float
        Bytes per second that a rank receives from all others together.
    start : float
        Seconds of an exchange of next to nothing.
    source : str
    """

    name: str
    bandwidth: float
    start: float
    source: str

    def all_gather(self, ranks: int, size: float) -> float:
        """Return the seconds in which every rank gives `size` bytes to all others."""
        return 0.0 if ranks == 1 else self.start + (ranks - 1) * size / self.bandwidth


_SHEET = "of which 0.8 are assumed to be attained; starts are assumed"
LINKS = {
    link.name: link
    for link in (
        Link("nvlink", 0.8 * 450e9, 15e-6, f"NVLink 4, 450 GB/s each way, {_SHEET}"),
        Link("pcie", 0.8 * 64e9, 20e-6, f"PCIe 5.0 x16, 64 GB/s each way, {_SHEET}"),
        Link("ib", 0.8 * 50e9, 25e-6, f"InfiniBand NDR, 400 Gb/s, {_SHEET}"),
        Link("ethernet", 0.8 * 12.5e9, 60e-6, f"Ethernet, 100 Gb/s, {_SHEET}"),
    )
}
"""Rates are those of the standards; nothing here was measured."""
