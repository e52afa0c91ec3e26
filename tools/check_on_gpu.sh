#!/bin/bash
# SPDX-License-Identifier: BSD-3-Clause
# Every check of a CUDA build on one GPU, in parts that run beside each other: check_cuda over all
# instances, the checks of tiles, and `pytest -m gpu`.
#
#   OUT=folder tools/check_on_gpu.sh [SECONDS] [ARGUMENT OF PYTEST ...]     600 seconds, all tests
#
# The tree needs torch_gpukern with its library, tests, tools, and the programs check_cuda* in
# $BUILD (build). A failure is printed when it happens, and what the time limit cut off is named at
# the end. Logs go to $OUT. It exits with 0 if all ran and nothing failed.
#
# Measured before this script (16 cores, H200): 1,650 of 5,222 tests in 600 s. Eight workers with 16
# OpenMP threads each, and four check_cuda with 16 threads each, shared 16 cores. So every process
# here has one thread, and pytest has a worker for each core.
set -u
cd "$(dirname "$0")/.." || exit 1
end=$((${1:-600} - 5)) # the summary takes a few seconds
shift
OUT=$(mkdir -p "${OUT:-build/gpu_check}" && cd "${OUT:-build/gpu_check}" && pwd)
BUILD=${BUILD:-build} PYTHON=${PYTHON:-python3} CORES=${CORES:-$(nproc)} MARK=${MARK-gpu}
PARTS=${PARTS:-$((CORES > 7 ? 4 : 1))} PROBLEMS=${PROBLEMS:-10}
export PYTHONPATH=$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 GPU_REPORT=$OUT
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1
rm -f "$OUT"/{collected,results,failures,pytest.log,pytest.rc} "$OUT"/check_cuda*.{log,rc}
parts=()

# part NAME COMMAND...: in the background, until the time is over; failures are printed at once
part() {
    local name=$1
    shift
    parts+=("$name")
    {
        timeout -k 5 $((end - SECONDS)) "$@" 2>&1 | tee "$OUT/$name.log" |
            grep -a --line-buffered --no-group-separator -A 1 -E '^(FAILED|ERROR) '
        rc=${PIPESTATUS[0]}
        echo "$rc" >"$OUT/$name.rc"
        echo "$name: exit $rc after $SECONDS s"
    } &
}
has() { "$PYTHON" -c "import $1" 2>/dev/null; }

for ((i = 1; i <= PARTS; ++i)); do
    GK_CHECK_PART=$i/$PARTS part "check_cuda$i" "$BUILD/check_cuda" -n "$PROBLEMS" -t 1
done
for program in "$BUILD"/check_cuda_tile "$BUILD"/check_cuda_tile_sm90a; do
    [ -x "$program" ] && part "$(basename "$program")" "$program"
done
options=(-m "$MARK" -q --no-summary -p no:cacheprovider -p gpu_report)
has xdist && options+=(-n "$CORES" --dist worksteal --max-worker-restart 50)
# a thread, because a signal does not interrupt a wait for a kernel that hangs
has pytest_timeout && options+=(--timeout 120 --timeout-method thread)
part pytest "$PYTHON" -m pytest "${options[@]}" "$@"
wait

failed=0
echo "---- $SECONDS s"
for name in "${parts[@]}"; do
    rc=$(cat "$OUT/$name.rc")
    [ "$rc" = 0 ] || failed=1
    [ "$name" = pytest ] && continue
    [ "$rc" = 124 ] && echo "$name: cut off by the time limit, after:"
    echo "$name: exit $rc, $(tail -n 1 "$OUT/$name.log")"
    grep -a '^FAILED' "$OUT/$name.log" | cut -c 1-300 | head -n 20
done
"$PYTHON" tests/gpu_report.py "$OUT" || failed=1
exit $failed
