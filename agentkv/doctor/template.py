"""Checks of the chat template that the server renders with: what chat requests become."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from typing import Final

from agentkv.doctor.findings import Outcome, ok, unchecked, warning
from agentkv.doctor.session import Session
from agentkv.template import Acceptance, Reasoning, TemplateTraits, measure
from agentkv.tokenizer import WireMessage

_UNSTABLE_FIX: Final = "send prompts of ids (PromptForm.IDS, the default): there the client's rendering stays"
_HELLO: Final[Sequence[WireMessage]] = ({"role": "user", "content": "Hello"},)
_FORMS: Final = (
    "%Y-%m-%d",
    "%Y/%m/%d",
    "%d/%m/%Y",
    "%m/%d/%Y",
    "%d.%m.%Y",
    "%d %b %Y",
    "%d %B %Y",
    "%b %d, %Y",
    "%B %d, %Y",
)
_HOW: Final = {
    Acceptance.ACCEPTED: "accepted where they stand",
    Acceptance.MOVED: "moved elsewhere",
    Acceptance.DROPPED: "dropped without a word",
    Acceptance.REFUSED: "refused",
}
_REASONING: Final = {
    Reasoning.KEPT: "kept",
    Reasoning.STRIPPED_ON_USER: "removed once a new user message follows",
    Reasoning.STRIPPED_ALWAYS: "removed from every earlier answer",
}

TraitsCheck = Callable[[TemplateTraits], Outcome]


def traits(session: Session) -> TemplateTraits:
    """Measure the served template; raises where the server renders nothing."""
    return measure(session.template)


def append_only(found: TemplateTraits) -> Outcome:
    """Whether a rendered prompt and its answer begin the next one."""
    if found.tools_moved or found.leading_system is Acceptance.MOVED:
        moved = "tools" if found.tools_moved else "the system text"
        return warning(
            f"no: {moved} move behind the newest messages; {found.breaks_at}",
            "serve a template that leaves them in front (--chat-template): else agentkv saves little",
        )
    if found.append_only:
        return ok("each rendered prompt, with its answer, begins the next")
    return warning(f"no: {found.breaks_at}", _UNSTABLE_FIX)


def late_system(found: TemplateTraits) -> Outcome:
    """What becomes of a system message behind an answer."""
    other = "" if found.late_system is Acceptance.ACCEPTED else "; errata go in user messages"
    return ok(f"{_HOW[found.late_system]}{other}")


def tool_role(found: TemplateTraits) -> Outcome:
    """What becomes of tool results, and of tools."""
    other = "" if found.tool_role is Acceptance.ACCEPTED else "; results go in user messages"
    shown = "shows tools" if found.tools else "shows no tools: they are described in the system text"
    return ok(f"{_HOW[found.tool_role]}{other}; the template {shown}")


def alternation(found: TemplateTraits) -> Outcome:
    """Whether two user messages in a row are refused."""
    return ok("demanded: neighbours are joined" if found.alternation else "not demanded")


def reasoning(found: TemplateTraits) -> Outcome:
    """What becomes of earlier reasoning."""
    kept = found.reasoning is Reasoning.KEPT
    return ok(_REASONING[found.reasoning] + ("" if kept else " (in prompts of ids what was generated stays)"))


def date(session: Session) -> Outcome:
    """Whether the server's prompts hold the current date, and who writes it."""
    if session.template.path is None:
        return unchecked("the server renders no messages (neither a render endpoint nor /tokenize)")
    text = session.template.render(_HELLO, add_generation_prompt=True)
    found = dates_in(text, dt.datetime.now(dt.UTC).date())
    if not found:
        return ok("none is written")
    local = session.tokenizer_or_none
    if local is None:
        return warning(
            f"{found!r} is written, by the template or by the server: it changes at midnight",
            "give --tokenizer, so that the two can be told apart",
        )
    same = local.encode(local.render(_HELLO, add_generation_prompt=True)) == session.template.ids(_HELLO)
    if same and measure(local, tools_probe=False).date_injected:
        return ok(f"{found!r} is written by the template: agentkv pins it in prompts of ids")
    return warning(
        f"{found!r} is written by the server, not by the template: chat requests lose the prefix at midnight",
        f"pin it in the server's environment: VLLM_SYSTEM_START_DATE={dt.datetime.now(dt.UTC):%Y-%m-%d}",
    )


def dates_in(text: str, today: dt.date) -> str | None:
    """Return today's date as it stands in a text, in any usual form and time zone; None if it does not."""
    for shift in (0, -1, 1):
        day = today + dt.timedelta(days=shift)
        for form in _FORMS:
            full = day.strftime(form)
            short = day.strftime(form.replace("%d", str(day.day)))
            for shown in (full, short):
                if shown in text:
                    return shown
    return None
