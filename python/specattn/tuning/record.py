"""A tuner's measurements, written to disk after every run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specattn.files import check_writable, write_atomically

Measurement = dict[str, Any]


class Record:
    """A JSON file that is whole at every moment.

    Parameters
    ----------
    path : Path
    heading : dict
        What was tuned and how; the first field is ``schema``.
    resume : bool
        Keep the measurements that the file has.

    Attributes
    ----------
    measurements : list of dict
        In the order in which they were made.

    Raises
    ------
    ValueError
        The file cannot be written, or it exists and `resume` is False, or it was measured
        on something else.
    """

    def __init__(self, path: Path, heading: dict[str, Any], *, resume: bool):
        self.path, self.heading = path, json.loads(json.dumps(heading))
        self.measurements: list[Measurement] = []
        self.chosen: dict[str, Any] | None = None
        try:
            check_writable(path)
        except ValueError as error:
            raise ValueError(f"--output: {error}") from None
        if path.exists():
            if not resume:
                raise ValueError(f"--output: {path} exists; go on with it by --resume")
            self.measurements = self._earlier()

    def add(self, measurement: Measurement) -> None:
        """Append a measurement, and write the file."""
        self.measurements.append(measurement)
        self.write()

    def write(self) -> None:
        """Write everything, or leave the file as it was."""
        content = {**self.heading, "measurements": self.measurements, "chosen": self.chosen}
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        write_atomically(self.path, lambda partial: partial.write_text(text, encoding="utf-8"))

    def _earlier(self) -> list[Measurement]:
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            measurements = content.pop("measurements")
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
            raise ValueError(f"--resume: {self.path} is no file of specattn tune") from None
        changed = [name for name in self.heading if content.get(name) != self.heading[name]]
        if changed:
            raise ValueError(
                f"--resume: {self.path} was measured with another {', '.join(changed)}"
            )
        return measurements
