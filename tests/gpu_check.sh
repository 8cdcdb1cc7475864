#!/usr/bin/env bash
# Everything that needs a GPU, in one call of under 9 minutes: GPU tests, the step benchmark, then as many rounds of the
# full CIFAR-10 setting as fit. No download: the data come from a folder {train,test}/<class>/* or from a packed copy.
#
#   bash tests/gpu_check.sh [PACK]      # PACK: folder with cifar10_jpeg.npz and unpack_cifar10.py; default: use ./data
#
# CSVs go to $OUT, or to results/gpu where OUT is unset. SECONDS_TO_TRAIN (default 240) bounds the training.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-results/gpu}
device=${DEVICE:-cuda}
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
data=data
if [ $# -gt 0 ]; then
  python3 "$1/unpack_cifar10.py" "$work" || exit
  data=$work
fi
python3 -m pytest -q tests/test_augment.py tests/test_proxyfl_maths.py 2>&1 | tail -n 3 | tee "$out/pytest.txt"
for flags in "--no-amp --no-compile" "--amp --no-compile" "--no-amp --compile" "--amp --compile"; do
  timeout 60 python3 tests/bench_step.py --device "$device" ${BENCH_FLAGS:---steps 19} $flags --csv "$out/bench_step.csv" || echo "bench_step $flags: failed"
done
# The interrupt arrives after the last whole step; the run folder then holds all complete rounds.
timeout -s INT "${SECONDS_TO_TRAIN:-240}" python3 proxyfl.py --dataset cifar10 --alpha 0.1 --data-dir "$data" --device "$device" \
  --out-dir "$work/runs" --run-name cifar10 ${TRAIN_FLAGS:-} > "$out/train.log" 2>&1
for file in config.json rounds.csv summary.json; do cp "$work/runs/cifar10/$file" "$out/cifar10_$file"; done
sed -i "s#$work#.#g" "$out/train.log" "$out/cifar10_config.json"
echo "== step benchmark"
cut -d, -f3-14 "$out/bench_step.csv"
echo "== CIFAR-10 (JPEG copy), the paper's setting, alpha 0.1"
tail -n 4 "$out/train.log"
cat "$out/cifar10_summary.json"
