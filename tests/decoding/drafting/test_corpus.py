"""Corpora of suffix decoding: files, earlier outputs, and the folder that keeps their indexes."""

import multiprocessing
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

pytest.importorskip("specattn._cpu", reason="the C++ kernels are not built")

from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from specattn.decoding import Suffix, generate, parse_method
from specattn.decoding.drafting.corpus import (
    END,
    Corpora,
    Index,
    IndexCache,
    Outputs,
    corpora_of,
    index_of,
)
from specattn.planning.models import EMBEDDED_TARGET
from tests.decoding.models import prompts, tiny_model

TEXT = 'def shout(words):\n    """Return the words in capitals."""\n    return words.upper()\n' * 3


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(EMBEDDED_TARGET, dtype=torch.float32)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "corpus.py"
    path.write_text(TEXT)
    return path


def test_an_index_has_every_text_and_where_it_ends():
    index = index_of([[3, 1], [], [2]])
    assert index.tokens.tolist() == [3, 1, END, END, 2, END]
    assert sorted(index.order.tolist()) == list(range(6))


def test_a_corpus_that_holds_the_continuation_is_drafted_from(target, file):
    corpora = corpora_of(target)
    tokens = corpora.tokenizer(TEXT)["input_ids"]
    prompt = torch.tensor(tokens[:12])
    plain = generate(target, [prompt], max_new_tokens=24, temperature=0)
    file.write_text(corpora.tokenizer.decode([*tokens[:12], *plain.new_tokens[0]]))
    alone, beside = (
        generate(target, [prompt], method, max_new_tokens=24, temperature=0)
        for method in (
            Suffix(nodes=16, recycling=False),
            Suffix(nodes=16, recycling=False, corpus=(file,)),
        )
    )
    assert alone.new_tokens == beside.new_tokens == plain.new_tokens
    assert beside.statistics.total.rounds < alone.statistics.total.rounds


def test_what_was_generated_before_is_drafted_from():
    model = tiny_model("qwen3")
    text = prompts([30, 20], vocabulary=model.config.vocab_size)
    method = Suffix(nodes=16, recycling=False, remember=True)
    first, second = (
        generate(model, text, method, max_new_tokens=40, temperature=0) for _ in range(2)
    )
    assert second.new_tokens == first.new_tokens
    assert second.statistics.total.rounds < first.statistics.total.rounds
    assert sorted(corpora_of(model).outputs.texts) == sorted(first.new_tokens * 2)


def test_outputs_of_another_process_come_from_the_cache(target, tmp_path):
    corpora = corpora_of(target)
    corpora.outputs.add([5, 6, 7])
    corpora.keep(tmp_path)
    other = Corpora.of(target)
    assert len(other.remembered(tmp_path)) == len(corpora.outputs.index().tokens)
    assert list(other.outputs.texts) == list(corpora.outputs.texts)


def test_a_run_with_a_cache_leaves_its_outputs_there(target, tmp_path):
    method = Suffix(nodes=4, remember=True, cache=tmp_path)
    prompt = torch.tensor([5, 6, 7, 8])
    found = generate(target, [prompt], method, max_new_tokens=6, temperature=0)
    (path,) = tmp_path.glob("outputs-*.safetensors")
    kept = IndexCache(tmp_path).get(path.stem)
    assert kept.tokens.tolist()[-7:] == [*found.new_tokens[0], END]


def test_runs_of_several_threads_remember_together():
    """One read the texts while another added its own: "deque mutated during iteration"."""
    outputs, interval = Outputs(), sys.getswitchinterval()

    def runs(thread):
        for number in range(40):
            outputs.add([thread, number] * 20)
            outputs.index()

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(runs, range(4)))
    finally:
        sys.setswitchinterval(interval)
    assert len(outputs.index().tokens) == 4 * 40 * (2 * 20 + 1)


def test_only_the_newest_outputs_are_remembered():
    outputs = Outputs(most=8)
    for text in ([1, 1, 1], [2, 2], [3, 3, 3]):
        outputs.add(text)
    assert list(outputs.texts) == [[2, 2], [3, 3, 3]]
    outputs.add(list(range(20)))
    assert list(outputs.texts) == [list(range(13, 20))]
    assert outputs.index().tokens.tolist() == [*range(13, 20), END]


def test_an_index_of_a_file_is_kept_and_mapped(target, file, tmp_path):
    cache = tmp_path / "made" / "cache"
    (first,) = Corpora.of(target).files([file], cache)
    (path,) = cache.glob("*.safetensors")
    written = path.stat().st_ino
    (second,) = Corpora.of(target).files([file], cache)
    assert len(first) == len(second)
    assert path.stat().st_ino == written, "not written again"
    if Path("/proc/self/maps").exists():
        assert str(path) in Path("/proc/self/maps").read_text()


def test_a_changed_file_is_read_again(target, file):
    (before,) = corpora_of(target).files([file], None)
    file.write_text(TEXT * 2)
    (after,) = corpora_of(target).files([file], None)
    assert len(after) > 1.5 * len(before)


def test_a_full_cache_forgets_what_was_not_used_for_longest(tmp_path):
    index = index_of([list(range(100))])
    cache = IndexCache(tmp_path, most_bytes=2200)
    for number in range(2):
        cache.put(f"{number}", index)
        os.utime(cache.path(f"{number}"), (number, number))  # long ago
    assert cache.get("0") is not None
    cache.put("2", index)
    assert [cache.get(name) is None for name in "012"] == [False, True, False]
    small = IndexCache(tmp_path, most_bytes=1)
    small.put("3", index)
    assert [path.stem for path in tmp_path.glob("*.safetensors")] == ["3"]


def test_a_cache_that_cannot_be_written_ends_no_run(target, file, tmp_path, monkeypatch):
    """It was there when it was opened."""
    put = IndexCache.put

    def gone(cache, key, index):
        cache.folder.rmdir()
        cache.folder.touch()
        put(cache, key, index)

    monkeypatch.setattr(IndexCache, "put", gone)
    with pytest.warns(UserWarning, match=f"{tmp_path / 'cache'} cannot be written"):
        (corpus,) = Corpora.of(target).files([file], tmp_path / "cache")
    assert len(corpus) > 20


def test_an_index_on_a_full_disk_is_not_kept(tmp_path, monkeypatch):
    def full(tensors, path):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("specattn.decoding.drafting.corpus.save_file", full)
    with pytest.warns(UserWarning, match=f"{tmp_path} cannot be written.*No space left on device"):
        IndexCache(tmp_path).put("one", index_of([[1, 2, 3]]))
    assert IndexCache(tmp_path).get("one") is None


def test_what_was_mapped_stays_when_it_is_replaced_or_deleted(tmp_path):
    cache = IndexCache(tmp_path)
    cache.put("one", index_of([[1, 2, 3]]))
    mapped = cache.get("one")
    cache.put("one", index_of([[7] * 50]))
    assert mapped.tokens.tolist() == [1, 2, 3, END]
    cache.path("one").unlink()
    assert mapped.tokens.tolist() == [1, 2, 3, END]


def _write(folder, rounds):
    cache = IndexCache(folder)
    for number in range(rounds):
        tokens = torch.full((2000 + number % 7,), number % 7, dtype=torch.int32)
        cache.put("shared", Index(tokens, torch.arange(len(tokens), dtype=torch.int32)))


def test_a_reader_beside_a_writer_finds_whole_indexes(tmp_path):
    _write(tmp_path, 1)
    writer = multiprocessing.get_context("fork").Process(target=_write, args=(tmp_path, 100))
    writer.start()
    cache, seen = IndexCache(tmp_path), set()
    while writer.is_alive():
        index = cache.get("shared")
        (number,) = set(index.tokens.tolist())
        assert len(index.tokens) == len(index.order) == 2000 + number
        seen.add(number)
        time.sleep(1e-3)  # leaves the core to the writer
    writer.join()
    assert writer.exitcode == 0
    assert seen


def test_a_damaged_index_is_made_anew(target, file, tmp_path):
    Corpora.of(target).files([file], tmp_path / "cache")
    (path,) = (tmp_path / "cache").glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:40])
    with pytest.warns(UserWarning, match="cannot be read and is made anew"):
        (corpus,) = Corpora.of(target).files([file], tmp_path / "cache")
    assert len(corpus) > 20


def test_files_that_cannot_be_read(target, tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    for path, reason in (("gone.txt", "is not a file"), ("latin.txt", "is not UTF-8 text")):
        with pytest.raises(ValueError, match=f"corpus: .*{path} {reason}"):
            Suffix(corpus=(tmp_path / path,)).prepared(target)
    with pytest.raises(ValueError, match="cache: .*latin.txt is no folder"):
        IndexCache(tmp_path / "latin.txt")


def test_a_model_without_a_tokenizer_or_with_another_vocabulary(file, monkeypatch, target):
    model = tiny_model("qwen3")
    with pytest.raises(ValueError, match="corpus: needs the target's tokenizer, and '.*' has none"):
        Suffix(corpus=(file,)).prepared(model)
    monkeypatch.setattr(model.config, "_name_or_path", str(EMBEDDED_TARGET))
    smaller = Corpora.of(model)
    with pytest.raises(ValueError, match=r"corpus: .*corpus.py does not fit the target: tokens: "):
        smaller.files([file], None)


def test_options_are_spelled_and_checked():
    assert parse_method("suffix:corpus=[a.py,b.py],cache=c") == (
        "suffix",
        {"corpus": ("a.py", "b.py"), "cache": "c"},
    )
    assert parse_method("suffix:corpus=a.py")[1] == {"corpus": ("a.py",)}
    with pytest.raises(ValueError, match=re.escape("corpus must be a sequence of paths")):
        Suffix(corpus="a.py")
    with pytest.raises(ValueError, match="cache needs corpus or remember"):
        Suffix(cache=Path("c"))
