"""The adapter over transformers tokenizers."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentkv.errors import ModelNotFoundError, TemplateError
from agentkv.huggingface import HuggingFaceTokenizer
from agentkv.template import TemplateEncoder
from agentkv.tokenizer import ChatTokenizer
from tests.templates import FAMILIES, load, transformers_tokenizer

HELLO = [{"role": "user", "content": "Hello"}]


def test_it_is_a_chat_tokenizer() -> None:
    """The adapter has what agentkv asks of a tokenizer."""
    assert isinstance(load("qwen"), ChatTokenizer)


def test_encoding_adds_nothing() -> None:
    """Text is encoded without a beginning-of-text token and decodes to itself."""
    tokenizer = load("llama")
    ids = tokenizer.encode("The order is late.")
    assert tokenizer.control_tokens["<|begin|>"] not in ids
    assert tokenizer.decode(ids) == "The order is late."


def test_control_tokens_are_special_and_plain_added_ones() -> None:
    """Every added token counts, special or not, but not runs of white space."""
    raw = transformers_tokenizer(FAMILIES["qwen"])
    raw.add_tokens(["    "])
    tokens = HuggingFaceTokenizer(raw).control_tokens
    assert {"<|im_end|>", "<tool_call>"} <= set(tokens)
    assert "    " not in tokens


def test_an_end_of_turn_token_ends_a_generation() -> None:
    """The token with which the template closes an answer counts beside the end-of-text token."""
    tokenizer = load("llama")
    assert tokenizer.eos_ids == {tokenizer.control_tokens["<|eos|>"], tokenizer.control_tokens["<|eot|>"]}


def test_the_fingerprint_follows_vocabulary_and_template() -> None:
    """Two equal tokenizers agree; another template or added token does not."""
    family = FAMILIES["chatml"]
    first = HuggingFaceTokenizer(transformers_tokenizer(family)).fingerprint
    assert HuggingFaceTokenizer(transformers_tokenizer(family)).fingerprint == first
    other = HuggingFaceTokenizer(transformers_tokenizer(family), chat_template="{{ messages }}")
    assert other.fingerprint != first
    grown = transformers_tokenizer(family)
    grown.add_tokens(["<more>"])
    assert HuggingFaceTokenizer(grown).fingerprint != first


def test_the_fingerprint_does_not_change_with_use() -> None:
    """A call that truncates leaves the fingerprint as it was."""
    raw = transformers_tokenizer(FAMILIES["chatml"])
    before = HuggingFaceTokenizer(raw).fingerprint
    raw("Hello there", truncation=True, max_length=2)
    assert HuggingFaceTokenizer(raw).fingerprint == before


def test_a_refusal_carries_the_templates_own_words() -> None:
    """What the template raises is in the message, with the roles it was given."""
    with pytest.raises(TemplateError, match=r"roles system: System role not supported"):
        load("gemma").render([{"role": "system", "content": "x"}])


def test_a_message_the_template_cannot_join_is_a_template_error() -> None:
    """A content that is None where the template adds strings is refused, not a bare TypeError."""
    with pytest.raises(TemplateError, match="roles user"):
        load("chatml").render([{"role": "user", "content": None}])


def test_no_chat_template_is_an_error_that_says_what_to_do() -> None:
    """An encoder over a tokenizer without a template is refused at once, and one can be given."""
    raw = transformers_tokenizer(FAMILIES["chatml"])
    template, raw.chat_template = raw.chat_template, None
    with pytest.raises(TemplateError, match="chat_template="):
        TemplateEncoder(HuggingFaceTokenizer(raw))
    given = HuggingFaceTokenizer(raw, chat_template=str(template))
    assert given.render(HELLO) == load("chatml").render(HELLO)


def test_a_saved_tokenizer_loads_with_the_same_fingerprint(tmp_path: Path) -> None:
    """A tokenizer that was saved and loaded again has the same fingerprint."""
    raw = transformers_tokenizer(FAMILIES["qwen"])
    raw.save_pretrained(str(tmp_path))
    assert HuggingFaceTokenizer.from_pretrained(tmp_path).fingerprint == HuggingFaceTokenizer(raw).fingerprint


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    """A path without a tokenizer is refused with its name."""
    with pytest.raises(ModelNotFoundError, match="nothing-here"):
        HuggingFaceTokenizer.from_pretrained(tmp_path / "nothing-here")
