"""What a turn needs to know of the model."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from typing import Any

from agentkv.backends.base import Capabilities, PromptForm
from agentkv.encode import Encoding, choose_encoding
from agentkv.profile import GENERIC, Profile
from agentkv.template import TemplateEncoder, pinned_date
from agentkv.tokenizer import ChatTokenizer


class ModelTraits:
    """The model's template, its backend's limits and the profile.

    Parameters
    ----------
    tokenizer
        The served model's tokenizer and chat template.
    capabilities
        What the backend can do.
    profile
        How errata are worded and carried.
    today
        The date that a template is told which writes the current one; pinned for an epoch's life.
    """

    __slots__ = ("_encoders", "_today", "_tokenizer", "capabilities", "fingerprint", "profile")

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        capabilities: Capabilities,
        profile: Profile = GENERIC,
        today: date | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._today = today
        self._encoders: list[tuple[Mapping[str, Any], date | None, TemplateEncoder]] = []
        self.capabilities = capabilities
        self.profile = profile
        self.fingerprint = tokenizer.fingerprint

    def encoder(self, template_arguments: Mapping[str, Any], day: date | None = None) -> TemplateEncoder:
        """Return the encoder for these template arguments and this date; its template is measured once."""
        for arguments, told, encoder in self._encoders:
            if told == day and arguments == template_arguments:
                return encoder
        pin = {} if day is None else pinned_date(day)
        made = TemplateEncoder(self._tokenizer, template_arguments={**pin, **template_arguments})
        self._encoders.append((dict(template_arguments), day, made))
        return made

    def encoding(self, encoder: TemplateEncoder) -> Encoding:
        """Return how prompts are made: from messages where the backend or the template leaves no choice."""
        if self.capabilities.prompts is PromptForm.MESSAGES:
            return Encoding.MESSAGES
        return choose_encoding(encoder)

    def day(self, template_arguments: Mapping[str, Any]) -> date | None:
        """Return the date to pin for a new epoch; None if the template writes none."""
        if self._today is None or not self.encoder(template_arguments, None).traits.date_injected:
            return None
        return self._today
