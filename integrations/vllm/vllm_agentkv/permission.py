"""Whether a request may do what it asks for: switches, namespace, tenant and ticket."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from agentkv.errors import TicketError
from agentkv.kv import Refusal
from agentkv.kv.protocol import Compile, Refused, Splices, SpliceSpec
from agentkv.kv.tickets import verify
from agentkv.salts import is_approximate
from vllm_agentkv.options import SpliceOptions, Switch
from vllm_agentkv.shelf import Sound

_MOST = 1024
"""Splices of one request: each is looked up between two steps of the engine."""

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from agentkv.kv import ModelIdentity


def refusal_of_request(
    request: Request, asking: Splices, options: SpliceOptions, ticket_key: bytes | None
) -> Refusal | None:
    """Return why none of a request's splices may be loaded; None if they may, as far as the request goes."""
    if options.splice is Switch.OFF:
        return Refusal.DISABLED
    salt = request.cache_salt or ""
    if not is_approximate(salt):
        return Refusal.NAMESPACE
    if request.lora_request is not None:
        return Refusal.FINGERPRINT
    if not _is_plain_text(request) or len(asking.splices) > _MOST:
        return Refusal.SPAN
    if ticket_key is not None and not _ticket_allows(asking, salt, ticket_key):
        return Refusal.TICKET
    return None


def refusal_of_compile(
    request: Request, asking: Compile, options: SpliceOptions, ticket_key: bytes | None
) -> Refused | None:
    """Return why a chunk may not be compiled; None if it may, as far as the request goes."""
    if options.compile is Switch.OFF:
        return Refused(
            reason=Refusal.DISABLED,
            message='this server compiles nothing; start it with "compile": "on" in its extra config',
        )
    if request.lora_request is not None:
        return Refused(
            reason=Refusal.FINGERPRINT, message="chunks are compiled by the base model only; name no adapter"
        )
    if not _is_plain_text(request) or asking.anchor >= request.num_prompt_tokens:
        return Refused(
            reason=Refusal.SPAN,
            message=f"a prompt of {request.num_prompt_tokens} tokens has no chunk behind an anchor of "
            f"{asking.anchor}, or is not of token ids alone; send anchor and chunk as token ids",
        )
    if ticket_key is None:
        return None
    try:
        ticket = verify(asking.ticket or "", ticket_key, now=time.time())
    except TicketError as error:
        return Refused(reason=Refusal.TICKET, message=str(error))
    if ticket.action != "compile" or ticket.tenant != asking.tenant or ticket.salt != request.cache_salt:
        return Refused(
            reason=Refusal.TICKET,
            message=f"the ticket is for {ticket.action} by tenant {ticket.tenant!r} under its own salt; "
            f"ask for one to compile by tenant {asking.tenant!r} under this request's salt",
        )
    return None


def refusal_of_splice(
    splice: SpliceSpec, artifact: Sound, tenant: str, prompt: list[int], identity: ModelIdentity
) -> Refusal | None:
    """Return why an artifact may not stand for a span of a prompt's tokens; None if it may."""
    header = artifact.header
    if header.tenant != tenant:
        return Refusal.TENANT
    if header.identity.rope != identity.rope:
        return Refusal.ROPE
    if header.identity.fingerprint != identity.fingerprint:
        return Refusal.FINGERPRINT
    length = splice.stop - splice.start
    if splice.stop > len(prompt) or splice.offset + length > len(header.ids):
        return Refusal.SPAN
    if tuple(prompt[splice.start : splice.stop]) != header.ids[splice.offset : splice.offset + length]:
        return Refusal.TOKENS
    return None


def _is_plain_text(request: Request) -> bool:
    return (
        request.prompt_token_ids is not None
        and request.prompt_embeds is None
        and not request.mm_features
        and request.sampling_params is not None
    )


def _ticket_allows(asking: Splices, salt: str, key: bytes) -> bool:
    try:
        ticket = verify(asking.ticket or "", key, now=time.time())
    except TicketError:
        return False
    asked = {(splice.artifact, splice.start, splice.stop) for splice in asking.splices}
    return (
        ticket.action == "splice"
        and ticket.tenant == asking.tenant
        and ticket.salt == salt
        and asked <= set(ticket.artifacts)
    )
