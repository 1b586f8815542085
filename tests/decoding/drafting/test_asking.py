"""`Asking`: lookups are made where they save more than they take, by a clock set by hand."""

import pytest

from specattn.decoding.drafting.asking import Asking
from tests.decoding.machine import Machine

FOUND, LEARNED = 0.05, 0.02  # what a lookup takes, where a round takes a second


def rounds(asking, machine, saved, count):
    """Return in which of `count` rounds is looked up; round n would save ``saved(n)``."""
    asked = []
    for number in range(count):
        if not asking.skips():
            asked.append(number)
            asking.begin()
            machine.time += FOUND
            asking.found(saved(number))
            asking.end("asked")
            asking.begin()
            machine.time += LEARNED
            asking.end("learned")
        machine.time += 1
    return asked


@pytest.mark.parametrize("late", [0, 5])
@pytest.mark.parametrize("every", [1, 10])
def test_what_saves_more_than_it_takes_is_never_left_out(late, every):
    machine = Machine(late)
    saved = every * 1.1 * (FOUND + LEARNED)
    asked = rounds(Asking(machine), machine, lambda n: saved * (n % every == 0), 600)
    assert asked == list(range(600))


@pytest.mark.parametrize("late", [0, 5])
@pytest.mark.parametrize("share", [0.0, 0.9])
def test_what_saves_less_is_left_out_more_and_more(late, share):
    machine = Machine(late)
    asked = rounds(Asking(machine), machine, lambda n: share * (FOUND + LEARNED), 600)
    steps = [b - a for a, b in zip(asked, asked[1:], strict=False)]
    assert steps[:12] == [1] * 12
    assert steps == sorted(steps)
    assert steps[-1] == 8
    lost = FOUND + LEARNED
    assert sum(n >= 300 for n in asked) * lost <= 0.01 * 300


def test_a_text_that_begins_to_repeat_is_asked_in_every_round_at_once():
    machine, starts = Machine(), 400
    asked = rounds(Asking(machine), machine, lambda n: 3.0 * (n >= starts), 600)
    first = next(n for n in asked if n >= starts)
    assert first < starts + 8
    assert asked[asked.index(first) :] == list(range(first, 600))


def test_one_find_does_not_bring_back_lookups_that_do_not_pay():
    machine = Machine()
    asked = rounds(Asking(machine), machine, lambda n: 0.1 * (n % 100 == 0), 800)
    assert sum(n >= 400 for n in asked) < 0.2 * 400
