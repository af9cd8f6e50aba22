#!/usr/bin/env bash
# The measurements behind the README's tables. On a CPU or a GPU:
#   measure.sh cpu|cuda checks OUT_DIR [REAL_MODEL_DIR]   validate_qwen on every model
#   measure.sh cpu|cuda int8 OUT_DIR MODEL_DIR            generate and perplexity in int8, on a real model
#   measure.sh cpu|cuda ops OUT_DIR                       every op at the shapes of real models
#   measure.sh cpu|cuda gemm OUT_DIR [SET]                linears in fp32, bf16 and int8, at a square size and those of models
#   measure.sh cuda decode OUT_DIR [SHAPE]                generate through the decode runtime, in bf16 and int8, against
#                                                         Transformers' own loop and its compiled static cache; 2 minutes
#                                                         a shape on an H200
#   measure.sh cuda sampling OUT_DIR [SHAPE]              the same in bf16, sampling; 1 minute
#   measure.sh cuda long OUT_DIR                          the same on Qwen3-8B with 8 sequences, and after 8,064 tokens;
#                                                         without the static cache; 3 minutes
#   measure.sh cuda prefill OUT_DIR                       a prompt of 1,734 tokens on Qwen3-8B, in bf16 and int8; 1 minute
#   measure.sh cuda speed OUT_DIR [SHAPE]                 the fused modules under Transformers' own loop, and the ablations,
#                                                         at official shapes; 4 minutes each on an H200
# Run it in an environment with this package, or from the source folder with PYTHONPATH=. set.
set -euo pipefail
device=$1
part=$2
out=$3
subject=${4:-}
mkdir -p "$out"
qwen_patch() { python3 -m qwen_patch.cli "$@"; }

if [ "$part" = checks ]; then
  failed=0
  for model in tiny-qwen2 tiny-qwen3 ${subject:+"$subject"}; do
    for dtype in float32 bfloat16; do
      file="$out/validate_$(basename "$model")_$dtype.json"
      qwen_patch validate --model "$model" --dtype "$dtype" --device "$device" --new-tokens 64 --oracle --json "$file" || failed=1
    done
  done
  exit $failed
fi

if [ "$part" = ops ]; then
  case $device in
    cuda) qwen_patch ops --device cuda --dtype bfloat16 --output "$out/ops" ;;
    cpu) qwen_patch ops --device cpu --dtype float32,bfloat16,float16 --tokens 1,8,512 --rounds 9 --output "$out/ops" ;;
  esac
  exit
fi

if [ "$part" = gemm ]; then
  failed=0
  few=()
  case $device in
    cpu) few=(-m 1,8,16 --rounds 5) ;; # the large M take many minutes a set there
    cuda) few=(--rounds 7) ;;
  esac
  for shapes in ${subject:-1472x4096x4096 Qwen2.5-0.5B Qwen2.5-7B Qwen3-0.6B Qwen3-8B}; do
    qwen_patch gemm --shapes "$shapes" --device "$device" "${few[@]}" --output "$out/gemm_$shapes" || failed=1
  done
  exit $failed
fi

if [ "$part" = int8 ]; then
  name=$(basename "$subject")
  options=(--model "$subject" --device "$device" --dtype bfloat16)
  qwen_patch bench "${options[@]}" --fusion both --quantize int8 --prompt-lengths 128 --new-tokens 64 --rounds 5 \
    --output "$out/int8_$name"
  qwen_patch perplexity "${options[@]}" --output "$out/perplexity_$name"
  exit
fi

if [ "$part" = decode ]; then
  for shape in ${subject:-Qwen2.5-0.5B Qwen3-0.6B Qwen3-1.7B Qwen3-8B}; do
    qwen_patch bench --device cuda --model "random:$shape" --fusion both,int8,int8-head --prompt-lengths 128 --rounds 3 --static \
      --output "$out/decode_$shape"
  done
  exit
fi

if [ "$part" = sampling ]; then
  shape=${subject:-Qwen3-0.6B}
  qwen_patch bench --device cuda --model "random:$shape" --fusion both --prompt-lengths 128 --rounds 3 --static --sample \
    --output "$out/sampling_$shape"
  exit
fi

if [ "$part" = long ]; then
  for case in "batch8 --batch 8 --prompt-lengths 128 --fusion both,int8,int8-head" "8k --prompt-lengths 8064 --fusion both"; do
    read -r name options <<<"$case"
    # shellcheck disable=SC2086
    qwen_patch bench --device cuda --model random:Qwen3-8B --rounds 3 $options --output "$out/decode_Qwen3-8B_$name"
  done
  exit
fi

if [ "$part" = prefill ]; then
  qwen_patch bench --device cuda --model random:Qwen3-8B --rounds 5 --prompt-lengths 1734 --new-tokens 16 \
    --fusion both,int8,int8-w8a16 --output "$out/prefill_Qwen3-8B"
  exit
fi

for shape in ${subject:-Qwen2.5-0.5B Qwen3-0.6B Qwen3-8B}; do
  qwen_patch bench --device cuda --model "random:$shape" --fusion modules --rounds 5 --output "$out/generate_$shape"
  qwen_patch bench --device cuda --model "random:$shape" --fusion mlp,rms,modules --prompt-lengths 128 --new-tokens 64 \
    --rounds 5 --static --output "$out/ablations_$shape"
done
