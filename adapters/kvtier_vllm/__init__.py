"""kvtier inside vLLM: a KV connector over its tiers.

    vllm serve MODEL --kv-transfer-config
        '{"kv_connector": "KVTierConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

connector        vLLM's interface, both sides
scheduler, worker, messages      what each side does, and what they tell each other
keys, identity   names of blocks; what their bytes are compatible with
stats, events    what vLLM is told of the tiers
settings, hints, versions
secondary        another way in: kvtier's lower tiers under vLLM's own host tier
"""

from contextlib import suppress

__all__ = ["register"]

_NAME = "KVTierConnector"


def register() -> None:
    """Make the connector known to vLLM; called by it in each of its processes, as a general plug-in."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415

    # What it raises where plug-ins are loaded once more in a process: that the name is taken.
    with suppress(ValueError):
        KVConnectorFactory.register_connector(_NAME, "kvtier_vllm.connector", _NAME)
