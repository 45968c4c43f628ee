"""What a chat template does with the messages it is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, Final

from agentkv.errors import TemplateError


class Acceptance(StrEnum):
    """What becomes of a message."""

    ACCEPTED = "accepted"
    """Its text stands where the message stands."""
    MOVED = "moved"
    """Its text stands elsewhere, or moves as the conversation grows."""
    DROPPED = "dropped"
    """Its text is missing, without an error."""
    REFUSED = "refused"
    """The template raises."""


class Reasoning(StrEnum):
    """What becomes of an earlier answer's reasoning."""

    KEPT = "kept"
    STRIPPED_ON_USER = "stripped_on_user"
    """Kept within a tool round, gone once a new user message stands behind it."""
    STRIPPED_ALWAYS = "stripped_always"


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """A chat template's behaviour, measured by rendering probes; never guessed from a name."""

    append_only: bool
    """Whether each rendered prompt, with its answer, begins the next rendered prompt."""
    breaks_at: str | None
    """In words: which message changes what stood before; None if append-only."""
    leading_system: Acceptance
    late_system: Acceptance
    """A system message after an answer, before the next user message."""
    late_system_in_tool_round: Acceptance
    """A system message behind a tool result."""
    tool_role: Acceptance
    tools: bool
    """Whether the tools that are passed show in the text."""
    tools_moved: bool
    """Whether they stand behind the first answer once there is one."""
    alternation: bool
    """Whether two user messages in a row are refused."""
    user_in_tool_round: Acceptance
    """A user message behind a tool result."""
    user_in_tool_round_rewrites: bool
    """Whether that message changes what stood before it."""
    tool_in_tool_round_rewrites: bool
    """Whether a further tool message changes what stood before it."""
    reasoning: Reasoning
    date_injected: bool
    """Whether the template writes the current date; pin it, or the prefix changes at midnight."""
    trims_content: bool
    """Whether white space around a content is removed."""
    default_system: bool
    """Whether the template speaks a system text of its own when none is given."""
    assistant_close: str
    """The text that ends an answer when another message follows."""

    def to_dict(self) -> dict[str, Any]:
        """Return the traits as plain JSON values."""
        return {
            key: str(value) if isinstance(value, StrEnum) else value for key, value in asdict(self).items()
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TemplateTraits:
        """Read what `to_dict` wrote.

        Raises
        ------
        TemplateError
            A trait is missing, unknown or has no such value.
        """
        names = {f.name for f in fields(cls)}
        if set(data) != names:
            odd = ", ".join(sorted(names ^ set(data)))
            raise TemplateError(f"stored template traits do not fit this release ({odd}): measure them again")
        values = dict(data)
        try:
            for key in _ACCEPTANCES:
                values[key] = Acceptance(values[key])
            values["reasoning"] = Reasoning(values["reasoning"])
        except ValueError as error:
            raise TemplateError(
                f"stored template traits are damaged ({error}): measure them again"
            ) from error
        return cls(**values)


_ACCEPTANCES: Final = (
    "leading_system",
    "late_system",
    "late_system_in_tool_round",
    "tool_role",
    "user_in_tool_round",
)
