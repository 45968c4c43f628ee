"""Logits of a spliced run against those of a full prefill."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Agreement:
    """What the positions of one answer say; one number for each position."""

    top1: tuple[bool, ...]
    """Whether the most likely token is the same."""
    kl: tuple[float, ...]
    """KL(reference || spliced), in nats."""
    cosine: tuple[float, ...]
    """Cosine of the two rows of logits."""

    @property
    def first_other(self) -> int | None:
        """The first position whose most likely token differs; None if none does."""
        return next((index for index, same in enumerate(self.top1) if not same), None)


@torch.inference_mode()
def compare(reference: torch.Tensor, spliced: torch.Tensor) -> Agreement:
    """Compare logits, each of shape ``[positions, vocabulary]``.

    Raises
    ------
    ValueError
        They are of different shapes.
    """
    if reference.shape != spliced.shape:
        raise ValueError(f"logits {list(reference.shape)} and {list(spliced.shape)} cannot be compared")
    one, other = reference.double(), spliced.double()
    log_p, log_q = one.log_softmax(-1), other.log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0.0)
    return Agreement(
        top1=tuple((one.argmax(-1) == other.argmax(-1)).tolist()),
        kl=tuple(kl.tolist()),
        cosine=tuple(torch.cosine_similarity(one, other, dim=-1).tolist()),
    )


def names(text: str, forms: tuple[str, ...]) -> bool:
    """Whether an answer names a fact, in one of its forms; case does not count."""
    return any(form.lower() in text.lower() for form in forms)
