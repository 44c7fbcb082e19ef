"""`python -m tests.mutations`: run commands on randomly mutated input files.

Each case has a number; `--seed S --only N` reruns one case and keeps its folder.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import tempfile
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path
from random import Random

from tests.mutations import runner
from tests.mutations.mutate import mutate
from tests.mutations.seeds import COSTLY, Seed, build

SHARES = {"folders": 24, "tokenizers": 18, "data": 18, "prepared": 8, "runs": 14, "records": 8}
SHARES["configs"] = 10
"""Weights of the areas, which sum to 100."""
_COSTLY_SHARE = 0.35
"""Fraction of model-compiling commands that are run; cheaper commands replace the others."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument(
        "--only", type=int, action="append", help="run only this case and keep its folder"
    )
    parser.add_argument(
        "--good", action="store_true", help="run without mutations; all must succeed"
    )
    parser.add_argument("--area", action="append", choices=sorted(SHARES))
    parser.add_argument("--folder", type=Path, help="folder for seeds and cases")
    parser.add_argument("--json", type=Path, help="append a line for each case")
    options = parser.parse_args()
    runner.prepare()
    with tempfile.TemporaryDirectory(prefix="mutations-") as temporary:
        return _run(options, options.folder or Path(temporary))


def _run(options: argparse.Namespace, home: Path) -> int:
    seeds = [each for each in _seeds(home) if not options.area or each.area in options.area]
    if options.good:
        return _good(seeds, home / "case")
    areas = {name: [each for each in seeds if each.area == name] for name in SHARES}
    numbers = options.only or range(options.first, options.first + options.cases)
    passed, failed = Counter[str](), Counter[str]()
    log = options.json.open("a") if options.json else None
    for number in numbers:
        case = Case(options.seed, number, areas)
        if options.area and case.seed.area not in options.area:
            continue
        fault, outcome = case.run(home / "case", keep=bool(options.only))
        (failed if fault else passed)[case.seed.area] += 1
        if log:
            line = {"case": number, "seed": case.seed.name, "did": case.did, "fault": fault}
            line |= {"command": shlex.join(case.command), "code": outcome.code}
            line |= {"cpu": round(outcome.cpu_seconds, 2), "mb": outcome.peak_bytes >> 20}
            log.write(json.dumps(line) + "\n")
            log.flush()
        if fault or options.only:
            print(f"case {number}: {fault or 'passed'}: {case.seed.name}: {case.did}")
            print(f"  maxpipe {shlex.join(case.command)}: exit code {outcome.code}, ", end="")
            print(f"{outcome.cpu_seconds:.1f} s of CPU, {outcome.peak_bytes >> 20} MiB")
            shown = outcome.output if options.only else outcome.output[-1500:]
            print("    " + "\n    ".join(shown.splitlines()), flush=True)
    print(f"seed {options.seed}")
    for area in SHARES:
        if count := passed[area] + failed[area]:
            print(f"  {area:<11} {passed[area]} of {count} passed")
    return 1 if failed else 0


def _good(seeds: list[Seed], folder: Path) -> int:
    """Run every command on its unchanged seed; all must succeed."""
    failed = 0
    for seed in seeds:
        for command in dict.fromkeys(seed.commands):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(seed.folder, folder, symlinks=True)
            outcome = runner.run(folder, command)
            bad = bool(outcome.fault or outcome.code not in (0, 1))
            failed += bad
            print(f"{'FAILED' if bad else 'passed'} {seed.name}: {shlex.join(command)}", end=" ")
            print(f"{outcome.cpu_seconds:.1f} s, {outcome.peak_bytes >> 20} MiB", flush=True)
            if bad:
                print("    " + "\n    ".join(outcome.output.splitlines()))
    return 1 if failed else 0


def _seeds(home: Path) -> list[Seed]:
    def call(folder: Path, *arguments: str) -> int:
        outcome = runner.run(folder, arguments)
        if outcome.code:
            print(outcome.output, file=sys.stderr)
        return outcome.code

    shutil.rmtree(home / "seeds", ignore_errors=True)
    return build((home / "seeds").absolute(), (home / "compiled").absolute(), call)


class Case:
    """One mutated folder and the command that reads it."""

    def __init__(self, seed: int, number: int, areas: dict[str, list[Seed]]):
        self.draw = Random(f"{seed} {number}")
        (area,) = self.draw.choices([*SHARES], [*SHARES.values()])
        self.seed = self.draw.choice(areas[area])
        commands = self.seed.commands
        self.command = self.draw.choice(commands)
        cheap = [each for each in commands if each[0] not in COSTLY]
        if self.command[0] in COSTLY and self.draw.random() > _COSTLY_SHARE:
            self.command = self.draw.choice(cheap)
        self.did = ""

    def run(self, folder: Path, keep: bool) -> tuple[str, runner.Outcome]:
        """Return the fault, or an empty string, and the outcome."""
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.seed.folder, folder, symlinks=True)
        before = self._mutate(folder)
        changed = any(_content(path) != raw for path, raw in before.items())
        sealed = any(
            fnmatch(str(path.relative_to(folder)), pattern)
            for path in before
            for pattern in self.seed.sealed
        )
        outcome = runner.run(folder, self.command)
        fault = outcome.fault
        if not fault and changed and sealed and "verify" in self.command and not outcome.code:
            fault = "a changed file was not noticed"
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        return fault, outcome

    def _mutate(self, folder: Path) -> dict[Path, bytes]:
        """Change some files and return their previous contents."""
        files = sorted(
            {path for pattern in self.seed.files for path in folder.glob(pattern) if path.is_file()}
        )
        before = {}
        for _ in range(self.draw.choice([1, 1, 1, 2])):
            path = self.draw.choice(files)
            if path in before:
                continue
            before[path] = path.read_bytes()
            others = [each for each in files if each not in before]
            did = mutate(path, others, self.draw)
            self.did += f"{'; ' if self.did else ''}{path.relative_to(folder)}: {did}"
        return before


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() and path.stat().st_size < 1 << 30 else None


if __name__ == "__main__":
    sys.exit(main())
