"""Measure a chat template: render probes whose texts are unique, and see what became of them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from agentkv.errors import TemplateError
from agentkv.template.traits import Acceptance, Reasoning, TemplateTraits
from agentkv.tokenizer import ChatTokenizer, WireMessage

# Plain letters and digits, so that no template trims, escapes or parses them.
_SYSTEM: Final = "Wq1system"
_LATE: Final = "Wq2late"
_USER: Final = "Wq3user"
_USER2: Final = "Wq4user"
_ANSWER: Final = "Wq5answer"
_ANSWER2: Final = "Wq6answer"
_THOUGHT: Final = "Wq7thought"
_RESULT: Final = "Wq8result"
_RESULT2: Final = "Wq9result"
_TOOL: Final = "wq0tool"

_TOOLS: Final[Sequence[Mapping[str, Any]]] = (
    {
        "type": "function",
        "function": {
            "name": _TOOL,
            "description": "Looks a thing up.",
            "parameters": {
                "type": "object",
                "properties": {"key": {"type": "string", "description": "A key."}},
            },
        },
    },
)


def _message(role: str, content: str, **more: Any) -> WireMessage:
    return {"role": role, "content": content, **more}


def _call(call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": _TOOL, "arguments": {"key": "v"}}}


_S: Final = _message("system", _SYSTEM)
_U: Final = _message("user", _USER)
_A: Final = _message("assistant", _ANSWER)
_U2: Final = _message("user", _USER2)
_A2: Final = _message("assistant", _ANSWER2)
_CALLS: Final = _message("assistant", "", tool_calls=[_call("callaaaa1"), _call("callaaaa2")])
_T: Final = _message("tool", _RESULT, name=_TOOL, tool_call_id="callaaaa1")
_T2: Final = _message("tool", _RESULT2, name=_TOOL, tool_call_id="callaaaa2")
_CALL: Final = _message("assistant", "", tool_calls=[_call("callaaaa1")])


@dataclass(frozen=True, slots=True)
class _Prober:
    tokenizer: ChatTokenizer
    arguments: Mapping[str, Any]
    lead: Sequence[WireMessage] = ()
    """A system message and a user message, or the latter alone where the former is refused."""

    def render(
        self, messages: Sequence[WireMessage], *, tools: bool = False, prompt: bool = False, **arguments: Any
    ) -> str | None:
        """Render; None if the template refuses."""
        try:
            return self.tokenizer.render(
                messages,
                tools=_TOOLS if tools else None,
                add_generation_prompt=prompt,
                **{**self.arguments, **arguments},
            )
        except TemplateError:
            return None

    def after_lead(self, *messages: WireMessage, tools: bool = False) -> str | None:
        return self.render([*self.lead, *messages], tools=tools)


def measure(
    tokenizer: ChatTokenizer, *, tools_probe: bool = True, template_arguments: Mapping[str, Any] | None = None
) -> TemplateTraits:
    """Measure what a chat template does with messages.

    Parameters
    ----------
    tokenizer
        Gives the template.
    tools_probe
        Whether to render with tools too; without it they are reported as not shown.
    template_arguments
        Further arguments of the template, the same as will be used to encode.

    Raises
    ------
    TemplateError
        There is no template, or it refuses even a single user message.
    """
    arguments = dict(template_arguments or {})
    tokenizer.render([_U], add_generation_prompt=True, **arguments)
    bare = _Prober(tokenizer, arguments)
    leading = _leading_system(bare)
    lead = [_U] if leading is Acceptance.REFUSED else [_S, _U]
    probe = _Prober(tokenizer, arguments, lead)
    shown = tools_probe and _TOOL in (probe.render(lead, tools=True) or "")
    calls = _calling(probe)
    broken = _breaks(probe, calls, tools=shown)
    in_round = [calls, _T]
    return TemplateTraits(
        append_only=broken is None,
        breaks_at=broken,
        leading_system=leading,
        late_system=_acceptance(probe.after_lead(_A, _message("system", _LATE), _U2), _ANSWER, _LATE, _USER2),
        late_system_in_tool_round=_acceptance(
            probe.after_lead(*in_round, _message("system", _LATE)), _RESULT, _LATE, None
        ),
        tool_role=_acceptance(probe.after_lead(*in_round), _USER, _RESULT, None),
        tools=shown,
        tools_moved=shown and _behind(probe.after_lead(_A, _U2, tools=True), _ANSWER, _TOOL),
        alternation=probe.after_lead(_U2) is None and probe.after_lead(_A, _U2) is not None,
        user_in_tool_round=_acceptance(probe.after_lead(*in_round, _U2), _RESULT, _USER2, None),
        user_in_tool_round_rewrites=_rewrites(probe, _U2),
        tool_in_tool_round_rewrites=_rewrites(probe, _T2),
        reasoning=_reasoning(probe),
        date_injected=_date_injected(probe),
        trims_content=_trims(probe),
        default_system=_default_system(probe, leading),
        assistant_close=_close(probe),
    )


def pinned_date(day: dt.date) -> dict[str, Any]:
    """Return template arguments that stop a template from writing the current date.

    Parameters
    ----------
    day
        What such a template writes instead; keep it for the life of a conversation's prefix.
    """
    moment = dt.datetime.combine(day, dt.time())
    return {"strftime_now": moment.strftime, "date_string": moment.strftime("%d %b %Y")}


def _acceptance(text: str | None, before: str, probed: str, behind: str | None) -> Acceptance:
    if text is None:
        return Acceptance.REFUSED
    at = text.find(probed)
    if at < 0:
        return Acceptance.DROPPED
    in_order = text.rfind(before) < at and (behind is None or at < text.rfind(behind))
    return Acceptance.ACCEPTED if in_order else Acceptance.MOVED


def _leading_system(probe: _Prober) -> Acceptance:
    first = _acceptance(probe.render([_S, _U]), "\0", _SYSTEM, _USER)
    if first is not Acceptance.ACCEPTED:
        return first
    later = probe.render([_S, _U, _A, _U2])
    # Refused here is refused for the second user turn, not for the system message.
    return first if later is None else _acceptance(later, "\0", _SYSTEM, _USER)


def _behind(text: str | None, first: str, second: str) -> bool:
    return text is not None and text.rfind(second) > text.rfind(first)


def _calling(probe: _Prober) -> WireMessage:
    """Return an answer with one call, or a plain answer where the template knows no calls."""
    return _CALL if probe.after_lead(_CALL, _T) is not None else _A2


def _breaks(probe: _Prober, calls: WireMessage, *, tools: bool) -> str | None:
    """Say where prompt and answer stop being the beginning of the next prompt; None if they never do."""
    two = _CALLS if calls is _CALL else calls
    for rounds in (
        [(_A, _U2), (two, _T, _T2), (_A2, _U)],
        [(_A, _U2), (two, _T, _T2)],
        [(_A, _U2), (_A2, _U)],
    ):
        steps = [step for part in rounds for step in part]
        if probe.after_lead(*steps) is None:
            continue
        for shown in (False, True) if tools else (False,):
            broken = _first_break(probe, rounds, tools=shown)
            if broken:
                return broken
        return None
    return "the template refuses a second user message"


def _first_break(probe: _Prober, rounds: Sequence[tuple[WireMessage, ...]], *, tools: bool) -> str | None:
    history = list(probe.lead)
    before = probe.render(history, tools=tools, prompt=True)
    for answer, *new in rounds:
        longer = [*history, answer, *new]
        after = probe.render(longer, tools=tools, prompt=True)
        if before is None or after is None:
            return f"message {len(longer) - 1} ({longer[-1]['role']}) is refused"
        sent = before + str(answer["content"])
        if not after.startswith(sent):
            at = next((i for i, (a, b) in enumerate(zip(sent, after, strict=False)) if a != b), len(after))
            return (
                f"{'with tools, ' if tools else ''}message {len(longer) - 1} ({longer[-1]['role']}) changes "
                f"the text {_place(sent, at, history)}"
            )
        history, before = longer, after
    return None


def _place(text: str, at: int, history: Sequence[WireMessage]) -> str:
    """Say in words where an offset lies among messages."""
    place = "before the first message"
    for number, message in enumerate(history):
        start = text.find(str(message["content"]) or "\0")
        if 0 <= start <= at:
            stop = start + len(str(message["content"]))
            place = f"{'of' if at < stop else 'behind'} message {number} ({message['role']})"
    return place


def _rewrites(probe: _Prober, added: WireMessage) -> bool:
    """Whether a message behind a tool result changes what stood before that result's end."""
    for calls in _thinking(_calling(probe)):
        before = probe.after_lead(calls, _T)
        after = probe.after_lead(calls, _T, added)
        if before is None or after is None or _RESULT not in before:
            continue
        if not after.startswith(before[: before.rfind(_RESULT) + len(_RESULT)]):
            return True
    return False


def _thinking(answer: WireMessage) -> Iterator[WireMessage]:
    """Yield an answer with reasoning in its text, then with reasoning beside it."""
    text = answer["content"] or _ANSWER2
    yield {**answer, "content": f"<think>\n{_THOUGHT}\n</think>\n\n{text}"}
    yield {**answer, "content": text, "reasoning_content": _THOUGHT}


def _reasoning(probe: _Prober) -> Reasoning:
    order = [Reasoning.KEPT, Reasoning.STRIPPED_ON_USER, Reasoning.STRIPPED_ALWAYS]
    found = Reasoning.KEPT
    for number, (answer, calls) in enumerate(zip(_thinking(_A), _thinking(_calling(probe)), strict=True)):
        later = probe.after_lead(answer, _U2)
        in_round = probe.after_lead(calls, _T)
        alone = probe.after_lead(answer)
        beside_unknown = number == 1 and not any(_THOUGHT in (text or "") for text in (in_round, alone))
        if later is None or _THOUGHT in later or beside_unknown:
            continue
        now = Reasoning.STRIPPED_ON_USER if _THOUGHT in (in_round or "") else Reasoning.STRIPPED_ALWAYS
        found = max(found, now, key=order.index)
    return found


def _date_injected(probe: _Prober) -> bool:
    def at(word: str) -> Callable[[str], str]:
        return lambda _format: word

    first, second = (probe.render(probe.lead, strftime_now=at(word)) for word in ("Wqmonday", "Wqtuesday"))
    return first != second


def _trims(probe: _Prober) -> bool:
    padded = [
        (f" \n{_USER}\n ", _message("user", f" \n{_USER}\n "), ()),
        (
            f" \n{_RESULT}\n ",
            _message("tool", f" \n{_RESULT}\n ", name=_TOOL, tool_call_id="callaaaa1"),
            (_CALL,),
        ),
    ]
    found = False
    for content, message, before in padded:
        messages = [message] if message["role"] == "user" else [*probe.lead, *before, message]
        text = probe.render(messages)
        escaped = content.replace("\n", "\\n")
        found = found or (
            text is not None and content.strip() in text and content not in text and escaped not in text
        )
    return found


def _default_system(probe: _Prober, leading: Acceptance) -> bool:
    without = (probe.render([_U]) or "").partition(_USER)[0]
    if leading in (Acceptance.REFUSED, Acceptance.MOVED):
        usual = (probe.render([_U, _A, _U2]) or without).partition(_ANSWER)[2].partition(_USER2)[0]
    else:
        usual = (probe.render([_S, _U]) or without).partition(_USER)[0].replace(_SYSTEM, "")
    for control in sorted(probe.tokenizer.control_tokens, key=len, reverse=True):
        without, usual = without.replace(control, " "), usual.replace(control, " ")
    return bool(set(_words(without)) - set(_words(usual)))


def _words(text: str) -> list[str]:
    return [word for word in "".join(c if c.isalpha() else " " for c in text).split() if len(word) > 1]


def _close(probe: _Prober) -> str:
    last = (probe.after_lead(_A) or "").rpartition(_ANSWER)[2]
    followed = (probe.after_lead(_A, _U2) or "").rpartition(_ANSWER)[2]
    if followed.startswith(last):
        return last
    # Some formats end a conversation otherwise than a message.
    controls = [token for token in probe.tokenizer.control_tokens if followed.startswith(token)]
    return max(controls, key=len, default="")
