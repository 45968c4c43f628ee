"""A small support desk for tests on a real server: short, so that a slow machine is quick with it."""

from __future__ import annotations

import secrets

from agentkv import Field, Policy, Tools
from agentkv.backends import VLLMBackend
from scripts.vllm_server import Server

RULES = "You are the support agent of a shop. " + "Refund within thirty days. Be kind and brief. " * 6


def lookup(order_id: str) -> str:
    """Look up an order by its number."""
    return f"order {order_id} is on the shelf"


def segments(*extra: object) -> list[object]:
    """A policy, a tool and two fields."""
    return [
        Policy(RULES),
        Tools([lookup]),
        Field("status", "in transit", label="Order status"),
        Field("eta", "Monday", label="Estimated delivery"),
        *extra,
    ]


def connect(server: Server, model: object, **options: object) -> VLLMBackend:
    """A backend on the server, with the small model's tokenizer."""
    return VLLMBackend(server.url, tokenizer=str(model), **options)  # type: ignore[arg-type]


def fresh() -> str:
    """A name that no other test uses, so that nothing of its cache is shared."""
    return secrets.token_hex(8)
