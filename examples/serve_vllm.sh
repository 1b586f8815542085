#!/usr/bin/env bash
# Serve the embedded target with vLLM, specattn inside it, and ask it a question through OpenAI's client.
#
#     make vllm && examples/serve_vllm.sh
#     DRAFTER=Vegas examples/serve_vllm.sh
set -euo pipefail
cd "$(dirname "$0")/.."
port=${PORT:-8417} drafter=${DRAFTER:-PromptLookup} bin=$PWD/.venv-vllm/bin

# The libraries that vLLM asks for on a CPU; without this one its threads wait for one another longer.
openmp=$PWD/.venv-vllm/lib/libiomp5.so
[ ! -f "$openmp" ] || export LD_PRELOAD=$openmp

SPECATTN_VLLM=1 VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} VLLM_NO_USAGE_STATS=1 \
    "$bin/python" -m vllm.entrypoints.openai.api_server --model examples/tiny --served-model-name tiny --port "$port" --dtype float32 \
    --max-model-len 8192 --max-num-seqs 8 --speculative-config \
    "{\"method\": \"custom_class\", \"model\": \"specattn.integrations.vllm.$drafter\", \"num_speculative_tokens\": 6}" \
    > "${LOG:=$(mktemp)}" 2>&1 &
server=$!
trap 'kill $server 2>/dev/null; wait $server 2>/dev/null || true' EXIT
echo "vLLM starts; its log is $LOG"
unset LD_PRELOAD
until "$bin/python" -c "import urllib.request as u; u.urlopen('http://127.0.0.1:$port/health')" 2>/dev/null; do
    kill -0 $server 2>/dev/null || { tail -n 20 "$LOG"; exit 1; }
    sleep 1
done

"$bin/python" - "$port" <<'PYTHON'
import sys

from openai import OpenAI

client = OpenAI(base_url=f"http://127.0.0.1:{sys.argv[1]}/v1", api_key="none")
prompt = "def read_lines(path):\n    \"\"\"Return the lines of a file.\"\"\"\n    with open(path) as file:\n"
print(prompt, end="")
for part in client.completions.create(
    model="tiny", prompt=prompt, max_tokens=96, temperature=0, stream=True
):
    print(part.choices[0].text, end="", flush=True)
print()
PYTHON
