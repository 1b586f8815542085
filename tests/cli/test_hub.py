"""A model by its id at the Hub: what is at hand, and what is not. There is no network here."""

import huggingface_hub
import pytest

from tests.cli.conftest import TINY


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A cache of the Hub that has the embedded target as me/tiny, and no network."""
    commit = "0123456789" * 4
    folder = tmp_path / "hub/models--me--tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text(commit)
    (snapshot := folder / "snapshots" / commit).mkdir(parents=True)
    for file in (*TINY.glob("*.json"), *TINY.glob("*.safetensors")):
        (snapshot / file.name).symlink_to(file)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return snapshot


def test_a_hub_id_is_a_model(hub, specattn, written, prompt, tmp_path):
    """It is read from the Hub's cache, and reports and pages call it by this name."""
    given = ("--max-new-tokens", 4, "--method", "plain")
    expected = specattn("generate", "--prompt-file", prompt, *given)[1]
    content, text, said = written("generate", *given, "--model", "me/tiny")
    assert text == expected
    assert (content["model"]["name"], content["model"]["path"]) == ("me/tiny", str(hub))
    assert "demo" not in said
    page = tmp_path / "page.html"
    given = ("--methods", "plain", "--prompt-file", prompt, "--max-new-tokens", 2)
    assert specattn("compare", *given, "--model", "me/tiny", "--html", page)[0] == 0
    assert "continued by me/tiny (" in page.read_text()
    assert str(tmp_path) not in page.read_text()


def test_what_the_hub_does_not_give_is_named(hub, refused):
    given = ("generate", "--prompt", "x", "--model")
    refused("where there is a network: hf download them/large", *given, "them/large")
    refused("folder/of/none is not a folder", *given, "folder/of/none")
    (hub / "config.json").unlink()
    (hub / "config.json").write_text('{"model_type": "abacus"}')
    refused("knows no models of type 'abacus'", *given, "me/tiny")


@pytest.mark.parametrize("command", ["tune vegas", "train longspec", "widen", "methods"])
def test_every_command_takes_a_hub_id(hub, refused, tmp_path, command):
    (hub / "config.json").unlink()
    (hub / "config.json").write_text('{"model_type": "abacus"}')
    out, text = tmp_path / "out", tmp_path / "text"
    text.write_text("import os\n" * 99)
    more = {
        "tune vegas": ("--prompts", text, "--output", out, "--model", "me/tiny"),
        "train longspec": ("--data", text, "--output", out, "--target", "me/tiny"),
        "widen": ("me/tiny", out),
        "methods": ("--model", "me/tiny"),
    }
    refused("knows no models of type 'abacus'", *command.split(), *more[command])
