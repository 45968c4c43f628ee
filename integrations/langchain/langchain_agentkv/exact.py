"""LangChain messages as the token ids of a prompt that only grows.

A prompt is a function of its messages alone: what users and tools said is encoded, and what the model said is
taken as it was generated, from the message's stamp. So a prompt begins with the ids of the one before it and
its answer, whoever kept the messages meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from functools import cached_property
from typing import Any, Final

from agentkv.backends.base import Backend, PromptForm
from agentkv.encode import UPDATE_ID, Encoding, render_ids, wire
from agentkv.entries import Carrier, Frozen, Generated, LedgerEntry, Message, RebaseReason, SegmentAdded
from agentkv.errors import CapabilityError, ConfigurationError
from agentkv.profile import GENERIC, Profile
from agentkv.salts import Namespace, salt
from agentkv.segments import Splicing
from agentkv.splicing import Shelf, shelf_of
from agentkv.template import Acceptance, TemplateEncoder
from agentkv.tokenizer import ChatTokenizer, WireMessage
from agentkv.tokens import TokenIds
from agentkv.tools import ToolSpec
from agentkv.traits import ModelTraits
from langchain_core.messages import AIMessage, BaseMessage, SystemMessage, ToolMessage
from langchain_core.utils.function_calling import convert_to_openai_tool

from langchain_agentkv.canonical import canonical_content, is_text_block, text_of
from langchain_agentkv.stamps import ids_of, short, stamp_of
from langchain_agentkv.toolwriting import ToolWritingTokenizer, written_call

SETTINGS_KEY: Final = "agentkv"
"""Argument of a call that tells a token-exact model what was planned."""
_NOTHING: Final = Message(role="user", content="")


@dataclass(frozen=True, slots=True)
class Written:
    """A prompt."""

    ids: TokenIds
    starts: Mapping[int, int] | None
    """Index of each answer among the messages to the ids in front of it; None where the template rewrites
    what was sent."""
    day: date | None
    """The date that the template was told."""


@dataclass(frozen=True)
class TokenExact:
    """A model that is sent token ids, and what is needed to say how many of them are cached.

    Raises
    ------
    CapabilityError
        When it is first used: the backend takes no ids, or cannot keep tenants apart.
    """

    backend: Backend
    tenant: str = "default"
    salt_key: bytes = field(default=b"", repr=False)
    splicing: Splicing = Splicing.AUTO
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    room: int = 256
    """Tokens that an answer may take."""

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        """The model's tokenizer, with a template that shows tools."""
        able = self.backend.capabilities
        if able.prompts is not PromptForm.IDS or not able.known_ids:
            raise CapabilityError(
                f"backend {able.name!r} takes no token ids: use ChatVLLM or any chat model, whose messages "
                "the server renders"
            )
        if not able.salts and self.tenant != "default":
            raise CapabilityError(
                f"backend {able.name!r} does not keep salts apart, so tenant {self.tenant!r} could read from "
                "another tenant's cache by its timing: use a backend that salts"
            )
        own = self.backend.tokenizer
        measured = TemplateEncoder(own, template_arguments=self.template_arguments)
        return own if measured.traits.tools else ToolWritingTokenizer(own)

    @cached_property
    def _traits(self) -> list[ModelTraits]:
        return []

    def traits(self, profile: Profile = GENERIC) -> ModelTraits:
        """Return what planning needs to know of the model."""
        for made in self._traits:
            if made.profile == profile:
                return made
        made = ModelTraits(self.tokenizer, self.backend.capabilities, profile)
        self._traits.append(made)
        return made

    def salt(self, namespace: Namespace = Namespace.EXACT, generation: int = 0) -> str:
        """Return the salt of the tenant's requests."""
        return salt(self.salt_key, tenant=self.tenant, namespace=namespace, generation=generation)

    def shelf(self) -> Shelf | None:
        """Return the artifacts that may be spliced; None where none is."""
        return shelf_of(self.backend, self.tenant, self.splicing)

    def write(self, messages: Sequence[BaseMessage], tools: Sequence[Mapping[str, Any]] = ()) -> Written:
        """Encode a conversation, the opening of the next answer included.

        Parameters
        ----------
        messages
            With the system message first, if there is one.
        tools
            As `tool_schemas` makes them.

        Raises
        ------
        CapabilityError
            A message holds what is not text.
        TemplateError
            The chat template refuses a message.
        """
        day = self._day(messages)
        encoder = self.traits().encoder(self.template_arguments, day)
        front = 1 if messages and isinstance(messages[0], SystemMessage) else 0
        system = text_of(messages[0]) if front else ""
        if self.traits().encoding(encoder) is Encoding.MESSAGES:
            entries = [_frozen(system, tools, self.tokenizer.fingerprint)]
            return Written(
                render_ids([*entries, *self._entries(messages[front:], encoder)], encoder), None, day
            )
        opening: list[WireMessage] = [{"role": "system", "content": system}] if system else []
        writer = _Writer(encoder, opening, tools)
        starts = {}
        entries_of = self._entries(messages[front:], encoder)
        for index, entry in enumerate(entries_of, start=front):
            if isinstance(entry, Generated):
                starts[index] = writer.answer(entry)
            else:
                writer.group.append(entry)
        return Written(writer.prompt(), starts, day)

    def _entries(self, messages: Sequence[BaseMessage], encoder: TemplateEncoder) -> list[LedgerEntry]:
        """Return each message as one entry."""
        made: list[LedgerEntry] = []
        calls: dict[str, str] = {}
        in_round = False
        for message in messages:
            if isinstance(message, AIMessage):
                calls = {call["id"]: call["name"] for call in message.tool_calls if call["id"]}
                in_round = False
                ids = ids_of(message, self.tokenizer.fingerprint)
                made.append(Generated(text=written_answer(message), ids=ids))
                continue
            text = _only_text(message)
            if isinstance(message, ToolMessage) and message.tool_call_id in {*calls, UPDATE_ID}:
                call_id, in_round = message.tool_call_id, True
                name = calls.get(call_id) or message.name
                made.append(Message(role="tool", content=text, call_id=call_id, name=name))
            elif isinstance(message, SystemMessage) and _takes_system(encoder, in_round=in_round):
                made.append(SegmentAdded(segments={}, text=text, carrier=Carrier.SYSTEM_BEFORE))
            else:
                made.append(Message(role="user", content=text))
        return made

    def _day(self, messages: Sequence[BaseMessage]) -> date | None:
        """Return the date to tell the template: that of the conversation's first answer, as dates move."""
        if not self.traits().encoder(self.template_arguments).traits.date_injected:
            return None
        for message in messages:
            stamp = stamp_of(message)
            if stamp is not None and stamp.of == short(self.tokenizer.fingerprint) and stamp.day:
                return stamp.day
        return datetime.now(UTC).date()


class _Writer:
    """Appends turn after turn."""

    def __init__(
        self, encoder: TemplateEncoder, opening: list[WireMessage], tools: Sequence[Mapping[str, Any]]
    ) -> None:
        self.group: list[LedgerEntry] = []
        self._encoder = encoder
        self._opening = opening
        self._tools = tools
        self._ids: TokenIds | None = None
        self._last: Sequence[int] = ()

    def answer(self, entry: Generated) -> int:
        """Append an answer behind the messages before it; returns the number of ids in front of it."""
        # Answers in a row continue each other.
        before = self._turn() if self.group or self._ids is None else self._ids
        self._last = entry.ids if entry.ids is not None else self._encoder.assistant(entry.text)
        self._ids = before.extend(self._last)
        return len(before)

    def prompt(self) -> TokenIds:
        """Return the ids up to where the next answer begins."""
        return self._turn()

    def _turn(self) -> TokenIds:
        messages = wire(self.group or [_NOTHING], self._encoder)
        self.group = []
        if self._ids is None:
            made = TokenIds(self._encoder.opening([*self._opening, *messages], tools=self._tools or None))
        else:
            made = self._ids.extend(self._encoder.extension(self._last, messages))
        return made


def tool_schemas(tools: Sequence[Any]) -> tuple[dict[str, Any], ...]:
    """Return tools in OpenAI's form, in one form for equal tools.

    Raises
    ------
    ConfigurationError
        One is a provider's own tool and no function.
    """
    made = []
    for tool in tools:
        schema = convert_to_openai_tool(tool)
        if "function" not in schema:
            raise ConfigurationError(
                f"tool {schema.get('type')!r} is a provider's own, and there is no provider"
            )
        made.append(ToolSpec.of(schema).schema)
    return tuple(made)


def token_exact(model: Any) -> TokenExact | None:
    """Return how a chat model is sent token ids; None if it is sent messages."""
    found = getattr(getattr(model, "bound", model), "token_exact", None)
    return found if isinstance(found, TokenExact) else None


def written_answer(message: AIMessage) -> str:
    """Return what a model said as the text of its answer, its calls included."""
    content = canonical_content(message.content)
    text = content if isinstance(content, str) else "".join(b["text"] for b in content if is_text_block(b))
    calls = [written_call(call["name"], call["args"]) for call in message.tool_calls]
    return "\n".join([*filter(None, [text]), *calls])


def _frozen(system: str, tools: Sequence[Mapping[str, Any]], fingerprint: str) -> LedgerEntry:
    return Frozen(
        epoch=1,
        reason=RebaseReason.FIRST,
        system=system,
        tools=tuple(dict(tool) for tool in tools),
        tool_texts={},
        template_arguments={},
        segments={},
        texts={},
        fields={},
        labels={},
        fingerprint=fingerprint,
    )


def _only_text(message: BaseMessage) -> str:
    content = canonical_content(message.content)
    if not isinstance(content, str):
        odd = [block.get("type", "block") for block in content if not is_text_block(block)]
        if odd:
            raise CapabilityError(
                f"a {message.type} message holds {', '.join(map(str, odd))}: ChatAgentKV sends token ids, "
                "which are text alone; use ChatVLLM for other contents"
            )
    return text_of(message)


def _takes_system(encoder: TemplateEncoder, *, in_round: bool) -> bool:
    traits = encoder.traits
    taken = traits.late_system_in_tool_round if in_round else traits.late_system
    return taken is Acceptance.ACCEPTED
