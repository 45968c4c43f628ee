"""What the middleware and the wrapped model share: from a request to a recorded answer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from agentkv.backends.plain import PlainTokenizer
from agentkv.costs import Costs
from agentkv.encode import render_ids
from agentkv.entries import Frozen, RebaseReason
from agentkv.errors import AgentKVError, ConfigurationError, ContextWindowError, LedgerFormatError
from agentkv.ledger import Ledger
from agentkv.options import effective_mode
from agentkv.plan import Mode
from agentkv.profile import GENERIC, Profile
from agentkv.prompt import Prompt
from agentkv.render import Carry, freeze
from agentkv.tokenizer import ChatTokenizer
from agentkv.traits import ModelTraits
from langchain_core.messages import AIMessage, BaseMessage, SystemMessage, ToolMessage

from langchain_agentkv.conversation import entries_of
from langchain_agentkv.declared import Declared, newest_round, updated_by
from langchain_agentkv.exact import TokenExact
from langchain_agentkv.fields import Scope
from langchain_agentkv.planning import Asked, Planned, capabilities, plan
from langchain_agentkv.predicting import exactly
from langchain_agentkv.recording import (
    FROZEN_KEY,
    LOG_KEY,
    Observed,
    plain_report,
    record,
    report_of,
    with_report,
)
from langchain_agentkv.records import Told, read_told
from langchain_agentkv.rendering import system_message
from langchain_agentkv.stamps import restamped
from langchain_agentkv.toolset import refused, with_text_calls

Unsupported = Literal["ignore", "warn", "raise"]
"""What becomes of a request that agentkv cannot extend."""
AddedTools = Literal["told", "bound"]
"""What becomes of a tool that was added after the prefix was frozen."""
_BEHAVIOURS: Final = ("ignore", "warn", "raise")
_ADDED: Final = ("told", "bound")


@dataclass(frozen=True, slots=True)
class Answered:
    """What comes of an answer."""

    answer: AIMessage
    """The model's message with the report in its response metadata."""
    refused: tuple[ToolMessage, ...]
    """Results for calls of tools that were withdrawn."""
    update: dict[str, Any]
    """What to record; empty if nothing is."""
    report: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is ready to be sent."""

    system: SystemMessage | None
    """The system message to send."""
    messages: tuple[BaseMessage, ...]
    """The messages to send behind it."""
    tools: tuple[Any, ...]
    """The tools to bind."""
    answered: Callable[[AIMessage, float], Answered]
    """To be called with the model's message and the seconds that it took."""
    rewrites: bool = False
    """Whether the message may be changed once it is whole, so that it should not be streamed."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the call, for a token-exact model."""


class Engine:
    """Plans calls and records answers; holds nothing that changes, so any number of threads can share it.

    Parameters
    ----------
    segments
        Policies, skills, documents, fields, field sources and objects with mutable fields.
    profile
        How errata are worded and carried.
    mode
        ``"on"``, ``"observe"`` or ``"off"``; the environment variable ``AGENTKV_MODE`` overrides it.
    tokenizer
        The model's tokenizer and chat template, if it is known: errata are then carried as its template
        takes them, and tokens are counted with it. By default what every server takes.
    unsupported_model_behavior
        What becomes of a request that cannot be extended: it is sent with its prompt rewritten, and
        ``"warn"`` also warns, or ``"raise"`` raises instead.
    added_tools
        ``"told"``: a tool that comes later is told in the newest message and called by the text of an answer,
        and the prefix stays; ``"bound"``: it opens a new epoch in which it is bound like the others.
    context_window
        Most tokens of prompt and answer. None goes by the model's profile, and refuses nothing: tokens are
        estimated where the tokenizer is not known.

    Raises
    ------
    ConfigurationError
        An option or a segment is wrong.
    """

    def __init__(
        self,
        segments: Iterable[Any] = (),
        *,
        profile: Profile = GENERIC,
        mode: Mode | str = Mode.ON,
        tokenizer: ChatTokenizer | None = None,
        unsupported_model_behavior: Unsupported = "warn",
        added_tools: AddedTools = "told",
        context_window: int | None = None,
        costs: Costs | None = None,
    ) -> None:
        if unsupported_model_behavior not in _BEHAVIOURS:
            raise ConfigurationError(
                f"unsupported_model_behavior={unsupported_model_behavior!r}: "
                f"give one of {', '.join(_BEHAVIOURS)}"
            )
        if added_tools not in _ADDED:
            raise ConfigurationError(f"added_tools={added_tools!r}: give one of {', '.join(_ADDED)}")
        if not isinstance(profile, Profile):
            raise ConfigurationError(f"profile is a {type(profile).__name__}; give a Profile")
        self.declared = Declared(segments)
        self.mode = effective_mode(mode)
        self._profile = profile
        self._tokenizer = tokenizer or PlainTokenizer()
        self._window = context_window
        self._behaviour = unsupported_model_behavior
        self._binds_added = added_tools == "bound"
        self._costs = costs or Costs()
        self._traits: dict[int | None, ModelTraits] = {}

    def prepare(
        self,
        asked: Asked,
        state: Mapping[str, Any],
        scope: Scope,
        window: int | None = None,
        exact: TokenExact | None = None,
    ) -> Prepared:
        """Plan a call.

        Parameters
        ----------
        state
            The recorded `FROZEN_KEY` and `LOG_KEY`; other keys are not read.
        window
            Most tokens that the model takes, where the engine was told none.
        exact
            How the model is sent token ids; None for models that are sent messages.

        Raises
        ------
        FieldError, ValueRenderError
            A field cannot be read.
        AgentKVError
            The request cannot be extended, and such requests are to raise.
        """
        told, damaged = self._told(state)
        changed_by = self._changed_by(asked)
        prompt = self.declared.read(scope, self._unread(asked, told, changed_by))
        return self._prepared(asked, told, prompt, changed_by, window, exact, damaged=damaged)

    async def aprepare(
        self,
        asked: Asked,
        state: Mapping[str, Any],
        scope: Scope,
        window: int | None = None,
        exact: TokenExact | None = None,
    ) -> Prepared:
        """As `prepare`, for fields that are read asynchronously."""
        told, damaged = self._told(state)
        changed_by = self._changed_by(asked)
        prompt = await self.declared.aread(scope, self._unread(asked, told, changed_by))
        return self._prepared(asked, told, prompt, changed_by, window, exact, damaged=damaged)

    def _told(self, state: Mapping[str, Any]) -> tuple[Told | None, bool]:
        try:
            return read_told(state.get(FROZEN_KEY), state.get(LOG_KEY)), False
        except LedgerFormatError as error:
            if self._behaviour == "raise":
                raise
            self._warn(str(error))
            return None, True

    def _changed_by(self, asked: Asked) -> dict[str, str]:
        self.declared.check_updates(asked.tools.originals.values())
        return dict(updated_by(asked.messages, asked.tools.originals))

    def _unread(self, asked: Asked, told: Told | None, changed_by: Mapping[str, str]) -> dict[str, str]:
        known = {} if told is None else told.fields
        return self.declared.unread(known, newest_round(asked.messages), changed_by)

    def _prepared(
        self,
        asked: Asked,
        told: Told | None,
        prompt: Prompt,
        changed_by: Mapping[str, str],
        window: int | None,
        exact: TokenExact | None,
        *,
        damaged: bool,
    ) -> Prepared:
        if exact is None:
            traits = self._traits_of(self._window or window)
        else:
            traits = exact.traits(self._profile)
            prompt = replace(prompt, template_arguments=dict(exact.template_arguments))
        if self.mode is Mode.OFF:
            return self._plain(asked, prompt, traits, "")
        asked = replace(asked, binds_added=self._binds_added)
        try:
            planned = self._planned(asked, told, prompt, traits, exact, damaged=damaged)
        except AgentKVError as error:
            if self._behaviour == "raise":
                raise
            self._warn(f"agentkv cannot extend this conversation, so its prompt is rewritten: {error}")
            return self._plain(asked, prompt, traits, f"cannot be extended: {error}")
        if self.mode is Mode.OBSERVE:
            return self._observed(planned, prompt, traits, changed_by)

        def answered(answer: AIMessage, seconds: float) -> Answered:
            message = restamped(answer, with_text_calls(answer, planned.text_tools, planned.turn))
            results = refused(message, planned.told_tools, asked.tools.names)
            names = tuple(result.name or "" for result in results)
            report = report_of(planned, Observed(message, seconds, changed_by, names))
            return Answered(with_report(message, report), tuple(results), record(planned, message), report)

        return Prepared(
            planned.system,
            planned.messages,
            planned.tools,
            answered,
            rewrites=bool(planned.text_tools),
            settings=planned.settings,
        )

    def _planned(
        self,
        asked: Asked,
        told: Told | None,
        prompt: Prompt,
        traits: ModelTraits,
        exact: TokenExact | None,
        *,
        damaged: bool,
    ) -> Planned:
        if exact is not None:
            return self._exactly(asked, told, prompt, traits, exact, damaged=damaged)
        try:
            return plan(asked, told, prompt, traits, self._costs, mode=self.mode, damaged=damaged)
        except ContextWindowError:
            if self._window is not None:
                raise
        # Only the server knows how many tokens there are; what does not fit it will refuse.
        free = self._traits_of(None)
        return plan(asked, told, prompt, free, self._costs, mode=self.mode, damaged=damaged)

    def _exactly(
        self,
        asked: Asked,
        told: Told | None,
        prompt: Prompt,
        traits: ModelTraits,
        exact: TokenExact,
        *,
        damaged: bool,
    ) -> Planned:
        planned = plan(
            asked,
            told,
            prompt,
            traits,
            self._costs,
            mode=self.mode,
            room=exact.room,
            damaged=damaged,
            shelf=exact.shelf() if self.mode is Mode.ON else None,
        )
        if self.mode is Mode.ON:
            return exactly(planned, exact, self._profile, self._costs)
        # Another prompt is sent, so that these ids are an estimate.
        return replace(planned, pending=replace(planned.pending, known_ids=False))

    def _plain(self, asked: Asked, prompt: Prompt, traits: ModelTraits, why: str) -> Prepared:
        """Return the request as it would be sent without agentkv: values written into the system text."""
        system = system_message(asked.system, _rewritten(prompt, traits).system)

        def answered(answer: AIMessage, seconds: float) -> Answered:
            report = plain_report(self.mode.value, why, Observed(answer, seconds))
            return Answered(with_report(answer, report), (), {}, report)

        return Prepared(system, asked.messages, asked.tools.given, answered)

    def _observed(
        self, planned: Planned, prompt: Prompt, traits: ModelTraits, changed_by: Mapping[str, str]
    ) -> Prepared:
        """Return the plain request; what agentkv would have told is recorded, so that it can be compared."""
        plain = self._plain(planned.asked, prompt, traits, "")
        new = _new_tokens(planned, prompt, traits)

        def answered(answer: AIMessage, seconds: float) -> Answered:
            would = report_of(planned, Observed(answer, seconds, changed_by))
            report = {
                **would,
                "new_tokens_estimated": new,
                "would_have_new_tokens_estimated": would["new_tokens_estimated"],
            }
            return Answered(with_report(answer, report), (), record(planned, answer), report)

        return replace(plain, answered=answered)

    def _traits_of(self, window: int | None) -> ModelTraits:
        if window not in self._traits:
            self._traits[window] = ModelTraits(self._tokenizer, capabilities(window), self._profile)
        return self._traits[window]

    def _warn(self, text: str) -> None:
        if self._behaviour == "warn":
            warnings.warn(text, stacklevel=2)


def _rewritten(prompt: Prompt, traits: ModelTraits) -> Frozen:
    encoder = traits.encoder(prompt.template_arguments)
    return freeze(
        replace(prompt, tools=()),
        Ledger(),
        traits.profile,
        encoder.traits,
        reason=RebaseReason.REWRITE,
        fingerprint=traits.fingerprint,
        carry=Carry(),
        mode=Mode.OFF,
    )


def _new_tokens(planned: Planned, prompt: Prompt, traits: ModelTraits) -> int:
    """Return how many tokens of the rewritten prompt neither the one before it nor its answer held."""
    encoder = traits.encoder(prompt.template_arguments)
    messages, told = planned.asked.messages, planned.told
    now = render_ids([_rewritten(prompt, traits), *entries_of(messages, ())], encoder)
    if told is None:
        return len(now)
    texts = {key: text for key, text in told.fields.items() if key in prompt.fields and text is not None}
    before = _rewritten(prompt.with_texts(texts), traits)
    kept = messages[: planned.change.kept]
    return len(now) - now.common_prefix(render_ids([before, *entries_of(kept, ())], encoder))
