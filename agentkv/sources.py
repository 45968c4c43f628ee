"""Where the current values of a context's fields come from."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from agentkv.errors import FieldError, SegmentError
from agentkv.fields import class_key, field_specs, is_mutable_fields, read_fields
from agentkv.prompt import Prompt
from agentkv.segments import Field, Segment


@dataclass(frozen=True, slots=True)
class Pulled:
    """A field whose value a function returns each turn."""

    field: Field
    """How its values become text."""
    function: Callable[[], object]

    @property
    def key(self) -> str:
        """Key of the field."""
        return self.field.key


class FieldSources:
    """Bound objects and pulled functions by key; values set by key go to where they came from."""

    def __init__(self) -> None:
        self._objects: dict[str, object] = {}
        self._pulled: dict[str, Pulled] = {}

    def copy(self) -> FieldSources:
        """Return sources that read the same objects and functions."""
        made = FieldSources()
        made._objects.update(self._objects)
        made._pulled.update(self._pulled)
        return made

    def declare(self, parts: Iterable[Segment | object]) -> list[Segment]:
        """Bind the objects among `parts` and return all of them as segments.

        Raises
        ------
        FieldError
            Two objects of one class are given: the second needs `bind` with a key of its own.
        """
        segments: list[Segment] = []
        for part in parts:
            if is_mutable_fields(part) and not isinstance(part, type):
                segments.extend(self.bind(part, key=None, label=None))
            elif isinstance(part, Segment):
                segments.append(part)
            elif isinstance(part, type) and is_mutable_fields(part):
                raise SegmentError(f"{part.__name__} is a class; give an instance of it")
            else:
                raise SegmentError(
                    f"{part!r} is not a segment; give Policy, Tools, Skill, Document, Field or an instance "
                    "of a @mutable_fields class"
                )
        return segments

    def bind(self, obj: object, *, key: str | None, label: str | None) -> list[Field]:
        """Add an object's fields under ``KEY.attribute``."""
        if not is_mutable_fields(obj) or isinstance(obj, type):
            raise FieldError(f"{obj!r} has no mutable fields; decorate its class with @mutable_fields")
        prefix = key or class_key(obj)
        if prefix in self._objects:
            raise FieldError(
                f"an object is bound as {prefix!r} already; bind this one with a key of its own, "
                f'such as bind(obj, key="{prefix}:2")'
            )
        texts = dict(read_fields(obj, prefix))
        suffix = label or (prefix.rpartition(":")[2] if key is not None else None)
        fields = []
        for spec in field_specs(obj):
            full = f"{prefix}.{spec.key}"
            field = Field(
                full,
                "",
                label=spec.label if suffix is None else f"{spec.label} ({suffix})",
                sensitive=spec.sensitive,
                critical=spec.critical,
                depends_on=tuple(_qualified(name, prefix) for name in spec.depends_on),
            )
            fields.append(field.told(texts[full]))
        self._objects[prefix] = obj
        return fields

    def names(self, key: str) -> list[str]:
        """Return the keys of a bound object's fields.

        Raises
        ------
        FieldError
            No object is bound so.
        """
        if key not in self._objects:
            raise FieldError(
                f"no object is bound as {key!r}; bound are: {', '.join(self._objects) or 'none'}"
            )
        return [f"{key}.{spec.key}" for spec in field_specs(self._objects[key])]

    def unbind(self, key: str) -> None:
        """Stop reading an object."""
        self._objects.pop(key, None)

    def pull(self, pulled: Pulled) -> None:
        """Add a function whose value is read each turn."""
        if pulled.key in self._pulled:
            raise FieldError(f"field {pulled.key!r} is pulled already; give this function another key")
        self._pulled[pulled.key] = pulled

    def forget(self, key: str) -> None:
        """Stop reading a field that was removed."""
        self._pulled.pop(key, None)

    def texts(self, prompt: Prompt, values: Mapping[str, object] | None = None) -> dict[str, str]:
        """Return the current texts of the prompt's fields; `values` are of functions that were awaited.

        Raises
        ------
        FieldError
            A pulled function is a coroutine function and was not awaited.
        """
        texts: dict[str, str] = {}
        for prefix, obj in list(self._objects.items()):
            texts.update((key, text) for key, text in read_fields(obj, prefix) if key in prompt.fields)
        for key, pulled in list(self._pulled.items()):
            if key not in prompt.fields:
                continue
            value = values[key] if values is not None and key in values else pulled.function()
            if inspect.isawaitable(value):
                _discard(value)
                raise FieldError(f"field {key!r} is pulled by a coroutine function: use AsyncAgentKVContext")
            texts[key] = pulled.field.text_of(value)
        return texts

    async def awaited(self) -> Mapping[str, object]:
        """Call the functions one after another, await those that need it, and return what they gave."""
        values: dict[str, object] = {}
        # Others may be declared while one is awaited.
        while waiting := [pulled for key, pulled in list(self._pulled.items()) if key not in values]:
            for pulled in waiting:
                value = pulled.function()
                values[pulled.key] = await value if inspect.isawaitable(value) else value
        return values

    def set(self, prompt: Prompt, key: str, value: object) -> Prompt:
        """Set a field where its value lives, and return the prompt with it.

        Raises
        ------
        FieldError
            There is no such field, or a function gives its value.
        ValueRenderError
            The value has no canonical text.
        """
        if key in self._pulled:
            raise FieldError(f"field {key!r} is pulled from a function; change what the function returns")
        for prefix, obj in self._objects.items():
            for spec in field_specs(obj):
                if key == f"{prefix}.{spec.key}":
                    setattr(obj, spec.attribute, value)
                    current = dict(read_fields(obj, prefix))
                    return prompt.with_texts({k: t for k, t in current.items() if k in prompt.fields})
        field = prompt.fields.get(key)
        if field is None:
            known = ", ".join(prompt.fields) or "none"
            raise FieldError(f"there is no field {key!r}; fields are: {known}")
        return prompt.with_texts({key: field.text_of(value)})


def _qualified(name: str, prefix: str) -> str:
    return name if "." in name else f"{prefix}.{name}"


def _discard(value: Awaitable[Any]) -> None:
    close = getattr(value, "close", None)
    if close is not None:
        close()


def with_fields(prompt: Prompt, fields: Iterable[Field]) -> Prompt:
    """Return a copy of the prompt with further fields.

    Raises
    ------
    FieldError
        A key or a label is taken.
    """
    known = dict(prompt.fields)
    labels = {field.label: key for key, field in known.items()}
    for field in fields:
        if field.key in known:
            raise FieldError(f"field {field.key!r} is declared already; give this one another key")
        if field.label in labels:
            raise FieldError(
                f"fields {labels[field.label]!r} and {field.key!r} are both labelled {field.label!r}: "
                "the model could not tell them apart; give one another label"
            )
        known[field.key] = field
        labels[field.label] = field.key
    deletions = {key: how for key, how in prompt.deletions.items() if key not in known}
    return replace(prompt, fields=known, deletions=deletions)
