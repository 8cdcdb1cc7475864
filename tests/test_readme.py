"""The README keeps its promises: its figures come from results/, its flags and DIFF tags exist."""

import csv
import json
import re

import numpy as np
import pytest
from conftest import ROOT
from scripts import SCRIPTS, UNSUPERVISED, load

README, BASELINES = ((ROOT / name).read_text() for name in ("README.md", "baselines/README.md"))
# A row of a results table: final round, mean of the last ten rounds, number of seeds, folders of the runs.
ZERO_SHOT = "baselines/clip_zeroshot.py"  # trains nothing, so it is not among SCRIPTS
PAIR = r"(\d+\.\d\d)(?: ± (\d+\.\d\d))?"
FIGURE = re.compile(rf"\| {PAIR} \| {PAIR} \| (\d) \| `(results/\S+)`")


@pytest.mark.parametrize("final, spread, last10, spread10, seeds, runs", FIGURE.findall(README + BASELINES))
def test_each_figure_is_the_mean_of_its_runs(final, spread, last10, spread10, seeds, runs):
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in ROOT.glob(runs)]
    assert len(summaries) == int(seeds) and all(summary["finished"] for summary in summaries)
    for key, mean, deviation in (("final_acc_pct", final, spread), ("mean_last10_acc_pct", last10, spread10)):
        values = [summary[key] for summary in summaries]
        assert f"{np.mean(values):.2f}" == mean
        assert deviation == ("" if len(values) == 1 else f"{np.std(values, ddof=1):.2f}")


def test_zero_shot_figures_are_those_of_the_runs_in_the_same_chapter():
    chapters = [chapter for chapter in re.split(r"^### ", README, flags=re.M) if "CLIP zero-shot, " in chapter]
    assert len(chapters) == 2
    for chapter in chapters:
        mean, pooled = re.search(
            r"CLIP zero-shot, .*?(\d+\.\d\d) % mean over clients,\s(\d+\.\d\d) % pooled", chapter
        ).groups()
        for *_, runs in FIGURE.findall(chapter):
            for folder in ROOT.glob(runs):
                summary = json.loads((folder / "summary.json").read_text())
                assert f"{summary['zeroshot_client_mean_pct']:.2f}" == mean
                assert f"{summary['zeroshot_pooled_pct']:.2f}" == pooled


def test_no_figure_is_still_to_be_filled_in():
    assert set(re.findall(r"\b[A-Z]{3,}_[A-Z_]+\b|\bTODO\b|\bXX+\b", README + BASELINES)) == {"OMP_NUM_THREADS"}


def test_results_name_their_settings_and_no_machine():
    folders = [path.parent for path in ROOT.glob("results/**/summary.json")]
    assert folders and len(FIGURE.findall(README)) >= 6 and len(FIGURE.findall(BASELINES)) >= 18
    for folder in folders:
        text = (folder / "config.json").read_text()
        config = json.loads(text)
        assert len(config["commit"]) == 40 and not re.search(r'"/|tmp', text), folder
        rounds = (folder / "rounds.csv").read_text().splitlines()
        assert len(rounds) == 1 + config["settings"]["rounds"]
        seed = re.search(r"_s(\d+)$", folder.name)
        assert config["settings"]["seed"] == int(seed[1]) if seed else config["script"] in ZERO_SHOT


def section(script):
    """The README's chapters on one script: of a baseline, its own in baselines/README.md."""
    if script.startswith("baselines/"):
        chapters = re.split(r"^(?=#+ )", BASELINES, flags=re.M)
        return "".join(chapter for chapter in chapters if chapter.startswith(f"### `{script[10:]}`"))
    chapters = re.split(r"^(?=## )", README, flags=re.M)
    name = {"proxyfl.py": "ProxyFL", "fedcopl.py": "FedCoPL"}[script]
    return "".join(chapter for chapter in chapters if re.match(rf"## (Results of )?{name}\n", chapter))


def diff_table(script):
    return dict(re.findall(r"^\| (DIFF-\d+) \| `(--[\w-]+)", section(script), re.M))


@pytest.mark.parametrize("script", [*SCRIPTS, ZERO_SHOT])
def test_diff_tags_and_flags_agree_between_script_and_readme(script, capsys):
    """Baselines of FedCoPL copy its labels and splits: the table of their tags is FedCoPL's."""
    module = load(script)
    source, text = (ROOT / script).read_text(), section(script)
    assert text
    with pytest.raises(SystemExit):
        module.parse_args(["--help"])
    flags = set(re.findall(r"--[a-z][\w-]+", capsys.readouterr().out))
    listed = diff_table(script)
    stated = dict(re.findall(r"^  (DIFF-\d+) +(--[\w-]+)", module.__doc__, re.M))
    if script == "proxyfl.py":
        stated = {f"DIFF-{n}": "--" + name.replace("_", "-") for n, name in enumerate(module.DIFFS, 1)}
    if script in (ZERO_SHOT, *UNSUPERVISED) and script != "fedcopl.py":
        assert not listed
        listed = {tag: flag for tag, flag in diff_table("fedcopl.py").items() if tag in stated}
    assert listed == stated and set(listed.values()) <= flags
    assert set(re.findall(r"DIFF-\d+", source)) <= set(listed)
    for tag, flag in listed.items():                         # a spot, beside the docstring; partitions are in common.py
        assert len(re.findall(rf"{tag}\b", source)) > (script != "proxyfl.py") or flag == "--partition", tag
    in_readme = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", text))
    in_readme -= {"--nproc-per-node", "--method", "--from"}  # of torchrun and tools/
    assert in_readme <= flags, in_readme - flags


@pytest.mark.parametrize(
    "title, scripts, rows",
    [
        ("Every row and its command", set(SCRIPTS) - set(UNSUPERVISED), 19),
        ("Every row of FedCoPL's table and its command", {ZERO_SHOT, *UNSUPERVISED}, 13),
    ],
)
def test_every_row_of_the_paper_has_a_command_that_its_script_takes(title, scripts, rows):
    chapter = re.search(rf"## {title}\n(.*?)\n##? ", BASELINES, re.S)[1]
    commands = re.findall(r"`((?:\.\./)?\w+\.py)((?: --[^`]*)?)`", chapter)
    used = set()
    for file, flags in commands:
        script = file.removeprefix("../") if file.startswith("../") else f"baselines/{file}"
        load(script).parse_args(flags.split())
        used.add(script)
    assert used == scripts and len(commands) >= rows


def test_step_times_and_costs_are_those_of_the_files():
    with open(ROOT / "results" / "bench_baselines_cpu.csv", newline="") as file:
        relative = {row["method"]: row["relative"] for row in csv.DictReader(file)}
    table = dict(re.findall(r"^\| ([^|]+) \| (\d+\.\d\d) \|$", BASELINES, re.M))
    assert table == {name: f"{float(value):.2f}" for name, value in relative.items()}
    costs = re.findall(r"`(results/\S+)` \| (\d+) s \| (\d+\.\d) ([kM])B \|", BASELINES)
    assert len(costs) >= 36
    for runs, seconds, size, unit in costs:
        summaries = [json.loads((folder / "summary.json").read_text()) for folder in ROOT.glob(runs)]
        assert f"{min(summary['seconds'] for summary in summaries):.0f}" == seconds
        sent = [(summary["bytes_up"] + summary["bytes_down"]) / summary["rounds"] for summary in summaries]
        assert f"{np.mean(sent) / {'k': 1e3, 'M': 1e6}[unit]:.1f}" == size


def test_crossed_tables_repeat_the_figures_of_their_chapter():
    """Framework x pseudo-labels, and the numbers of clients: each cell is the final round of a row below it."""
    crossed = 0
    for chapter in re.split(r"^### ", BASELINES, flags=re.M):
        finals = {f"{final} ± {spread}" for final, spread, *_ in FIGURE.findall(chapter)}
        finals |= {f"{final} ± {spread}" for final, spread, *_, runs in FIGURE.findall(BASELINES) if "/cifar_" in runs}
        for table in re.findall(r"^\| (?:framework|clients) \|.*\n(?:\|.*\n)+", chapter, re.M):
            for cell in re.findall(r"\d+\.\d\d ± \d+\.\d\d", table):
                assert cell in finals, cell
                crossed += 1
    assert crossed >= 12 + 9 + 12 + 8


def test_accuracies_of_pseudo_labels_are_those_of_the_runs():
    tables = re.findall(r"^\| labels \|.*\n\|-.*\n((?:\|.*\n)+)", BASELINES, re.M)
    for data, table in zip(("digits", "cifar"), tables, strict=True):
        for line in table.splitlines():
            name, first, *last = [cell.strip() for cell in line.strip("|").split("|")]
            for script, cell in zip(("promptfl", "pfedprompt", "fedotp", "fedcopl"), last):
                runs = []
                for seed in (1, 2, 3):
                    with open(ROOT / f"results/{script}/{data}_{name.lower()}_s{seed}/rounds.csv", newline="") as file:
                        runs.append([float(row["pl_acc_pct"]) for row in csv.DictReader(file)])
                assert f"{np.mean([run[0] for run in runs]):.2f}" == first
                final = [run[-1] for run in runs]
                assert f"{np.mean(final):.2f} ± {np.std(final, ddof=1):.2f}" == cell
