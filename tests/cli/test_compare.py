"""``specattn compare`` as a user types it."""


def test_compare_says_whether_the_outputs_are_identical(specattn, prompt):
    code, _, figures = specattn("compare", "--prompt-file", prompt, "--max-new-tokens", 12)
    assert code == 0
    assert "identical, token for token: yes" in figures
    for row in ("tokens/s", "mean acceptance length", "draft / target / accept"):
        assert row in figures


def test_every_method_has_options_of_its_own(specattn, prompt, drafter):
    methods = [
        "plain",
        "vegas:gamma=2",
        f"longspec:gamma=3,drafter={drafter}",
        "longspec:widths=[2,2]",
    ]
    code, _, figures = specattn(
        "compare", "--prompt-file", prompt, "--max-new-tokens", 6, "--methods", ",".join(methods)
    )
    assert code == 0
    assert "identical, token for token: yes" in figures
    for name in ("vegas:gamma=2", "longspec:widths=[2,2]"):
        assert f"{name} " in figures


def test_the_option_that_is_wrong_is_named(specattn, prompt):
    methods = ("--methods", "plain,vegas:gamma=0")
    code, text, error = specattn("compare", "--prompt-file", prompt, *methods)
    assert (code, text) == (2, "")
    assert error.startswith("specattn: error: Invalid value: --methods: gamma must be at least 1")
    assert error.count("\n") == 1
