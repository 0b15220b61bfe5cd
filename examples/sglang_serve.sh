#!/usr/bin/env bash
# SGLang's server with kvtier below its own host cache. kvtier's settings are in sglang_kvtier.json: the first four
# entries say which class to load, prefetch_threshold is SGLang's, all others are kvtier's `tiering` section.
#
# examples/sglang_serve.sh MODEL [further arguments of the server]
set -euo pipefail
model=${1:?the model to serve}
shift
exec python -m sglang.launch_server --model-path "$model" \
    --enable-hierarchical-cache \
    --hicache-mem-layout page_first_direct --hicache-io-backend direct \
    --hicache-storage-backend dynamic \
    --hicache-storage-backend-extra-config "@$(dirname "$0")/sglang_kvtier.json" "$@"
