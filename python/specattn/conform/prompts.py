"""Prompts for engines: of files, or what drafters copy, and what they cannot."""

import json
from collections.abc import Collection
from pathlib import Path

_FIELDS = ("name", "street", "city", "country", "phone", "email", "birthday", "language")
_ORDERS = ((1042, "lamp", 3), (1043, "desk", 1), (1044, "chair", 4), (1045, "shelf", 2))

PROMPTS = {
    "accessors": "class Person:\n"
    + "".join(
        f"    def get_{one}(self):\n        return self._{one}\n\n"
        f"    def set_{one}(self, {one}):\n        self._{one} = {one}\n\n"
        for one in _FIELDS
    ),
    "sorting": "def insertion_sort(values):\n    for i in range(1, len(values)):\n        value = ",
    "tests": "import unittest\n\n\nclass TestAdd(unittest.TestCase):\n"
    + "".join(
        f"    def test_{n}(self):\n        self.assertEqual(add({n}, {n}), {2 * n})\n\n"
        for n in range(1, 9)
    ),
    "records": "[\n"
    + "".join(
        f'  {{"order": {number}, "article": "{what}", "pieces": {count}, "paid": true}},\n'
        for number, what, count in _ORDERS * 3
    ),
    "table": "| order | article | pieces |\n| --- | --- | --- |\n"
    + "".join(f"| {number} | {what} | {count} |\n" for number, what, count in _ORDERS * 3),
    "log": "".join(
        f"2024-03-{day:02d} 08:00:00 INFO worker {day % 3} finished job {day * 7} in {day} s\n"
        for day in range(1, 20)
    ),
    "counting": "One, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, ",
    "story": "The keeper of the lighthouse had not spoken to anyone since the autumn storms. ",
    "question": "Q: Why is the sky blue?\nA: Because air scatters short waves more.\n\n"
    "Q: Why are sunsets red?\nA: Because their light has crossed more air.\n\n"
    "Q: Why does ice float?\nA:",
    "letter": "Dear Ms. Alvarez,\n\nthank you for your letter of 3 May. We have read what you ",
    "rewriting": "Original: The cat sat on the mat because the floor was cold.\n"
    "Copy: The cat sat on the mat because the floor was cold.\n"
    "Original: The rain fell on the roof while the house was quiet.\nCopy: The rain",
    "proof": "Theorem. The sum of two even numbers is even.\nProof. Let a = 2m and b = 2n. Then ",
}
"""By name."""


def read_prompts(file: Path, taken: Collection[str] = ()) -> dict[str, str]:
    """Return a file's text, or the prompts of its lines of JSON, by names that are not `taken`."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".jsonl":
        lines = [line for line in text.splitlines() if line.strip()]
        read = {f"{file.name}:{n}": json.loads(one)["prompt"] for n, one in enumerate(lines, 1)}
    else:
        read = {file.name if file.name not in taken else str(file): text}
    wrong = [name for name, one in read.items() if not isinstance(one, str) or not one]
    if wrong or not read:
        raise ValueError(f"expected text, got none in {', '.join(wrong) or 'it'}")
    return read
