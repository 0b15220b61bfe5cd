#!/bin/sh
# Fetch SGLang's wheel and what its host pools import into build/sglang, without their dependencies: nothing of it is
# installed. Without the second part, tests/sglang runs on pools of its own.
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
version=0.5.23
if [ ! -f build/sglang/wheel/sglang/srt/mem_cache/hicache_storage.py ]; then
    "$python" -m pip download --quiet --no-deps --only-binary :all: --dest build/sglang "sglang==$version"
    "$python" -m zipfile --extract build/sglang/sglang-"$version"-*.whl build/sglang/wheel
fi
if [ ! -d build/sglang/deps/orjson ]; then
    "$python" -m pip install --quiet --no-deps --target build/sglang/deps \
        orjson pybase64 dill loguru apache-tvm-ffi compressed-tensors sentencepiece \
        ipython traitlets decorator prompt_toolkit wcwidth "torchvision==0.28.*"
fi
