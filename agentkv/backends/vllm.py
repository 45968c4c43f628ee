"""A vLLM server over HTTP: token-exact by default, so that no turn loses what was cached before."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Unpack

from agentkv.anchor import ANCHOR
from agentkv.backends.base import Capabilities, Completion, PromptForm, Request, Usage, complete
from agentkv.errors import (
    BackendError,
    BackendRequestError,
    CapabilityError,
    ConfigurationError,
    MissingDependencyError,
)
from agentkv.miss import Miss
from agentkv.reasoning import OPEN_TAG, ReasoningSplitter, opens_reasoning
from agentkv.segments import Splicing, member
from agentkv.splicing import SEAM, check_seam

try:
    from agentkv.backends import bodies, parsing
    from agentkv.backends.answers import AnswerReader
    from agentkv.backends.connecting import Connected, Wanted, WantedSplices, connect
    from agentkv.backends.connector import Connector
    from agentkv.backends.served import ServedBackend, check_tokens
    from agentkv.backends.serverinfo import cache_info
    from agentkv.http import Post, ServerOptions, ServerSettings
except ImportError as error:
    raise MissingDependencyError(
        f"VLLMBackend needs httpx2 and tenacity ({error}): "
        "pip install 'agentkv-middleware[vllm]', or '.[vllm]' in a checkout"
    ) from error

if TYPE_CHECKING:
    from agentkv.tokenizer import ChatTokenizer

_MOST_CONVERSATIONS: Final = 10_000
PRIMING_PRIORITY: Final = 1_000_000
"""Priority of calls that only warm the cache: behind everything else."""


class VLLMBackend(ServedBackend):
    """Runs the model on a vLLM server.

    Prompts go as token ids to ``/v1/completions`` and generated ids come back, so that each prompt begins
    with the last prompt and answer, id for id. Tool calls and reasoning are read by the server's own parsers
    if it was started with ``--enable-scale-out``, else here (`agentkv.backends.parsing`). With
    ``prompts=PromptForm.MESSAGES`` chat messages go to ``/v1/chat/completions``, which the server renders
    anew each turn.

    The server is asked what it can do when a context is first entered.

    Parameters
    ----------
    base_url
        Address of the server, or of a router in front of several.
    model
        The served name, that of a LoRA adapter for example; None takes the only one.
    tokenizer
        The served model's: a `ChatTokenizer`, a folder, a hub id or a pulled model's name. None loads what
        the server says it loaded, which works where that is a hub id or a folder of this machine too; with
        prompts of messages the client can do without one.
    prompts
        `PromptForm.IDS`, or `PromptForm.MESSAGES` for servers that take no ids.
    block_size
        Tokens of a block of the prefix cache; None reads it from the server's ``/metrics``.
    context_window
        Most tokens of prompt and answer together; None takes what the server says.
    splices
        Whether compiled chunks are spliced by the connector of ``vllm-agentkv``: ``"auto"`` where the
        server's ``/metrics`` shows it, ``"always"`` requires it, ``"never"`` leaves it alone.
    anchor
        Text that chunks are compiled behind; artifacts made behind another one are not found.
    seam
        Leading tokens of a chunk that are computed for real.
    ticket_key
        Secret of at least 16 bytes that the server shares, where it splices with tickets only.
    prime_after_s
        Seconds after a conversation's last call from which on what stands before its splices is sent along,
        in case the server has evicted it.
    routing_header
        Header that carries the routing key, by which a router keeps a conversation on its replica.
    settings
        Fields of `ServerOptions`: ``api_key``, ``headers``, ``verify``, ``proxy``, ``stall_s``,
        ``deadline_s``, ``attempts`` and so on.

    Raises
    ------
    ConfigurationError
        An argument is wrong.
    """

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        tokenizer: ChatTokenizer | str | Path | None = None,
        *,
        prompts: PromptForm = PromptForm.IDS,
        block_size: int | None = None,
        context_window: int | None = None,
        splices: Splicing | str = Splicing.AUTO,
        anchor: str = ANCHOR,
        seam: int = SEAM,
        ticket_key: bytes | None = None,
        prime_after_s: float = 5.0,
        routing_header: str = "X-Session-ID",
        **settings: Unpack[ServerSettings],
    ) -> None:
        super().__init__(ServerOptions(base_url, **settings))
        check_tokens(block_size=block_size, context_window=context_window)
        form: object = prompts
        if not isinstance(form, PromptForm):
            known = ", ".join(f"PromptForm.{form.name}" for form in PromptForm)
            raise ConfigurationError(f"prompts={prompts!r} is no form of prompts; give {known}")
        self._prompts = prompts
        wish = WantedSplices(
            member(Splicing, splices, "splices"), anchor, check_seam(seam), ticket_key, prime_after_s
        )
        self._wanted = Wanted(model, tokenizer, self._prompts, block_size, context_window, wish)
        self._routing_header = routing_header
        self._found: Connected | None = None
        self._grammars: dict[str, Any] = {}
        self._start = 0
        """Counts the server's starts that were noticed."""
        self._starts: dict[str, int] = {}
        """Conversation to the start that it last talked to, the most recent ones last."""
        self._priorities = True
        self._connecting = threading.Lock()

    def __repr__(self) -> str:
        return f"VLLMBackend({self.url!r}, model={self._wanted.model!r}, prompts={self._prompts.name})"

    @property
    def capabilities(self) -> Capabilities:
        """What the server can do; it is asked the first time.

        Raises
        ------
        BackendConnectionError, BackendTimeoutError
            It cannot be reached.
        CapabilityError
            It serves no such model, its tokenizer is another one, or its block size is not known.
        ModelNotFoundError
            The tokenizer cannot be loaded.
        """
        return self._connected().capabilities

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The client's tokenizer and chat template of the served model; raises as `capabilities`."""
        return self._connected().tokenizer

    @property
    def model(self) -> str:
        """The served model's name; raises as `capabilities`."""
        return self._connected().model.name

    @property
    def seam(self) -> int:
        """Leading tokens of a chunk that are computed for real."""
        return self._wanted.splices.seam

    def find_artifact(self, tenant: str, ids: Sequence[int]) -> str | None:
        """Return the name of the artifact of these tokens, if the server has it.

        Raises
        ------
        CapabilityError
            The server does not splice.
        BackendError
            It cannot be asked.
        """
        return self._connector().find(tenant, ids)

    def compile_chunk(self, tenant: str, ids: Sequence[int]) -> str:
        """Have the server compute the artifact of these tokens, unless it has it; returns its name.

        Raises
        ------
        CapabilityError
            The server does not splice, does not compile, or refuses this chunk.
        BackendError
            The call failed.
        """
        connector = self._connector()
        return connector.find(tenant, ids) or connector.compile(tenant, ids).artifact

    def _connector(self) -> Connector:
        found = self._connected().connector
        if found is None:
            raise CapabilityError(
                f"{self.url} does not splice: start it with the connector of vllm-agentkv, and send prompts "
                "of token ids"
            )
        return found

    def prefill(self, request: Request) -> Usage:
        """Have the server compute a prompt's KV, behind all other calls, so that a later request finds it.

        Raises as `stream`. Servers without priority scheduling do it in turn.
        """
        options = replace(
            request.options, max_tokens=1, tool_choice=None, response_format=None, stop=(), extra={}
        )
        lowest = replace(request, options=options, priority=request.priority or PRIMING_PRIORITY)
        try:
            return complete(self, lowest).usage
        except BackendRequestError as error:
            if not self._priorities or "priority" not in str(error):
                raise
            # Some versions refuse a priority where the scheduler knows none.
            self._priorities = False
            return complete(self, lowest).usage

    def _connected(self) -> Connected:
        with self._connecting:
            if self._found is None:
                self._found = connect(self._http, self._wanted)
            return self._found

    def _check(self, request: Request) -> None:
        bodies.check_extra(request.options)
        bodies.check_tool_choice(request, self._prompts)
        self._connected()

    def _needs(self, request: Request) -> Post | None:
        if not self._constrained(request) or not self._connected().scale_out:
            return None
        if self._grammar_key(request) in self._grammars:
            return None
        return Post.json(parsing.RENDER, parsing.chat_request(self.model, request))

    def _constrained(self, request: Request) -> bool:
        """Whether a prompt of ids needs a grammar that holds it to a tool call."""
        return self._prompts is PromptForm.IDS and bodies.tool_choice(request.options.tool_choice) is not None

    def _grammar_key(self, request: Request) -> str:
        return json.dumps([request.options.tool_choice, [dict(tool) for tool in request.tools]])

    def _grammar(self, request: Request, answered: Any) -> dict[str, Any]:
        key = self._grammar_key(request)
        if key not in self._grammars:
            found = None if answered is None else parsing.rendered_grammar(answered)
            if len(self._grammars) >= 256:
                self._grammars.clear()
            self._grammars[key] = found or parsing.local_grammar(request)
        return dict(self._grammars[key])

    def _post(self, request: Request, reader: AnswerReader, answered: Any) -> Post:
        body: dict[str, Any] = {
            "model": self.model,
            **bodies.vllm_sampling(request.options),
            **request.options.extra,
            "return_token_ids": True,
            "cache_salt": request.salt,
        }
        if request.priority and self._priorities:
            body["priority"] = request.priority
        headers = {self._routing_header: bodies.routing_value(request)}
        if self._prompts is PromptForm.MESSAGES:
            body |= bodies.chat_fields(request)
            if request.template_arguments:
                body["chat_template_kwargs"] = dict(request.template_arguments)
            return Post.json("/v1/chat/completions", body, headers)
        ids = request.ids.tolist()
        body["prompt"] = ids if reader.splices is None else reader.splices.prompts(ids)
        if reader.splices is not None:
            body["kv_transfer_params"] = reader.splices.params
        body["add_special_tokens"] = False
        if self._constrained(request):
            body["structured_outputs"] = self._grammar(request, answered)
        return Post.json("/v1/completions", body, headers)

    def _reader(self, request: Request) -> AnswerReader:
        if self._prompts is PromptForm.MESSAGES:
            return AnswerReader(request)
        controls = self.tokenizer.control_tokens
        tail = request.ids.tolist(max(0, len(request.ids) - 4))
        opened = controls.get(OPEN_TAG) in tail or opens_reasoning(self.tokenizer.decode(tail))
        connector = self._connected().connector
        splices = None if connector is None else connector.call(request)
        return AnswerReader(request, ReasoningSplitter(inside=opened), splices)

    def _parse(self, request: Request, reader: AnswerReader) -> Post | None:
        if self._prompts is PromptForm.MESSAGES or not self._connected().scale_out or not reader.ids:
            return None
        return Post.json(parsing.DERENDER, parsing.derender_body(self.model, request, reader))

    def _completed(self, request: Request, reader: AnswerReader, parsed: Any) -> Completion:
        if parsed is None:
            # Calls in the answer to a prompt of ids are left to `agentkv.tools`.
            completion = reader.completion()
            return (
                completion if self._prompts is PromptForm.IDS else bodies.read_by_server(request, completion)
            )
        message = parsing.derendered(parsed)
        calls = parsing.calls_of(message, reader.raw) if request.tools else ()
        completion = reader.completion(calls if request.tools else None)
        reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
        if reasoning and not reader.stopped_by_string:
            content = message.get("content") or ""
            return replace(completion, text=content, reasoning=reasoning)
        return completion

    def _explained(self, request: Request, reader: AnswerReader, completion: Completion) -> Completion:
        if reader.splices is not None:
            completion = self._connector().outcome(request, reader.splices, completion)
        starts = self._starts
        seen = starts.pop(request.conversation, None)
        missing = completion.usage.cached_tokens < request.expected_cached_tokens
        lost = self._cause(seen) if missing and completion.counted else None
        starts[request.conversation] = self._start
        if len(starts) > _MOST_CONVERSATIONS:
            starts.pop(next(iter(starts)), None)
        return replace(completion, lost=lost)

    def _cause(self, seen: int | None) -> Miss | None:
        """Return why something was not cached; `seen` is the start that the conversation last talked to."""
        try:
            answer = self._http.get("/metrics")
        except BackendError:
            return None
        now, found = cache_info(answer.text if answer.is_success else ""), self._connected()
        if now.enabled is False:
            return Miss.DISABLED
        if now.started is None or found.cache.started is None:
            return None
        if now.started != found.cache.started:
            self._found = replace(found, cache=now)
            self._start += 1
        if seen is None or now.engines != 1:
            return None
        return Miss.RESTARTED if seen < self._start else Miss.EVICTED
