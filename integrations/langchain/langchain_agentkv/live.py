"""What an agentkv context declares, for LangChain."""

from __future__ import annotations

from dataclasses import dataclass

from agentkv.conversation import Conversation
from agentkv.prompt import Prompt


@dataclass(frozen=True, slots=True)
class LivePrompt:
    """A context's segments and fields, read anew at every call; stands in the place of segments."""

    conversation: Conversation

    @property
    def prompt(self) -> Prompt:
        """What is declared, with the values that were last read."""
        return self.conversation.prompt

    def read(self) -> Prompt:
        """Return the prompt with current values.

        Raises
        ------
        FieldError
            A field is read by a coroutine function.
        """
        return self.conversation.read()

    async def aread(self) -> Prompt:
        """As `read`, for fields that are read asynchronously."""
        return self.conversation.read(await self.conversation.sources.awaited())
