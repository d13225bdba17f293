#!/usr/bin/env bash
# The tests of hosts/sglang beside SGLang: whole engines of 0.5.23 on the CPU, then the Python code of 0.5.15 and 0.5.20. The
# environment is made once for each content of requirements-sglang.txt and of this file.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONPATH

PYTHON=${PYTHON:-python3}
CACHE=${HOSTS_CACHE:-.venv-hosts}
read -ra pip_args <<<"${PIP_ARGS:-}"
# 0.5.15 registers a model that newer releases of transformers have themselves; that release wants these.
declare -A overlays=([0.5.15]="sglang==0.5.15 transformers==5.12.1 tokenizers==0.22.2 huggingface-hub==1.5.0" [0.5.20]="sglang==0.5.20")

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "hosts/sglang needs Python 3.11 or newer, and '$PYTHON' is $("$PYTHON" --version 2>/dev/null || echo missing)." \
    "Name a newer one: make PYTHON=python3.12 test-hosts" >&2
  exit 1
}

hash_of() { "$PYTHON" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest()[:16])'; }

environment="$PWD/$CACHE/sglang-$({ "$PYTHON" --version; cat requirements-sglang.txt tools/test-hosts-sglang.sh; } | hash_of)"
[ "${CACHE#/}" = "$CACHE" ] || environment=${environment#"$PWD/"}
python="$environment/bin/python"
install() { "$python" -m pip --disable-pip-version-check -qq install --no-compile --no-deps "${pip_args[@]}" "$@"; }

if [ ! -e "$environment/.ready" ]; then
  echo "setting up $environment (minutes, and 2.5 GB)"
  rm -rf "$environment"
  "$PYTHON" -m venv "$environment"
  install -r requirements-sglang.txt
  for version in "${!overlays[@]}"; do
    read -ra packages <<<"${overlays[$version]}"
    install --target "$environment/overlays/$version" "${packages[@]}"
  done
  touch "$environment/.ready"
fi

# The workspace, as a user would have it; once more where the metadata of a distribution changed.
distributions=(core kit hosts/sglang plugins/*)
workspace="$environment/.workspace-$({ pwd; cat "${distributions[@]/%//pyproject.toml}"; } | hash_of)"
if [ ! -e "$workspace" ]; then
  install --no-build-isolation "${distributions[@]/#/-e./}"
  rm -f "$environment"/.workspace-*
  touch "$workspace"
fi

export OMP_NUM_THREADS=1
unset PYTHONDONTWRITEBYTECODE
coverage=("$python" -m coverage)
measure=("${coverage[@]}" run --rcfile=hosts/sglang/pyproject.toml -m pytest hosts/sglang/tests)
rm -f .coverage-sglang*
failed=0
echo "hosts/sglang beside SGLang 0.5.23"
"${measure[@]}" "$@" || failed=1
for version in "${!overlays[@]}"; do
  echo "hosts/sglang beside the Python code of SGLang $version"
  PYTHONPATH="$environment/overlays/$version" "${measure[@]}" -m 'not slow' "$@" || failed=1
done
"${coverage[@]}" combine --rcfile=hosts/sglang/pyproject.toml --quiet
"${coverage[@]}" report --rcfile=hosts/sglang/pyproject.toml || failed=1
exit $failed
