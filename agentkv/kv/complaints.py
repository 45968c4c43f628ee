"""What is wrong with a malformed record, in one line that repeats none of its values."""

from __future__ import annotations

from pydantic import ValidationError

_MOST = 3


def complaint(error: ValidationError) -> str:
    """Name the first members that are wrong, and how."""
    found = error.errors(include_input=False, include_url=False, include_context=False)
    told = [f"{'.'.join(map(str, item['loc'])) or 'all of it'}: {item['msg']}" for item in found[:_MOST]]
    more = len(found) - len(told)
    return "; ".join([*told, f"{more} more"] if more else told)
