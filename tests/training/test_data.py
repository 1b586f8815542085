"""Training text: every token once and in order, and nothing lost without a word."""

import json
import logging

import pytest
import torch
from torch.utils.data import DataLoader

from specattn.training import Documents, PackedRows, find_files


class Characters:
    """A tokenizer of one token per character, with 0 as its end of text."""

    eos_token_id = 0

    def __call__(self, texts, verbose):
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}


@pytest.fixture
def corpus(tmp_path):
    """Three good texts in two files, and six things that cannot be used."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.txt").write_text("plain text")
    (tmp_path / "deep" / "b.jsonl").write_bytes(
        json.dumps({"text": "first"}).encode()
        + b'\n{"text": "cut off\n\xff\n{"body": "x"}\n{"text": " "}\n'
        + json.dumps({"text": "second é"}).encode()
        + b"\n"
    )
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe")
    (tmp_path / ".hidden").write_text("not training text")
    return tmp_path


def words(row):
    return "".join(chr(token) for token in row)


def test_what_cannot_be_used_is_named_and_counted(corpus, caplog):
    documents = Documents(find_files([corpus]))
    with caplog.at_level(logging.WARNING):
        assert list(documents) == ["plain text", "first", "second é"]
        assert list(documents) == ["plain text", "first", "second é"]
    line = f"{corpus / 'deep' / 'b.jsonl'}:"
    assert documents.skipped == {
        f"{line}2": "not JSON (Invalid control character at)",
        f"{line}3": "not UTF-8",
        f"{line}4": "no string under 'text'",
        f"{line}5": "empty",
        str(corpus / "empty.txt"): "empty",
        str(corpus / "binary.txt"): "not UTF-8",
    }
    for where in documents.skipped:
        assert caplog.text.count(f"skipped {where}: ") == 1


def test_rows_are_the_texts_end_to_end(corpus):
    rows = list(PackedRows(Documents(find_files([corpus])), Characters(), 6))
    stream = "\0plain text\0first\0second é\0"
    assert [words(row["input_ids"]) for row in rows] == [stream[n : n + 6] for n in (0, 6, 12, 18)]
    for n, row in enumerate(rows):
        assert words(row["labels"]) == stream[6 * n + 1 : 6 * n + 7]


@pytest.mark.parametrize("length", [1, 5, 25, 26, 27])
def test_a_row_needs_its_labels(corpus, length):
    rows = PackedRows(Documents(find_files([corpus])), Characters(), length)
    assert len(rows) == len(list(rows)) == 26 // length


def test_order_follows_seed_and_epoch(tmp_path):
    for name in "abcdefgh":
        (tmp_path / name).write_text(name * 11)
    documents = Documents(find_files([tmp_path]))

    def epoch(number, seed=3):
        rows = PackedRows(documents, Characters(), 4, seed=seed)
        rows.set_epoch(number)
        return [words(row["input_ids"]) for row in rows]

    assert epoch(0) == epoch(0)
    assert len({tuple(epoch(0)), tuple(epoch(1)), tuple(epoch(0, seed=4))}) == 3
    assert len(epoch(0)) == len(epoch(1)) == len(PackedRows(documents, Characters(), 4))


def test_an_endless_stream_goes_on_with_the_next_epoch(corpus):
    documents = Documents(find_files([corpus]))
    endless = iter(PackedRows(documents, Characters(), 6, seed=0, endless=True))
    once = PackedRows(documents, Characters(), 6, seed=0)
    for epoch in range(3):
        once.set_epoch(epoch)
        for row in once:
            assert torch.equal(row["input_ids"], next(endless)["input_ids"])
    with pytest.raises(TypeError, match="no length"):
        len(PackedRows(documents, Characters(), 6, endless=True))


def test_an_endless_stream_of_nothing_ends(tmp_path):
    (tmp_path / "short.txt").write_text("ab")
    documents = Documents(find_files([tmp_path]))
    assert list(PackedRows(documents, Characters(), 6, endless=True)) == []


def test_a_limit_is_a_limit(corpus):
    rows = PackedRows(Documents(find_files([corpus])), Characters(), 6, limit=2)
    assert len(rows) == len(list(rows)) == 2


def test_two_workers_would_read_everything_twice(corpus):
    rows = PackedRows(Documents(find_files([corpus])), Characters(), 6)
    with pytest.raises(ValueError, match="dataloader_num_workers must be 0 or 1, got 2"):
        list(DataLoader(rows, num_workers=2))


def test_paths_that_hold_nothing_are_refused(tmp_path):
    with pytest.raises(ValueError, match="nowhere is neither a file nor a folder"):
        find_files([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="no file in"):
        find_files([tmp_path])
    with pytest.raises(ValueError, match="row_length must be positive, got 0"):
        PackedRows(Documents([]), Characters(), 0)
