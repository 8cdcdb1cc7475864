"""The README keeps its promises: its figures come from results/, its flags and DIFF tags exist."""

import json
import re

import numpy as np
import pytest
from conftest import ROOT

import proxyfl

README = (ROOT / "README.md").read_text()
FIGURE = re.compile(
    r"\| (\d+\.\d\d) ± (\d+\.\d\d) .*`(results/\S+)`"
)  # a row: mean ± deviation ... `glob of run folders`


@pytest.mark.parametrize("mean, deviation, runs", FIGURE.findall(README))
def test_each_figure_is_the_mean_of_its_runs(mean, deviation, runs):
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in ROOT.glob(runs)]
    assert len(summaries) >= 2 and all(summary["finished"] for summary in summaries)
    final = [summary["final_acc_pct"] for summary in summaries]
    assert f"{np.mean(final):.2f}" == mean and f"{np.std(final, ddof=1):.2f}" == deviation


def test_results_name_their_settings_and_no_machine():
    folders = [path.parent for path in ROOT.glob("results/**/summary.json")]
    assert folders and len(FIGURE.findall(README)) >= 6
    for folder in folders:
        text = (folder / "config.json").read_text()
        config = json.loads(text)
        assert len(config["commit"]) == 40 and not re.search(r'"/|tmp', text), folder
        rounds = (folder / "rounds.csv").read_text().splitlines()
        assert len(rounds) == 1 + config["settings"]["rounds"]
        seed = re.search(r"_s(\d+)$", folder.name)
        assert seed and config["settings"]["seed"] == int(seed[1])


def test_diff_tags_and_flags_agree_between_script_and_readme(capsys):
    source = (ROOT / "proxyfl.py").read_text()
    with pytest.raises(SystemExit):
        proxyfl.parse_args(["--help"])
    flags = set(re.findall(r"--[a-z][\w-]+", capsys.readouterr().out))
    listed = dict(re.findall(r"^\| (DIFF-\d+) \| `(--[\w-]+)", README, re.M))
    in_docstring = dict(re.findall(r"^  (DIFF-\d+) +(--[\w-]+)", proxyfl.__doc__, re.M))
    assert listed == in_docstring and set(listed.values()) <= flags
    assert set(re.findall(r"DIFF-\d+", source)) == set(listed)
    for tag in listed:
        assert len(re.findall(rf"{tag}\b", source)) >= 3, f"{tag}: docstring, flag and spot"
    in_readme = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", README)) - {"--nproc-per-node"}
    assert in_readme <= flags, in_readme - flags
