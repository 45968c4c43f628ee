"""The server under examination: what was asked of it so far, and how probes are sent."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agentkv.backends.connecting import load_tokenizer
from agentkv.backends.serverinfo import CacheInfo, ServedModel, cache_info, choose_model, served_models
from agentkv.doctor.served import ServedTemplate
from agentkv.errors import AgentKVError, BackendError, BackendRequestError
from agentkv.http import HttpClient, Post

if TYPE_CHECKING:
    import httpx2

    from agentkv.tokenizer import ChatTokenizer

ROUTING_HEADER: Final = "X-Session-ID"
"""As `VLLMBackend` sends it."""
_ORDINARY: Final = range(100, 240)
"""Ids that any vocabulary has, where none can be asked for."""
_SOURCE: Final = (
    "It was a bright morning, and the parcel with order number 7731 had still not arrived at the old house "
    "by the river. Someone called the desk; nobody knew where it was. Later that week, two drivers found "
    "their map wrong: north was south, left was right, and every third street had another name than before."
)
_random: Final = secrets.SystemRandom()


class Lengths(StrEnum):
    """How long the prompts may get that look for large blocks."""

    SHORT = "short"
    """641 tokens: enough for blocks of 640."""
    LONG = "long"
    """4,201 tokens: hybrid models have blocks of 528 to 2,096 tokens."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the caller wants examined."""

    model: str | None = None
    tokenizer: ChatTokenizer | str | Path | None = None
    lengths: Lengths = Lengths.SHORT


@dataclass(frozen=True, slots=True)
class Sample:
    """What the server told of one short call."""

    prompt_tokens: int | None
    cached: int | None
    """Prompt tokens found in the prefix cache; None where the server does not tell."""
    ids: tuple[int, ...] | None
    """Generated ids; None where the server does not tell."""
    text: str


class Session:
    """One examination. What is asked is asked once and kept.

    Parameters
    ----------
    http
        Reaches the server.
    asked
        What the caller said of it.
    """

    def __init__(self, http: HttpClient, asked: Asked) -> None:
        self.http = http
        self.asked = asked
        self._route = secrets.token_hex(16)

    @cached_property
    def listing(self) -> httpx2.Response:
        """The answer of ``/v1/models``, whatever it is."""
        return self.http.get("/v1/models")

    @cached_property
    def model(self) -> ServedModel:
        """The served model."""
        if not self.listing.is_success:
            raise self.http.refusal("/v1/models", self.listing)
        models = served_models(self.http.value(self.listing))
        return choose_model(models, self.asked.model, self.http.url)

    @cached_property
    def metrics(self) -> str | None:
        """The text of ``/metrics``; None if there is none."""
        answer = self.http.get("/metrics")
        return answer.text if answer.is_success else None

    @cached_property
    def cache(self) -> CacheInfo:
        """What ``/metrics`` tell of the cache."""
        return cache_info(self.metrics or "")

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        """The client's tokenizer; raises where it cannot be loaded."""
        return load_tokenizer(self.asked.tokenizer, self.model, self.http.url)

    @cached_property
    def tokenizer_or_none(self) -> ChatTokenizer | None:
        """The client's tokenizer, if there is one."""
        try:
            return self.tokenizer
        except AgentKVError:
            return None

    @cached_property
    def template(self) -> ServedTemplate:
        """The chat template that the server renders with."""
        return ServedTemplate(self.http, self.model.name, self.tokenizer_or_none)

    def tokenized(self, text: str) -> list[int] | None:
        """Return the server's ids of a text; None if it does not tokenise."""
        body = {"model": self.model.name, "prompt": text, "add_special_tokens": False}
        answer = self.http.try_post(Post.json("/tokenize", body))
        if not answer.is_success:
            return None
        value = self.http.value(answer)
        tokens = value.get("tokens") if isinstance(value, Mapping) else None
        if not isinstance(tokens, list):
            raise BackendError(f"{self.http.url}/tokenize tells no tokens")
        return tokens

    @cached_property
    def alphabet(self) -> tuple[int, ...]:
        """Ordinary ids of the served model's vocabulary, which prompts are drawn from."""
        local = self.tokenizer_or_none
        ids = self.tokenized(_SOURCE) or (local.encode(_SOURCE) if local is not None else _ORDINARY)
        return tuple(sorted(set(ids)))

    def prompt(self, length: int) -> tuple[int, ...]:
        """Draw a prompt that nobody sent before, `length` ids long."""
        return tuple(_random.choices(self.alphabet, k=length))

    @cached_property
    def ids_sample(self) -> Sample:
        """The answer to a short prompt of ids."""
        return self._completion(self.prompt(16), {"cache_salt": salt()})

    @cached_property
    def takes_ids(self) -> bool:
        """Whether prompts of ids are read as they are."""
        try:
            return self.ids_sample.prompt_tokens == 16
        except BackendRequestError:
            return False

    def send(self, prompt: Sequence[int], salted: str | None, **more: Any) -> Sample:
        """Send a prompt and have one token generated, unless `more` says otherwise.

        Where the server takes no ids, each is sent as a word of a chat message.

        Raises
        ------
        BackendError
            The call failed.
        """
        fields = {**({} if salted is None else {"cache_salt": salted}), **more}
        if self.takes_ids:
            return self._completion(prompt, fields)
        words = " ".join(f"w{number}" for number in prompt)
        return self.chat({"messages": [{"role": "user", "content": words}], **fields})

    def _completion(self, prompt: Sequence[int], fields: Mapping[str, Any]) -> Sample:
        return self._sampled(
            "/v1/completions", {"prompt": list(prompt), "add_special_tokens": False, **fields}
        )

    def chat(self, fields: Mapping[str, Any]) -> Sample:
        """Send a chat request; raises as `send`."""
        return self._sampled("/v1/chat/completions", fields)

    def _sampled(self, path: str, fields: Mapping[str, Any]) -> Sample:
        body = {"max_tokens": 1, "temperature": 0.0, "return_token_ids": True, **fields}
        return sampled(self.post(path, body))

    def post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a body for the model, with the routing header as a backend would send it."""
        post = Post.json(path, {"model": self.model.name, **body}, {ROUTING_HEADER: self._route})
        answer = self.http.post(post)
        if not isinstance(answer, Mapping):
            raise BackendError(f"{self.http.url}{path} answered {type(answer).__name__}, no JSON object")
        return answer


def salt() -> str:
    """Return a salt that nobody has."""
    return secrets.token_hex(32)


def sampled(answer: Mapping[str, Any]) -> Sample:
    """Read the answer of a text or chat completion.

    Raises
    ------
    BackendError
        It holds no choice.
    """
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        raise BackendError("the server answered without a choice: is it an OpenAI-compatible server?")
    choice = choices[0]
    usage = answer.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    message = choice.get("message") or {}
    ids = choice.get("token_ids")
    return Sample(
        prompt_tokens=usage.get("prompt_tokens"),
        cached=details.get("cached_tokens"),
        ids=None if ids is None else tuple(ids),
        text=choice.get("text") or message.get("content") or "",
    )
