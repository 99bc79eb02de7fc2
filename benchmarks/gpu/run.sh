#!/usr/bin/env bash
# All that evenload can show on one CUDA machine, in one call and under eight minutes: every `-m gpu` test, attention
# kernels, decode steps, experts with copies, slices, chunks of a stage, the places of a ring, offload, exactness and
# speed through both trainers, the costs of the card (recipes/costs/<card>.yaml), one JSON file.
#
#   benchmarks/gpu/run.sh [--out result.json] [--limit seconds] [--dry-run]
#
# Wants a python3 (PYTHON names another) with a CUDA build of torch. What else is lacking is installed from a folder of
# wheels, WHEELS=folder, into a place that is removed at the end; the checkout itself needs no installation. Wheels for
# such a machine are collected on one with a network, python version and platform being those of the GPU machine:
#
#   python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
#       --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
#       -d wheels -r benchmarks/gpu/wheels.txt
#   python3 -m pip wheel --no-deps -w wheels deepspeed==0.19.8     # published as source only
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
mkdir "$site/wheels"
ln -s "$root" "$site/evenload"
export PYTHONPATH="$site:$site/wheels${PYTHONPATH:+:$PYTHONPATH}"
"${PYTHON:-python3}" -P "$root/benchmarks/gpu/stages.py" --site "$site/wheels" "$@"
