#!/usr/bin/env bash
# What needs a GPU, in one call of under 10 minutes: the augmentation's CUDA test, the step benchmarks of ProxyFL, of
# FedCoPL and its baselines on ViT-B/32 (random weights) and of all semi-supervised methods, then as many rounds of
# ProxyFL's full CIFAR-10 setting as fit, and two rounds of FedCoPL on the miniature CLIP. Ends with status 1 if a test
# fails, a benchmark fails or finds a host synchronisation inside a client's training, or no round was completed. No
# download: the data are those in ./data, or a packed copy.
#
#   bash tools/gpu_check.sh [PACK]      # PACK: folder with cifar10_jpeg.npz and unpack_cifar10.py; default: use ./data
#
# CSVs go to $OUT, or to results/gpu where OUT is unset. SECONDS_TO_TRAIN (default 90) bounds ProxyFL's training.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-results/gpu}
device=${DEVICE:-cuda}
mkdir -p "$out"
rm -f "$out/bench_step.csv" "$out/bench_clip.csv" "$out/bench_baselines.csv" "$out/bench_clip_baselines.csv"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
data=data
if [ $# -gt 0 ]; then
  python3 "$1/unpack_cifar10.py" "$work" || exit
  data=$work
fi
status=0
python3 -m pytest -q tests/test_augment.py tests/test_proxyfl_maths.py tests/test_fedcopl_maths.py \
  > "$out/pytest.txt" 2>&1 || status=1
tail -n 3 "$out/pytest.txt"
for flags in "--no-amp --no-compile" "--amp --no-compile" "--no-amp --compile" "--amp --compile"; do
  timeout 60 python3 tools/bench_step.py --device "$device" ${BENCH_FLAGS:---steps 19} $flags \
    --csv "$out/bench_step.csv" || { echo "bench_step $flags: failed"; status=1; }
done
# bfloat16 in the towers alone; label passes, features, logits and losses are float32
for flags in "--no-amp" "--amp"; do
  timeout 60 python3 tools/bench_step.py --method fedcopl --device "$device" ${CLIP_FLAGS:---steps 10} $flags \
    --csv "$out/bench_clip.csv" || { echo "bench_step fedcopl $flags: failed"; status=1; }
done
timeout 90 python3 tools/bench_step.py --method baselines --device "$device" ${BASELINE_FLAGS:---repeats 1} \
  --csv "$out/bench_baselines.csv" || { echo "bench_step baselines: failed"; status=1; }
timeout 60 python3 tools/bench_step.py --method clip-baselines --device "$device" ${CLIP_FLAGS:---steps 10} \
  --csv "$out/bench_clip_baselines.csv" || { echo "bench_step clip-baselines: failed"; status=1; }
grep -q "found (" "$out/bench_step.csv" "$out/bench_clip.csv" && status=1
timeout 150 python3 fedcopl.py --device "$device" --data-dir "$work" --out-dir "$work/runs" --run-name digits \
  --rounds 2 > "$out/fedcopl.log" 2>&1 || status=1
cp "$work/runs/digits/rounds.csv" "$out/fedcopl_rounds.csv" || status=1
# The termination ends the round in progress; the run folder keeps all complete ones.
timeout -k 20 "${SECONDS_TO_TRAIN:-90}" python3 proxyfl.py --dataset cifar10 --alpha 0.1 --data-dir "$data" \
  --device "$device" --out-dir "$work/runs" --run-name cifar10 ${TRAIN_FLAGS:-} > "$out/train.log" 2>&1
for file in config.json rounds.csv summary.json; do cp "$work/runs/cifar10/$file" "$out/cifar10_$file" || status=1; done
sed -i "s#$work#.#g" "$out/train.log" "$out/fedcopl.log" "$out/cifar10_config.json"
echo "== step benchmark"
cut -d, -f3-14 "$out/bench_step.csv"
echo "== FedCoPL: a training step and a labelling pass of ViT-B/32, then the miniature"
cut -d, -f3-15 "$out/bench_clip.csv"
tail -n 2 "$out/fedcopl.log"
echo "== a local step of each semi-supervised method"
cut -d, -f5-8 "$out/bench_baselines.csv"
echo "== a local step of each CLIP method"
cut -d, -f6-9 "$out/bench_clip_baselines.csv"
echo "== CIFAR-10 (JPEG copy), the paper's setting, alpha 0.1"
tail -n 4 "$out/train.log"
cat "$out/cifar10_summary.json"
echo
echo "status $status"
exit $status
