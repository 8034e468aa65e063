#!/usr/bin/env bash
# The life of a model, on a CPU in some ten minutes: a base model is warmed up on worked solutions (SFT), then trained by
# reinforcement (GRPO); before, between and after it answers the same held-out sums. README.md says what to look at.
#
#   examples/life-of-a-model/run.sh [OUT]        # default: runs/life
#
# MODEL names another base model; TRAIN_ROWS, TEST_ROWS, EPOCHS and STEPS make it longer or shorter. Broken off, the same
# command goes on: every command below does.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
out=${1:-runs/life}
model=${MODEL:-}
python=${PYTHON:-python3}

if [ -z "$model" ]; then # the demo's model, made from a package on first use
  model=$("$python" -c "from posttrain.models.smollm2 import smollm2_135m_instruct as make; print(make())")
fi

# 1. Data: sums with their answers, and for the warm-up worked solutions.
if [ ! -e "$out/data/worked.jsonl" ]; then
  posttrain data reasoning-gym --task chain_sum --train-rows "${TRAIN_ROWS:-480}" --validation-rows "${TEST_ROWS:-100}" \
    --seed 1 --option min_terms=3 --option max_terms=3 --option min_digits=1 --option max_digits=1 --overwrite "$out/data"
  "$python" "$here/worked_solutions.py" "$out/data/train.parquet" "$out/data/worked.jsonl"
fi
posttrain data check "$out/data/validation.parquet" --for rl
posttrain data check "$out/data/worked.jsonl" --for sft

# What a model answers to the held-out sums, and what that is worth.
judge() { # NAME MODEL
  posttrain generate "$here/generate.yaml" "model.path=$2" "data.files=$out/data/validation.parquet" \
    "output.file=$out/$1.parquet"
  posttrain evaluate "$here/evaluate.yaml" "run.name=$1" "data.files=$out/$1.parquet" "output.folder=$out/$1"
}

# 2. The base model.
judge base "$model"

# 3. SFT on the worked solutions.
posttrain sft "$here/sft.yaml" "model.path=$model" "data.train_files=$out/data/worked.jsonl" "run.folder=$out/run-sft" \
  "run.total_epochs=${EPOCHS:-1}"
[ -e "$out/model-sft" ] || posttrain export "$out/run-sft" "$out/model-sft"
judge sft "$out/model-sft"

# 4. GRPO from there, on the same sums, with the task's own verifier.
posttrain train "$here/grpo.yaml" "model.path=$out/model-sft" "data.train_files=$out/data/train.parquet" \
  "run.folder=$out/run-grpo" "run.total_steps=${STEPS:-20}"
[ -e "$out/model-grpo" ] || posttrain export "$out/run-grpo" "$out/model-grpo"
judge grpo "$out/model-grpo"

# 5. The three side by side.
posttrain report "$out/base" "$out/sft" "$out/grpo" --out "$out/report.html"
