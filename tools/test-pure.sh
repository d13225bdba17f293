#!/usr/bin/env bash
# The parts of core that need no torch: on the oldest Python with the oldest dependencies that core admits, and on the
# newest Python with the newest. A Python that this machine does not have is skipped, and said to be.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
unset PYTHONPATH

tests=(core/tests/{request,manifest,negotiation,discovery,selection})
oldest=(attrs==24.1.0 packaging==24.0 platformdirs==4.0.0 pluggy==1.7.0 rich==13.0.0 pytest==8.2.0 hypothesis==6.100.0)
newest=(attrs packaging platformdirs pluggy rich pytest hypothesis)

find_python() { # on PATH (a shim may exist and not run), else the newest that pyenv has
  if "python$1" -c '' 2>/dev/null; then
    command -v "python$1"
  else
    find "${PYENV_ROOT:-$HOME/.pyenv}/versions" -path "*/$1.*/bin/python" 2>/dev/null | sort -V | tail -1
  fi
}

pure() { # VERSION REQUIREMENT...
  local python environment status
  python=$(find_python "$1")
  if [ -z "$python" ]; then
    echo "skipped: the tests without torch on Python $1, which this machine does not have"
    return 0
  fi
  echo "the tests without torch on Python $1: ${*:2}"
  environment=$(mktemp -d)
  # The kit stays out: its pytest plugin would be loaded, and the kit depends on torch.
  "$python" -m venv "$environment" &&
    "$environment/bin/python" -m pip install -qq ${PIP_ARGS:-} "${@:2}" pytest-randomly &&
    "$environment/bin/python" -m pip install -qq --no-deps -e core &&
    OMP_NUM_THREADS=1 "$environment/bin/python" -m pytest -q -p no:cacheprovider -m "not slow" "${tests[@]}"
  status=$?
  rm -rf "$environment"
  return $status
}

failed=0 # both at the same time: each is one process
log=$(mktemp)
trap 'rm -f "$log"' EXIT
pure 3.10 "${oldest[@]}" tomli==2.0.0 >"$log" 2>&1 &
pure 3.13 "${newest[@]}" || failed=1
wait $! || failed=1
cat "$log"
exit $failed
