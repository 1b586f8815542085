#!/usr/bin/env bash
# Everything that needs a GPU, in steps of at most 90 seconds, what tells most first: are the kernels
# right, passes of an 8B model, texts, decoding with such a model, attention beside other libraries,
# training, tests.
#
#   bench/gpu_suite.sh --out DIR             all steps, on a machine with a GPU
#   bench/gpu_suite.sh --out DIR STEP...     some of them; what others have left in DIR stays
#   bench/gpu_suite.sh --list                their names, in order
#   bench/gpu_suite.sh --commands [STEP...]  what they would run, each a line; runs nothing
#   bench/gpu_suite.sh --out DIR --smoke     the same steps, tiny, on any machine
#
# Needs a Python with torch, Triton, transformers and pytest; the package need not be installed.
# PYTHON names another interpreter than python3. Each step has its own time limit and log in DIR;
# a step that fails costs no other. Exit status: 0 when all passed, 1 when one failed, 2 when called
# wrongly.
set -uo pipefail
from="$PWD"

usage() {
    echo "gpu_suite.sh: $1; usage: gpu_suite.sh --out DIR [--smoke] [STEP...]" >&2
    exit 2
}

cd "$(dirname "$0")/.."
decoded=(greedy blocks codes sampled batch codes-32k greedy-32k more batch-sampled batch-more
    more-sampled)
chains=(chains chains-long chains-batch chains-batch-long)
sweeps=(4k 32k 128k batch)
tests=()
for file in tests/triton_kernels/test_*.py tests/ops/test_*.py tests/backends/test_*_device.py \
    $(grep -rlE '^@?pytest.mark.gpu$|marks=pytest.mark.gpu\)' tests --include='test_*.py' |
        grep -vE '^tests/(triton_kernels|ops|backends)/' | LC_ALL=C sort); do
    # Compiling for other GPUs needs none: CI does it.
    [[ "$file" == */test_compile.py ]] || tests+=("$file")
done
named() { local name="${1#tests/}"; name="${name%.py}"; echo "tests-${name//\//-}"; }
test_steps=()
for file in "${tests[@]}"; do test_steps+=("$(named "$file")"); done
steps=(environment check body texts texts-trained body-codes widen "${decoded[@]/#/decode-}" "${chains[@]}"
    passes between trees body-cache body-batch body-modules prefill "${sweeps[@]/#/kernels-}" weights
    train kernels-cuda kernels-triton winners "${test_steps[@]}")
smoke_steps=(environment tests body prefill kernels kernels-cpu kernels-reference winners decode-tiny)
out="" smoke="" commands="" wanted=()
while [ $# -gt 0 ]; do
    case "$1" in
        --out) [ $# -ge 2 ] || usage "--out needs a directory"; out="$2"; shift 2 ;;
        --smoke) smoke=1; shift ;;
        --commands) commands=1; out=OUT; shift ;;
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
if [ -z "$commands" ]; then
    [[ "$out" == /* ]] || out="$from/$out"
    mkdir -p "$out" 2>/dev/null && [ -w "$out" ] || usage "cannot write to '$out'"
fi
PYTHON="${PYTHON:-python3}"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1

# An installation does what setup.py says; a folder of links does the same and needs no installer.
package="$(mktemp -d)"
trap 'rm -rf "$package"' EXIT
mkdir "$package/specattn"
ln -s "$PWD"/python/specattn/* "$PWD/reference" "$PWD/triton_kernels" "$package/specattn/"
export PYTHONPATH="$package${PYTHONPATH:+:$PYTHONPATH}"

failed=0 ran=()
[ -n "$commands" ] || touch "$out/summary.txt"

is_wanted() { [ ${#wanted[@]} -eq 0 ] || [[ " ${wanted[*]} " == *" $1 "* ]]; }

# step NAME SECONDS COMMAND...: run within a limit if wanted, keep the output, note the outcome.
# The interrupt lets pytest and the sweep report what they finished.
step() {
    local name="$1" limit="$2" start=$SECONDS status verdict
    shift 2
    is_wanted "$name" || return 0
    if [ -n "$commands" ]; then
        printf '%s' "$name"
        printf ' %q' "$@"
        echo
        return 0
    fi
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
if [ -z "$smoke$commands" ] && "$PYTHON" -c 'import xdist' 2>/dev/null; then pytest+=(-n 8); fi
if [ -n "$smoke" ]; then
    kernels=(--quick --shape tiny --context 256 --rows 1,4 --budget 0.01)
    against=(cpu reference)
    export SPECATTN_CACHE="$out/cache"
    decode=(--layers 1 --context 256 --new-tokens 8 --repeats 1 --budget 0.01)
else
    kernels=(--quick --device cuda --shape llama-3.1-8b --rows 1,4,8,16,64 --budget 0.2)
    against=(cuda triton)
fi
body=("$PYTHON" bench/studies/body.py --json "$out/body.jsonl")
prefill=("$PYTHON" bench/studies/prefill.py --json "$out/prefill.jsonl")

step environment 30 "$PYTHON" -c '
import sys, torch, specattn
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, {gpu}")
print(f"specattn from {specattn.__file__}")
print(f"backends {specattn.backends()}")'
is_there() {
    [ -n "$commands" ] || "$PYTHON" -c '
import sys, specattn
sys.exit(specattn.backends()[sys.argv[1]] != "available")' "$1"
}
if [ -n "$smoke" ]; then
    step tests 90 "${pytest[@]}" tests/ops/test_checks.py
    step body 90 "${body[@]}" --shape tiny --dtype float32 --context 64 --rows 1,4 --budget 0.01
    step prefill 90 "${prefill[@]}" --shape tiny --dtype float32 --context 64 --budget 0.01
    step kernels 90 "$PYTHON" bench/run_kernels.py "${kernels[@]}" --json "$out/kernels.jsonl" \
        --pictures "$out"
else
    step check 90 "$PYTHON" -m specattn.cli gpu-check --budget 75 --no-times
    large=("${body[@]}" --device cuda --shape llama-3.1-8b)
    step body 90 "${large[@]}" --context 512,32k --rows 1,8,16,64,200
    # Greedy texts in float32, where they must be plain decoding's, token for token. Drafts are of given
    # sizes: of so few tokens a method that sizes itself may draft nothing.
    texts=("$PYTHON" bench/run_decoding.py --device cuda --dtype float32 --no-peer --resume
        --context 512 --temperature 0 --new-tokens 48 --texts 1 --repeats 1)
    sparse="gamma=4,min_tokens=64"
    step texts 90 "${texts[@]}" --json "$out/texts.jsonl" --method auto --method suffix:nodes=24 \
        --method prompt_lookup:gamma=7 --method token_recycling:nodes=24 --method cast:gamma=4 \
        --method "vegas:$sparse" --method "vegas:$sparse,weights=int4" --method "quest:$sparse" \
        --method "streaming:$sparse" --method "specextend:$sparse" --method "triforce:$sparse"
    given="depth=5,total_tokens=24"
    step texts-trained 90 "${texts[@]}" --json "$out/texts-trained.jsonl" --method "longspec:widths=[2,2,2]" \
        --method "poss:$given" --method "eagle3:$given" --method "mtp:$given" --method dflash:width=1,depth=5 \
        --method jetflow:total_tokens=64 --method "medusa:widths=[2,2]" --method "tokenswift:widths=[1,2]"
    step body-codes 90 "${large[@]}" --context 512 --rows 1,16,64,128 --quantize int4,int8,fp8
    # A checkpoint of real size whose drafts are accepted as the embedded target's are.
    step widen 90 "$PYTHON" -m specattn.cli widen tiny build/wide/llama-3.1-8b --like llama-3.1-8b
    decode=("$PYTHON" bench/run_decoding.py --model build/wide/llama-3.1-8b --device cuda --no-peer
        --texts 1 --repeats 1 --resume)
    poss=(--method "poss:width=3,depth=5,total_tokens=24")
    fixed=("${poss[@]}" --method "longspec:widths=[2,2,2]")
    eagle=(--method "eagle3:width=4,depth=6,total_tokens=24" --method eagle3)
    sized=(--method auto --method poss --method longspec --method suffix)
    further=("${eagle[@]}" --method vegas --method "tokenswift:widths=[1,2]")
    more=(--method "mtp:$given" --method mtp --method "medusa:widths=[2,2]" --method medusa
        --method prompt_lookup:gamma=7 --method token_recycling:nodes=24 --method quest:gamma=4
        --method streaming:gamma=4 --method specextend:gamma=4 --method triforce:gamma=4)
    blocks=(--method "jetflow:total_tokens=64,window=512" --method "jetflow:total_tokens=128,window=512"
        --method "jetflow:total_tokens=256,window=512" --method "jetflow:window=512" --method jetflow
        --method "dflash:width=1")
    int4="weights=int4,min_tokens=1024"
    for name in "${decoded[@]}"; do
        case "$name" in
            greedy) how=(--context 4k --temperature 0 "${fixed[@]}" "${sized[@]}" "${further[@]}") ;;
            sampled) how=(--context 4k --temperature 1 "${fixed[@]}" "${sized[@]}" "${further[@]}") ;;
            blocks) how=(--context 4k --temperature 0 "${blocks[@]}") ;;
            codes) how=(--context 512,4k --temperature 0,1 --new-tokens 256 --method cast
                --method cast:gamma=5 --method auto) ;;
            codes-32k) how=(--context 31k --temperature 0 --batch 1,4 --method "vegas:$int4"
                --method "vegas:gamma=6,switch=False,$int4") ;;
            batch) how=(--context 4k --temperature 0 --batch 8 "${fixed[@]}" "${sized[@]}") ;;
            batch-sampled) how=(--context 4k --temperature 1 --batch 8 "${fixed[@]}" "${sized[@]}") ;;
            batch-more) how=(--context 4k --temperature 0 --batch 8 "${further[@]}" --method cast
                --method "jetflow:total_tokens=24,window=512" --method "mtp:$given"
                --method "medusa:widths=[2,2]") ;;
            greedy-32k) how=(--context 31k --temperature 0 "${fixed[@]}" "${sized[@]}") ;;
            more) how=(--context 4k --temperature 0 "${more[@]}") ;;
            more-sampled) how=(--context 4k --temperature 1 "${more[@]}") ;;
        esac
        step "decode-$name" 90 "${decode[@]}" "${how[@]}" --json "$out/decode-$name.jsonl"
    done
    # Attention beside other libraries: FlashAttention of every version, FlashInfer (which compiles first).
    beside=("${kernels[@]}" --only hybrid_tree_attention --peers sdpa)
    others=(--peers flash-attn-3 --peers flash-attn-4 --peers flash-attn-2)
    for name in "${chains[@]}"; do
        case "$name" in
            chains) how=(--context 4k,8k) ;;
            chains-long) how=(--context 32k,128k) ;;
            chains-batch) how=(--context 4k,8k --batch 8) ;;
            chains-batch-long) how=(--context 32k,128k --batch 8) ;;
        esac
        step "$name" 90 "$PYTHON" bench/run_kernels.py "${beside[@]}" "${others[@]}" "${how[@]}" \
            --rows 1,4,8,16,32,64 --variant chain --json "$out/$name.jsonl"
    done
    # A round's passes one by one: of all layers, what scores cost and what selecting does.
    step passes 90 "$PYTHON" bench/run_decoding.py --shape llama-3.1-8b --random-weights --device cuda \
        --acceptance vegas-qwen3-8b --context 32k --temperature 0 --texts 1 --repeats 1 --new-tokens 32 \
        --no-peer --resume --method vegas:gamma=6 --passes --budget 10 --json "$out/passes.jsonl"
    # A round around passes that return at once: a layer is enough, with a real vocabulary.
    step between 90 "$PYTHON" bench/studies/between_passes.py --shape llama-3.1-8b --layers 1 \
        --device cuda --batch 1,8 --method plain --method suffix:nodes=24 --json "$out/between.jsonl"
    step trees 90 "$PYTHON" bench/run_kernels.py "${beside[@]}" --peers flashinfer --context 4k,32k \
        --variant contiguous --json "$out/trees.jsonl"
    step body-cache 90 "${large[@]}" --context 32k,128k --rows 1,16 --kv-dtype off,int8,fp8
    step body-batch 90 "${large[@]}" --context 4k --batch 8 --rows 1,2,8,25
    step body-modules 90 "${large[@]}" --context 512,32k --rows 1,8 --compile off
    # Prompts, by our attention, by each FlashAttention that is installed, and through the modules.
    step prefill 90 "${prefill[@]}" --device cuda --shape llama-3.1-8b --context 512,4k,16k
    for name in "${sweeps[@]}"; do
        if [ "$name" = batch ]; then how=(--context 4k,32k --batch 8); else how=(--context "$name"); fi
        step "kernels-$name" 90 "$PYTHON" bench/run_kernels.py "${kernels[@]}" "${how[@]}" \
            --only hybrid_tree_attention --only verify_attention --only sparse_gather_attention \
            --json "$out/kernels-$name.jsonl"
    done
    step weights 90 "$PYTHON" bench/run_kernels.py "${kernels[@]}" --only linear_few_rows \
        --json "$out/weights.jsonl"
    # It begins, is interrupted half way, goes on, and has learnt something: needs specattn[train].
    step train 90 "$PYTHON" bench/train_and_resume.py --output "$out/train" --steps 20 --bf16 True
fi
# Every backend on all that it serves, against the others: from then on the fastest are chosen here.
[ -n "$smoke" ] || kernels+=(--context 32k,128k --batch 1,8)
for backend in "${against[@]}"; do
    if ! is_wanted "kernels-$backend" || ! is_there "$backend"; then continue; fi
    step "kernels-$backend" 90 "$PYTHON" bench/run_kernels.py "${kernels[@]}" --peers varlen \
        --backend "$backend" --only hybrid_tree_attention --only verify_attention \
        --only sparse_gather_attention --json "$out/kernels-$backend.jsonl"
done
found=()
for name in "${against[@]}"; do
    file="$out/kernels-$name.jsonl"
    if [ -n "$commands" ] || [ -e "$file" ]; then found+=("$file"); fi
done
if [ ${#found[@]} -gt 1 ]; then
    step winners 30 "$PYTHON" bench/winners.py "${found[@]}"
fi
if [ -n "$smoke" ]; then
    # Random weights: the time of every round is real, what is accepted is drawn.
    rm -f "$out/decode-tiny.jsonl"
    step decode-tiny 90 "$PYTHON" bench/run_decoding.py --shape tiny --random-weights \
        --acceptance vegas-qwen3-8b --temperature 0 --texts 1 --passes "${decode[@]}" \
        --json "$out/decode-tiny.jsonl" --pictures "$out/decode-tiny"
else
    for file in "${tests[@]}"; do
        marked=()
        [[ "$file" =~ ^tests/(triton_kernels|ops|backends)/ ]] || marked=(-m gpu)
        step "$(named "$file")" 90 "${pytest[@]}" "${marked[@]}" "$file"
    done
fi
[ -z "$commands" ] || exit 0

for name in "${ran[@]+"${ran[@]}"}"; do
    case "$name" in tests* | widen | weights | winners) ;; *) echo; cat "$out/$name.log" ;; esac
done
echo
cat "$out/summary.txt"
exit $failed
