#!/usr/bin/env bash
# Core and the kit with the oldest torch, and the oldest of everything else, that they admit. Downloads several GB.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONPATH

environment=.venv-oldest
"${PYTHON:-python3.11}" -m venv "$environment"
"$environment/bin/python" -m pip install -q ${PIP_ARGS:-} torch==2.6.0 numpy safetensors pytest-randomly \
  attrs==24.1.0 packaging==24.0 platformdirs==4.0.0 pluggy==1.7.0 rich==13.0.0 pytest==8.2.0 hypothesis==6.100.0
"$environment/bin/python" -m pip install -q --no-deps -e core -e kit
export OMP_NUM_THREADS=1
"$environment/bin/python" -m pytest -q core/tests/{contract,ops,batching,torch_backend}
"$environment/bin/python" -m pytest -q --pyargs attnplug_kit --attn-backend=torch/sdpa
