"""Loading a causal language model of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from agentkv.backends.model_traits import default_dtype
from agentkv.errors import CapabilityError, ConfigurationError, ModelNotFoundError
from agentkv.models import KNOWN_MODELS, resolve


def load_model(
    name: str, device: str, dtype: torch.dtype | str | None, options: Mapping[str, Any]
) -> tuple[str, Any]:
    """Load a model from a folder, the hub or the local store.

    Parameters
    ----------
    name
        A folder, an id on the hub, or the name of a model that was pulled.
    device
        Where it is to run, which decides the default of `dtype`.
    options
        Of ``AutoModelForCausalLM.from_pretrained``.

    Returns
    -------
    tuple
        Where the model's files are (a folder or an id), and the model.

    Raises
    ------
    ModelNotFoundError
        There is no such model, or it cannot be loaded.
    CapabilityError
        There is no such device.
    ConfigurationError
        The model does not take an option.
    """
    from transformers import AutoModelForCausalLM

    if name in KNOWN_MODELS:
        name = resolve(name).location
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise CapabilityError(f"device {device!r}: torch finds no CUDA device; leave device out for the CPU")
    try:
        return name, AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype or default_dtype(device), **options
        )
    except (TypeError, AttributeError) as error:
        raise ConfigurationError(f"the model {name!r} does not take these options: {error}") from error
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(
            f"no model can be loaded from {name!r}: {str(error).rstrip('.')}. Give a folder with "
            "config.json and weights, the id of a model on the hub, or fetch one with "
            "agentkv model pull smollm2-135m"
        ) from error
