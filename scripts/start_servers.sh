#!/usr/bin/env bash
# Starts `segue serve` and `segue trainer` on one model, waits until both are healthy, and shows how to send
# weights from one to the other. Ctrl-C stops both.
#
#   MODEL        for both; default: the bundled one       SERVE_ARGS    further options of segue serve
#   SERVE_PORT   30000                                    TRAINER_ARGS  further options of segue trainer
#   TRAINER_PORT 8990                                     MASTER_PORT   29600, of the weight update group
#   TP           1, ranks of the server                   DEADLINE_S    300, for both to become healthy
set -euo pipefail

serve_port=${SERVE_PORT:-30000} trainer_port=${TRAINER_PORT:-8990} tp=${TP:-1}
segue=$(cd "$(dirname "$0")/.." && pwd)/.venv/bin/segue
[ -x "$segue" ] || segue=$(command -v segue) || { echo "segue is not installed: make setup, or pip install" >&2; exit 1; }
command -v curl >/dev/null || { echo "this script checks the servers' health with curl; install curl" >&2; exit 1; }
pids=()

stop() {
  trap - EXIT INT TERM
  [ ${#pids[@]} -eq 0 ] || kill "${pids[@]}" 2>/dev/null || true
  wait
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

healthy() {
  local deadline=$((SECONDS + ${DEADLINE_S:-300}))
  until curl -fs --noproxy 127.0.0.1 --max-time 2 -o /dev/null "http://127.0.0.1:$2/health"; do
    kill -0 "$1" 2>/dev/null || { echo "$3 ended before it was healthy" >&2; exit 1; }
    [ $SECONDS -lt $deadline ] || { echo "$3 was not healthy within ${DEADLINE_S:-300} s" >&2; exit 1; }
    sleep 0.2
  done
}

# The server takes the first TP GPUs and the trainer the next one, or the CPU if no GPU is left.
gpus=${CUDA_VISIBLE_DEVICES-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd, || true)}
IFS=, read -ra gpus <<<"$gpus"
trainer=("$segue" trainer)
if [ ${#gpus[@]} -gt "$tp" ]; then
  trainer=(env CUDA_VISIBLE_DEVICES="${gpus[tp]}" "${trainer[@]}")
elif [ ${#gpus[@]} -gt 0 ]; then
  trainer+=(--device cpu)
fi

# shellcheck disable=SC2086 # options are split into words
"$segue" serve ${MODEL:+--model "$MODEL"} --port "$serve_port" --tp "$tp" ${SERVE_ARGS:-} &
pids+=($!)
# shellcheck disable=SC2086
"${trainer[@]}" ${MODEL:+--model "$MODEL"} --port "$trainer_port" ${TRAINER_ARGS:-} &
pids+=($!)
healthy "${pids[0]}" "$serve_port" "segue serve"
healthy "${pids[1]}" "$trainer_port" "segue trainer"

cat <<EOF

Both are ready. Take a training step, register the server with the trainer, send the weights:

curl -X POST http://localhost:$trainer_port/train_step \\
    -H "Content-Type: application/json" \\
    -d '{"texts": ["The capital of France is Paris."]}'

curl -X POST http://localhost:$trainer_port/add_inference_endpoint \\
    -H "Content-Type: application/json" \\
    -d '{"host": "localhost", "port": $serve_port, "world_size": $tp}'

curl -X POST http://localhost:$trainer_port/sync_inference_weights \\
    -H "Content-Type: application/json" \\
    -d '{"master_port": ${MASTER_PORT:-29600}, "buffer_size_mb": 1024}'

Ctrl-C stops both.
EOF
wait -n || true
echo "a server ended; stopping the other" >&2
exit 1
