"""What a turn adds to the prompt, against stating the whole state every turn."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from agentkv import Inline, Policy, SamplingOptions
from agentkv.huggingface import HuggingFaceTokenizer
from agentkv.testing import ScriptedBackend
from benchmarks._arms import AGENTKV, APPEND_STATE, Case, make_arm
from benchmarks._workload import LABELS, VALUES

QUESTION = "What happens next?"


def case() -> Case:
    """Eight fields near the top of a short policy."""
    card = "".join(f"- {label}: {{{key}}}\n" for key, label in LABELS.items())
    return Case(
        segments=(Policy(Inline("The open case:\n" + card)),),
        labels=LABELS,
        first_values={key: values[0] for key, values in VALUES.items()},
        sampling=SamplingOptions(max_tokens=24),
    )


def new_tokens(changes: Sequence[Sequence[str]], folder: Path) -> dict[str, list[int]]:
    """New tokens of each turn after the first, in which the named fields take their next value."""
    tokenizer = HuggingFaceTokenizer.from_pretrained(str(folder))
    found = {}
    for name in (AGENTKV, APPEND_STATE):
        arm = make_arm(name, ScriptedBackend(["It is noted."], tokenizer=tokenizer), case(), run="a")
        rounds = {key: itertools.cycle(values) for key, values in VALUES.items()}
        values = {key: next(options) for key, options in rounds.items()}
        arm.turn(values, QUESTION)
        found[name] = []
        for changed in changes:
            values.update({key: next(rounds[key]) for key in changed})
            found[name].append(arm.turn(values, QUESTION).new_tokens)
    return found


def test_one_change_of_eight_fields_costs_fewer_tokens_than_the_whole_state(small_model_dir: Path) -> None:
    """Every field in turn changes alone: each turn adds fewer tokens than the whole state would."""
    tokens = new_tokens([[key] for key in LABELS], small_model_dir)
    assert all(ours < theirs for ours, theirs in zip(tokens[AGENTKV], tokens[APPEND_STATE], strict=True))


@pytest.mark.parametrize("count", range(9))
def test_any_number_of_changes_costs_at_most_the_whole_state(count: int, small_model_dir: Path) -> None:
    """However many of eight fields change at once, no turn adds more tokens than the whole state would."""
    keys = list(LABELS)
    changes = [(keys[start:] + keys[:start])[:count] for start in range(len(keys))]
    tokens = new_tokens(changes, small_model_dir)
    assert all(ours <= theirs for ours, theirs in zip(tokens[AGENTKV], tokens[APPEND_STATE], strict=True))


def test_snapshots_cost_at_most_the_whole_state(small_model_dir: Path) -> None:
    """A conversation long enough for snapshots adds no more than the whole state in any turn."""
    keys = list(LABELS)
    tokens = new_tokens([[keys[turn % 8]] for turn in range(40)], small_model_dir)
    assert all(ours <= theirs for ours, theirs in zip(tokens[AGENTKV], tokens[APPEND_STATE], strict=True))
