"""A transformers model, run token by token over KV that is put together here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from agentkv.backends.kvcache import ModelKV
from agentkv.backends.model_traits import forward_arguments, generation_eos
from agentkv.kv.rope import RopeSpec
from agentkv.kv.spans import KVSpan
from agentkv.tokenizer import ChatTokenizer

_CHUNK: Final = 512


class KVModel:
    """A model whose logits can be read at any position.

    Parameters
    ----------
    model
        A loaded model.
    tokenizer
        Its tokenizer.
    """

    def __init__(self, model: Any, tokenizer: ChatTokenizer) -> None:
        self._model = model.eval()
        self.tokenizer: Final = tokenizer
        self.rope: Final = RopeSpec.of(model.config.get_text_config(decoder=True).to_dict())
        self.ends: Final = frozenset(tokenizer.eos_ids | generation_eos(model))
        self._argument, fixed = forward_arguments(model)
        self._fixed = {name: value for name, value in fixed.items() if name != "logits_to_keep"}
        self._keeps = "logits_to_keep" in fixed
        self._device = model.get_input_embeddings().weight.device

    def empty(self) -> ModelKV:
        """Return KV of no token."""
        return ModelKV(self._model.config)

    @torch.inference_mode()
    def extend(self, kv: ModelKV, ids: Sequence[int], keep: int = 1) -> torch.Tensor:
        """Compute tokens behind KV; returns logits ``[keep, vocabulary]`` of the last `keep` of them."""
        logits = torch.empty(0)
        for at in range(0, len(ids), _CHUNK):
            piece = list(ids[at : at + _CHUNK])
            kept = {"logits_to_keep": min(keep, len(piece))} if self._keeps else {}
            input_ids = torch.tensor([piece], device=self._device)
            output = self._model(input_ids=input_ids, **{self._argument: kv.cache}, **self._fixed, **kept)
            kv.length += len(piece)
            logits = output.logits[0, -keep:]
        return logits

    def greedy(self, kv: ModelKV, logits: torch.Tensor, most: int) -> tuple[list[int], torch.Tensor]:
        """Generate up to `most` tokens or to the end of the turn.

        Parameters
        ----------
        logits
            Those behind the prompt, of shape ``[vocabulary]``.

        Returns
        -------
        tuple
            The ids, and the logits ``[tokens, vocabulary]`` that each of them was chosen from.
        """
        ids: list[int] = []
        rows: list[torch.Tensor] = []
        while len(ids) < most and not (ids and ids[-1] in self.ends):
            if ids:
                logits = self.extend(kv, ids[-1:])[-1]
            rows.append(logits)
            ids.append(int(logits.argmax()))
        return ids, torch.stack(rows) if rows else torch.empty(0)

    def compiled(self, anchor: Sequence[int], chunk: Sequence[int]) -> KVSpan:
        """Return the KV of a chunk behind an anchor, whose own KV is dropped."""
        kv = self.empty()
        self.extend(kv, [*anchor, *chunk])
        return kv.span(len(anchor), len(anchor) + len(chunk))
