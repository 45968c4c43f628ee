"""A stand-in for a vLLM server, on a real socket, whose prefix cache behaves like one.

It holds no model: every answer is the same. It renders, tokenises, counts cached tokens in whole blocks under
salts, and keeps a cache for each replica. What a server or gateway may lack or spoil is a `Quirk`::

    with StubServer(quirks={Quirk.NO_DETAILS}, block_size=16) as server:
        httpx2.get(f"{server.url}/v1/models")
        assert server.requests[-1].path == "/v1/models"
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Self

from agentkv.errors import TemplateError
from agentkv.huggingface import HuggingFaceTokenizer
from tests.templates import FAMILIES, transformers_tokenizer

MODEL: Final = "stub"
ANSWER: Final = "The order is in transit."
STARTED: Final = 1_700_000_000.0
_KNOWN: Final = frozenset(
    (
        *(
            "model",
            "prompt",
            "messages",
            "tools",
            "tool_choice",
            "max_tokens",
            "temperature",
            "top_p",
            "stop",
        ),
        *("seed", "stream", "stream_options", "response_format"),
    )
)
"""What a gateway that drops unknown parameters passes on."""
_VLLM: Final = _KNOWN | frozenset(
    (
        *("cache_salt", "return_token_ids", "add_special_tokens", "priority", "structured_outputs", "top_k"),
        *("repetition_penalty", "add_generation_prompt", "chat_template_kwargs", "token_ids", "tokens"),
        *("kv_transfer_params", "sampling_params", "generate_response", "prompt_token_ids", "chat_request"),
    )
)


class Quirk(StrEnum):
    """What is amiss with the server, or with a gateway in front of it."""

    NO_CACHE = "prefix caching is off"
    NO_DETAILS = "cached tokens are not told"
    SALTS_IGNORED = "requests of different salts share what is cached"
    PARAMETERS_DROPPED = "parameters that OpenAI does not know are dropped"
    PARAMETERS_REFUSED = "unknown parameters are refused"
    NO_METRICS = "/metrics is missing"
    NO_IDS = "prompts of ids are refused"
    NO_TOKENIZE = "/tokenize and /detokenize are missing"
    NO_SCALE_OUT = "scale-out endpoints are closed"
    NO_TOOL_PARSER = "requests with tools are refused"
    NO_PRIORITY = "priorities are refused"
    NO_GRAMMAR = "structured outputs are not heeded"
    NONE_HIDES_TOOLS = 'tool_choice="none" takes the tools out of the prompt'
    STICKY = "requests of one X-Session-ID stay on one replica"
    ODD_USAGE = "usage is a list"


@dataclass(frozen=True, slots=True)
class Received:
    """One request."""

    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]


class RefusedError(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@cache
def _tokenizer(family: str) -> Any:
    return transformers_tokenizer(FAMILIES[family])


class StubServer:
    """Serves while its ``with`` block runs.

    Parameters
    ----------
    quirks
        What is amiss.
    family
        Whose tokenizer and chat template it has; a name in `tests.templates.FAMILIES`.
    block_size
        Tokens of a block of the prefix cache.
    told_block_size
        What ``/metrics`` says of it; None says the truth.
    replicas
        How many caches take turns.
    api_key
        Asked for under ``/v1``, if given.
    date
        Written in front of every rendered prompt, as a server does that writes the date itself.
    root
        What it says it loaded.
    """

    def __init__(
        self,
        quirks: Collection[Quirk] = (),
        *,
        family: str = "qwen",
        block_size: int = 16,
        told_block_size: int | None = None,
        replicas: int = 1,
        api_key: str | None = None,
        date: str = "",
        root: str | None = None,
        context_window: int = 8192,
    ) -> None:
        self.quirks = frozenset(quirks)
        self.block_size = block_size
        self.told_block_size = told_block_size or block_size
        self.api_key = api_key
        self.date = date
        self.root = root
        self.context_window = context_window
        self.requests: list[Received] = []
        """Every request so far."""
        self._tokenizer = _tokenizer(family)
        self.tokenizer: Final = HuggingFaceTokenizer(self._tokenizer)
        self._caches: Final[list[set[tuple[str, tuple[int, ...]]]]] = [set() for _ in range(replicas)]
        self._turn = 0
        self._lock = threading.Lock()
        stub = self

        class Handler(_Handler):
            server_state = stub

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def got(self, path: str) -> list[Received]:
        """Return the requests for a path."""
        return [request for request in self.requests if request.path == path]

    def has(self, quirk: Quirk) -> bool:
        """Whether that is amiss."""
        return quirk in self.quirks

    def answer(self, received: Received) -> Any:
        """Return the value, or the text, that a request is answered with.

        Raises
        ------
        RefusedError
            It is refused.
        """
        path, body = received.path, dict(received.body)
        key = received.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.api_key is not None and path.startswith("/v1") and key != self.api_key:
            raise RefusedError(401, f"Unauthorized: {key!r}")
        if self.has(Quirk.PARAMETERS_DROPPED):
            body = {name: value for name, value in body.items() if name in _KNOWN}
        elif self.has(Quirk.PARAMETERS_REFUSED) and set(body) - _VLLM:
            raise RefusedError(400, f"unknown parameters {sorted(set(body) - _VLLM)}")
        route = self._routes().get(path)
        if route is None:
            raise RefusedError(404, "Not Found")
        return route(body, received.headers)

    def _routes(self) -> dict[str, Callable[[Mapping[str, Any], Mapping[str, str]], Any]]:
        routes: dict[str, Callable[[Mapping[str, Any], Mapping[str, str]], Any]] = {
            "/v1/models": lambda *_: self._models(),
            "/version": lambda *_: {"version": "0.32.0"},
            "/v1/completions": self._completion,
            "/v1/chat/completions": self._chat,
            "/v1/chat/completions/render": lambda body, _: self._scale_out(lambda: self._rendered(body)),
            "/v1/chat/completions/derender": lambda *_: self._scale_out(
                lambda: {"choices": [{"index": 0, "message": {"role": "assistant", "content": ANSWER}}]}
            ),
            "/inference/v1/generate": lambda *_: self._scale_out(
                lambda: {"choices": [{"index": 0, "token_ids": [1]}]}
            ),
        }
        if not self.has(Quirk.NO_METRICS):
            routes["/metrics"] = lambda *_: self._metrics()
        if not self.has(Quirk.NO_TOKENIZE):
            routes["/tokenize"] = lambda body, _: self._tokenized(body)
            routes["/detokenize"] = lambda body, _: {"prompt": self._decode(body["tokens"])}
        return routes

    def _models(self) -> Any:
        row = {"id": MODEL, "root": self.root, "max_model_len": self.context_window}
        return {"object": "list", "data": [row]}

    def _metrics(self) -> str:
        labels = f'block_size="{self.told_block_size}",enable_prefix_caching="{not self.has(Quirk.NO_CACHE)}"'
        return f'process_start_time_seconds {STARTED}\nvllm:cache_config_info{{{labels},engine="0"}} 1.0\n'

    def _scale_out(self, made: Callable[[], Any]) -> Any:
        if self.has(Quirk.NO_SCALE_OUT):
            raise RefusedError(403, "scale-out is not enabled")
        return made()

    def _rendered(self, body: Mapping[str, Any]) -> Any:
        if body.get("tools") and self.has(Quirk.NO_TOOL_PARSER) and "tool_choice" not in body:
            raise RefusedError(400, '"auto" tool choice requires --enable-auto-tool-choice')
        return {"token_ids": self._render(body)}

    def _render(self, body: Mapping[str, Any]) -> list[int]:
        hidden = body.get("tool_choice") == "none" and self.has(Quirk.NONE_HIDES_TOOLS)
        try:
            text = self.tokenizer.render(
                [_parsed(message) for message in body["messages"]],
                tools=None if hidden else body.get("tools"),
                add_generation_prompt=body.get("add_generation_prompt", True),
                **body.get("chat_template_kwargs", {}),
            )
        except TemplateError as error:
            raise RefusedError(400, str(error)) from error
        return self.tokenizer.encode(self.date + text)

    def _tokenized(self, body: Mapping[str, Any]) -> Any:
        ids = self._render(body) if "messages" in body else self.tokenizer.encode(body["prompt"])
        return {"tokens": ids, "count": len(ids)}

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def _completion(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Any:
        prompt = body["prompt"]
        if not isinstance(prompt, str) and self.has(Quirk.NO_IDS):
            raise RefusedError(400, "prompt: Input should be a valid string")
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        text, made, finish = self._generated(body)
        choice = {"index": 0, "text": text, "finish_reason": finish, **_told(body, ids, made)}
        return self._answered(body, headers, ids, made, choice)

    def _chat(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Any:
        if body.get("tools") and self.has(Quirk.NO_TOOL_PARSER):
            raise RefusedError(400, '"auto" tool choice requires --enable-auto-tool-choice')
        ids = self._render(body)
        text, made, finish = self._generated(body)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if body.get("tool_choice") == "required":
            function = {"name": body["tools"][0]["function"]["name"], "arguments": "{}"}
            message |= {
                "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": function}],
            }
            finish = "tool_calls"
        choice = {"index": 0, "message": message, "finish_reason": finish, **_told(body, ids, made)}
        return self._answered(body, headers, ids, made, choice)

    def _generated(self, body: Mapping[str, Any]) -> tuple[str, list[int], str]:
        if body.get("priority") and self.has(Quirk.NO_PRIORITY):
            raise RefusedError(400, "priority scheduling is not enabled")
        choices = (body.get("structured_outputs") or {}).get("choice")
        text = choices[0] if choices and not self.has(Quirk.NO_GRAMMAR) else ANSWER
        ids = self.tokenizer.encode(text)
        kept = ids[: body.get("max_tokens", 16)]
        return self._decode(kept), kept, "stop" if len(kept) == len(ids) else "length"

    def _answered(
        self,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
        ids: Sequence[int],
        made: Sequence[int],
        choice: Mapping[str, Any],
    ) -> Any:
        cached = self._cached(tuple(ids), body.get("cache_salt") or "", headers)
        usage: Any = {
            "prompt_tokens": len(ids),
            "completion_tokens": len(made),
            "total_tokens": len(ids) + len(made),
        }
        if not self.has(Quirk.NO_DETAILS):
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        if self.has(Quirk.ODD_USAGE):
            usage = [usage]
        return {"id": "stub", "model": MODEL, "choices": [choice], "usage": usage}

    def _cached(self, ids: tuple[int, ...], salt: str, headers: Mapping[str, str]) -> int:
        """Count the leading blocks that are known, and remember all of them."""
        salt = "" if self.has(Quirk.SALTS_IGNORED) else salt
        if self.has(Quirk.NO_CACHE):
            return 0
        with self._lock:
            session = headers.get("X-Session-ID", "")
            at = sum(session.encode()) if self.has(Quirk.STICKY) else self._turn
            self._turn += 1
            known = self._caches[at % len(self._caches)]
            ends = range(self.block_size, len(ids) + 1, self.block_size)
            found = 0
            for end in ends:
                if (salt, ids[:end]) not in known or end >= len(ids):
                    break
                found = end
            known.update((salt, ids[:end]) for end in ends)
            return found


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server_state: StubServer

    def do_GET(self) -> None:
        self._serve({})

    def do_POST(self) -> None:
        self._serve(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Keep quiet."""

    def _serve(self, body: Mapping[str, Any]) -> None:
        received = Received(self.path, dict(self.headers), body)
        self.server_state.requests.append(received)
        try:
            value = self.server_state.answer(received)
            status = 200
        except RefusedError as error:
            value = {"error": {"message": str(error), "code": error.status}}
            status = error.status
        streamed = status == 200 and body.get("stream")
        text = _events(value) if streamed else value if isinstance(value, str) else json.dumps(value)
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/event-stream" if streamed else "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _parsed(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as servers hand it to templates: arguments of calls are values."""
    made = dict(message)
    if made.get("tool_calls"):
        made["tool_calls"] = [
            {**call, "function": call["function"] | {"arguments": json.loads(call["function"]["arguments"])}}
            for call in made["tool_calls"]
        ]
    return made


def _events(value: Mapping[str, Any]) -> str:
    """Write an answer as server-sent events: the choices, the usage, the end."""
    chunks = [
        {key: part for key, part in value.items() if key != "usage"} | {"choices": [_streamed(choice)]}
        for choice in value["choices"]
    ]
    chunks.append({"id": "stub", "choices": [], "usage": value["usage"]})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def _streamed(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    if "message" not in choice:
        return choice
    calls = [call | {"index": i} for i, call in enumerate(choice["message"].get("tool_calls", ()))]
    delta = choice["message"] | ({"tool_calls": calls} if calls else {})
    return {key: part for key, part in choice.items() if key != "message"} | {"delta": delta}


def _told(body: Mapping[str, Any], ids: Sequence[int], made: Sequence[int]) -> dict[str, Any]:
    if not body.get("return_token_ids"):
        return {}
    return {"token_ids": list(made), "prompt_token_ids": list(ids)}
