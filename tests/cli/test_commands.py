"""The commands together: how they are started, and what starting them costs."""

import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys

import pytest
import torch
import transformers
import typer
from safetensors import safe_open

import specattn as package
from specattn import _cpu
from specattn.cli.errors import one_line_errors
from specattn.cli.options import DTYPES
from specattn.decoding import METHODS, parse_method
from specattn.method_names import method_names
from tests import HANGS, NEVER_ENDS

WITHOUT_TORCH = (
    *("", "-h", "--version", "generate -h", "compare -h", "train longspec -h", "tune vegas -h"),
    *("generat", "generate --temprature 1", "generate", "generate --prompt-file no/such"),
    *("generate --method vega", "compare --method plain,vega:gamma=[1,2]", "methods vega"),
)
WITHOUT_TRANSFORMERS = ("env", "plan")
LINES = f"""
import sys
from specattn_command import main
def said(*what):
    heavy = [name for name in ("torch", "transformers") if name in sys.modules]
    print("imports", *what, *heavy, sep="|")
for line in {(*WITHOUT_TORCH, *WITHOUT_TRANSFORMERS)}:
    sys.argv[1:] = line.split()
    try:
        main()
    except SystemExit as stop:
        said(line, stop.code)
    if line == {WITHOUT_TORCH[-1]!r}:
        import specattn
        said("import specattn", 0)
assert callable(specattn.backends) and callable(specattn.hybrid_tree_attention)
assert 'hybrid_tree_attention' in specattn.__all__ and not hasattr(specattn, 'nothing')
import torch
torch.ops.specattn.hybrid_tree_attention.default
"""


def test_help_imports_no_torch_and_what_decodes_nothing_no_transformers():
    """Importing them takes seconds; a mistake in the options needs neither, too."""
    done = subprocess.run([sys.executable, "-c", LINES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [line.split("|")[1:] for line in done.stdout.splitlines() if "imports|" in line]
    failing = ("", *WITHOUT_TORCH[WITHOUT_TORCH.index("generat") :])
    assert found == [
        *([line, "2" if line in failing else "0"] for line in WITHOUT_TORCH),
        ["import specattn", "0"],
        *([line, "0", "torch"] for line in WITHOUT_TRANSFORMERS),
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_torch_is_imported_is_one_line(number, tmp_path):
    """Before anything is loaded; `torch` here is a module that never ends."""
    (tmp_path / "torch.py").write_text(NEVER_ENDS)
    code = "import sys; sys.argv = ['specattn', 'env']; from specattn_command import main; main()"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "here\n"
        process.send_signal(number)
        _, said = process.communicate(timeout=HANGS)
    assert (process.returncode, said) == (128 + number, "specattn: interrupted\n")


def test_what_is_not_installed_is_named(prompt):
    """As after an installation without extras; a process with torch forks for each package."""
    code = (
        "import os, sys\nimport specattn\n"
        "for missing in ('typer', 'transformers', 'rich'):\n"
        "    if os.fork() == 0:\n"
        f"        sys.argv[1:] = ['generate', '--prompt-file', '{prompt}']\n"
        "        sys.modules[missing] = None\n"
        "        from specattn_command import main\n        main()\n"
        "    assert os.waitstatus_to_exitcode(os.wait()[1]) == 2\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for missing, line in zip(
        ("typer", "transformers", "rich"), done.stderr.splitlines(), strict=True
    ):
        assert f"needs {missing}: pip install 'specattn[cli]'" in line


def test_version_and_backends(specattn):
    assert specattn("--version")[:2] == (0, f"specattn {package.__version__}\n")
    code, text, _ = specattn("env")
    assert code == 0
    assert all(name in text for name in ("triton", "cpu", "reference"))


def test_methods_are_known_by_their_files():
    assert sorted(method_names()) == sorted(METHODS)


def test_python_m_runs_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "specattn", "--version"], capture_output=True, text=True
    )
    assert (done.stdout, done.returncode) == (f"specattn {package.__version__}\n", 0)


def test_the_list_of_methods_can_be_given_back(specattn, refused):
    code, text, _ = specattn("methods")
    assert code == 0
    found = dict(re.findall(r"^(\w+)\n((?:  .*\n)*)", text, re.MULTILINE))
    assert [*found] == [*METHODS]
    for name, lines in found.items():
        options = ",".join(line.split()[0] for line in lines.splitlines())
        read, given = parse_method(f"{name}:{options}" if options else name)
        assert METHODS[read](**given) == METHODS[name]()
    assert specattn("methods", "vegas")[1].startswith("vegas\n  gamma=none ")
    refused("got 'magic'", "methods", "magic")


def test_the_drafters_in_a_models_folder_are_listed(specattn, refused, tmp_path):
    code, text, _ = specattn("methods", "--model", "tiny")
    found = dict(line.split(maxsplit=1) for line in text.splitlines())
    assert code == 0
    assert found["poss"] == "in poss/"
    assert found["mtp"] == "in mtp/"
    assert specattn("methods", "mtp", "--model", "tiny-hybrid")[1].split() == ["mtp", "none"]
    refused("is not a folder", "methods", "--model", tmp_path / "nowhere")


@pytest.mark.parametrize("name", [*DTYPES, *DTYPES.values()])
def test_a_dtype_has_a_short_and_a_long_name(specattn, written, name):
    content, _, _ = written("generate", "--max-new-tokens", 1, "--dtype", name)
    assert content["model"]["dtype"] == DTYPES.get(name, name)
    assert specattn("plan", "--dtype", name)[0] == 0


@pytest.mark.parametrize("option", ["--context", "--batch", "--ranks"])
def test_a_plan_counts_in_32_bits(refused, option):
    refused(option, "plan", option, 10**400)


@contextlib.contextmanager
def without_reader(monkeypatch, *names):
    """Let streams be pipes that nobody reads any more."""
    with contextlib.ExitStack() as stack:
        for name in names:
            reads, writes = os.pipe()
            os.close(reads)
            stream = stack.enter_context(open(writes, "w", encoding="utf-8"))
            monkeypatch.setattr(sys, name, stream)
        yield


def test_a_reader_may_go(specattn, prompt, monkeypatch):
    """As of ``specattn generate ... | head -c 1``."""
    with without_reader(monkeypatch, "stdout"):
        code, _, said = specattn("generate", "--prompt-file", prompt, "--max-new-tokens", 60)
    assert code == 0
    assert "rror" not in said
    assert "tokens/s" not in said, "it ends at once"


@pytest.mark.parametrize("closed", [["stdout"], ["stdout", "stderr"]], ids="+".join)
@pytest.mark.parametrize("options", [[], ["--show"], ["batch"]], ids=str)
def test_who_asks_for_files_gets_them_though_the_reader_goes(
    specattn, prompt, tmp_path, monkeypatch, options, closed
):
    """As of ``specattn generate --state s --json o | head -4``, and of a batch of prompts."""
    out, state = tmp_path / "out.json", tmp_path / "state"
    files = ["--json", out, "--state", state]
    if options == ["batch"]:
        (other := tmp_path / "other.py").write_text("def other(")
        files, options = ["--json", out], ["--prompt-file", other]
    given = ["--prompt-file", prompt, *options, "--max-new-tokens", 30]
    with without_reader(monkeypatch, *closed):
        code, _, said = specattn("generate", *given, *files)
    assert code == 0
    assert "rror" not in said
    content = json.loads(out.read_text())
    texts = content.get("texts", [content])
    assert [len(one["tokens"]) for one in texts] == [30] * (1 if "--state" in files else 2)
    if "--state" in files:
        with safe_open(str(state), "pt") as file:
            assert len(file.get_tensor("tokens")) == 30


def test_a_comparison_and_its_page_are_written_though_the_reader_goes(
    specattn, prompt, tmp_path, monkeypatch
):
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    given = ["--prompt-file", prompt, "--max-new-tokens", 6, "--json", out, "--html", page]
    with without_reader(monkeypatch, "stdout"):
        code, _, _ = specattn("compare", "--method", "plain,suffix", *given)
    assert code == 0
    assert json.loads(out.read_text())["schema"] == "specattn.compare/1"
    assert page.read_text().rstrip().endswith("</html>")


@pytest.mark.parametrize("words", ["", "train", "tune"])
def test_without_a_sub_command_there_is_help(specattn, words):
    code, text, said = specattn(*words.split())
    assert code == 2
    assert re.match(rf"\s*Usage: (\S.*)?specattn {words} ?\[OPTIONS\]", text)
    assert not said


def test_help_is_in_groups_and_names_values_in_words(specattn):
    """``FILE`` and ``N`` in place of Python's types, and no bound that nobody reaches."""
    for command in ("generate", "compare"):
        code, text, _ = specattn(command, "-h")
        assert code == 0
        for group in ("Prompt", "Method", "Model", "Sampling", "Output"):
            assert f" {group} " in text
        assert re.search(r"--prompt-file +FILE", text)
        assert re.search(r"--max-new-tokens +N ", text)
    for command in ("generate", "compare", "demo", "methods", "plan", "widen", "conform",
                    "quantize", "env", "gpu-check", "tune vegas", "train longspec", "train poss",
                    ""):  # fmt: skip
        _, text, _ = specattn(*command.split(), "-h")
        assert not re.search(r"<(bool|str|int|float|path)( range)?>|<list|\d{10}", text)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("generate --temprature 1", "'--temperature'"),
        ("generate --prompt x --method vega", "'vegas'"),
        ("compare --prompt x --method plain,vegas:gama=3", "'gamma'"),
        ("methods sufix", "'suffix'"),
        ("plan --link nvlnk", "'nvlink'"),
        ("plan --gpu h10", "'h100'"),
        ("generat", "'generate'"),
    ],
)
def test_who_mistypes_is_told_what_was_meant(refused, given, meant):
    refused(f"id you mean {meant}?", *given.split())


def test_the_environment_says_what_an_issue_needs(specattn):
    _, text, _ = specattn("env")
    lines = dict(re.split(r"  +", line, maxsplit=1) for line in text.splitlines())
    assert lines["specattn"] == package.__version__
    assert platform.python_version() in lines["Python"]
    assert platform.platform() in lines["Python"]
    assert lines["torch"].startswith(torch.__version__)
    assert lines["transformers"] == transformers.__version__
    assert f"instruction set {_cpu.isa()}" in lines["processor"]
    assert lines["backend reference"] == "available"


def test_an_error_without_words_is_called_by_its_name():
    with pytest.raises(typer.BadParameter, match="^MemoryError$"), one_line_errors():
        raise MemoryError
