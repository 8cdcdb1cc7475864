"""tools/bench_step.py: what it counts, and the table that it appends to."""

import csv
import importlib.util

import open_clip
import pytest
from conftest import ROOT
from scripts import mini_clip

spec = importlib.util.spec_from_file_location("bench_step", ROOT / "tools" / "bench_step.py")
bench_step = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bench_step)


def measure(tmp_path, *flags):
    bench_step.main(["--device", "cpu", "--repeats", "1", "--csv", str(tmp_path / "bench.csv"), *map(str, flags)])
    with open(tmp_path / "bench.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("steps, rows", [(1, 16 + 2 * 16), (3, 16 + 2 * 32)])
def test_rows_of_a_step_are_those_that_pass_through_the_network(tmp_path, steps, rows):
    """One step's client owns 16 images, fewer than mu * B = 32: unlabelled ones count twice, as two views."""
    for lines in (1, 2):  # a second call appends
        table = measure(tmp_path, "--steps", steps, "--width", 8, "--batch-size", 16)
        assert len(table) == lines and table[0].keys() == table[-1].keys()
    assert int(table[0]["rows"]) == rows and float(table[0]["gflops"]) > 0
    assert float(table[0]["images_per_s"]) == pytest.approx(rows / float(table[0]["step_s"]), rel=0.01)


@pytest.mark.parametrize(
    "method, lines",
    [("fedcopl", 1), ("clip-baselines", 3), pytest.param("baselines", 18, marks=pytest.mark.slow)],
)
def test_all_methods_are_measured(tmp_path, method, lines):
    open_clip.add_model_config(mini_clip() / "mini.json")
    own = ["--width", 8] if method == "baselines" else ["--model", "mini", "--classes", 4]
    table = measure(tmp_path, "--method", method, "--batch-size", 8, *own)
    assert len(table) == lines and all(float(row["step_s"]) >= 0 for row in table)
    if method == "fedcopl":
        assert float(table[0]["max_prob_error"]) < 1e-5 and float(table[0]["flop_ratio"]) > 1


def test_a_flag_of_another_method_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        bench_step.main(["--method", "baselines", "--steps", "2"])
    assert "--steps is not for --method baselines" in capsys.readouterr().err
