"""A KV connector for vLLM that loads compiled chunks of a prompt instead of prefilling them.

vLLM calls `register` by itself where this distribution is installed; the connector is then named in
``--kv-transfer-config``.
"""

from __future__ import annotations

from typing import Final

from vllm_agentkv._version import __version__

__all__ = ["CONNECTOR", "MODULE", "__version__", "register"]

CONNECTOR: Final = "SpliceConnector"
"""Its name in ``--kv-transfer-config``."""
MODULE: Final = "vllm_agentkv.connector"
"""Its module, the ``kv_connector_module_path`` for a server that it is not installed for."""


def register() -> None:
    """Make the connector's name known to vLLM; a name that is known already stays as it is."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, MODULE, CONNECTOR)
