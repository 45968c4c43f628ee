"""A model in this process whose answers are held to a grammar, by llguidance."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from agentkv.backends.base import Request
from agentkv.errors import BackendError, ConfigurationError, MissingDependencyError
from agentkv.tokenizer import ChatTokenizer

try:
    import torch
    from agentkv.backends.kvcache import ModelKV
    from agentkv.backends.kvstore import Entry
    from agentkv.backends.sampling import Sampler
    from agentkv.backends.transformers import TransformersBackend
    from llguidance import LLMatcher, LLTokenizer
except ImportError as error:
    raise MissingDependencyError(
        f"answers of a model in this process are held to schemas by llguidance ({error}): "
        "pip install 'langchain-agentkv[constrained]'"
    ) from error

_STYLE: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": True,
}
"""No free white space, of which small models never stop writing; keywords that are not known hold nothing."""
_REST: Final = """
call: body "</tool_call>"
TEXT: /(.|\\n)*/
WS: /[ \\n]+/
"""


def hold(backend: Any, request: Request) -> TransformersBackend | None:
    """Return a backend that answers this request as its tools or its format want it.

    Returns
    -------
    TransformersBackend or None
        It shares model and KV with `backend`. None if nothing has to be held, or the tokenizer is none
        that llguidance reads.

    Raises
    ------
    ConfigurationError
        A schema is none that answers can be held to.
    """
    grammar = _grammar(request)
    rows = int(backend.model.get_input_embeddings().weight.shape[0])
    tokenizer = None if grammar is None else _readable(backend.tokenizer, rows)
    if grammar is None or tokenizer is None:
        return None
    return _Held(backend, _matcher(tokenizer, grammar))


class _Held(TransformersBackend):
    """Answers one request; what the grammar forbids is never sampled."""

    def __init__(self, base: TransformersBackend, matcher: LLMatcher) -> None:
        vars(self).update(vars(base))
        self._matcher = matcher

    def _sample(self, entry: Entry[ModelKV], sampler: Sampler, logits: torch.Tensor) -> int:
        allowed = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8) > 0
        allowed = allowed[: logits.shape[-1]].to(logits.device)
        token = super()._sample(entry, sampler, logits.masked_fill(~allowed, float("-inf")))
        if not self._matcher.consume_token(token):
            raise BackendError(f"the answer left its grammar at token {token}: {self._matcher.get_error()}")
        return token


def _grammar(request: Request) -> str | None:
    form = request.options.response_format
    if form is not None:
        return _form_grammar(form)
    choice = request.options.tool_choice
    tools = [tool["function"] for tool in request.tools]
    if choice in (None, "auto"):
        return _lark(tools, 'start: (trigger call)* tail\ntrigger[lazy]: TEXT "<tool_call>"\ntail: TEXT')
    if choice == "required":
        return _lark(tools, 'start: ("<tool_call>" call)+')
    return _lark([tool for tool in tools if tool["name"] == choice], 'start: "<tool_call>" call')


def _form_grammar(form: Mapping[str, Any]) -> str | None:
    match form.get("type"):
        case "json_schema":
            schema = form["json_schema"].get("schema", {})
        case "json_object":
            schema = {"type": "object"}
        case "text":
            return None
        case kind:
            raise ConfigurationError(f"response_format of type {kind!r}: give json_schema or json_object")
    return LLMatcher.grammar_from_json_schema({**schema, "x-guidance": _STYLE})


def _lark(tools: Sequence[Mapping[str, Any]], start: str) -> str:
    """Return the grammar of calls in the form of `agentkv.tools.as_text`."""
    names = " | ".join(f"tool_{index}" for index in range(len(tools)))
    return "\n".join([start, _REST, f"body: WS? ({names}) WS?", *_tool_rules(tools)])


def _tool_rules(tools: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    for index, tool in enumerate(tools):
        front = json.dumps(f'{{"name": {json.dumps(tool["name"])}, "arguments": ')
        schema = json.dumps({**tool["parameters"], "x-guidance": _STYLE})
        yield f'tool_{index}: {front} %json {schema} "}}"'


@lru_cache(maxsize=8)
def _readable(tokenizer: ChatTokenizer, rows: int) -> LLTokenizer | None:
    """Return a tokenizer as llguidance reads it; None if it is not one of the tokenizers library."""
    inner = getattr(getattr(tokenizer, "_tokenizer", None), "backend_tokenizer", None)
    if inner is None:
        return None
    parts = json.loads(inner.to_str())
    parts["truncation"] = parts["padding"] = None
    size = max(rows, inner.get_vocab_size(with_added_tokens=True))
    return LLTokenizer(json.dumps(parts), n_vocab=size, eos_token=sorted(tokenizer.eos_ids))


@lru_cache(maxsize=64)
def _made(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    return LLMatcher(tokenizer, grammar)


def _matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    matcher = _made(tokenizer, grammar).deep_copy()
    if matcher.is_error():
        raise ConfigurationError(f"answers cannot be held to these schemas: {matcher.get_error()}")
    return matcher
