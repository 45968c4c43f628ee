"""The next token from the logits of the last position."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from agentkv.backends.base import SamplingOptions
from agentkv.errors import BackendError, CapabilityError, ConfigurationError

_SEEDS = 2**64


def check_options(options: SamplingOptions) -> None:
    """Refuse what `SamplingOptions` allows and torch cannot sample with.

    Raises
    ------
    ConfigurationError
        The seed is out of range; the message has its value.
    CapabilityError
        The answer would have to be held to a tool or a format, or a parameter is a server's.
    """
    if options.tool_choice not in (None, "auto", "none") or options.response_format is not None:
        raise CapabilityError(
            f"tool_choice={options.tool_choice!r}, response_format={options.response_format!r}: this backend "
            "cannot hold an answer to a tool or a format; use a server backend, such as VLLMBackend"
        )
    if options.extra:
        raise CapabilityError(
            f"extra={dict(options.extra)!r}: these are parameters of a server, and this backend is none"
        )
    if options.seed is not None and not 0 <= options.seed < _SEEDS:
        raise ConfigurationError(
            f"option seed={options.seed!r} is out of range: it has to be None or in [0, 2**64)"
        )


class Sampler:
    """Samples one answer; the order is repetition penalty, temperature, top-k, top-p.

    Parameters
    ----------
    options
        Checked with `check_options`.
    prompt
        Prompt token ids, which the repetition penalty counts as seen; not read without one.
    device
        Where the logits are. Answers repeat by seed on one kind of device, not across kinds.
    """

    def __init__(self, options: SamplingOptions, prompt: Iterable[int], device: torch.device) -> None:
        self._options = options
        self._device = device
        self._generator: torch.Generator | None = None
        if options.temperature > 0:
            self._generator = torch.Generator(device=device)
            if options.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(options.seed)
        self._penalised = options.repetition_penalty != 1.0
        self._prompt = sorted(set(prompt)) if self._penalised else []
        self._seen: torch.Tensor | None = None

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor) -> int:
        """Choose a token id from logits of shape ``[vocabulary]``.

        Raises
        ------
        BackendError
            The best logit is not a finite number.
        """
        scores = logits.float()
        if self._penalised:
            scores = self._penalise(scores)
        best = int(scores.argmax())
        if not math.isfinite(scores[best]):
            raise BackendError(
                f"the model's logits are not finite (token {best}: {float(scores[best])}); "
                "load it with a wider dtype, such as float32"
            )
        token = best if self._generator is None else self._draw(scores, self._generator)
        if self._seen is not None:
            self._seen[token] = True
        return token

    def _penalise(self, scores: torch.Tensor) -> torch.Tensor:
        if self._seen is None:
            # A mask over the vocabulary: each token costs the same, however long prompt and answer are.
            self._seen = torch.zeros(len(scores), dtype=torch.bool, device=self._device)
            self._seen[torch.tensor(self._prompt, dtype=torch.long, device=self._device)] = True
        penalty = self._options.repetition_penalty
        return torch.where(self._seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)

    def _draw(self, scores: torch.Tensor, generator: torch.Generator) -> int:
        options = self._options
        scores = (scores - scores.max()) / options.temperature
        count = min(options.top_k or len(scores), len(scores))
        if count == len(scores) and options.top_p == 1:
            return int(torch.multinomial(scores.softmax(-1), 1, generator=generator))
        scores, tokens = scores.topk(count)
        probabilities = scores.softmax(-1)
        # A token stays if those before it do not reach top_p: the first always does.
        probabilities[probabilities.cumsum(-1) - probabilities >= options.top_p] = 0
        return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])
