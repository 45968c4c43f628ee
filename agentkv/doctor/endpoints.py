"""Checks of what else the server offers: scale-out endpoints, parsers, grammars, priorities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from agentkv.backends.parsing import DERENDER, RENDER
from agentkv.doctor.cache import Partition
from agentkv.doctor.findings import Outcome, ok, unchecked, warning
from agentkv.doctor.session import Session, salt
from agentkv.doctor.tokens import TOOLS
from agentkv.errors import BackendRequestError, TemplateError
from agentkv.http import Post

_GENERATE: Final = "/inference/v1/generate"
_PARSER_FIX: Final = "start vLLM with --enable-auto-tool-choice --tool-call-parser NAME"
_HELLO: Final = ({"role": "user", "content": "Hello"},)
_PING: Final[Mapping[str, Any]] = {
    "type": "function",
    "function": {
        "name": "ping",
        "description": "Answers.",
        "strict": True,
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}
_WORDS: Final = ("yes", "no")
_CHOICES: Final[tuple[Mapping[str, Any], ...]] = (
    {},
    {"tools": TOOLS},
    {"tools": TOOLS, "tool_choice": "none"},
)


def parameters(session: Session, found: Partition | None) -> Outcome:
    """Whether parameters that OpenAI does not know arrive."""
    lost = [] if session.send(session.prompt(8), salt()).ids else ["return_token_ids"]
    if found is not None and (found.other or found.none):
        lost.append("cache_salt")
    try:
        session.send(session.prompt(8), salt(), agentkv_doctor=1)
        unknown = "unknown ones are ignored"
    except BackendRequestError:
        unknown = "unknown ones are refused"
    if lost:
        return warning(
            f"{' and '.join(lost)} had no effect: a gateway drops that, or the server does not know it; "
            f"{unknown}",
            "let the gateway pass vLLM's own parameters on, or give the address of vLLM itself",
        )
    arrive = "return_token_ids arrives" if found is None else "return_token_ids and cache_salt arrive"
    return ok(f"{arrive}; {unknown}")


def scale_out(session: Session) -> Outcome:
    """Whether the server renders, generates from ids and reads answers with its own parsers."""
    name, prompt = session.model.name, session.prompt(8)
    chat = {"model": name, "messages": list(_HELLO)}
    choice = {"index": 0, "token_ids": [prompt[0]], "finish_reason": "stop"}
    bodies: Mapping[str, Mapping[str, Any]] = {
        RENDER: chat,
        _GENERATE: {
            "model": name,
            "token_ids": list(prompt),
            "sampling_params": {"max_tokens": 1, "temperature": 0.0},
            "cache_salt": salt(),
        },
        DERENDER: {
            "model": name,
            "generate_response": {"request_id": "agentkv", "choices": [choice]},
            "prompt_token_ids": list(prompt),
            "chat_request": chat,
        },
    }
    closed = {}
    for path, body in bodies.items():
        answer = session.http.try_post(Post.json(path, body))
        if not answer.is_success:
            closed[path] = answer.status_code
    if not closed:
        return ok("render, generate and derender answer")
    return warning(
        "; ".join(f"{path} answered {status}" for path, status in closed.items()),
        "start vLLM with --enable-scale-out, so that its own parsers read tool calls and reasoning",
    )


def tool_parser(session: Session) -> Outcome:
    """Whether the server parses tool calls."""
    body = {"messages": list(_HELLO), "tools": [_PING], "cache_salt": salt()}
    try:
        session.chat({**body, "tool_choice": "auto"})
    except BackendRequestError as error:
        return warning(f"a request with tools is refused: {error}", _PARSER_FIX)
    forced = {**body, "tool_choice": "required", "max_tokens": 96, "temperature": 0.0}
    choice = session.post("/v1/chat/completions", forced)["choices"][0]
    calls = (choice.get("message") or {}).get("tool_calls") or []
    if calls and calls[0].get("function", {}).get("name") == "ping":
        return ok("a forced call was parsed")
    if choice.get("finish_reason") == "length":
        return unchecked("a forced call did not end within 96 tokens")
    return warning("a forced call was not parsed", _PARSER_FIX)


def priority(session: Session) -> Outcome:
    """Whether calls may have a priority."""
    try:
        session.send(session.prompt(8), salt(), priority=1)
    except BackendRequestError as error:
        return warning(
            f"refused: {error}",
            "start vLLM with --scheduling-policy priority, so that priming waits for everything else",
        )
    return ok("a call with priority=1 is accepted; it counts under --scheduling-policy priority only")


def structured_output(session: Session) -> Outcome:
    """Whether an answer can be held to a form."""
    choices = {"structured_outputs": {"choice": list(_WORDS)}}
    try:
        sample = session.send(session.prompt(8), salt(), max_tokens=8, **choices)
    except BackendRequestError as error:
        return warning(
            f"refused: {error}", "use vLLM 0.11 or newer, with its structured output backend installed"
        )
    if sample.text.strip() in _WORDS:
        return ok("an answer was held to a choice of words")
    return warning(
        "an answer was not held to a choice of words",
        "let the gateway pass structured_outputs on, and use vLLM 0.11 or newer",
    )


def tool_choice_none(session: Session) -> Outcome:
    """Whether ``tool_choice="none"`` leaves the tools in the prompt."""
    served = session.template
    plain: object
    tools: object
    none: object
    try:
        if served.path == RENDER:
            plain = served.ids(_HELLO)
            tools = served.ids(_HELLO, tools=TOOLS)
            none = served.ids(_HELLO, tools=TOOLS, tool_choice="none")
        else:
            plain, tools, none = (_size(session, **more) for more in _CHOICES)
    except (TemplateError, BackendRequestError) as error:
        return unchecked(f"tools are refused: {error}")
    if tools == plain:
        return unchecked("the template shows no tools")
    if none == tools:
        return ok("the tools stay in the prompt")
    return warning(
        'tool_choice="none" takes the tools out of the prompt, and what was cached behind them is lost',
        "start vLLM without --exclude-tools-when-tool-choice-none; agentkv itself never sends none",
    )


def _size(session: Session, **more: Any) -> int | None:
    """Return how many tokens a chat request has where nothing tells which."""
    return session.chat({"messages": list(_HELLO), "cache_salt": salt(), **more}).prompt_tokens
