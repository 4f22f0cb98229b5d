#!/usr/bin/env bash
# Measure the kernels on a machine with a GPU within some minutes: device times and host overhead, of packages that are
# built already.
#
#     benchmarks/measure_kernels.sh OUT [--minutes 20] [--rounds 9] [--machine h100] [KERNEL...] [-- OPTION...]
#
# It writes OUT/<kernel>.<machine>.json after each point. Each kernel has an equal part of the time that is left, from the
# smallest to the largest. A kernel that is stopped keeps the points that it has measured, and the exit status is 1:
# measure it again by itself. Options after `--` are those of `kernel-builder benchmark`, such as `--only host`.
#
# PYTHON: a Python with Torch and what the builder needs. Peers that are not installed are left out: liger-kernel,
# quack-kernels.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
minutes=20 rounds=9 machine='' out='' kernels=()
while [ $# -gt 0 ]; do
  case $1 in
    --minutes) minutes=$2; shift ;;
    --rounds) rounds=$2; shift ;;
    --machine) machine=$2; shift ;;
    --) shift; break ;;
    -*) echo "unknown option $1" >&2; exit 2 ;;
    *) if [ -z "$out" ]; then out=$1; else kernels+=("$1"); fi ;;
  esac
  shift
done
[ -n "$out" ] || { sed -n '2,5s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
[ ${#kernels[@]} -gt 0 ] || kernels=(decode rope3d rmsnorm geglu adaln)
[ -n "$machine" ] || machine=$("$python" -c 'import re, torch
name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
print(re.search(r"[A-Z]+\d+|CPU", name)[0].lower())')
mkdir -p "$out" && out=$(realpath --relative-to="$root" "$out") && cd "$root"

end=$((SECONDS + minutes * 60)) left=${#kernels[@]} failed=0
for kernel in "${kernels[@]}"; do
  began=$SECONDS limit=$(((end - SECONDS) / left)) left=$((left - 1)) status=0
  timeout --signal=INT --kill-after=20 "$((limit > 0 ? limit : 1))" "$python" -m kernel_builder benchmark \
    "kernels/$kernel" --rounds "$rounds" --json "$out/$kernel.$machine.json" "$@" || status=$?
  echo "$kernel: $((SECONDS - began)) s of $limit s, exit status $status$([ $status -eq 124 ] && echo ', stopped')" >&2
  [ $status -eq 0 ] || failed=1
done
exit $failed
