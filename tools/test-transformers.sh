#!/usr/bin/env bash
# The continuous batching of hosts/transformers beside older releases of transformers, each in a folder in front of what
# .venv has. Arguments are pytest's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONPATH

python=.venv/bin/python
read -ra pip_args <<<"${PIP_ARGS:-}"
declare -A overlays=(
  # It measures the memory of a CPU by psutil, and wants an older hub, which wants httpx.
  [5.17.0]="transformers==5.17.0 psutil==7.2.2 huggingface-hub==1.33.0 httpx==0.28.1 httpcore==1.0.9"
  [5.23.0]="transformers==5.23.0"
)

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "skipped: other releases of transformers beside that of .venv, which has the one for Python 3.10"
  exit 0
}

export OMP_NUM_THREADS=1
failed=0
for release in "${!overlays[@]}"; do
  echo "hosts/transformers beside transformers $release"
  overlay=.venv/overlays/transformers-$release
  if [ ! -e "$overlay/.ready" ]; then
    read -ra packages <<<"${overlays[$release]}"
    "$python" -m pip --disable-pip-version-check -qq install --no-deps --upgrade "${pip_args[@]}" --target "$overlay" "${packages[@]}"
    touch "$overlay/.ready"
  fi
  PYTHONPATH="$overlay" "$python" -m pytest -q hosts/transformers/tests/test_continuous.py tests/hosts/test_continuous_batching.py "$@" || failed=1
done
exit $failed
