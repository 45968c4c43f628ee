"""Answers of a pydantic model's schema, which the server's grammar holds the model to."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import PydanticOutputParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema
from pydantic import BaseModel


def structured_arguments(schema: type[BaseModel], *, strict: bool | None) -> dict[str, Any]:
    """Return what to bind to a model, so that its answers have this schema."""
    shape = schema.model_json_schema()
    told = convert_to_json_schema(schema)
    form = {"name": schema.__name__, "schema": shape, **({} if strict is None else {"strict": strict})}
    return {
        "response_format": {"type": "json_schema", "json_schema": form},
        "ls_structured_output_format": {"kwargs": {"method": "json_schema"}, "schema": told},
    }


def parsed_by(
    parser: PydanticOutputParser[Any], model: Runnable[LanguageModelInput, AIMessage], *, include_raw: bool
) -> Runnable[LanguageModelInput, Any]:
    """Return a model whose answers are parsed; with `include_raw`, message, value and error side by side."""
    if not include_raw:
        return model | parser
    tried = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=model) | tried.with_fallbacks([failed], exception_key="parsing_error")
