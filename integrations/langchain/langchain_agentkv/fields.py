"""Fields in LangChain's terms: from graph state, from the runtime's context, from a store, from functions.

::

    from_state("order.status", label="Order status")        # state["order"]["status"]
    from_context("user.tier")                               # runtime.context.tier, with path="tier"
    from_store("user.language", namespace=("users",), item="mara", path="language")

    @field("today", label="Today")
    def today() -> date: ...
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from dataclasses import field as slot
from enum import StrEnum
from typing import Any, Final, Protocol, TypedDict, TypeVar, Unpack

from agentkv.errors import FieldError
from agentkv.segments import Field
from agentkv.values import Granularity
from langchain_core.tools import BaseTool

from langchain_agentkv.toolset import UPDATES

_Tool = TypeVar("_Tool", bound=Callable[..., Any] | BaseTool)
_NAMES: Final = ("state", "context", "store", "runtime")


class Refresh(StrEnum):
    """When a field is read again."""

    EACH_CALL = "each call"
    """Before every model call."""
    DECLARED = "declared"
    """When the user says something, and after a tool that `updates` it; for sources that are slow to read."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What a field can be read from during a model call."""

    state: Mapping[str, Any] = slot(default_factory=dict)
    """The graph's state."""
    context: object = None
    """The runtime's context, an instance of the agent's ``context_schema``."""
    store: Any = None
    """The graph's store; None if it has none."""
    runtime: Any = None
    """LangGraph's runtime."""


class Reader(Protocol):
    """Reads a field's current value."""

    def __call__(self, scope: Scope, /) -> object:
        """Return the value, or an awaitable of it."""
        ...


class FieldOptions(TypedDict, total=False):
    """What a field is declared with; see `agentkv.Field`."""

    label: str
    unit: str
    granularity: Granularity
    sensitive: bool
    critical: bool
    depends_on: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FieldSource:
    """A field and where its value comes from; one of the middleware's segments."""

    field: Field
    """How its values become text."""
    read: Reader
    aread: Reader | None = None
    """The same for asynchronous calls; None if `read` does for both."""
    refresh: Refresh = Refresh.EACH_CALL
    needs: frozenset[str] = frozenset()
    """Which of ``state``, ``context``, ``store`` and ``runtime`` it reads."""

    @property
    def key(self) -> str:
        """Key of the field."""
        return self.field.key


def from_state(
    key: str,
    path: str | None = None,
    *,
    refresh: Refresh = Refresh.EACH_CALL,
    **options: Unpack[FieldOptions],
) -> FieldSource:
    """Declare a field that shows a value of the graph's state.

    Parameters
    ----------
    key
        The field's stable name, such as ``"order.status"``.
    path
        Where the value lies, keys or attributes with dots between; by default `key`. What is not there
        reads as None.
    options
        As of `agentkv.Field`.

    Raises
    ------
    FieldError
        The key or an option is malformed.
    """
    where = path or key
    return FieldSource(
        _declared(key, options),
        lambda scope: walk(scope.state, where),
        refresh=refresh,
        needs=frozenset({"state"}),
    )


def from_context(
    key: str,
    path: str | None = None,
    *,
    refresh: Refresh = Refresh.EACH_CALL,
    **options: Unpack[FieldOptions],
) -> FieldSource:
    """Declare a field that shows a value of the run's context; arguments and errors as `from_state`."""
    where = path or key
    return FieldSource(
        _declared(key, options),
        lambda scope: walk(scope.context, where),
        refresh=refresh,
        needs=frozenset({"context"}),
    )


def from_store(
    key: str,
    *,
    namespace: tuple[str, ...] | Callable[[Scope], tuple[str, ...]],
    item: str | Callable[[Scope], str],
    path: str | None = None,
    refresh: Refresh = Refresh.EACH_CALL,
    **options: Unpack[FieldOptions],
) -> FieldSource:
    """Declare a field that shows a value of the graph's store.

    Parameters
    ----------
    key
        The field's stable name.
    namespace, item
        Where the item lies; a function is given the `Scope`, to take a user's id from it.
    path
        Where the value lies in the item; by default the whole item. What is not there reads as None.
    options
        As of `agentkv.Field`.

    Raises
    ------
    FieldError
        The key or an option is malformed; when read, the graph has no store.
    """

    def place(scope: Scope) -> tuple[Any, tuple[str, ...], str]:
        if scope.store is None:
            raise FieldError(f"field {key!r} comes from the store, but the graph has none: give it store=")
        space = namespace(scope) if callable(namespace) else namespace
        return scope.store, space, item(scope) if callable(item) else item

    def read(scope: Scope) -> object:
        store, space, name = place(scope)
        return _value(store.get(space, name), path)

    async def aread(scope: Scope) -> object:
        store, space, name = place(scope)
        return _value(await store.aget(space, name), path)

    return FieldSource(_declared(key, options), read, aread, refresh=refresh, needs=frozenset({"store"}))


def from_function(
    key: str,
    function: Callable[..., object],
    *,
    refresh: Refresh = Refresh.EACH_CALL,
    **options: Unpack[FieldOptions],
) -> FieldSource:
    """Declare a field whose value a function gives, which may be asynchronous.

    Parameters
    ----------
    key
        The field's stable name.
    function
        Called without arguments, or with those of ``state``, ``context``, ``store`` and ``runtime`` that it
        names as parameters.
    options
        As of `agentkv.Field`.

    Raises
    ------
    FieldError
        The key or an option is malformed, or the function has other parameters.
    """
    names = _parameters(key, function)
    return FieldSource(
        _declared(key, options),
        lambda scope: function(**{name: getattr(scope, name) for name in names}),
        refresh=refresh,
        needs=names,
    )


def field(
    key: str, *, refresh: Refresh = Refresh.EACH_CALL, **options: Unpack[FieldOptions]
) -> Callable[[Callable[..., object]], FieldSource]:
    """Make a function a field; arguments and errors as `from_function`."""

    def declare(function: Callable[..., object]) -> FieldSource:
        return from_function(key, function, refresh=refresh, **options)

    return declare


def updates(*keys: str) -> Callable[[_Tool], _Tool]:
    """Declare which fields a tool changes; stands above or below LangChain's ``@tool``.

    After a round in which it was called those fields are read again, and what changed is said behind the
    round's results. The report names the tool.

    Raises
    ------
    FieldError
        No key is given.
    """
    if not keys or not all(isinstance(key, str) and key for key in keys):
        raise FieldError(f"updates{keys!r}: give the keys of the fields that the tool changes")

    def declare(tool: _Tool) -> _Tool:
        if isinstance(tool, BaseTool):
            tool.metadata = {**(tool.metadata or {}), UPDATES: list(keys)}
        else:
            setattr(tool, UPDATES, tuple(keys))
        return tool

    return declare


def walk(value: object, path: str) -> object:
    """Return what lies at a path of keys and attributes; None where a part of it is missing."""
    if isinstance(value, Mapping) and path in value:
        found: object = value[path]
        return found
    for part in path.split("."):
        if value is None:
            return None
        value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
    return value


def read_text(source: FieldSource, scope: Scope) -> str:
    """Return a field's current canonical text.

    Raises
    ------
    FieldError
        Its function is asynchronous.
    ValueRenderError
        The value has no canonical text.
    """
    value = source.read(scope)
    if inspect.isawaitable(value):
        _discard(value)
        raise FieldError(f"field {source.key!r} is read by an async function: use ainvoke or astream")
    return source.field.text_of(value)


async def aread_text(source: FieldSource, scope: Scope) -> str:
    """Return a field's current canonical text; raises as `read_text` for values without one."""
    value = (source.aread or source.read)(scope)
    return source.field.text_of(await value if inspect.isawaitable(value) else value)


def check_needs(sources: Collection[FieldSource], given: Collection[str], where: str) -> None:
    """Raise `FieldError` if a field reads what there is none of.

    Parameters
    ----------
    given
        What there is of ``state``, ``context``, ``store`` and ``runtime``.
    where
        Who reads it, for the message.
    """
    for source in sources:
        missing = sorted(source.needs - set(given))
        if missing:
            raise FieldError(
                f"field {source.key!r} reads the graph's {' and '.join(missing)}, which {where} does not "
                "see: use a field from a function or an object, or AgentKVMiddleware"
            )


def _declared(key: str, options: FieldOptions) -> Field:
    return Field(key, None, **options)


def _value(item: Any, path: str | None) -> object:
    if item is None:
        return None
    return item.value if path is None else walk(item.value, path)


def _parameters(key: str, function: Callable[..., object]) -> frozenset[str]:
    names = frozenset(inspect.signature(function).parameters)
    odd = sorted(names - set(_NAMES))
    if odd:
        raise FieldError(
            f"field {key!r}: its function takes {', '.join(odd)}; it can be given {', '.join(_NAMES)} by name"
        )
    return names


def _discard(value: Awaitable[Any]) -> None:
    close = getattr(value, "close", None)
    if close is not None:
        close()
