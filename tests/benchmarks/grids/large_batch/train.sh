#!/usr/bin/env bash
# The commands of the experiment with large batches, in their order:
#
#   tests/benchmarks/grids/large_batch/train.sh FOLDER ../shared/data/cifar10.zip
#
# FOLDER is a working folder, made if it is missing. The same command continues what was ended: cells that
# tests/benchmarks/results has are not trained again, on any machine. Two grids run at once, each on one core; those of
# two workers come after them. `make bench NAME=large_batch` then makes the table and the pictures. The network of the
# baseline is trained by claim.yaml, whose head has the command.
set -euo pipefail
work=$(mkdir -p "$1" && cd "$1" && pwd)
images=$(realpath "$2")
here=$(cd "$(dirname "$0")" && pwd)
results=$(realpath "$here/../../results")
config=$here/../large_batch.yaml

cd "$work"
# The official test images are the validation split of these grids.
if [ ! -d cifar10/validation ]; then
    python -m zipfile -e "$images" .
    mv cifar10/test cifar10/validation
fi
groundswell prepare --config "$config" --set archive.kind=image_folder --set archive.root=cifar10 \
    --set dataset.path="$work/cifar10-dataset"

# failed LANE: what its log ends with.
failed() {
    tail -n 1 "$work/$1.log" >&2
    echo "all of it: $work/$1.log" >&2
    exit 1
}

# grids LANE GRID...: one after the other, in a working folder of their own.
grids() {
    local lane=$1 grid
    shift
    mkdir -p "$work/$lane"
    cd "$work/$lane"
    for grid in "$@"; do
        groundswell grid --config "$config" --set dataset.path="$work/cifar10-dataset" --grid "$here/$grid.yaml" \
            --results "$results/large_batch_$grid.jsonl" >>"$work/$lane.log" 2>&1 || failed "$lane"
    done
}

grids first sgd longer lecture_rule &
first=$!
grids second lars seeds lamb &
second=$!
wait $first
wait $second
grids third beyond ablations compression
