"""The bot's texts, read from the Markdown files beside this module.

`POLICY` is a template: each ``{key}`` near its top is a field of the open case (see
`examples.support_desk.database.LABELS`), and a literal brace is written twice.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Final


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8").strip()


POLICY: Final = _read("policy.md")
"""The support desk's policy, about 2,000 tokens, with eight inline fields."""

RETURNS: Final = _read("returns.md")
"""How returns are handled, about 450 tokens: a skill that is the same for every case."""
