"""The tokenizer and chat template of a model, as agentkv needs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

WireMessage: TypeAlias = Mapping[str, Any]
"""A chat message in the OpenAI form: ``role``, ``content`` and, where they apply, ``tool_calls``,
``tool_call_id``, ``name``, ``reasoning_content``."""


@runtime_checkable
class ChatTokenizer(Protocol):
    """Text to ids and back, and messages to text."""

    @property
    def fingerprint(self) -> str:
        """Hex digest over vocabulary, merges, control tokens and chat template; stable over processes."""
        ...

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """Every added token (special or not) that a plain encoding of its text would produce."""
        ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a generation."""
        ...

    def encode(self, text: str) -> list[int]:
        """Encode plain text; no beginning-of-text token is added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids; control tokens are left out."""
        ...

    def render(
        self,
        messages: Sequence[WireMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **template_arguments: Any,
    ) -> str:
        """Render messages with the chat template.

        Raises
        ------
        TemplateError
            The template refuses the messages; its own words are in the message.
        """
        ...
