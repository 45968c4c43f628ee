"""A salt depends on all of key, tenant, namespace and generation, and on nothing else."""

from __future__ import annotations

import hashlib
import hmac
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv.errors import ConfigurationError
from agentkv.salts import Namespace, is_approximate, process_key, salt

KEY = bytes(range(32))

ARGUMENTS = st.tuples(
    st.sampled_from([KEY, KEY[:16], bytes(16)]),
    st.text(st.sampled_from("ab01\x00"), min_size=1, max_size=3),
    st.sampled_from(Namespace),
    st.integers(0, 12),
)


def _salt(arguments: tuple[bytes, str, Namespace, int]) -> str:
    key, tenant, namespace, generation = arguments
    return salt(key, tenant=tenant, namespace=namespace, generation=generation)


@given(ARGUMENTS, ARGUMENTS)
def test_salts_are_equal_only_for_equal_arguments(
    one: tuple[bytes, str, Namespace, int], other: tuple[bytes, str, Namespace, int]
) -> None:
    """Distinct arguments give distinct salts, the same give the same."""
    assert (_salt(one) == _salt(other)) == (one == other)


def test_salt_is_hmac_sha256_of_length_prefixed_parts() -> None:
    """The encoding is fixed: another process, or another release, finds the same cache."""
    parts = (b"agentkv/1", "zwölf".encode(), b"approximate", b"7")
    message = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    expected = hmac.new(KEY, message, hashlib.sha256).hexdigest()
    made = salt(KEY, tenant="zwölf", namespace=Namespace.APPROXIMATE, generation=7)
    assert made == f"approx-{expected}"


def test_salt_is_lower_case_hex() -> None:
    """64 hex digits that name neither tenant nor key."""
    made = salt(KEY, tenant="acme", namespace=Namespace.EXACT)
    assert len(made) == 64
    assert set(made) <= set("0123456789abcdef")


@given(ARGUMENTS)
def test_salt_says_whether_its_namespace_is_approximate(arguments: tuple[bytes, str, Namespace, int]) -> None:
    """A server that holds no key can still tell the two namespaces apart."""
    assert is_approximate(_salt(arguments)) == (arguments[2] is Namespace.APPROXIMATE)


@pytest.mark.parametrize(
    "text", ["", "approx-", "approx-" + "0" * 63, "approx-" + "G" * 64, "approx-" + "0" * 64 + "\n", "0" * 71]
)
def test_other_text_is_no_approximate_salt(text: str) -> None:
    """Only the whole form counts; a client's own salt that merely begins alike does not."""
    assert not is_approximate(text)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"key": b"short and secret"[:15]}, "15 bytes"),
        ({"key": "a string of more than 16 characters"}, "a str"),
        ({"tenant": ""}, "tenant is empty"),
        ({"tenant": "\ud800"}, "lone surrogate"),
        ({"namespace": "exact"}, "member of Namespace"),
        ({"generation": -1}, "generation -1 is negative"),
    ],
)
def test_malformed_argument_is_refused(changed: dict[str, Any], why: str) -> None:
    """The message names the argument and never the key."""
    arguments: dict[str, Any] = {"key": KEY, "tenant": "acme", "namespace": Namespace.EXACT, **changed}
    with pytest.raises(ConfigurationError, match=why) as caught:
        salt(arguments.pop("key"), **arguments)
    assert "secret" not in str(caught.value).replace("secrets.", "")


def test_process_key_is_made_once() -> None:
    """Every call of one process returns the same key, and it is long enough for a salt."""
    assert process_key() is process_key()
    assert salt(process_key(), tenant="acme", namespace=Namespace.EXACT)


def test_process_key_differs_between_processes() -> None:
    """Another process cannot find KV that was cached under this one's key."""
    other = subprocess.run(
        [sys.executable, "-c", "from agentkv.salts import process_key; print(process_key().hex())"],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert len(other) == 64
    assert other != process_key().hex()
