"""Methods as a command line writes them."""

import pytest

from specattn.decoding import parse_method
from specattn.decoding.methods import split_methods


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", ("plain", {})),
        ("vegas:gamma=4,ratio=0.05", ("vegas", {"gamma": 4, "ratio": 0.05})),
        (
            "longspec:widths=[4,16],drafter=a/b.c",
            ("longspec", {"widths": [4, 16], "drafter": "a/b.c"}),
        ),
    ],
)
def test_name_and_options(text, expected):
    assert parse_method(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("eagle", "expected one of .*longspec.*plain.*, got 'eagle'"),
        ("plain:gamma=3", "plain: expected no option, got 'gamma=3'"),
        ("vegas:gamma", "vegas: expected one of gamma, ratio.* as option=value, got 'gamma'"),
        ("vegas:width=3", "vegas: expected one of gamma, ratio.* as option=value, got 'width=3'"),
    ],
)
def test_mistakes_are_named(text, message):
    with pytest.raises(ValueError, match=message):
        parse_method(text)


def test_a_comma_ends_a_method_where_no_option_follows():
    text = "plain,longspec:widths=[2,2],gamma=3,vegas,vegas:gamma=4"
    assert split_methods(text) == [
        "plain",
        "longspec:widths=[2,2],gamma=3",
        "vegas",
        "vegas:gamma=4",
    ]
