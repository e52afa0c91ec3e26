#!/bin/bash
# SPDX-License-Identifier: BSD-3-Clause
# Runs tests and benchmarks that need several GPUs of one host, in parts. The arguments name the
# parts, in the order in which they run:
#
#   OUT=folder tools/run_on_gpus.sh SECONDS links checks first training second pairs all_checks
#
# checks and all_checks are tests of tests/distributed. first, training and second are parts of
# benchmarks/bench_distributed.py on all GPUs. pairs runs it on two pairs of GPUs at the same time.
#
# Each part has a time limit, and all end after SECONDS. Logs and results go to $OUT. NVLink multicast
# is off.
set -u
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4 TORCH_NCCL_ASYNC_ERROR_HANDLING=1
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH=$PWD
gpus=$(nvidia-smi -L | grep -c '^GPU')
last=$1
mkdir -p "$OUT"

# part SECONDS NAME COMMAND...
part() {
    local limit=$1 name=$2 left=$((last - SECONDS)) begin=$SECONDS
    shift 2
    if ((left < 8)); then
        echo "$name: not begun, $SECONDS s have passed"
        return
    fi
    timeout -k 5 $((limit < left ? limit : left)) "$@" >"$OUT/$name.log" 2>&1
    echo "$name: rc $?, $((SECONDS - begin)) s"
}
# bench SECONDS NAME GPUS PARTS: results go to $OUT/NAME/
bench() {
    mkdir -p "$OUT/$2"
    part "$1" "$2" python3 -m torch.distributed.run --nproc-per-node "$3" \
        --master-port $((port++)) benchmarks/bench_distributed.py --parts "$4" --out "$OUT/$2"
}
port=29500
checks=mailboxes,products_equal,sums_of,large,in_parts,operands

run_part() {
    case $1 in
    links) part 10 links nvidia-smi topo -m ;;
    checks)
        ONLY=$checks part 45 checks python3 -m pytest -n 0 -q -x -s tests/distributed -p no:cacheprovider \
            -k "mailboxes_of_one_gpu or (several_gpus and $gpus)"
        ;;
    all_checks)
        part 150 all_checks python3 -m pytest -n 0 -q -x -s tests/distributed -p no:cacheprovider \
            -k "several_gpus and $gpus"
        ;;
    first)
        bench 110 first "$gpus" \
            links,products,loss,experts,attention,all_reduce,attention_32k,decode
        ;;
    training) bench 70 training "$gpus" training ;;
    second) bench 60 second "$gpus" attention_128k,crossover ;;
    pairs) # both pairs at the same time; they share no link
        CUDA_VISIBLE_DEVICES=0,1 bench 45 pair0 2 products,all_reduce,loss &
        port=29600
        CUDA_VISIBLE_DEVICES=2,3 bench 45 pair1 2 attention,attention_32k,experts &
        wait
        ;;
    esac
}
for name in "${@:2}"; do run_part "$name"; done
echo "$SECONDS s"
