#!/usr/bin/env bash
# Everything that needs a GPU, in steps of at most eight minutes: tests on the real device, the kernel
# sweep, decoding at two real models' shapes.
#
#   bench/gpu_suite.sh --out DIR           all steps, on a machine with a GPU
#   bench/gpu_suite.sh --out DIR STEP...   some of them; what others have left in DIR stays
#   bench/gpu_suite.sh --list              their names, in order
#   bench/gpu_suite.sh --out DIR --smoke   the same steps, tiny, on any machine
#
# Needs a Python with torch, Triton, transformers and pytest; the package need not be installed.
# PYTHON names another interpreter than python3. Each step has its own time limit and log in DIR;
# a step that fails costs no other. Exit status: 0 when all passed, 1 when one failed, 2 when called
# wrongly.
set -uo pipefail

usage() {
    echo "gpu_suite.sh: $1; usage: gpu_suite.sh --out DIR [--smoke] [STEP...]" >&2
    exit 2
}

steps=(environment check tests-cuda tests-attention tests-triton tests-ops kernels kernels-cuda
    kernels-triton winners decode-llama-3.1-8b decode-qwen3-8b)
smoke_steps=(environment tests kernels kernels-cpu kernels-reference winners decode-tiny)
out="" smoke="" wanted=()
while [ $# -gt 0 ]; do
    case "$1" in
        --out) [ $# -ge 2 ] || usage "--out needs a directory"; out="$2"; shift 2 ;;
        --smoke) smoke=1; shift ;;
        --list) printf '%s\n' "${steps[@]}"; exit 0 ;;
        [a-z]*) wanted+=("$1"); shift ;;
        *) usage "unknown argument '$1'" ;;
    esac
done
[ -n "$out" ] || usage "--out is missing"
[ -z "$smoke" ] || steps=("${smoke_steps[@]}")
for name in "${wanted[@]+"${wanted[@]}"}"; do
    [[ " ${steps[*]} " == *" $name "* ]] || usage "unknown step '$name', not one of ${steps[*]}"
done
mkdir -p "$out" 2>/dev/null && out="$(cd "$out" && pwd)" || usage "cannot write to '$out'"
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-python3}"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1

# An installation does what setup.py says; a folder of links does the same and needs no installer.
package="$(mktemp -d)"
trap 'rm -rf "$package"' EXIT
mkdir "$package/specattn"
ln -s "$PWD"/python/specattn/* "$PWD/reference" "$PWD/triton_kernels" "$package/specattn/"
export PYTHONPATH="$package${PYTHONPATH:+:$PYTHONPATH}"

failed=0 ran=()
touch "$out/summary.txt"

is_wanted() { [ ${#wanted[@]} -eq 0 ] || [[ " ${wanted[*]} " == *" $1 "* ]]; }

# step NAME SECONDS COMMAND...: run within a limit if wanted, keep the output, note the outcome.
# The interrupt lets pytest and the sweep report what they finished.
step() {
    local name="$1" limit="$2" start=$SECONDS status verdict
    shift 2
    is_wanted "$name" || return 0
    ran+=("$name")
    sed -i "/^$name /d" "$out/summary.txt"
    [ -z "$smoke" ] || limit=900  # any machine may be busy: only what hangs takes so long
    echo "== $name (at most ${limit} s)"
    timeout --signal=INT --kill-after=15 "$limit" "$@" >"$out/$name.log" 2>&1
    status=$?
    case $status in
        0) verdict=passed ;;
        124 | 137) verdict="ran past its limit" ;;
        *) verdict="failed with status $status" ;;
    esac
    [ $status -eq 0 ] || { failed=1; tail -n 15 "$out/$name.log"; }
    printf '%-20s %4d s  %s\n' "$name" $((SECONDS - start)) "$verdict" | tee -a "$out/summary.txt"
}

# Kernels compile side by side where pytest-xdist is installed.
pytest=("$PYTHON" -m pytest -p no:cacheprovider --tb=short -rfE)
if [ -z "$smoke" ] && "$PYTHON" -c 'import xdist' 2>/dev/null; then pytest+=(-n 8); fi
if [ -n "$smoke" ]; then
    kernels=(--quick --shape tiny --context 256 --rows 1,4 --budget 0.01)
    shapes=(tiny)
    against=(cpu reference)
    export SPECATTN_CACHE="$out/cache"
    decode=(--layers 1 --context 256 --new-tokens 8 --repeats 1 --budget 0.01)
else
    kernels=(--quick --device cuda --shape llama-3.1-8b --context 32k,128k --rows 1,16,64 --batch 1,8
        --budget 0.3)
    shapes=(llama-3.1-8b qwen3-8b)
    against=(cuda triton)
    decode=(--device cuda --context 32k,128k --new-tokens 64 --repeats 2 --budget 1)
fi

step environment 60 "$PYTHON" -c '
import sys, torch, specattn
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, {gpu}")
print(f"specattn from {specattn.__file__}")
print(f"backends {specattn.backends()}")'
is_there() { "$PYTHON" -c 'import sys, specattn; sys.exit(specattn.backends()[sys.argv[1]] != "available")' "$1"; }
if [ -n "$smoke" ]; then
    step tests 200 "${pytest[@]}" tests/ops/test_checks.py
else
    step check 240 "$PYTHON" -m specattn.cli gpu-check
    if is_wanted tests-cuda && is_there cuda; then
        step tests-cuda 300 "${pytest[@]}" tests/backends/test_cuda_device.py
    fi
    step tests-attention 480 "${pytest[@]}" tests/triton_kernels/test_attention.py
    # Compiling for other GPUs needs none: CI does it.
    step tests-triton 480 "${pytest[@]}" tests/triton_kernels \
        --ignore tests/triton_kernels/test_compile.py --ignore tests/triton_kernels/test_attention.py
    step tests-ops 480 "${pytest[@]}" tests/ops
fi
step kernels 300 "$PYTHON" bench/run_kernels.py "${kernels[@]}" --json "$out/kernels.jsonl" \
    --pictures "$out"
# Every backend on all that it serves, against the others: from then on the fastest are chosen here.
for backend in "${against[@]}"; do
    if ! is_wanted "kernels-$backend" || ! is_there "$backend"; then continue; fi
    step "kernels-$backend" 300 "$PYTHON" bench/run_kernels.py "${kernels[@]}" --peers varlen \
        --backend "$backend" --only hybrid_tree_attention --only verify_attention \
        --only sparse_gather_attention \
        --json "$out/kernels-$backend.jsonl"
done
sweeps=("$out"/kernels-*.jsonl)
if [ ${#sweeps[@]} -gt 1 ]; then
    step winners 30 "$PYTHON" bench/winners.py "${sweeps[@]}"
fi
# Random weights: the time of every round is real, what is accepted is drawn, and every line says so.
for shape in "${shapes[@]}"; do
    is_wanted "decode-$shape" || continue
    rm -f "$out/decode-$shape.jsonl"
    step "decode-$shape" 240 "$PYTHON" bench/run_decoding.py --shape "$shape" --random-weights \
        --acceptance vegas-qwen3-8b --temperature 0 --texts 1 --passes "${decode[@]}" \
        --json "$out/decode-$shape.jsonl" --pictures "$out/decode-$shape"
done

for name in "${ran[@]+"${ran[@]}"}"; do
    case "$name" in environment | check | kernels | decode-*) echo; cat "$out/$name.log" ;; esac
done
echo
cat "$out/summary.txt"
exit $failed
