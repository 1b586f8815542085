"""``specattn env`` as a user types it."""


def test_env_names_every_backend(specattn):
    code, text, _ = specattn("env")
    assert code == 0
    assert all(name in text for name in ("triton", "cpu", "reference"))
