#!/usr/bin/env bash
# The table of resharding on one host: every way side by side, one run per row and model.
# Usage: benchmarks/resharding.sh [OUT]
# On 4 GPUs the first two rows run, on 8 all four. GPUS, DENSE, MOE and DEVICE may say otherwise:
#     GPUS=8 DEVICE=cpu DENSE=small MOE=tiny-moe benchmarks/resharding.sh
set -euo pipefail

out=${1:-$(dirname "${BASH_SOURCE[0]}")/results}
device=${DEVICE:-cuda}
dense=${DENSE:-qwen3-8b}
moe=${MOE:-qwen3-30b-a3b}
gpus=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}

row() { # GPUs, model, trainer, engine, further options
    local needed=$1 model=$2 trainer=$3 engine=$4
    shift 4
    if ((gpus < needed)); then
        printf 'left out, it takes %d GPUs: %s, %s to %s\n' "$needed" "$model" "$trainer" "$engine" >&2
        return
    fi
    printf '%s, %s to %s %s\n' "$model" "$trainer" "$engine" "$*" >&2
    # Files are named for date, machine and model; several layouts of one model need more.
    local made suffix="${trainer//[=,]/}-to-${engine//[=,]/}${*:+-${*//[ -]/}}"
    made=$(mktemp -d)
    sglang-rdt bench --device "$device" --model "$model" --trainer "$trainer" --engine "$engine" \
        --out "$made" "$@"
    mkdir -p "$out"
    for file in "$made"/*; do
        mv "$file" "$out/$(basename "${file%.*}")-$suffix.${file##*.}"
    done
    rmdir "$made"
}

for model in "$dense" "$moe"; do
    row 4 "$model" tp=2 tp=2
    row 4 "$model" tp=2 tp=1 --engines 2
    row 6 "$model" tp=4 tp=2
done
row 8 "$moe" ep=4,dp=4 tp=4
