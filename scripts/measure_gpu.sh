#!/usr/bin/env bash
# The measurements behind the README's GPU tables, in two halves:
#   measure_gpu.sh checks OUT_DIR [REAL_MODEL_DIR]   validate_qwen on every model, and the op benchmark; 3 minutes
#   measure_gpu.sh speed OUT_DIR                     end-to-end generate at the official shapes; 9 minutes on an H200
# Run it in an environment with this package, or from the source folder with PYTHONPATH=. set.
set -euo pipefail
half=$1
out=$2
real=${3:-}
mkdir -p "$out"
qwen_patch() { python3 -m qwen_patch.cli "$@"; }

if [ "$half" = checks ]; then
  failed=0
  for model in tiny-qwen2 tiny-qwen3 ${real:+"$real"}; do
    for dtype in float32 bfloat16; do
      file="$out/validate_$(basename "$model")_$dtype.json"
      qwen_patch validate --model "$model" --dtype "$dtype" --device cuda --new-tokens 64 --oracle --json "$file" || failed=1
    done
  done
  qwen_patch ops --device cuda --dtype bfloat16 --rounds 15 --output "$out/ops" >/dev/null
  exit $failed
fi

for shape in Qwen2.5-0.5B Qwen3-0.6B Qwen3-8B; do
  qwen_patch bench --device cuda --model "random:$shape" --fusion both --rounds 5 --output "$out/generate_$shape"
done
# The ablations, and Transformers' own compiled static cache as a second baseline.
qwen_patch bench --device cuda --model random:Qwen2.5-0.5B --prompt-lengths 128 --new-tokens 64 --rounds 5 \
  --output "$out/ablations_Qwen2.5-0.5B"
qwen_patch bench --device cuda --model random:Qwen3-0.6B --prompt-lengths 128 --new-tokens 64 --rounds 5 --static \
  --output "$out/ablations_Qwen3-0.6B"
