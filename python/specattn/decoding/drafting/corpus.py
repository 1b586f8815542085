"""Suffix arrays of other texts (files, earlier outputs), in which suffix decoding looks matches up.

An index is the texts' tokens and the order of all their suffixes, 8 bytes a token. Indexes of files
are kept in a folder, if one is given, as safetensors that are mapped into memory, not read: a file
there is whole or absent, and one that is replaced or deleted stays readable to whoever has mapped
it. What a model generated can be such a text too.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import threading
import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import AutoTokenizer, PreTrainedModel

from specattn.decoding.drafting import suffix_index as in_python
from specattn.decoding.model.model import Model
from specattn.decoding.text.sampling import kernels
from specattn.files import keep

END = -1
"""Between two texts."""
CACHE_BYTES = 1 << 30
"""What a folder of indexes may take; those that were not used for longest go first."""
REMEMBERED = 1 << 17
"""Newest tokens of a model's outputs that are remembered."""


class Index(NamedTuple):
    """Texts, int32 [n] with `END` behind each, and where their suffixes begin, int32 [n].

    Suffixes are sorted by their first 64 tokens.
    """

    tokens: torch.Tensor
    order: torch.Tensor


def index_of(texts: Iterable[Sequence[int]]) -> Index:
    """Return the index of some texts."""
    joined = [token for text in texts for token in (*text, END)]
    tokens = torch.tensor(joined, dtype=torch.int32, device="cpu")
    order = torch.empty_like(tokens)
    suffix_index().sort_suffixes(tokens, order)
    return Index(tokens, order)


class IndexCache:
    """A folder of indexes, each by the digest of what it was made from; made where there is none.

    Several processes may read and write it at once; of two that write one index the later stays.
    Those not used for longest are deleted until `most_bytes` are kept; never the newest.
    """

    def __init__(self, folder: Path | str, most_bytes: int = CACHE_BYTES):
        self.folder, self.most_bytes = Path(folder), most_bytes
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"cache: {folder} is no folder: {error.strerror}") from None

    def get(self, key: str) -> Index | None:
        """Return an index, mapped into memory; None where there is none that can be read."""
        path = self.path(key)
        try:
            index = _mapped(path)
            os.utime(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            warnings.warn(f"{path} cannot be read and is made anew: {error}", stacklevel=2)
            return None
        return index

    def put(self, key: str, index: Index) -> None:
        """Keep an index, if the folder can be written."""
        path = self.path(key)
        keep(self.folder, path, partial(_save, index))
        self._shrink(path)

    def path(self, key: str) -> Path:
        """Return where an index lies, if it does."""
        return self.folder / f"{key}.safetensors"

    def _shrink(self, newest: Path) -> None:
        found = []
        for path in self.folder.glob("*.safetensors"):
            try:
                found.append((path.stat().st_mtime_ns, path.stat().st_size, path))
            except FileNotFoundError:  # another process was quicker
                continue
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self.most_bytes or path == newest:
                continue
            with suppress(OSError):  # in a folder that cannot be written
                path.unlink(missing_ok=True)
                total -= size


class Outputs:
    """What a model has generated, the newest `most` tokens of it, by runs in any threads."""

    def __init__(self, most: int = REMEMBERED):
        self.most = most
        self.texts = deque[list[int]]()
        self._size = 0
        self._index: Index | None = None
        self._lock = threading.Lock()

    def add(self, tokens: Sequence[int]) -> None:
        """Remember one text, its end if it is too long, and forget the oldest beyond `most`."""
        kept = list(tokens)[-self.most + 1 :]
        with self._lock:
            self.texts.append(kept)
            self._size += len(kept) + 1
            while self._size > self.most:
                self._size -= len(self.texts.popleft()) + 1
            self._index = None

    def index(self) -> Index:
        """Return their index, made anew only when something was added."""
        with self._lock:
            if self._index is None:
                self._index = index_of(self.texts)
            return self._index

    def read(self, index: Index) -> None:
        """Add the texts of an index."""
        text: list[int] = []
        for token in index.tokens.tolist():
            if token != END:
                text.append(token)
                continue
            self.add(text)
            text = []


class Corpora:
    """The corpora of one model, whose tokenizer lies in its `folder`, in this process."""

    def __init__(self, vocabulary: int, folder: str):
        self.vocabulary, self.folder = vocabulary, folder
        self.outputs = Outputs()
        self._read_outputs_of: set[Path] = set()
        self._files: dict[tuple[Any, ...], Any] = {}
        self._tokenizer: Any = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> Corpora:
        """Return those of a checkpoint, with nothing read."""
        return cls(int(model.config.vocab_size), str(model.config._name_or_path))

    def files(self, paths: Sequence[Path | str], cache: Path | str | None) -> list[Any]:
        """Return an index for each file, a `Corpus` of `suffix_index`.

        ValueError: a file cannot be read or is not UTF-8, or the model has no tokenizer, or one
        whose tokens are not the model's.
        """
        return [self._file(Path(path), cache) for path in paths]

    def remembered(self, cache: Path | str | None) -> Any:
        """Return the index of what was generated, in earlier processes too if there is a cache."""
        if cache is not None and Path(cache) not in self._read_outputs_of:
            self._read_outputs_of.add(Path(cache))
            if (known := IndexCache(cache).get(self._outputs_key)) is not None:
                self._corpus(known, "outputs")  # before its tokens are used
                self.outputs.read(known)
        return self._corpus(self.outputs.index(), "outputs")

    def keep(self, cache: Path | str) -> None:
        """Write what was generated into a cache."""
        IndexCache(cache).put(self._outputs_key, self.outputs.index())

    @property
    def tokenizer(self) -> Any:
        """The tokenizer in the model's folder."""
        if self._tokenizer is None:
            try:
                self._tokenizer = AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
            except (OSError, ValueError):
                raise ValueError(
                    f"corpus: needs the target's tokenizer, and '{self.folder}' has none"
                ) from None
        return self._tokenizer

    @property
    def _outputs_key(self) -> str:
        return f"outputs-{_digest(_spelling(self.tokenizer))}"

    def _file(self, path: Path, cache: Path | str | None) -> Any:
        if not path.is_file():
            raise ValueError(f"corpus: {path} is not a file")
        try:
            stat = path.stat()
            known = (path.resolve(), stat.st_mtime_ns, stat.st_size)
            if known not in self._files:
                index = self._indexed(path.read_bytes(), cache)
                self._files[known] = self._corpus(index, str(path))
        except OSError as error:
            raise ValueError(f"corpus: {path} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ValueError(f"corpus: {path} is not UTF-8 text") from None
        return self._files[known]

    def _indexed(self, content: bytes, cache: Path | str | None) -> Index:
        folder = None if cache is None else IndexCache(cache)
        key = _digest(_spelling(self.tokenizer), content)
        index = folder.get(key) if folder is not None else None
        if index is None:
            text = content.decode("utf-8")
            index = index_of([self.tokenizer(text, add_special_tokens=False)["input_ids"]])
            if folder is not None:
                folder.put(key, index)
        return index

    def _corpus(self, index: Index, name: str) -> Any:
        try:
            return suffix_index().Corpus(*index, self.vocabulary)
        except ValueError as error:
            raise ValueError(f"corpus: {name} does not fit the target: {error}") from None


def corpora_of(model: PreTrainedModel) -> Corpora:
    """Return what this process knows of a model's corpora."""
    return Model.of(model).recall("corpora", lambda: Corpora.of(model))


def _save(index: Index, path: Path) -> None:
    try:
        save_file(index._asdict(), path)
    except SafetensorError as error:  # of a full disk, say
        raise OSError(str(error)) from None


def _mapped(path: Path) -> Index:
    """Return the index in a safetensors file, mapped; raises ValueError where it is none.

    The file is opened once: `safetensors.safe_open` opens it again for each tensor, and may find
    another by then.
    """
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    try:
        (size,) = struct.unpack_from("<Q", memory)
        header = json.loads(memory[8 : 8 + size])
        parts = [header[name] for name in Index._fields]
        spans = [(part["dtype"], *part["shape"], *part["data_offsets"]) for part in parts]
    except (struct.error, KeyError, TypeError) as error:
        raise ValueError(f"no index: {error!r}") from None
    tensors = []
    for span in spans:
        kind, count, begin, end = span
        if kind != "I32" or end - begin != 4 * count:
            raise ValueError(f"no index: {span}")
        at = 8 + size + begin
        empty = torch.empty(0, dtype=torch.int32, device="cpu")
        tensors.append(
            torch.frombuffer(memory, dtype=torch.int32, count=count, offset=at) if count else empty
        )
    return Index(*tensors)


def suffix_index() -> Any:
    """Return `specattn._cpu`, or what has its names for suffix decoding where it is not built."""
    native = kernels()
    return in_python if native is None else native


def _spelling(tokenizer: Any) -> bytes:
    """Return what decides into which tokens a text is cut."""
    if tokenizer.is_fast:
        return str(tokenizer.backend_tokenizer.to_str()).encode()
    return json.dumps(sorted(tokenizer.get_vocab().items())).encode()


def _digest(*parts: bytes) -> str:
    joined = hashlib.sha256()
    for part in parts:
        joined.update(hashlib.sha256(part).digest())
    return joined.hexdigest()
