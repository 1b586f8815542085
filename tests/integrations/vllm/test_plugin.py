"""When the plugin does nothing, and what it says then."""

import logging

import pytest

from specattn.integrations.vllm import register as entry_point
from specattn.integrations.vllm.plugin import _why_not


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.32.0rc1"])
def test_tested_versions_are_served(version):
    assert _why_not(version) is None


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0", "dev"])
def test_other_versions_are_left_alone(version):
    assert version in _why_not(version)
    assert "0.32" in _why_not(version)


@pytest.fixture
def registered(monkeypatch):
    """Return the backends that a call registered, whatever is installed."""
    found = []
    monkeypatch.setattr(
        "specattn.integrations.vllm.plugin._replace", lambda: found.append("replaced")
    )
    return found


@pytest.mark.parametrize("value", [None, "", "0"])
def test_it_is_off_unless_asked_for(monkeypatch, registered, value):
    monkeypatch.delenv("SPECATTN_VLLM", raising=False)
    if value is not None:
        monkeypatch.setenv("SPECATTN_VLLM", value)
    entry_point()
    assert registered == []


def test_another_version_gets_one_line_and_stays_as_it_is(monkeypatch, registered, caplog):
    monkeypatch.setenv("SPECATTN_VLLM", "1")
    monkeypatch.setattr("specattn.integrations.vllm.plugin._installed_version", lambda: "0.99.0")
    with caplog.at_level(logging.WARNING, "vllm.specattn"):
        entry_point()
    assert registered == []
    (record,) = caplog.records
    assert "0.99.0" in record.getMessage()
