"""Blocks that scripts repeat stay equal to their original.

A function or class that a method script shares with another one carries a marker in the comment above it:

    # Copied from baselines/fedavg.py: evaluate
    # Copied from baselines/fixmatch.py: client_update with fixmatch_loss->freematch_loss
    # Differs from baselines/fedavg.py: server_update, which has no momentum

A copy equals the original after the renames: code, comments inside it, and the comment lines between the marker and
the block. A bug is fixed in the original; `python tests/test_copies.py --fix` then rewrites the copies.
"""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
UNMARKED = {"main", "parse_args"}  # every script has its own
ANY_MARK = re.compile(r"\s*#+\s*(?:copied|differs) from \S+\.py\b", re.IGNORECASE)
COPIED = re.compile(r"# Copied from (\S+\.py): (\w+)(?: with (\S+->\S+(?:, \S+->\S+)*))?$")
DIFFERS = re.compile(r"# Differs from (\S+\.py): (\w+), \S.*$")


class Block(NamedTuple):  # a top-level function or class
    kind: str  # "Copied", "Differs" or "" (no marker)
    source: tuple  # (script, name) the marker refers to
    renames: tuple  # of (from, to)
    first: int  # lines[first:last] is what is compared
    last: int
    text: str


def scripts(root):
    """Every method script as "file.py" or "baselines/file.py"."""
    found = [path for pattern in ("*.py", "baselines/*.py") for path in root.glob(pattern)]
    return sorted(path.relative_to(root).as_posix() for path in found if path.name != "common.py")


def read(root, script):
    """The lines of a script and its blocks: name -> Block; second, the lines that hold a marker of some block."""
    lines, found, used = (root / script).read_text(encoding="utf-8").split("\n"), {}, set()
    for node in ast.parse("\n".join(lines)).body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        top = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
        last = node.end_lineno
        while last < len(lines) and re.match(r"[ \t]+#", lines[last]):  # a comment may end the body
            last += 1
        first = top
        while first and lines[first - 1].startswith("#") and not ANY_MARK.match(lines[first - 1]):
            first -= 1
        kind, source, renames = "", (), ()
        if first and (match := COPIED.match(lines[first - 1])):
            kind, source = "Copied", match.groups()[:2]
            renames = tuple(tuple(pair.split("->")) for pair in match[3].split(", ")) if match[3] else ()
        elif first and (match := DIFFERS.match(lines[first - 1])):
            kind, source = "Differs", match.groups()
        if kind:
            used.add(first - 1)
        if kind == "Differs":  # the lines up to the block go on with the reason
            first = top
        found[node.name] = Block(kind, source, renames, first, last, "\n".join(lines[first:last]))
    return lines, found, used


def renamed(text, renames):
    """All renames at once (a->b, b->a swaps), whole names only."""
    if not renames:
        return text
    names = dict(renames)
    return re.sub(rf"(?<!\w)(?:{'|'.join(map(re.escape, names))})(?!\w)", lambda match: names[match[0]], text)


def problems(root):
    """One line for each rule that a script under root breaks."""
    found, wrong, owners = {}, [], {}
    for script in scripts(root):
        lines, found[script], used = read(root, script)
        for number, line in enumerate(lines):
            if ANY_MARK.match(line) and number not in used:
                wrong.append(f"{script}:{number + 1}: not a marker right above a top-level block: {line.strip()}")
    for script, blocks in found.items():
        for name, block in blocks.items():
            here = f"{script}: {name}"
            if not block.kind:
                owners.setdefault(name, []).append(script)
                continue
            original = found.get(block.source[0], {}).get(block.source[1])
            there = ": ".join(block.source)
            if original is None:
                wrong.append(f"{here} refers to {there}, which does not exist")
            elif block.kind == "Differs" and original.text == block.text:
                wrong.append(f"{here} does not differ from {there}")
            elif block.kind == "Copied" and original.kind == "Copied":
                wrong.append(f"{here} is copied from {there}, itself a copy")
            elif block.kind == "Copied":
                for old, _ in block.renames:
                    if renamed(original.text, [(old, "")]) == original.text:
                        wrong.append(f"{here} renames {old}, which {there} does not have")
                if renamed(original.text, block.renames) != block.text:
                    wrong.append(f"{here} is not equal to {there}: fix the original, then run this file with --fix")
    for name, places in owners.items():
        if len(places) > 1 and name not in UNMARKED:
            wrong.append(f"{name} stands without a marker in {' and '.join(places)}")
    return wrong


def fix(root):
    """Rewrite each copy that is not equal to its original. Returns the scripts that changed."""
    found, changed = {script: read(root, script) for script in scripts(root)}, []
    for script, (lines, blocks, _) in found.items():
        new = list(lines)
        for block in sorted(blocks.values(), key=lambda block: -block.first):  # from below: line numbers stay right
            if block.kind == "Copied" and block.source[0] in found:
                original = found[block.source[0]][1].get(block.source[1])
                if original and original.kind != "Copied":
                    new[block.first : block.last] = renamed(original.text, block.renames).split("\n")
        if new != lines:
            (root / script).write_text("\n".join(new), encoding="utf-8")
            changed.append(script)
    return changed


# ---- this repository ------------------------------------------------------------------------------------------


def test_the_scripts_of_this_repository():
    assert "proxyfl.py" in scripts(ROOT) and "common.py" not in scripts(ROOT)
    assert problems(ROOT) == []


# ---- the checker itself ---------------------------------------------------------------------------------------

ORIGINAL = '''"""The simplest script."""

import common

RATE = 0.5


# Eq. 1: the mean over the clients.
@common.cached
def average(states):
    """A mean."""
    total = sum(states)  # before the division
    return total / len(states)
    # nothing follows


class Upload:
    state: int


def main():
    return average([1])
'''
COPY = '''"""Another script."""

import common


# Copied from baselines/plain.py: average
# Eq. 1: the mean over the clients.
@common.cached
def average(states):
    """A mean."""
    total = sum(states)  # before the division
    return total / len(states)
    # nothing follows


# Differs from baselines/plain.py: Upload, which has
# no count
class Upload:
    state: int
    count: int


# Copied from baselines/plain.py: average with average->mean, states->values, total->states
# Eq. 1: the mean over the clients.
@common.cached
def mean(values):
    """A mean."""
    states = sum(values)  # before the division
    return states / len(values)
    # nothing follows


def main():
    return mean([2])
'''


def project(folder, copy=COPY, original=ORIGINAL, **more):
    """A folder of scripts: baselines/plain.py, method.py, and more by name."""
    (folder / "baselines").mkdir(exist_ok=True)
    texts = {"baselines/plain": original, "method": copy, "common": "def average():\n    pass\n", **more}
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return folder


def edit(text, old, new):
    assert text.count(old) >= 1, old
    return text.replace(old, new)


def test_a_right_project_has_no_problem_and_fix_leaves_it_untouched(tmp_path):
    project(tmp_path)
    assert scripts(tmp_path) == ["baselines/plain.py", "method.py"]
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.rglob("*.py")}
    assert problems(tmp_path) == [] and fix(tmp_path) == []
    assert before == {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.rglob("*.py")}


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("    total = sum(states)  # before", "    total = 0 + sum(states)  # before", "average is not equal"),
        ("# before the division\n    return total", "# after the division\n    return total", "average is not equal"),
        ("total / len(states)\n    # nothing follows", "total / len(states)", "average is not equal"),
        ("average\n# Eq. 1: the mean", "average\n# Eq. 2: the mean", "average is not equal"),
        ("average\n# Eq. 1: the mean over the clients.\n", "average\n", "average is not equal"),
        ("over the clients.\n@common.cached\ndef average", "over the clients.\ndef average", "average is not equal"),
        ("    states = sum(values)", "    states = sum(states)", "mean is not equal"),
        ("states->values, total->states", "states->values", "mean is not equal"),
        ("total->states", "total->states, length->size", "renames length, which baselines/plain.py: average"),
        ("total->states", "total->states, tota->x", "renames tota, which"),  # whole names only
        ("baselines/plain.py: average\n", "baselines/gone.py: average\n", "baselines/gone.py: average, which does not"),
        ("baselines/plain.py: average\n", "plain.py: average\n", "plain.py: average, which does not exist"),
        ("baselines/plain.py: average\n", "common.py: average\n", "common.py: average, which does not exist"),
        ("baselines/plain.py: average\n", "baselines/plain.py: gone\n", "baselines/plain.py: gone, which does not"),
        ("baselines/plain.py: Upload", "baselines/gone.py: Upload", "baselines/gone.py: Upload, which does not exist"),
        ("baselines/plain.py: Upload", "baselines/plain.py: Down", "baselines/plain.py: Down, which does not exist"),
        ("    count: int\n", "", "Upload does not differ"),
        ("Upload, which has\n# no count", "Upload", "not a marker"),  # no reason
        ("# Copied from baselines/plain.py: average\n", "# Copied from baselines/plain.py average\n", "not a marker"),
        ("# Copied from baselines/plain.py: average\n", "# copied from baselines/plain.py: average\n", "not a marker"),
        ("average with average->mean", "average with average=mean", "not a marker"),
        ("average\n# Eq. 1: the mean", "average\n\n# Eq. 1: the mean", "not a marker"),  # detached
        ("    state: int\n", "    # Copied from baselines/plain.py: Upload\n    state: int\n", "not a marker"),
        ("\n\ndef main", "\n\n# Copied from baselines/plain.py: RATE\nRATE = 0.5\n\n\ndef main", "not a marker"),
        (
            "# Copied from baselines/plain.py: average\n",
            "",
            "average stands without a marker in baselines/plain.py and",
        ),
        ("# Differs from baselines/plain.py: Upload, which has\n# no count\n", "", "Upload stands without a marker"),
    ],
)
def test_each_violation_is_found(tmp_path, old, new, said):
    found = problems(project(tmp_path, edit(COPY, old, new)))
    assert any(said in problem for problem in found), found


def test_change_of_the_original_is_found_in_every_copy_and_repaired(tmp_path):
    original = edit(
        edit(ORIGINAL, "total = sum(states)", "total = math.fsum(states)\n    total += 0"), "Eq. 1", "Eq. 7"
    )
    project(tmp_path, original=original)
    assert [problem.split(" is ")[0] for problem in problems(tmp_path)] == ["method.py: average", "method.py: mean"]
    assert fix(tmp_path) == ["method.py"] and problems(tmp_path) == []
    text = COPY
    for old, new in (
        ("Eq. 1", "Eq. 7"),
        ("total = sum(states)", "total = math.fsum(states)\n    total += 0"),
        ("states = sum(values)", "states = math.fsum(values)\n    states += 0"),
    ):
        text = edit(text, old, new)
    assert (tmp_path / "method.py").read_text() == text  # and nothing else in the file moved
    assert (tmp_path / "baselines/plain.py").read_text() == original and fix(tmp_path) == []


def test_fix_leaves_to_the_author_what_it_cannot_know(tmp_path):
    copy = edit(COPY, "baselines/plain.py: average\n", "baselines/gone.py: average\n")
    project(tmp_path, edit(copy, "total = sum", "total = 1 + sum"))
    assert fix(tmp_path) == [] and len(problems(tmp_path)) == 1
    assert "total = 1 + sum" in (tmp_path / "method.py").read_text()


def test_a_copy_of_a_copy(tmp_path):
    again = "# Copied from method.py: average\n" + ORIGINAL[ORIGINAL.index("# Eq. 1") : ORIGINAL.index("class")]
    project(tmp_path, third=again)
    assert problems(tmp_path) == ["third.py: average is copied from method.py: average, itself a copy"]
    assert fix(tmp_path) == []
    project(tmp_path, third=edit(again, "method.py", "baselines/plain.py"))
    assert problems(tmp_path) == []
    itself = edit(again, "method.py", "third.py")
    assert "itself a copy" in problems(project(tmp_path, third=itself))[0]


def test_a_copy_of_a_block_that_differs_from_a_third(tmp_path):
    third = "# Copied from method.py: Upload\nclass Upload:\n    state: int\n    count: int\n"
    assert problems(project(tmp_path, third=third)) == []
    assert problems(project(tmp_path, third=edit(third, "    count", "    size")))


def test_shared_names(tmp_path):
    other = "def unique():\n    pass\n\n\nasync def parse_args():\n    pass\n\n\ndef main():\n    pass\n"
    assert problems(project(tmp_path, third=other, fourth=edit(other, "unique", "single"))) == []
    assert problems(project(tmp_path, third=other, fourth=other)) == [
        "unique stands without a marker in fourth.py and third.py"
    ]


def test_run_as_a_program(tmp_path):
    (tmp_path / "tests").mkdir()
    program = shutil.copy(__file__, tmp_path / "tests")
    project(tmp_path, original=edit(ORIGINAL, "A mean.", "The mean."))

    def run(*flags):
        done = subprocess.run([sys.executable, program, *flags], capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout.splitlines()

    status, output = run()
    assert status == 1 and len(output) == 2 and "method.py: average is not equal" in output[0]
    assert run("--fix") == (0, ["rewrote the copies in method.py"])
    assert run("--fix") == (0, []) and run() == (0, [])
    assert run("--repair")[0] == 2


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--fix"]):
        print(f"usage: {sys.argv[0]} [--fix]", file=sys.stderr)
        sys.exit(2)
    for changed_script in fix(ROOT) if sys.argv[1:] else []:
        print(f"rewrote the copies in {changed_script}")
    remaining = problems(ROOT)
    print(*remaining, sep="\n", end="\n" if remaining else "")
    sys.exit(bool(remaining))
