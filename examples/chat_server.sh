#!/usr/bin/env bash
# A server with host memory and NVMe behind the device, and a conversation with it from a pipe.
#
# examples/chat_server.sh [MODEL]
set -euo pipefail

kv=$(mktemp -d)
log=$(mktemp)
trap 'kill "$server" 2>/dev/null || true; wait; rm -rf "$kv" "$log"' EXIT

export KVTIER_TIERING__NVME__PATH="$kv/blocks" KVTIER_TIERING__NVME__CAPACITY=256MiB
kvtier serve "$@" --port 0 2>"$log" &
server=$!

# It says where it listens once the model is loaded.
until url=$(grep -o 'http://[^ "]*' "$log"); do
    kill -0 "$server" || { cat "$log" >&2; exit 1; }
    sleep 0.2
done

kvtier chat --url "$url" --temperature 0 --max-tokens 24 <<'EOF'
What is the capital of France?
And of Italy?
/stats
EOF
