#!/usr/bin/env bash
# vLLM's server with kvtier's host memory and NVMe behind the device: everything of kvtier is in one flag.
#
# examples/vllm_serve.sh MODEL [further arguments of `vllm serve`]
set -euo pipefail
model=${1:?the model to serve}
shift
exec vllm serve "$model" --kv-transfer-config '{
  "kv_connector": "KVTierConnector",
  "kv_role": "kv_both",
  "kv_load_failure_policy": "recompute",
  "kv_connector_extra_config": {
    "host": {"capacity": "16GiB"},
    "nvme": {"path": "/var/cache/kvtier", "capacity": "200GiB"}
  }
}' "$@"
