#!/bin/bash
# SPDX-License-Identifier: BSD-3-Clause
# The benchmarks of one GPU, one after the other, each with a time limit; results go into
# benchmarks/results and, after each benchmark, to $OUT.
#
#   OUT=folder tools/figures_on_gpu.sh SECONDS [NAME ...]      all names, in order of value
#   tools/figures_on_gpu.sh list                               the names, limits and commands
#
# A benchmark begins only if its limit fits into the rest of SECONDS, because a benchmark that is cut
# off stores nothing (its rows are in its log). Peers take part if they can be imported:
# FlashAttention-3 and 4, FlashInfer, FlashMLA, quack, Liger. Nothing else may run on the GPU
# meanwhile.
set -u
cd "$(dirname "$0")/.." || exit 1
PYTHON=${PYTHON:-python3} DEVICE=${DEVICE:-cuda}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

# name, seconds, arguments. A limit is twice the time that the same rows took before. The limits of
# the last five names are guesses, and so are those of benchmarks whose peers compile:
# FlashAttention-4 and quack take 3 to 10 s for each new kernel.
table() {
    cat <<'END'
attn 330 bench_flash_attn.py --quick --compiled some
masks 330 bench_attn_masks.py --quick
paged 130 bench_paged_attn.py --quick
scaled 110 bench_scaled_gemm.py --quick
gemm 200 bench_gemm.py --quick --budget 1000 --quack none
sparse 60 bench_sparse_gemm.py --quick
grouped 100 bench_grouped_gemm.py --quick
attn_fp8 90 bench_flash_attn_fp8.py --quick
weight 90 bench_weight_gemm.py --quick
gemm_quack 400 bench_gemm.py --quick --budget 1000 --quack default
train 60 bench_train.py --quick --compile
rows 150 bench_rows.py --quick --compile
rows_peers 150 bench_rows.py --quick --compile --peers
sample 90 bench_sample_tokens.py --quick
claims 60 ../learn/benchmarks/bench_claims.py
moe 90 bench_moe.py --quick
recipes 300 bench_recipes.py --quick
END
}
if [ "${1:-list}" = list ]; then
    table
    exit
fi
total=$1
shift
[ $# -gt 0 ] || mapfile -t names < <(table | cut -d ' ' -f 1)
[ $# -gt 0 ] && names=("$@")
OUT=$(mkdir -p "${OUT:-build/gpu_figures}" && cd "${OUT:-build/gpu_figures}" && pwd)
not_run=() failed=()
for name in "${names[@]}"; do
    read -r _ limit arguments < <(table | grep "^$name ") || {
        echo "$name: no such benchmark; tools/figures_on_gpu.sh list names them" >&2
        exit 2
    }
    if ((limit > total - SECONDS)); then
        not_run+=("$name")
        continue
    fi
    begin=$SECONDS
    touch "$OUT/began"
    # word splitting is wanted: the arguments are words
    # shellcheck disable=SC2086
    timeout -k 5 "$limit" "$PYTHON" benchmarks/$arguments --device "$DEVICE" --save >"$OUT/$name.log" 2>&1
    rc=$?
    [ $rc = 0 ] || failed+=("$name")
    echo "==== $name: exit $rc after $((SECONDS - begin)) s of $limit"
    grep -aE 'geomean|results:|left out|Error' "$OUT/$name.log" | cut -c 1-150 | tail -n 12
    [ $rc = 0 ] || tail -n 5 "$OUT/$name.log"
    find benchmarks/results -name '*.csv' -newer "$OUT/began" -exec cp {} "$OUT"/ \;
    rm "$OUT/began"
done
echo "---- $SECONDS s; failed or cut off: ${failed[*]:-none}; not begun: ${not_run[*]:-none}"
[ ${#failed[@]} = 0 ]
