"""What the connector refuses to start with, each named with what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from agentkv.errors import CapabilityError
from vllm_agentkv.options import SpliceOptions, Switch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

TESTED: Final = "0.32"
"""Release of vLLM that this connector was tested with."""
PARTNERS: Final = ("LMCacheConnectorV1", "OffloadingConnector")
"""Connectors known to keep KV under block hashes or the salt, so that approximate KV stays where it is."""

_FUSIONS: Final = ("fuse_rope_kvcache", "fuse_qk_norm_rope_kvcache", "fuse_rope_kvcache_cat_mla")
_WITHOUT_A_MODEL: Final = ("ngram", "ngram_gpu", "suffix")
_OVERRIDE: Final = 'or set "allow_untested": true in kv_connector_extra_config'


def check_server(
    config: VllmConfig, caches: KVCacheConfig, options: SpliceOptions, version: str, dtype: str
) -> None:
    """Refuse a server whose KV the connector cannot write or would get wrong.

    Parameters
    ----------
    config, caches
        The server's.
    options
        The connector's.
    version
        vLLM's.
    dtype
        Number format of the model, such as ``float32``.

    Raises
    ------
    CapabilityError
        It names everything that is in the way.
    """
    problems = [*_layout(config, dtype), *_groups(caches), *_policies(config)]
    if options.compile is Switch.ON and config.parallel_config.tensor_parallel_size > 1:
        problems.append(
            "compiling under tensor parallelism, where each rank holds a part of the heads: compile on a "
            'server of one rank into the same store, and leave "compile" off here'
        )
    if not options.allow_untested and not _is_tested(version):
        problems.append(f"vLLM {version}, which was never tested; install {TESTED}, {_OVERRIDE}")
    _raise(problems)


def check_partners(transfer: Any, options: SpliceOptions) -> None:
    """Refuse connectors beside this one that may hand approximate KV to an exact request.

    Parameters
    ----------
    transfer
        The server's ``kv_transfer_config``; its connectors are looked at if it is a MultiConnector.

    Raises
    ------
    CapabilityError
        One of them is not known to keep salts apart.
    """
    if transfer is None or transfer.kv_connector != "MultiConnector" or options.allow_untested:
        return
    entries: Sequence[Mapping[str, Any]] = transfer.kv_connector_extra_config.get("connectors", ())
    names = [str(entry.get("kv_connector")) for entry in entries]
    strange = [name for name in names if name not in {*PARTNERS, "SpliceConnector"}]
    _raise(
        f"connector {name} beside it, which is not known to keep the KV of different salts apart; use one of "
        f"{', '.join(PARTNERS)}, {_OVERRIDE}"
        for name in strange
    )


def _layout(config: VllmConfig, dtype: str) -> Iterator[str]:
    parallel, cache = config.parallel_config, config.cache_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            yield f"{name}={size}, where no worker holds a whole token's KV; set it to 1"
    if cache.cache_dtype not in {"auto", dtype}:
        yield f"a KV cache of {cache.cache_dtype}, when artifacts are {dtype}; use --kv-cache-dtype auto"
    if config.model_config.use_mla:
        yield "multi-head latent attention, whose cache is written in a fused step; serve another model"
    for name in _FUSIONS:
        if getattr(config.compilation_config.pass_config, name, False):
            yield f"the compiler pass {name}, which writes KV past the attention layers; switch it off"


def _groups(caches: KVCacheConfig) -> Iterator[str]:
    groups = caches.kv_cache_groups
    if len(groups) > 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        yield (
            f"a KV cache of {len(groups)} groups ({kinds}), in which a failed load would end the engine; "
            "start with --disable-hybrid-kv-cache-manager"
        )


def _policies(config: VllmConfig) -> Iterator[str]:
    if not config.cache_config.enable_prefix_caching:
        yield "no prefix caching, which splices are placed behind; use --enable-prefix-caching"
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_load_failure_policy != "fail":
        yield f'kv_load_failure_policy "{transfer.kv_load_failure_policy}"; leave it at "fail"'
    speculative = config.speculative_config
    if speculative is not None and speculative.method not in _WITHOUT_A_MODEL:
        yield (
            f"speculative decoding with a draft model ({speculative.method}), of which artifacts hold no "
            f"KV; use {' or '.join(_WITHOUT_A_MODEL)}, or none"
        )


def _is_tested(version: str) -> bool:
    return version == TESTED or version.startswith(f"{TESTED}.")


def _raise(problems: Iterator[str] | Sequence[str]) -> None:
    found = list(problems)
    if found:
        raise CapabilityError("the SpliceConnector cannot run with " + "; nor with ".join(found))
