"""Methods as a command line writes them."""

import pytest

from specattn.decoding import METHODS, parse_method
from specattn.decoding.methods.spelling import options_of
from specattn.method_names import split_methods
from tests.decoding import fuzzing, test_distribution
from tests.decoding.models import tiny_model
from tests.decoding.settings import settings_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", ("plain", {})),
        ("vegas:gamma=4,ratio=0.05", ("vegas", {"gamma": 4, "ratio": 0.05})),
        (
            "longspec:widths=[4,16],drafter=a/b.c",
            ("longspec", {"widths": (4, 16), "drafter": "a/b.c"}),
        ),
        ("vegas:switch=false", ("vegas", {"switch": False})),
        ("vegas:switch=True,rows=last", ("vegas", {"switch": True, "rows": "last"})),
        ("vegas:budget=NONE", ("vegas", {"budget": None})),
        ("tokenswift:dynamic=no", ("tokenswift", {"dynamic": False})),
        ("tokenswift:dynamic=1,k=1", ("tokenswift", {"dynamic": True, "k": 1})),
        ("vegas:ratio=1", ("vegas", {"ratio": 1.0})),
        ("poss:total_tokens=none", ("poss", {"total_tokens": None})),
        ("longspec:gamma=auto", ("longspec", {"gamma": "auto"})),
        ("vegas:gamma=none", ("vegas", {"gamma": None})),
        ("poss:a/b,width=3", ("poss", {"drafter": "a/b", "width": 3})),
        ("poss:total_tokens=40,drafter=12", ("poss", {"total_tokens": 40, "drafter": "12"})),
    ],
)
def test_name_and_options(text, expected):
    assert parse_method(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("beam", "expected one of .*longspec.*plain.*, got 'beam'"),
        ("eagle", "there is no 'eagle': did you mean 'eagle3'\\?"),
        ("plain:gamma=3", "plain: expected no option, got 'gamma=3'"),
        ("vegas:gamma", "vegas: expected one of gamma, ratio.* as option=value, got 'gamma'"),
        ("poss:width=3,a/b", "poss: expected one of drafter, .* as option=value, got 'a/b'"),
        ("vegas:beams=3", "vegas: expected one of gamma, ratio.*, got 'beams'"),
        ("vegas:gama=3", "vegas: there is no 'gama': did you mean 'gamma'\\?"),
        ("vegas:", "vegas: expected one of gamma, .* as option=value, got ''"),
        ("vegas:gamma=2,gamma=3", "vegas: gamma is given twice"),
        ("vegas:gamma=abc", "vegas: gamma: expected an integer or none, got 'abc'"),
        ("vegas:gamma=2.5", "vegas: gamma: expected an integer or none, got '2.5'"),
        ("vegas:gamma=", "vegas: gamma: expected an integer or none, got ''"),
        ("vegas:gamma=true", "vegas: gamma: expected an integer or none, got 'true'"),
        ("vegas:ratio=abc", "vegas: ratio: expected a number, got 'abc'"),
        ("vegas:ratio=nan", "vegas: ratio: expected a number, got 'nan'"),
        ("vegas:budget=1e3", "vegas: budget: expected an integer or none, got '1e3'"),
        ("vegas:switch=maybe", "vegas: switch: expected true or false, got 'maybe'"),
        ("tokenswift:dynamic=none", "dynamic: expected true or false, got 'none'"),
        ("quest:page_size=abc", "quest: page_size: expected an integer, got 'abc'"),
        (
            "longspec:widths=3",
            r"widths: expected integers in brackets, such as \[4,16\] or none, got '3'",
        ),
        ("longspec:widths=[a]", "longspec: widths: expected integers in brackets"),
        ("longspec:widths=[]", "longspec: widths: expected integers in brackets"),
        ("longspec:drafter=", "longspec: drafter: expected a path or none, got ''"),
        ("poss:total_tokens=some", "total_tokens: expected an integer or none, got 'some'"),
    ],
)
def test_mistakes_are_named(text, message):
    with pytest.raises(ValueError, match=message):
        parse_method(text)


def test_home_is_expanded_in_paths(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert parse_method("longspec:drafter=~/d")[1] == {"drafter": "/home/me/d"}


def test_every_method_is_among_those_that_are_tested_together():
    """In fixed settings, for its distribution, and by random options."""
    ours = {name for name, method in METHODS.items() if method.__module__.startswith("specattn.")}
    fixed, sampled = settings_of(tiny_model("qwen3")), test_distribution.METHODS
    for methods in (fixed, sampled):
        assert {METHODS[name] for name in ours} <= set(map(type, methods.values()))
    assert ours <= {*fuzzing.UNTRAINED, *fuzzing.TRAINED}


def test_choices_are_listed():
    """Not that an option takes some word."""
    vegas = options_of(METHODS["vegas"])
    assert vegas["rows"].takes == "two or all or last"
    assert vegas["ranking"].takes == "logit or weight"
    with pytest.raises(ValueError, match="expected two or all or last, got 'none'"):
        vegas["rows"].read("none")
    every = [one.takes for method in METHODS.values() for one in options_of(method).values()]
    assert not [takes for takes in every if "a word" in takes]


@pytest.mark.parametrize("name", METHODS)
def test_every_default_can_be_written(name):
    """What the list of methods prints can be given back."""
    options = options_of(METHODS[name])
    assert {key: one.read(one.default_text) for key, one in options.items()} == {
        key: one.default for key, one in options.items()
    }


@pytest.mark.parametrize(
    ("name", "option"),
    [
        (name, option)
        for name, method in METHODS.items()
        for option, spelled in options_of(method).items()
        if "an integer" in spelled.takes
    ],
)
def test_no_count_is_negative(name, option):
    _, given = parse_method(f"{name}:{option}=-1")
    with pytest.raises(ValueError, match=rf"\b{option}\b"):
        METHODS[name](**given)


def test_a_comma_ends_a_method_where_no_option_follows():
    text = "plain,longspec:widths=[2,2],gamma=3,vegas,vegas:gamma=4"
    assert split_methods(text) == [
        "plain",
        "longspec:widths=[2,2],gamma=3",
        "vegas",
        "vegas:gamma=4",
    ]
