"""When the plugin does nothing, and what it says then."""

import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest

from specattn.integrations.vllm import plugin, register
from specattn.integrations.vllm.plugin import _why_not


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.32.0rc1"])
def test_tested_versions_are_served(version):
    assert _why_not(version) is None


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0", "dev"])
def test_other_versions_are_left_alone(version):
    assert version in _why_not(version)
    assert "0.32" in _why_not(version)


class Platform:
    """vLLM on some device, whatever is installed."""

    def __init__(self, monkeypatch, on_cpu=True, version="0.32.0", wanted=None):
        self.replaced = []
        platforms = ModuleType("vllm.platforms")
        platforms.current_platform = SimpleNamespace(is_cpu=lambda: on_cpu)
        monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
        monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
        monkeypatch.setattr(plugin, "_installed_version", lambda: version)
        monkeypatch.setattr(plugin, "_replace", self.replaced.append)
        monkeypatch.delenv("SPECATTN_VLLM", raising=False)
        if wanted is not None:
            monkeypatch.setenv("SPECATTN_VLLM", wanted)


@pytest.mark.parametrize("wanted", [None, "", "0"])
def test_on_a_cpu_it_is_off_unless_asked_for(monkeypatch, wanted):
    platform = Platform(monkeypatch, wanted=wanted)
    register()
    assert platform.replaced == []


def test_asked_for_it_is_on_and_a_second_call_is_allowed(monkeypatch):
    platform = Platform(monkeypatch, wanted="1")
    register()
    register()
    assert platform.replaced == [True, True]


def test_elsewhere_it_can_be_chosen_by_name(monkeypatch):
    platform = Platform(monkeypatch, on_cpu=False)
    register()
    assert platform.replaced == [False]


@pytest.mark.parametrize(("wanted", "lines"), [("1", 1), (None, 0)])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_another_version_stays_as_it_is(monkeypatch, caplog, on_cpu, wanted, lines):
    platform = Platform(monkeypatch, on_cpu=on_cpu, version="0.99.0", wanted=wanted)
    with caplog.at_level(logging.WARNING, "vllm.specattn"):
        register()
    assert platform.replaced == []
    assert len(caplog.records) == lines
    assert all("0.99.0" in record.getMessage() for record in caplog.records)
