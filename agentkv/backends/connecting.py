"""The first contact with a vLLM server: what it serves, and whether its tokens are the client's."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agentkv.anchor import ANCHOR, anchor_ids
from agentkv.backends.base import Capabilities, PromptForm
from agentkv.backends.connector import METRICS_MARK, Connector, greet
from agentkv.backends.parsing import RENDER
from agentkv.backends.plain import PlainTokenizer
from agentkv.backends.serverinfo import CacheInfo, ServedModel, cache_info, choose_model, served_models
from agentkv.errors import CapabilityError, MissingDependencyError, ModelError
from agentkv.http import HttpClient, Post
from agentkv.segments import Splicing
from agentkv.splicing import SEAM

if TYPE_CHECKING:
    from agentkv.tokenizer import ChatTokenizer

SAMPLE: Final = 'Order 7731: crème brûlée, 3.50 €\n\n\tZoë\'s   parcel — 你好 🙂 {"a": [1, 2.5]}'
"""Encoded on both sides, to see whether the client's tokenizer is the server's."""


@dataclass(frozen=True, slots=True)
class WantedSplices:
    """What the caller said of splicing."""

    use: Splicing = Splicing.AUTO
    anchor: str = ANCHOR
    seam: int = SEAM
    ticket_key: bytes | None = field(default=None, repr=False)
    prime_after_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the caller said of the server; None is asked of it."""

    model: str | None
    tokenizer: ChatTokenizer | str | Path | None
    prompts: PromptForm
    block_size: int | None
    context_window: int | None
    splices: WantedSplices = WantedSplices(Splicing.NEVER)


@dataclass(frozen=True, slots=True)
class Connected:
    """What the server said when it was first asked."""

    model: ServedModel
    cache: CacheInfo
    capabilities: Capabilities
    tokenizer: ChatTokenizer
    scale_out: bool
    """Whether it renders and derenders."""
    connector: Connector | None = None
    """What splices there, if anything does."""


def connect(http: HttpClient, wanted: Wanted) -> Connected:
    """Ask a server what it serves.

    Raises
    ------
    BackendError
        It cannot be reached, or is no such server.
    CapabilityError
        It serves no such model, its tokenizer is another one, or it does not say what has to be known.
    ModelNotFoundError
        The tokenizer cannot be loaded.
    """
    listed = http.get("/v1/models")
    if not listed.is_success:
        raise http.refusal("/v1/models", listed)
    model = choose_model(served_models(http.value(listed)), wanted.model, http.url)
    metrics = http.get("/metrics")
    cache = cache_info(metrics.text if metrics.is_success else "")
    block = wanted.block_size or cache.block_size
    window = wanted.context_window or model.context_window
    if block is None:
        raise CapabilityError(
            f"{http.url}/metrics does not tell the block size of the prefix cache (is a router or gateway in "
            "front?): give block_size=; `agentkv doctor` measures it"
        )
    if window is None:
        raise CapabilityError(f"{http.url} does not tell its context length: give context_window=")
    tokenizer = _tokenizer(wanted, model, http.url)
    known = not isinstance(tokenizer, PlainTokenizer)
    if not known and wanted.prompts is PromptForm.IDS:
        raise CapabilityError(
            "prompts of token ids need the served model's tokenizer, and PlainTokenizer only estimates: give "
            "it as tokenizer=, or prompts=PromptForm.MESSAGES"
        )
    unlike = unlike_tokenizer(http, model.name, tokenizer) if known else None
    if unlike is not None:
        raise CapabilityError(
            f"the client's tokenizer is not that of {model.name!r} on {http.url}: {unlike}; give the served "
            "model's as tokenizer="
        )
    connector = _connector(http, model.name, wanted, tokenizer, metrics.text if metrics.is_success else "")
    capabilities = Capabilities(
        name="vllm",
        context_window=window,
        block_size=block,
        prompts=wanted.prompts,
        known_ids=known,
        splices=connector is not None,
    )
    return Connected(model, cache, capabilities, tokenizer, renders(http, model.name), connector)


def _connector(
    http: HttpClient, model: str, wanted: Wanted, tokenizer: ChatTokenizer, metrics: str
) -> Connector | None:
    wish = wanted.splices
    if wish.use is Splicing.NEVER or (wish.use is Splicing.AUTO and METRICS_MARK not in metrics):
        return None
    if wanted.prompts is not PromptForm.IDS:
        if wish.use is Splicing.AUTO:
            return None
        raise CapabilityError("splices need prompts of token ids: give prompts=PromptForm.IDS")
    hello = greet(http, model)
    if hello is None:
        if wish.use is Splicing.AUTO:
            return None
        raise CapabilityError(
            f"{http.url} does not splice: start it with the connector of vllm-agentkv (docs/splices.md), or "
            "give splices='never'"
        )
    return Connector(
        http, hello, model, anchor_ids(tokenizer, wish.anchor), wish.ticket_key, wish.prime_after_s
    )


def _tokenizer(wanted: Wanted, model: ServedModel, url: str) -> ChatTokenizer:
    try:
        return load_tokenizer(wanted.tokenizer, model, url)
    except (CapabilityError, MissingDependencyError):
        if wanted.prompts is PromptForm.IDS or wanted.tokenizer is not None:
            raise
        # The server renders; its ids come back with the answer.
        return PlainTokenizer()


def load_tokenizer(given: ChatTokenizer | str | Path | None, model: ServedModel, url: str) -> ChatTokenizer:
    """Return the tokenizer that was given, or load the one of what the server says it loaded.

    Raises
    ------
    CapabilityError
        The server does not say, or it cannot be loaded here.
    ModelNotFoundError
        The one that was named cannot be loaded.
    """
    source = given or model.root
    if source is None:
        raise CapabilityError(f"{url} does not say which model it loaded: give tokenizer=")
    if not isinstance(source, str | Path):
        return source
    from agentkv.huggingface import HuggingFaceTokenizer
    from agentkv.models import resolve

    try:
        # A folder with a tokenizer and no model will do.
        name = str(source) if Path(source).is_dir() else str(resolve(str(source)))
        return HuggingFaceTokenizer.from_pretrained(name)
    except ModelError as error:
        if given is not None:
            raise
        raise CapabilityError(
            f"the server loaded {source!r}, whose tokenizer cannot be loaded here ({error}): give tokenizer="
        ) from error


def unlike_tokenizer(http: HttpClient, model: str, tokenizer: ChatTokenizer) -> str | None:
    """Say how the server's ids of one text differ from the client's; None if they do not.

    Servers without ``/tokenize`` are taken at their word.
    """
    text = SAMPLE + next(iter(sorted(tokenizer.control_tokens)), "")
    answer = http.try_post(
        Post.json("/tokenize", {"model": model, "prompt": text, "add_special_tokens": False})
    )
    if not answer.is_success:
        return None
    theirs, ours = http.value(answer).get("tokens") or [], tokenizer.encode(text)
    if theirs == ours:
        return None
    at = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), len(ours))
    return f"they encode one text to {len(theirs)} and {len(ours)} ids, which part at index {at}"


def renders(http: HttpClient, model: str) -> bool:
    """Whether the scale-out endpoints answer."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}]}
    return http.try_post(Post.json(RENDER, body)).is_success
