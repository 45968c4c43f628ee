"""What `benchmarks.turns` runs: eight fields near the top of a long policy, of which one changes a turn."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from agentkv import Inline, Policy, SamplingOptions
from agentkv.tokenizer import ChatTokenizer
from benchmarks._arms import Case

LABELS: Final[Mapping[str, str]] = {
    "case.status": "Case status",
    "case.priority": "Priority",
    "case.agent": "Assigned agent",
    "case.warehouse": "Warehouse",
    "case.carrier": "Carrier",
    "case.pickup": "Pickup point",
    "case.payment": "Payment method",
    "case.insurance": "Insurance",
}
VALUES: Final[Mapping[str, tuple[str, ...]]] = {
    "case.status": ("open", "waiting for the customer", "waiting for the carrier", "closed"),
    "case.priority": ("normal", "urgent", "low", "high"),
    "case.agent": ("Ines Calder", "Bruno Vask", "Lena Orth", "Piet Maas"),
    "case.warehouse": ("Ostwick", "Calder Bay", "Fenmoor", "Hale"),
    "case.carrier": ("Northwind Parcel", "Harrow Couriers", "Swift Post", "Dale Freight"),
    "case.pickup": ("Lindenhof kiosk", "Brookside station", "Mill Street shop", "none"),
    "case.payment": ("credit card", "bank transfer", "voucher", "cash"),
    "case.insurance": ("basic cover", "full cover", "no cover", "glass cover"),
}
_SUBJECTS: Final = (
    "a parcel",
    "a refund",
    "an exchange",
    "a gift card",
    "a repair",
    "a complaint",
    "an invoice",
)
EVENTS: Final = ("arrives late", "is refused", "is sent twice", "has no label", "is asked for by phone")
ACTIONS: Final = (
    "write down who reported it and when",
    "ask for a photograph before anything is promised",
    "tell the customer within one working day",
    "leave the decision to the team lead",
    "check the order number against the case",
)
_AROUND: Final = 66
"""Tokens of a first prompt around its policy, with the small model's template."""
_HEAD: Final = "You handle cases for a mail-order shop. The open case:\n"


@dataclass(frozen=True, slots=True)
class WorkloadTurn:
    """What is true in a turn, and what is asked."""

    values: Mapping[str, str]
    changed: str | None
    question: str


def make_case(tokenizer: ChatTokenizer, prompt_tokens: int, answer_tokens: int) -> Case:
    """Return a case whose policy makes a first prompt of about `prompt_tokens` tokens.

    Parameters
    ----------
    answer_tokens
        Most tokens of an answer.
    """
    rules = _rules()
    card = "".join(f"- {label}: {{{key}}}\n" for key, label in LABELS.items())
    text = _HEAD + card
    room = prompt_tokens - len(tokenizer.encode(text)) - _AROUND
    lines: list[str] = []
    while room > 0:
        lines.append(next(rules))
        room -= len(tokenizer.encode(lines[-1] + "\n"))
    policy = text + "\n# Rules\n\n" + "\n".join(lines)
    return Case(
        segments=(Policy(Inline(policy)),),
        labels=LABELS,
        first_values={key: values[0] for key, values in VALUES.items()},
        sampling=SamplingOptions(max_tokens=answer_tokens),
    )


def _rules() -> Iterator[str]:
    number = 0
    while True:
        for subject in _SUBJECTS:
            for event in EVENTS:
                for action in ACTIONS:
                    number += 1
                    other = number // 2 + 1
                    yield f"{number}. When {subject} {event}, {action}, unless rule {other} says otherwise."


def make_turns(count: int, seed: int) -> list[WorkloadTurn]:
    """Return turns in which, from the second on, one of the eight fields has another value."""
    chance = random.Random(seed)  # noqa: S311 - a workload, not a secret
    values = {key: options[0] for key, options in VALUES.items()}
    turns = []
    for index in range(count):
        key = chance.choice(list(VALUES))
        changed = None
        if index:
            values[key] = chance.choice([value for value in VALUES[key] if value != values[key]])
            changed = key
        turns.append(WorkloadTurn(dict(values), changed, f"What is the {LABELS[key].lower()} of this case?"))
    return turns
