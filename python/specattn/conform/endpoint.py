"""A server with OpenAI's completions, asked for texts and for how likely their tokens were."""

from __future__ import annotations

import http.client
import json
import math
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

LISTED = 5  # of the likeliest tokens at each place: as many as every server gives


@dataclass(frozen=True)
class Place:
    """A token of a text, and what else could have stood there.

    Log-probabilities are natural, of the model's own distribution; NaN where a server gave none.
    """

    token: str
    logprob: float
    listed: Mapping[str, float] = field(default_factory=dict)  # by token, the likeliest ones

    def gap(self, token: str) -> float | None:
        """Return how far the logit of this place's token is above another's.

        None if the other is not listed, or one of the two is no finite number.
        """
        gap = self.logprob - self.listed.get(token, math.nan)
        return gap if math.isfinite(gap) else None

    @property
    def least_gap(self) -> float:
        """What the gap of a token that is not listed must exceed; NaN if no number says so."""
        finite = filter(math.isfinite, self.listed.values())
        return self.logprob - min(finite, default=self.logprob)


@dataclass(frozen=True)
class Answer:
    """What continues a prompt; an engine without log-probabilities gives no places."""

    text: str
    places: tuple[Place, ...] = ()

    @property
    def lists(self) -> bool:
        """Whether it says of any place what else could have stood there."""
        return any(one.listed for one in self.places)


@dataclass(frozen=True)
class Request:
    """How prompts are continued; at a temperature above 0 the seed decides."""

    new_tokens: int
    temperature: float = 0.0
    seed: int = 0


class Engine(Protocol):
    """Whatever continues prompts."""

    @property
    def name(self) -> str:
        """How reports call it."""

    def answer(self, prompt: str, request: Request) -> Answer:
        """Continue a prompt."""


class Endpoint:
    """An engine behind ``/v1/completions``.

    Parameters
    ----------
    url : str
        Of the server, with ``/v1`` or without.
    model : str, optional
        Its name there; the first one that the server lists if left out.
    timeout : float
        Seconds that an answer may take.

    Raises
    ------
    ValueError
        The server is not there, or is none of this kind.
    """

    def __init__(self, url: str, model: str | None = None, timeout: float = 600.0):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{url}: expected a URL that begins with http:// or https://")
        self.url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self.timeout, self.lists = timeout, True
        self.model = model or self._first_model()

    @property
    def name(self) -> str:
        """How reports call it."""
        return f"{self.model} at {self.url}"

    def answer(self, prompt: str, request: Request) -> Answer:
        """Continue a prompt; raises ValueError for an answer that is no completion."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": request.new_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "ignore_eos": True,  # of an end no server says how likely it was
        }
        if self.lists:
            try:
                return self._parsed(self._ask("completions", body | {"logprobs": LISTED}))
            except _Refused as refusal:
                if "logprob" not in str(refusal):
                    raise
                self.lists = False
        return self._parsed(self._ask("completions", body))

    def _first_model(self) -> str:
        found = self._ask("models")
        try:
            return str(found["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"{self.url}/models: expected a list of models, got {found}") from None

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return what the server answers, read as JSON."""
        url = f"{self.url}/{path}"
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(asked, timeout=self.timeout) as reply:
                return json.loads(reply.read())
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:300]
            raise _Refused(f"{url}: status {error.code}: {said}") from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error) or type(error).__name__
            raise ValueError(f"{url}: expected a server's answer, got: {reason}") from None
        except ValueError as error:
            raise ValueError(f"{url}: expected JSON: {error}") from None

    def _parsed(self, found: Any) -> Answer:
        try:
            choice = found["choices"][0]
            return Answer(str(choice["text"]), tuple(_places(choice.get("logprobs") or {})))
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            said = f"{type(error).__name__}: {error}"
            raise ValueError(f"{self.url}/completions: expected a completion: {said}") from None


class _Refused(ValueError):
    """A status that is no success."""


def _places(logprobs: Any) -> list[Place]:
    """Return the places of OpenAI's completions, or of the layout of its chats."""
    if "content" in logprobs:  # llama.cpp's own server
        return [
            Place(
                one["token"],
                _number(one["logprob"]),
                {other["token"]: _number(other["logprob"]) for other in one["top_logprobs"] or ()},
            )
            for one in logprobs["content"] or ()
        ]
    tokens = logprobs.get("tokens") or ()
    columns = []
    for name in ("token_logprobs", "top_logprobs"):
        column = logprobs.get(name, ())
        column = [None] * len(tokens) if column is None else column
        if len(column) != len(tokens):
            raise ValueError(f"expected {name} of {len(tokens)} tokens, got {len(column)}")
        columns.append(column)
    return [
        Place(token, _number(logprob), {name: _number(x) for name, x in (listed or {}).items()})
        for token, logprob, listed in zip(tokens, *columns, strict=True)
    ]


def _number(given: Any) -> float:
    """Return a log-probability; NaN for a null."""
    return math.nan if given is None else float(given)
