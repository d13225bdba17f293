#!/usr/bin/env bash
# The kernels of plugins/triton compiled by the oldest release of Triton that the plugin admits, and by the newest on the index:
# .venv has the pinned one. A release is downloaded once, 200 MB, into the folder HOSTS_CACHE, which clones may share.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONPATH

CACHE=$(realpath -m "${HOSTS_CACHE:-.venv-hosts}")
python=$PWD/.venv/bin/python
read -ra pip_args <<<"${PIP_ARGS:-}"
pip=("$python" -m pip --disable-pip-version-check)
oldest=$(sed -nE 's/^requires = \["triton >=([0-9.]+)"\]$/\1/p' plugins/triton/src/attnplug_triton/attnplug.toml).0
newest=$("${pip[@]}" index versions "${pip_args[@]}" triton | sed -nE '1s/^triton \((.*)\)$/\1/p')

for version in "$oldest" "$newest"; do
  folder=$CACHE/triton-$version
  if [ ! -e "$folder/.ready" ]; then
    rm -rf "$folder"
    "${pip[@]}" install --quiet "${pip_args[@]}" --no-deps --target "$folder" "triton==$version"
    touch "$folder/.ready"
  fi
  echo "Triton $version"
  PYTHONPATH=$folder "$python" -m pytest -q -n "${WORKERS:-auto}" plugins/triton/tests/test_compile.py "$@"
done
