#!/usr/bin/env bash
# The cache service from plain curl: put a chain of blocks, find it, read it, pin it, see it in the figures.
#
# examples/rest_curl.sh
set -euo pipefail

work=$(mktemp -d)
trap 'kill "$service" 2>/dev/null || true; wait; rm -rf "$work"' EXIT
kvtier cache serve --port 0 --data-port none --socket "$work/kv.sock" --state "$work/state" --capacity 64MiB \
    2>"$work/log" &
service=$!

# It says where it listens once it does.
until url=$(grep -o 'http://[^ "]*' "$work/log"); do
    kill -0 "$service" || { cat "$work/log" >&2; exit 1; }
    sleep 0.1
done
kv=${url%/}/v1
kv=${kv//\/v1\/v1/\/v1}
call() { curl --silent --show-error --fail-with-body "$@"; }

echo "== a namespace: blocks of any bytes"
call "$kv/namespaces" --json '{"name": "demo", "layout": null}' >/dev/null

# A block is named by the hash of its whole prefix: here, of the text so far.
parent="" depth=0 keys=""
for text in "once upon a time" " there was a cache" " that forgot nothing"; do
    key=$(printf '%s' "$parent$text" | sha256sum | cut -c1-64)
    head -c 65536 < <(yes "$text") >"$work/block-$depth"
    headers=(-H "KVTier-Depth: $depth")
    [ -z "$parent" ] || headers+=(-H "KVTier-Parent: $parent")
    echo "put depth $depth: $(call -T "$work/block-$depth" "${headers[@]}" "$kv/namespaces/demo/blocks/$key")"
    keys+="${keys:+, }\"$key\"" parent=$key depth=$((depth + 1))
done

echo "== the longest run that is there, and where"
found=$(call "$kv/match" --json "{\"namespace\": \"demo\", \"keys\": [$keys, \"$(printf 0%.0s {1..64})\"]}")
echo "$found"
[[ $found == *'"blocks":3'* ]]

echo "== the bytes come back as they went"
call "$kv/namespaces/demo/blocks/$parent" -o "$work/got"
cmp "$work/got" "$work/block-2"

echo "== a pin keeps the run in host, for a minute at most"
pin=$(call "$kv/namespaces/demo/pins" --json "{\"keys\": [$keys], \"ttl\": 60}")
echo "$pin"
id=$(sed 's/.*"id":"\([^"]*\)".*/\1/' <<<"$pin")
call -X DELETE "$kv/pins/$id"

echo "== what descends from a block goes with it"
first=$(cut -d'"' -f2 <<<"$keys")
call -X DELETE "$kv/namespaces/demo/blocks/$first"
status=$(curl --silent -o "$work/gone" -w '%{http_code}' "$kv/namespaces/demo/blocks/$parent")
echo " then the last one: $status $(cat "$work/gone")"
[ "$status" = 404 ]
