"""Changes one operator or constant of `gossip` or `pipeline` at a time, and says which changes no test notices.

    python -m benchmarks.structure.mutants [--count 200] [--seed 0] [--only TEXT] [--results FILE] [--json]

The tests of both packages run once, without those that start processes, to learn which of them run which lines: two
minutes. Then a change takes a second, one that no test notices up to half a minute. The results are kept in a file: the
same command again goes on where it ended, and tries again what has changed since. `equivalent_mutants.toml` lists
changes that alter nothing that anyone could notice, each with the reason.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.structure.mutant_tests import TESTED, Baseline, Copy, Outcome
from benchmarks.structure.mutations import Mutant, draw, mutants_of
from benchmarks.structure.source import ROOT

EQUIVALENTS = Path(__file__).with_name("equivalent_mutants.toml")
KEPT = ROOT / "build" / "mutants.jsonl"


class Equivalent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A change that alters nothing that anyone could notice: a line of a file, what it becomes, and why it may."""

    path: str
    was: str
    becomes: str
    why: str


class Result(msgspec.Struct):
    """One line of the file of results. `of`: a digest of what the outcome depends on."""

    name: str
    of: str
    outcome: Outcome


class Results:
    """What became of mutants in earlier runs, and in this one."""

    def __init__(self, path: Path, root: Path) -> None:
        self._path, self._root = path, root
        self._tests = _digest(*sorted((root / "tests").rglob("*.py")))
        lines = path.read_bytes().splitlines() if path.exists() else []
        decoded = [msgspec.json.decode(line, type=Result) for line in lines]
        self._known = {(result.name, result.of): result.outcome for result in decoded}

    def get(self, mutant: Mutant) -> Outcome | None:
        """Return what is known: a survivor may be noticed by other tests, but what was noticed stays so."""
        for of in (self._of(mutant), self._of(mutant) + self._tests):
            if (outcome := self._known.get((mutant.name, of))) is not None:
                return outcome
        return None

    def add(self, mutant: Mutant, outcome: Outcome) -> None:
        """Keep an outcome."""
        of = self._of(mutant) + (self._tests if outcome.kind == "survived" else "")
        self._known[mutant.name, of] = outcome
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(Result(mutant.name, of, outcome)) + b"\n")

    def baseline(self, copy: Copy) -> Baseline:
        """Return what the tests run; they run once for each state of packages and tests."""
        paths = sorted(
            path for name in TESTED for top in ("", "tests") for path in (self._root / top / name).rglob("*.py")
        )
        kept = self._path.with_name(f"mutants-{_digest(*paths)[:16]}.json")
        if not kept.exists():
            _say("the tests run once without a change, which takes two minutes")
            found = copy.baseline()
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_bytes(msgspec.json.encode(found))
        return msgspec.json.decode(kept.read_bytes(), type=Baseline)

    def _of(self, mutant: Mutant) -> str:
        return hashlib.sha256(mutant.text.encode()).hexdigest()


def all_mutants(root: Path) -> list[Mutant]:
    """Return every mutant of the packages."""
    paths = sorted(path for name in TESTED for path in (root / name).rglob("*.py"))
    return [mutant for path in paths for mutant in mutants_of(path.relative_to(root).as_posix(), path.read_text())]


def read_equivalents(path: Path = EQUIVALENTS) -> list[Equivalent]:
    """Return the list of changes that nobody could notice."""
    return msgspec.convert(tomllib.loads(path.read_text())["equivalent"], list[Equivalent])


def judged(
    drawn: Sequence[Mutant], results: Results, equivalents: Sequence[Equivalent]
) -> list[tuple[Mutant, Outcome]]:
    """Return each mutant with its outcome so far; a survivor may be listed as equivalent."""
    listed = {(each.path, each.was, each.becomes) for each in equivalents}
    found = []
    for mutant in drawn:
        outcome = results.get(mutant)
        if outcome is not None and outcome.kind == "survived" and (mutant.path, mutant.was, mutant.becomes) in listed:
            outcome = Outcome("equivalent")
        if outcome is not None:
            found.append((mutant, outcome))
    return found


def try_all(drawn: Sequence[Mutant], results: Results, root: Path) -> None:
    """Try those whose outcome is not known."""
    left = [mutant for mutant in drawn if results.get(mutant) is None]
    if not left:
        return
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        copy = Copy(root, Path(directory))
        _say(f"{len(left)} of {len(drawn)} to try")
        baseline = results.baseline(copy)
        copy.load()
        begun_s = time.monotonic()
        for number, mutant in enumerate(left, 1):
            outcome = copy.outcome(mutant, baseline)
            results.add(mutant, outcome)
            each_s = (time.monotonic() - begun_s) / number
            _say(
                f"{number}/{len(left)}, {each_s:.1f} s each, {each_s * (len(left) - number) / 60:.1f} min left: "
                f"{mutant.path}:{mutant.number} {outcome.kind}"
            )


def report(found: Sequence[tuple[Mutant, Outcome]]) -> str:
    """Return the survivors, each with its line before and after, and the counts."""
    parts = [
        f"{mutant.path}:{mutant.number}\n  - {mutant.was}\n  + {mutant.becomes}"
        for mutant, outcome in sorted(found, key=lambda pair: (pair[0].path, pair[0].number))
        if outcome.kind == "survived"
    ]
    counts = Counter(outcome.kind for _, outcome in found)
    noticed = counts["killed"] + counts["timed out"]
    others = noticed + counts["survived"]
    share = f"{noticed / others:.1%} of those that are not equivalent" if others else "none"
    kinds = ", ".join(f"{counts[kind]} {kind}" for kind in ("killed", "timed out", "survived", "equivalent"))
    return "\n".join([*parts, f"{len(found)} mutants: {kinds}; noticed: {share}"])


def main() -> None:
    """Draw, try and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=200, help="try so many")
    parser.add_argument("--seed", type=int, default=0, help="draw these; the same seed draws the same")
    parser.add_argument("--only", default="", metavar="TEXT", help="draw from files with this in their path")
    parser.add_argument("--results", type=Path, default=KEPT, metavar="FILE", help="keep the outcomes here")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    mutants = [mutant for mutant in all_mutants(ROOT) if options.only in mutant.path]
    drawn = draw(mutants, options.count, options.seed)
    results = Results(options.results, ROOT)
    try:
        try_all(drawn, results, ROOT)
    except RuntimeError as error:
        parser.error(str(error))
    found = judged(drawn, results, read_equivalents())
    if options.json:
        rows = [{**_row(mutant), **msgspec.structs.asdict(outcome)} for mutant, outcome in found]
        print(json.dumps(rows, indent=1))
    else:
        print(f"{len(drawn)} of {len(mutants)} possible mutants, seed {options.seed}\n{report(found)}")


def _row(mutant: Mutant) -> dict[str, object]:
    return {"path": mutant.path, "line": mutant.number, "was": mutant.was, "becomes": mutant.becomes}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _digest(*paths: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


if __name__ == "__main__":
    main()
