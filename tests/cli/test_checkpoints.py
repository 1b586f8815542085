"""What is wrong with somebody's checkpoint is one line that names it, whatever a library raises."""

import shutil

import pytest

from tests.cli.conftest import TINY

# Layers are made before their activation is looked up.
UNKNOWN_ACTIVATION = (
    b'{"model_type": "qwen3", "hidden_size": 8, "intermediate_size": 8, "vocab_size": 8, '
    b'"hidden_act": "\\u001b"}'
)


@pytest.fixture
def checkpoint(tmp_path):
    """Return a way to copy the embedded target with other contents of one of its files."""

    def copy(name, content):
        folder = tmp_path / "model"
        shutil.copytree(TINY, folder)
        (folder / name).write_bytes(content)
        return folder

    return copy


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("config.json", b"[]", "has no readable config.json"),
        ("config.json", b'{"a": "\xff"}', "has no readable config.json"),
        ("config.json", b'{"model_type": ["qwen3"]}', "knows no models of type ['qwen3']"),
        ("config.json", b'{"model_type": "\\u001b]0;"}', r"knows no models of type '\x1b]0;'"),
        ("config.json", UNKNOWN_ACTIVATION, r"KeyError: '\x1b'"),
        ("config.json", b'{"model_type": "qwen3", "hidden_size": "x"}', "expected int, got str"),
        ("generation_config.json", b'{"eos_token_id": "x"}', "eos_token_id: expected token ids"),
        ("generation_config.json", b'{"eos_token_id": [1, null]}', "expected token ids, got [1, N"),
        ("generation_config.json", b'{"pad_token_id": 1e30}', "pad_token_id: expected token ids"),
        ("generation_config.json", b'{"stop_strings": 5}', "stop_strings: expected strings, got 5"),
        ("generation_config.json", b'{"stop_strings": ["a", 5]}', "stop_strings: expected strings"),
        ("tokenizer.json", b"", "model: Expecting value"),
        ("tokenizer.json", b'{"x": 1}', "model: KeyError"),
    ],
)
def test_what_is_wrong_with_a_checkpoint_is_one_line(
    refused, prompt, checkpoint, name, content, reason
):
    folder = checkpoint(name, content)
    refused(reason, "generate", "--prompt-file", prompt, "--model", folder)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no \x1b]0;') }}", "TemplateError: no \\x1b]0;"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ 'a' + 1 }}", "TypeError: can only concatenate str"),
        ("{{ messages[7].content }}", "UndefinedError: list object has no element 7"),
    ],
)
def test_a_template_that_fails_is_named(refused, prompt, checkpoint, template, reason):
    folder = checkpoint("chat_template.jinja", template.encode())
    refused(
        "--chat: the template: ",
        "generate",
        "--prompt-file",
        prompt,
        "--chat",
        "--model",
        folder,
    )
    refused(reason, "generate", "--prompt-file", prompt, "--chat", "--model", folder)
