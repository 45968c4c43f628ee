"""A transformers tokenizer as agentkv's `ChatTokenizer`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from agentkv.errors import MissingDependencyError, ModelNotFoundError, TemplateError
from agentkv.tokenizer import WireMessage

_ANSWER: Final = "Wq5answer"
_DIRECTIVES: Final = "aAbBcdHIjmMpSUwWxXyYZz"


class HuggingFaceTokenizer:
    """Wraps a tokenizer of the transformers library.

    Parameters
    ----------
    tokenizer
        A ``PreTrainedTokenizerBase``; a fast one is expected.
    chat_template
        A Jinja chat template to use in place of the tokenizer's own.
    """

    def __init__(self, tokenizer: Any, *, chat_template: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = chat_template

    @classmethod
    def from_pretrained(
        cls, path_or_id: str | Path, *, chat_template: str | None = None, **options: Any
    ) -> HuggingFaceTokenizer:
        """Load a tokenizer from a folder or by its hub id.

        Parameters
        ----------
        path_or_id
            A local folder, or a name on the hub.
        chat_template
            A Jinja chat template to use in place of the tokenizer's own.
        options
            Passed on to ``AutoTokenizer.from_pretrained``, such as ``gguf_file``.

        Raises
        ------
        MissingDependencyError
            The transformers library is not installed.
        ModelNotFoundError
            There is no tokenizer there.
        """
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise MissingDependencyError(
                "the transformers library is not installed: pip install "
                "'agentkv-middleware[transformers]', or '.[transformers]' in a checkout"
            ) from error
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(path_or_id), **options)
        except (OSError, ValueError) as error:
            raise ModelNotFoundError(
                f"no tokenizer can be loaded from {str(path_or_id)!r} ({error}): give a folder that holds "
                "tokenizer.json, or a hub id while there is a connection"
            ) from error
        return cls(tokenizer, chat_template=chat_template)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over vocabulary, merges, added tokens and chat template; stable over processes."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        parts: Any
        if backend is not None:
            parts = json.loads(backend.to_str())
            # These are set by each call and change no id of ours.
            parts.pop("truncation", None)
            parts.pop("padding", None)
        else:
            parts = [self._tokenizer.get_vocab(), dict(self._tokenizer.added_tokens_encoder)]
        text = json.dumps([parts, self._chat_template()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def control_tokens(self) -> Mapping[str, int]:
        """Every added token, special or not, that holds more than white space."""
        # Some vocabularies add runs of spaces or line breaks: those structure nothing.
        added = self._tokenizer.added_tokens_encoder
        return {text: id_ for text, id_ in added.items() if text.strip()}

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """The end-of-text id, and the control token with which the template closes an answer."""
        ids = {self._tokenizer.eos_token_id}
        messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _ANSWER}]
        try:
            tail = self.render(messages).rpartition(_ANSWER)[2].lstrip()
        except TemplateError:
            tail = ""
        closing = [token for token in self.control_tokens if tail.startswith(token)]
        if closing:
            ids.add(self.control_tokens[max(closing, key=len)])
        return frozenset(id_ for id_ in ids if id_ is not None)

    def encode(self, text: str) -> list[int]:
        """Encode plain text; no beginning-of-text token is added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids; special tokens are left out."""
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

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
            There is no chat template, or it refuses the messages; its own words are in the message.

        Notes
        -----
        A ``strftime_now`` among the arguments stands in for the template's clock.
        """
        template = self._chat_template()
        if template is None:
            raise TemplateError(
                "the tokenizer has no chat template: give the one that the model was trained with as "
                "chat_template="
            )
        from jinja2.exceptions import TemplateError as JinjaError

        clock = template_arguments.pop("strftime_now", None)
        if callable(clock):
            template = _clock_macro(clock) + template
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **template_arguments,
            )
        except (JinjaError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise TemplateError(
                f"the chat template refuses messages of the roles {roles}: {error}"
            ) from error
        return text

    def _chat_template(self) -> str | None:
        template = self._template or self._tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        return template or None


def _clock_macro(clock: Callable[[str], str]) -> str:
    """Write a clock as a Jinja macro, as transformers hands no functions to templates."""
    shown = []
    for directive in (f"%{flag}{letter}" for letter in _DIRECTIVES for flag in ("-", "")):
        # Not every platform knows the form without leading zeros.
        with suppress(ValueError):
            shown.append([directive, clock(directive)])
    # The line break keeps the template's first line at the start of a line; Jinja drops it.
    return (
        "{%- macro strftime_now(format) -%}{%- set ns = namespace(text=format) -%}"
        f"{{%- for directive, shown in {json.dumps(shown)} -%}}"
        "{%- set ns.text = ns.text.replace(directive, shown) -%}{%- endfor -%}"
        "{{- ns.text -}}{%- endmacro %}\n"
    )
