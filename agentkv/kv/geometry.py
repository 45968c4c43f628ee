"""Reading the rotary positions of a model from its configuration.

What the configuration says decides. It does not say in which order a model caches the numbers of a pair, nor
that a model has no rotary positions at all: for that the model types are listed. What is not recognised is
refused, because keys that were turned wrongly look like any others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum, auto
from math import log
from typing import Any, Final

from pydantic import ValidationError

from agentkv.kv.complaints import complaint
from agentkv.kv.geometry_refusals import refuse, refuse_other_positions
from agentkv.kv.rope import RopeSpec, Rotation

_ATTENTION: Final = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


class Layout(Enum):
    """How a model caches the numbers that it turns."""

    HALVES = auto()
    """The first half of a pair stands in the first half of the keys' rotary numbers."""
    PAIRS = auto()
    """The numbers of a pair are neighbours in the keys."""
    LATENT = auto()
    """Multi-head latent attention: the rotary numbers, in halves, are cached as values."""
    LATENT_PAIRS = auto()
    """The same, in pairs."""


# Each was compared with keys computed at another position, with norms and all other weights at random.
_MODELS: Final = {
    Layout.HALVES: """
        apertus arcee bitnet cwm dots1 exaone exaone4 exaone_moe falcon flex_olmo gemma gemma2 gemma3_text
        glm4_moe gpt_neox gpt_oss granite granitemoe granitemoeshared hyperclovax internlm3 llama minimax_m2
        ministral ministral3 mistral mixtral nemotron olmo olmo2 olmo3 olmoe persimmon phi phi3 phimoe qwen2
        qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma
        """,
    Layout.PAIRS: "codegen cohere cohere2 cohere2_moe ernie4_5 ernie4_5_moe glm glm4 gptj helium llama4_text",
    Layout.LATENT: "deepseek_v3 glm4_moe_lite minicpm3 youtu",
    Layout.LATENT_PAIRS: "deepseek_v2",
}
_LAYOUTS: Final = {model: layout for layout, models in _MODELS.items() for model in models.split()}

_ONLY_SLIDING: Final = frozenset({"cohere2", "cohere2_moe", "exaone4", "exaone_moe"})
"""Models whose layers have positions where a sliding window bounds them, and none where not."""
_THETA: Final = {"codegen": 10_000.0, "gptj": 10_000.0}
"""The base of models that have it in their code."""


def rope_spec(config: Mapping[str, Any], layout: Layout | None = None) -> RopeSpec:
    """Read it; `RopeSpec.of` says what from, and what is raised.

    Parameters
    ----------
    config
        Configuration of the language model.
    layout
        How it caches keys, where this release does not know its model type.
    """
    refuse_other_positions(config)
    kinds = list(_layers(config))
    layout = layout or _LAYOUTS.get(str(config.get("model_type")))
    if layout is None:
        refuse(config, "this release does not know in which order it caches the numbers of its keys")
    rotations: list[Rotation] = []
    layers: list[int | None] = []
    for kind, turned in kinds:
        if not turned:
            layers.append(None)
            continue
        rotation = _rotation(config, _parameters(config, kind), layout)
        if rotation not in rotations:
            rotations.append(rotation)
        layers.append(rotations.index(rotation))
    return RopeSpec(rotations=tuple(rotations), layers=tuple(layers))


def _first(config: Mapping[str, Any], *names: str) -> Any:
    """Return the first of these that is set."""
    return next((config[name] for name in names if config.get(name) is not None), None)


def _layers(config: Mapping[str, Any]) -> Iterator[tuple[str | None, bool]]:
    """Yield each layer's type, where types are given, and whether it has positions."""
    count = _first(config, "num_hidden_layers", "n_layer", "num_layers")
    if not isinstance(count, int) or count < 1:
        refuse(config, f"its number of layers is given as {count!r}")
    kinds = _layer_types(config, count)
    for layer, (kind, turned) in enumerate(zip(kinds, _with_positions(config, kinds), strict=True)):
        if kind is not None and kind not in _ATTENTION:
            refuse(config, f"layer {layer} is of type {kind!r}, whose state is not made of keys and values")
        yield kind, turned


def _layer_types(config: Mapping[str, Any], count: int) -> list[str | None]:
    kinds = config.get("layer_types")
    if kinds is None and (pattern := _first(config, "sliding_window_pattern", "_sliding_window_pattern")):
        if not isinstance(pattern, int):
            refuse(config, f"its sliding_window_pattern is {pattern!r}")
        kinds = [
            "full_attention" if (layer + 1) % pattern == 0 else "sliding_attention" for layer in range(count)
        ]
    if kinds is None:
        return [None] * count
    if len(kinds) != count:
        refuse(config, f"it has {count} layers and {len(kinds)} layer types")
    return list(kinds)


def _with_positions(config: Mapping[str, Any], kinds: list[str | None]) -> list[bool]:
    given = config.get("no_rope_layers")
    if given is not None:
        if len(given) != len(kinds):
            refuse(config, f"it has {len(kinds)} layers and {len(given)} no_rope_layers")
        return [bool(turned) for turned in given]
    if interval := config.get("no_rope_layer_interval"):
        return [(layer + 1) % interval != 0 for layer in range(len(kinds))]
    if config.get("model_type") in _ONLY_SLIDING and config.get("sliding_window"):
        if None in kinds:
            refuse(config, "it does not say which layers have a sliding window, and with it positions")
        return [kind == "sliding_attention" for kind in kinds]
    return [True] * len(kinds)


def _parameters(config: Mapping[str, Any], kind: str | None) -> dict[str, Any]:
    """Gather the rotary parameters of layers of this type, named as transformers names them today."""
    given = _first(config, "rope_parameters", "rope_scaling") or {}
    own = given.get(kind) if kind is not None else None
    if own is None and any(isinstance(value, Mapping) for value in given.values()):
        refuse(config, f"its rope_parameters have none for layers of type {kind!r}")
    local = config.get("rope_local_base_freq")
    if own is None and local is not None and kind == "sliding_attention":
        own = {"rope_type": "default", "rope_theta": local}
    parameters = {key: value for key, value in (own or given).items() if value is not None}
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    for name, sources in _ELSEWHERE.items():
        found = _first(config, *sources)
        if found is not None:
            parameters.setdefault(name, found)
    return parameters


_ELSEWHERE: Final = {
    "rope_theta": ("rope_theta", "rotary_emb_base"),
    "partial_rotary_factor": ("partial_rotary_factor", "rotary_pct"),
}
"""Parameters that older configurations give beside the others."""


def _rotation(config: Mapping[str, Any], parameters: Mapping[str, Any], layout: Layout) -> Rotation:
    kind = parameters["rope_type"]
    theta = parameters.get("rope_theta") or _THETA.get(str(config.get("model_type")))
    if theta is None:
        refuse(config, "it gives no rope_theta")
    latent = layout in (Layout.LATENT, Layout.LATENT_PAIRS)
    dim, size = _sizes(config, parameters, latent=latent)
    fields: dict[str, Any] = {
        "type": kind,
        "theta": theta,
        "part": "values" if latent else "keys",
        "dim": dim,
        "size": size,
        "interleaved": layout in (Layout.PAIRS, Layout.LATENT_PAIRS),
    }
    if kind != "default":
        fields["factor"] = parameters.get("factor")
    if kind in ("llama3", "yarn"):
        fields["original_window"] = _original_window(config, parameters)
    if kind == "llama3":
        fields |= {name: parameters.get(name) for name in ("low_freq_factor", "high_freq_factor")}
    if kind == "yarn":
        fields |= _yarn(config, parameters, fields)
    try:
        return Rotation(**fields)
    except ValidationError as error:
        refuse(config, f"its rotary parameters are not understood ({complaint(error)})")


def _sizes(config: Mapping[str, Any], parameters: Mapping[str, Any], *, latent: bool) -> tuple[int, int]:
    """Numbers of a head in the tensor that is turned, and how many of them are."""
    if latent:
        dim = config.get("qk_rope_head_dim")
        if not isinstance(dim, int):
            refuse(config, f"its qk_rope_head_dim is {dim!r}")
        return dim, dim
    dim = config.get("head_dim")
    if dim is None:
        width, heads = (
            _first(config, "hidden_size", "n_embd"),
            _first(config, "num_attention_heads", "n_head"),
        )
        if not width or not heads:
            refuse(config, "it gives no head_dim")
        dim = width // heads
    if not isinstance(dim, int):
        refuse(config, f"its head_dim is {dim!r}, not one number for all layers")
    rotary = config.get("rotary_dim")
    return dim, rotary or int(dim * parameters.get("partial_rotary_factor", 1.0))


def _original_window(config: Mapping[str, Any], parameters: Mapping[str, Any]) -> Any:
    # Some models save it outside of the parameters; that one counts.
    outside = config.get("original_max_position_embeddings")
    inside = parameters.get("original_max_position_embeddings")
    return outside or inside or config.get("max_position_embeddings")


def _yarn(
    config: Mapping[str, Any], parameters: Mapping[str, Any], fields: Mapping[str, Any]
) -> dict[str, Any]:
    window, factor = fields["original_window"], fields["factor"]
    longest = config.get("max_position_embeddings")
    if factor is None and longest and window:
        factor = longest / window
    if not isinstance(factor, int | float) or factor <= 0:
        refuse(config, f"its yarn factor is {factor!r}")

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * log(factor) + 1.0

    attention = parameters.get("attention_factor")
    if attention is None:
        own, all_dims = parameters.get("mscale"), parameters.get("mscale_all_dim")
        attention = scale(own) / scale(all_dims) if own and all_dims else scale(1.0)
    return {
        "factor": factor,
        "beta_fast": parameters.get("beta_fast") or 32.0,
        "beta_slow": parameters.get("beta_slow") or 1.0,
        "truncate": parameters.get("truncate", True),
        "attention_factor": attention,
    }
