#!/usr/bin/env bash
# What a machine with GPUs is to show of this library, in stages:
#
#   benchmarks/gpus.sh FOLDER [STAGE ...]      stages: kernels suite psum matmuls models soak
#
# FOLDER gets a log of each step, and the records as JSON; a line for each step comes last. A
# step that fails, or is stopped by its limit, does not end the others. With several GPUs one
# process has them all; `RANKS=8 benchmarks/gpus.sh ...` makes that many processes of one GPU
# each, several on a GPU where there are fewer. Needs an installed jax_overlap, built for tests
# (CONTRIBUTING.md), and for the kernels what `make cuda` makes.
set -uo pipefail
mkdir -p "${1:?folder for logs and records}"
OUT=$(realpath "$1")
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONUNBUFFERED=1
# For large matmuls; the default does for all else.
readonly LARGE_HEAP=8589934592
readonly WINDOWED="--xla_gpu_threshold_for_windowed_einsum_mib=0 --xla_gpu_multi_streamed_windowed_einsum=true"
readonly PROGRAMS=${PROGRAMS:-out/cuda13}
export OUT PYTHON=${PYTHON:-python3}

ranks() {  # of one process, or of several
  local limit=$1
  shift
  if [[ -n "${RANKS:-}" ]]; then
    "$PYTHON" -P -m jax_overlap.testing.launch -n "$RANKS" --timeout "$limit" --output "$OUT/ranks" -- "$@"
  else
    JAX_PLATFORMS=cuda "$@"
  fi
}

summary=()
failed=0

# step NAME LIMIT_S COMMAND...
step() {
  local name=$1 limit=$2 start=$SECONDS code=0 last
  shift 2
  timeout --kill-after=20 "$((limit + 20))" bash -c "$(declare -f ranks)"'; ranks "$@"' - "$limit" "$@" \
    </dev/null >"$OUT/$name.log" 2>&1 || code=$?
  ((code == 0)) || failed=1
  last=$(grep -v '^$' "$OUT/$name.log" | tail -1 | cut -c1-110)
  summary+=("$(printf '%-22s %4d s  exit %3d  %s' "$name" $((SECONDS - start)) "$code" "$last")")
}
program() {  # of C++, which has all GPUs in one process
  local name=$1 limit=$2
  shift 2
  RANKS='' CUDA_DEVICE_MAX_CONNECTIONS=32 step "$name" "$limit" "$PROGRAMS/$name" "$@"
}
suite() {
  local name=$1 limit=$2
  shift 2
  JAX_OVERLAP_WAIT_TIMEOUT_S=${JAX_OVERLAP_WAIT_TIMEOUT_S:-20} step "$name" "$limit" \
    "$PYTHON" -P -m pytest -q -rf -p no:cacheprovider "$@"
}
bench() {
  local name=$1 limit=$2
  shift 2
  step "$name" "$limit" "$PYTHON" -P -m jax_overlap.bench "$@" --gpu --json "$OUT/$name.json"
}

kernels() {
  program psum_cuda_test 90
  program matmul_cuda_test 120
  program psum_cuda_bench 60
  program link_cuda_bench 60
  program matmul_link_cuda_bench 60
}
tests() {
  suite suite_psum 150 tests/gpu/psum_test.py tests/gpu/psum_gpu_test.py
  local op
  for op in matmul_reduce_scatter all_gather_matmul matmul_all_reduce matmuls_by_psum matmuls_gpu matmuls_huge; do
    suite "suite_$op" 240 "tests/gpu/${op}_test.py"
  done
  local faults
  for faults in psum matmuls; do
    RANKS='' suite "suite_${faults}_faults" 400 "tests/gpu/${faults}_faults_test.py"
  done
}
psums() {
  local -x JAX_OVERLAP_HEAP_BYTES=$LARGE_HEAP  # the programs have 480 calls, each with a part of it
  bench psum 240 psum --dtype bfloat16 --sizes 1K 8K 64K 256K 1M 2M 4M --algorithms auto one_shot two_shot
  XLA_FLAGS="--xla_gpu_experimental_use_collective_kernels=ALL_REDUCE" \
    bench psum_xla_kernels 120 psum --dtype bfloat16 --sizes 8K 256K 2M
  bench psum_large 150 psum --dtype bfloat16 --sizes 16M 256M 1G --rounds 2
}
matmuls() {
  local -x JAX_OVERLAP_HEAP_BYTES=$LARGE_HEAP
  bench matmul_reduce_scatter 240 matmul_reduce_scatter --rounds 11
  XLA_FLAGS=$WINDOWED bench all_gather_matmul 300 all_gather_matmul --rounds 11 --peers xla_windowed pallas
  bench small_rows 120 matmul_reduce_scatter --rounds 11 --shapes 64x8192x8192 512x8192x8192 \
    --algorithms auto sliced by_psum
  bench matmul_all_reduce 150 matmul_all_reduce --rounds 11 --models llama-70b --rows 16 64 256 \
    --algorithms auto sliced by_psum
}
models() {
  JAX_OVERLAP_HEAP_BYTES=$LARGE_HEAP step llama_block 300 \
    "$PYTHON" -P examples/llama_block.py --model 70b --tokens 2048 --decode --repeats 20 \
    --json "$OUT/llama_block.json"
  step llama_decode 200 "$PYTHON" -P examples/llama_block.py --model 70b --tokens 0 --decode 1 8 64 \
    --in-flight 50 --json "$OUT/llama_decode.json"
}
soak() {
  JAX_OVERLAP_WAIT_TIMEOUT_S=20 step soak 560 "$PYTHON" -P -m jax_overlap.testing.soak --minutes 8
}

for stage in "${@:-kernels suite psum matmuls models soak}"; do
  for one in $stage; do
    case $one in
      kernels | matmuls | models | soak) "$one" ;;
      suite) tests ;;
      psum) psums ;;
      *)
        echo "unknown stage: $one" >&2
        exit 2
        ;;
    esac
  done
done
printf '%s\n' "${summary[@]}"
exit "$failed"
