# ruff: noqa: E501 - a line break in a template is text
"""Small chat templates of our own, one per family's habits, on tiny tokenizers trained here."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agentkv.huggingface import HuggingFaceTokenizer

CORPUS = [
    "You are a helpful assistant. Answer in one short sentence, please.",
    "The order is in transit and will arrive on Monday. May I return it?",
    "system user assistant tool model think analysis final function name arguments",
    '{"name": "lookup", "arguments": {"key": "value"}} <|im_start|> <|im_end|> </s> [INST] [/INST]',
    "Update: the status is no longer in transit. The status is delivered.",
] * 4

CHATML = """
{%- for m in messages %}
{%- if loop.first and m.role != 'system' %}{{ '<|im_start|>system\nYou are a kind machine<|im_end|>\n' }}{% endif %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}{% set rest = messages[1:] %}
{%- else %}{% set system = '' %}{% set rest = messages %}{% endif %}
{{- '<|start|>system<|stop|>\n\n' + system + '<|eot|>' }}
{%- for m in rest %}
{%- if m.role == 'tool' %}{{ '<|start|>ipython<|stop|>\n\n' + (m.content | tojson) + '<|eot|>' }}
{%- elif m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set f = m.tool_calls[0].function %}
{{- '<|start|>assistant<|stop|>\n\n{"name": "' + f.name + '", "parameters": ' + (f.arguments | tojson) + '}<|eot|>' }}
{%- else %}
{{- '<|start|>' + m.role + '<|stop|>\n\n' }}
{%- if tools and loop.first %}{{ 'Functions:\n' }}{% for t in tools %}{{ (t | tojson) + '\n' }}{% endfor %}{% endif %}
{{- (m.content | trim) + '<|eot|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|stop|>\n\n' }}{% endif %}"""

GEMMA = """
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
{{- '<turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (m.content | trim) + '<end_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"""

QWEN = """
{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}
{{- '# Tools\n<tools>' }}{% for t in tools %}{{ '\n' + (t | tojson) }}{% endfor %}{{ '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set said = m.content %}{% set thought = m.reasoning_content or '' %}
{%- if '</think>' in said %}
{%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- set said = said.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last and (loop.last or thought) %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}
{{- said }}
{%- for c in m.tool_calls or [] %}
{{- ('' if loop.first and not said else '\n') + '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- (c.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- elif not (m.role == 'system' and loop.first) %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

MISTRAL = """
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}
{%- else %}{% set system = '' %}{% set rest = messages %}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in rest %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{{- bos_token }}
{%- for m in rest %}
{%- if m.role == 'user' %}
{%- if tools and loop.index0 == ns.last %}{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' }}
{%- if system and loop.index0 == ns.last %}{{ system + '\n\n' }}{% endif %}
{{- m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('call ids have nine characters') }}{% endif %}
{{- '[TOOL_RESULTS] {"content": ' + (m.content | tojson) + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- elif m.role == 'assistant' and m.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for c in m.tool_calls %}
{{- '{"name": "' + c.function.name + '", "arguments": ' + (c.function.arguments | tojson) + ', "id": "' + c.id + '"}' }}
{%- endfor %}
{{- ']</s>' }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content + '</s>' }}
{%- else %}{{ raise_exception('Only user, assistant and tool roles are supported') }}
{%- endif %}
{%- endfor %}"""

STRICT = """
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}
{{- '<|im_start|>' + m.role + '\n' + (m.content | trim) + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{% endif %}"""

HARMONY = """
{{- '<|start|>system<|message|>Today is ' + strftime_now('%Y-%m-%d') + '.<|end|>' }}
{%- if messages[0].role == 'system' %}{{ '<|start|>developer<|message|>' + messages[0].content + '<|end|>' }}{% endif %}
{%- set ns = namespace(last=-1, called='') %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'tool' %}
{{- '<|start|>functions.' + ns.called + ' to=assistant<|channel|>commentary<|message|>' + (m.content | tojson) + '<|end|>' }}
{%- elif m.role == 'assistant' %}
{%- if m.reasoning_content and loop.index0 > ns.last %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|>' }}
{%- endif %}
{%- if m.tool_calls %}
{%- set f = m.tool_calls[0].function %}{% set ns.called = f.name %}
{{- '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary<|message|>' + (f.arguments | tojson) + '<|call|>' }}
{%- else %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}
{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

PHI = """
{%- for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""

PLAIN_CLOSE = """
{%- for m in messages %}{{ '### ' + m.role + ':\n' + m.content + '\n\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}"""

SHIFTING = """
{{- '<|im_start|>system\nThere are ' + (messages | length | string) + ' messages.<|im_end|>\n' }}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""Broken on purpose: each message changes the first line."""


def byte_level() -> Tokenizer:
    """Train a byte-level BPE, as most models have."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def metaspace(prepend: str = "first") -> Tokenizer:
    """Train a BPE that marks spaces and falls back to bytes, as sentencepiece models do."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False, max_token_length=8)
    tokenizer.train_from_iterator(CORPUS, trainer)
    state = json.loads(tokenizer.to_str())
    vocab = state["model"]["vocab"]
    for token in ("<unk>", *(f"<0x{byte:02X}>" for byte in range(256))):
        vocab.setdefault(token, len(vocab))
    trained: Tokenizer = Tokenizer.from_str(json.dumps(state))
    trained.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return trained


def metaspace_always() -> Tokenizer:
    """As `metaspace`, with a space put before the text behind every control token too."""
    return metaspace("always")


def folding() -> Tokenizer:
    """A byte-level BPE whose normalizer makes ordinary brackets of full-width ones."""
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Replace(Regex("＜"), "<")
    return tokenizer


@dataclass(frozen=True)
class Family:
    """A template, its tokenizer, and the tokens that it adds."""

    name: str
    template: str
    special: tuple[str, ...]
    eos: str
    plain: tuple[str, ...] = ()
    """Added tokens that are not special, such as ``<tool_call>``."""
    bos: str | None = None
    make: Callable[[], Tokenizer] = byte_level
    rstrip: bool = False
    """Whether control tokens take the white space behind them."""


_IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_HEADERS = ("<|begin|>", "<|start|>", "<|stop|>", "<|eot|>", "<|eos|>")
_THINK = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_INST = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
_AVAILABLE = ("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
_HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>")
_PHI = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", "<|endoftext|>")

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("chatml", CHATML, _IM, "<|im_end|>"),
        Family("llama", LLAMA, _HEADERS, "<|eos|>", bos="<|begin|>"),
        Family(
            "gemma", GEMMA, ("<bos>", "<eos>", "<turn>", "<end_turn>"), "<eos>", bos="<bos>", make=metaspace
        ),
        Family("qwen", QWEN, _IM, "<|im_end|>", plain=_THINK),
        Family("mistral", MISTRAL, (*_INST, *_AVAILABLE), "</s>", bos="<s>", make=metaspace),
        Family("strict", STRICT, _IM, "<|im_end|>", plain=_THINK),
        Family("harmony", HARMONY, _HARMONY, "<|return|>"),
        Family("phi", PHI, _PHI, "<|endoftext|>", make=metaspace_always, rstrip=True),
        Family("plain-close", PLAIN_CLOSE, ("<s>", "</s>"), "</s>", make=metaspace),
        Family("folding", QWEN, _IM, "<|im_end|>", plain=_THINK, make=folding),
    )
}

BROKEN = Family("shifting", SHIFTING, _IM, "<|im_end|>")


def transformers_tokenizer(family: Family) -> PreTrainedTokenizerFast:
    """Build a transformers tokenizer with the family's added tokens and chat template."""
    backend = family.make()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False, rstrip=family.rstrip) for token in family.special]
    )
    backend.add_tokens([AddedToken(token, special=False, normalized=True) for token in family.plain])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=family.eos,
        bos_token=family.bos,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = family.template
    return tokenizer


@cache
def load(name: str) -> HuggingFaceTokenizer:
    """Return the tokenizer of a family by name; built once."""
    return HuggingFaceTokenizer(transformers_tokenizer(BROKEN if name == BROKEN.name else FAMILIES[name]))
