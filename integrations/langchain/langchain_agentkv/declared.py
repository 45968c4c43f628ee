"""What a middleware or a wrapped model declares, and the values that are true at a call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from agentkv.errors import FieldError, SegmentError
from agentkv.prompt import Prompt
from agentkv.segments import Tools
from agentkv.sources import FieldSources, with_fields
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage

from langchain_agentkv.fields import FieldSource, Refresh, Scope, aread_text, read_text
from langchain_agentkv.live import LivePrompt
from langchain_agentkv.toolset import updates_of


class Declared:
    """Segments, fields and where their values come from. It never changes, so threads share it.

    Raises
    ------
    SegmentError, FieldError
        A part is no segment, a name is taken, or a segment shows a field that is not declared.
    """

    def __init__(self, parts: Iterable[Any]) -> None:
        given = list(parts)
        for part in given:
            if isinstance(part, Tools):
                raise SegmentError(
                    "tools belong to the agent: give them to create_agent or bind_tools, not to the segments"
                )
        self.pulled: tuple[FieldSource, ...] = tuple(p for p in given if isinstance(p, FieldSource))
        live = [part for part in given if isinstance(part, LivePrompt)]
        others = [part for part in given if not isinstance(part, FieldSource | LivePrompt)]
        if len(live) > 1 or (live and others):
            raise SegmentError(
                "a context brings its own segments: declare further ones on it, with add or bind"
            )
        self._live = live[0] if live else None
        self._objects = FieldSources()
        self._own = Prompt.of(self._objects.declare(others))
        self.prompt.check()

    @property
    def prompt(self) -> Prompt:
        """What is declared; values are read by `read`."""
        return self._whole(self._own if self._live is None else self._live.prompt)

    def read(self, scope: Scope, wanted: Mapping[str, str]) -> Prompt:
        """Return the prompt with current values.

        Parameters
        ----------
        wanted
            Fields that need not be read, with the texts to use.
        """
        texts = {s.key: wanted[s.key] if s.key in wanted else read_text(s, scope) for s in self.pulled}
        base = self._with_objects() if self._live is None else self._live.read()
        return self._whole(base).with_texts(texts)

    async def aread(self, scope: Scope, wanted: Mapping[str, str]) -> Prompt:
        """As `read`, for fields that are read asynchronously."""
        texts: dict[str, str] = {}
        for source in self.pulled:
            kept = wanted.get(source.key)
            texts[source.key] = await aread_text(source, scope) if kept is None else kept
        base = self._with_objects() if self._live is None else await self._live.aread()
        return self._whole(base).with_texts(texts)

    def unread(
        self, told: Mapping[str, str | None], newest: Sequence[BaseMessage], updated: Iterable[str]
    ) -> dict[str, str]:
        """Return the fields that need not be read at a call, with the texts that were told last.

        Parameters
        ----------
        told
            Field key to what was told last; empty before the first call.
        newest
            The messages since the last answer.
        updated
            Keys of the fields that tools of the newest round changed.
        """
        if any(not isinstance(message, ToolMessage) for message in newest):
            return {}
        again = set(updated)
        kept = {}
        for source in self.pulled:
            text = told.get(source.key)
            if source.refresh is Refresh.DECLARED and source.key not in again and text is not None:
                kept[source.key] = text
        return kept

    def check_updates(self, tools: Iterable[object]) -> None:
        """Raise `FieldError` if a tool is declared to change a field that there is none of."""
        for tool in tools:
            for key in updates_of(tool):
                if key not in self.prompt.fields:
                    known = ", ".join(self.prompt.fields) or "none"
                    name = getattr(tool, "name", tool)
                    raise FieldError(f"tool {name!r} updates field {key!r}, but the fields are: {known}")

    def _with_objects(self) -> Prompt:
        return self._own.with_texts(self._objects.texts(self._own))

    def _whole(self, prompt: Prompt) -> Prompt:
        """Return a prompt with the fields that are read from elsewhere."""
        return with_fields(prompt, [source.field for source in self.pulled]) if self.pulled else prompt


def newest_round(messages: Sequence[BaseMessage]) -> Sequence[BaseMessage]:
    """Return the messages since the last answer."""
    for index in range(len(messages) - 1, -1, -1):
        if isinstance(messages[index], AIMessage):
            return messages[index + 1 :]
    return messages


def updated_by(messages: Sequence[BaseMessage], tools: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield key and tool name of each field that the tools of the newest round were declared to change."""
    calls = {}
    for message in messages:
        if isinstance(message, AIMessage):
            calls = {call["id"]: call["name"] for call in message.tool_calls}
    for message in newest_round(messages):
        if isinstance(message, ToolMessage):
            name = calls.get(message.tool_call_id) or message.name or ""
            for key in updates_of(tools.get(name)):
                yield key, name
