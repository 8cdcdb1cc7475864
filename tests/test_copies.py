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
import sys
from collections import namedtuple
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
UNMARKED = {"main", "parse_args"}  # every script has its own
ANY_MARK = re.compile(r"\s*#+\s*(?:copied|differs) from \S+\.py\b", re.IGNORECASE)
COPIED = re.compile(r"# (Copied) from (\S+\.py): (\w+)(?: with (\S+->\S+(?:, \S+->\S+)*))?$")
DIFFERS = re.compile(r"# (Differs) from (\S+\.py): (\w+), (\S.*)$")


Block = namedtuple("Block", "kind source renames first last text")  # lines[first:last] is the text that is compared


def read(root):
    """Of every method script: its lines, its top-level blocks by name, and which lines are markers of a block."""
    found = {}
    for path in sorted({*root.glob("*.py"), *root.glob("baselines/*.py")} - {root / "common.py"}):
        lines, blocks, used = path.read_text(encoding="utf-8").split("\n"), {}, set()
        for node in ast.parse("\n".join(lines)).body:
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                continue
            top, last = min([node.lineno, *(each.lineno for each in node.decorator_list)]) - 1, node.end_lineno
            while last < len(lines) and re.match(r"[ \t]+#", lines[last]):  # a comment may end the body
                last += 1
            first = top
            while first and lines[first - 1].startswith("#") and not ANY_MARK.match(lines[first - 1]):
                first -= 1
            match = first and (COPIED.match(lines[first - 1]) or DIFFERS.match(lines[first - 1]))
            kind, *source, rest = match.groups() if match else ("", "", "", "")
            renames = dict(pair.split("->") for pair in rest.split(", ")) if kind == "Copied" and rest else {}
            used |= {first - 1} if match else set()
            first = top if kind == "Differs" else first  # the lines up to the block go on with the reason
            blocks[node.name] = Block(kind, source, renames, first, last, "\n".join(lines[first:last]))
        found[path.relative_to(root).as_posix()] = lines, blocks, used
    return found


def renamed(text, names):
    """All renames at once (a->b, b->a swaps), whole names only."""
    pattern = rf"(?<!\w)(?:{'|'.join(map(re.escape, names))})(?!\w)"
    return re.sub(pattern, lambda match: names[match[0]], text) if names else text


def problems(root):
    """One line for each rule that a script under root breaks."""
    found, wrong, owners = read(root), [], {}
    for script, (lines, blocks, used) in found.items():
        wrong += [f"{script}:{number + 1}: not a marker right above a top-level block: {line.strip()}"
                  for number, line in enumerate(lines) if ANY_MARK.match(line) and number not in used]
        for name, block in blocks.items():
            here, there = f"{script}: {name}", ": ".join(block.source)
            original = found.get(block.source[0], ((), {}))[1].get(block.source[1])
            if not block.kind:
                owners.setdefault(name, []).append(script)
            elif original is None:
                wrong.append(f"{here} refers to {there}, which does not exist")
            elif block.kind == "Differs":
                wrong += [f"{here} does not differ from {there}"] * (original.text == block.text)
            elif original.kind == "Copied":
                wrong.append(f"{here} is copied from {there}, itself a copy")
            else:
                wrong += [f"{here} renames {old}, which {there} does not have" for old in block.renames
                          if renamed(original.text, {old: ""}) == original.text]
                if renamed(original.text, block.renames) != block.text:
                    wrong.append(f"{here} is not equal to {there}: fix the original, then run this file with --fix")
    return wrong + [f"{name} stands without a marker in {' and '.join(places)}" for name, places in owners.items()
                    if len(places) > 1 and name not in UNMARKED]


def fix(root):
    """Rewrite each copy that is not equal to its original. Returns the scripts that changed."""
    found, changed = read(root), []
    for script, (lines, blocks, _) in found.items():
        new = list(lines)
        for block in sorted(blocks.values(), key=lambda block: -block.first):  # from below: line numbers stay right
            if block.kind == "Copied" and block.source[0] in found:
                original = found[block.source[0]][1].get(block.source[1])
                if original and original.kind != "Copied":
                    new[block.first:block.last] = renamed(original.text, block.renames).split("\n")
        if new != lines:
            (root / script).write_text("\n".join(new), encoding="utf-8")
            changed.append(script)
    return changed


# ---- this repository, and the checker itself ----------------------------------------------------------------------

def test_the_scripts_of_this_repository():
    assert "proxyfl.py" in read(ROOT) and problems(ROOT) == []


BODY = '''# Eq. 1: the mean over the clients.
@common.cached
def average(states):
    total = sum(states)  # before the division
    return total / len(states)
    # nothing follows
'''
ORIGINAL = f"RATE = 0.5\n\n\n{BODY}\n\nclass Upload:\n    state: int\n\n\ndef main():\n    pass\n"
COPY = f'''# Copied from plain.py: average
{BODY}

# Differs from plain.py: Upload, which has
# no count
class Upload:
    state: int
    count: int


# Copied from plain.py: average with average->mean, states->total, total->states
# Eq. 1: the mean over the clients.
@common.cached
def mean(total):
    states = sum(total)  # before the division
    return states / len(total)
    # nothing follows


def main():
    pass
'''


def project(folder, copy=COPY, original=ORIGINAL):
    """A folder of two scripts and a common.py."""
    for name, text in (("plain", original), ("method", copy), ("common", "def average():\n    pass\n")):
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("old, new, said", [
    ("    total = sum(states)", "    total = 0 + sum(states)", "average is not equal"),
    ("# before the division\n    return total", "# after the division\n    return total", "average is not equal"),
    ("# Eq. 1", "# Eq. 2", "average is not equal"), ("@common.cached\n", "", "average is not equal"),
    ("    states = sum(total)", "    states = sum(states)", "mean is not equal"),
    ("states->total, total->states", "states->total", "mean is not equal"),
    ("total->states", "total->states, tota->x", "renames tota, which"),    # whole names only
    ("plain.py: average\n", "gone.py: average\n", "gone.py: average, which does not exist"),
    ("plain.py: average\n", "plain.py: gone\n", "plain.py: gone, which does not exist"),
    ("plain.py: Upload", "common.py: average", "common.py: average, which does not exist"),
    ("    count: int\n", "", "Upload does not differ"), ("Upload, which has\n# no count", "Upload", "not a marker"),
    ("# Copied from plain.py: average\n", "# copied from plain.py: average\n", "not a marker"),
    ("average with average->mean", "average with average=mean", "not a marker"),
    ("average\n# Eq. 1", "average\n\n# Eq. 1", "not a marker"),            # detached
    ("# Copied from plain.py: average\n", "", "average stands without a marker in method.py and plain.py"),
    ("def main", "# Copied from method.py: mean\ndef again(total):\n    pass\n\n\ndef main", "itself a copy")])
def test_each_violation_is_found(tmp_path, old, new, said):
    assert COPY.count(old) >= 1 and problems(project(tmp_path)) == []
    found = problems(project(tmp_path, COPY.replace(old, new, 1)))
    assert any(said in problem for problem in found), found


def test_a_change_of_the_original_is_found_in_every_copy_and_repaired(tmp_path):
    new = ORIGINAL.replace("sum(states)  # before", "fsum(states)  # well before")
    found = problems(project(tmp_path, original=new))
    assert [problem.split(" is ")[0] for problem in found] == ["method.py: average", "method.py: mean"]
    assert fix(tmp_path) == ["method.py"] and problems(tmp_path) == fix(tmp_path) == []
    expected = COPY.replace("= sum(", "= fsum(").replace("# before", "# well before")      # nothing else moved
    assert (tmp_path / "method.py").read_text() == expected and (tmp_path / "plain.py").read_text() == new


if __name__ == "__main__":
    if sys.argv[1:] == ["--fix"]:
        print(*(f"rewrote the copies in {script}" for script in fix(ROOT)), sep="\n")
    sys.exit("\n".join(problems(ROOT)) or 0)
