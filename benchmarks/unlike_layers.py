"""Estimate the cost of multiple layer types in the engine with the TPU compiler, without a TPU.

    python benchmarks/unlike_layers.py            # prints the table
    python benchmarks/unlike_layers.py --write    # and writes unlike_layers.md

The model of `tpu_ahead_of_time.py` is compiled twice: unchanged, and with the same layers declared
as several types. The arithmetic is the same, so the difference is the overhead of layer types.
Results are cached in `--cache`, as in `tpu_ahead_of_time.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, cast

from tpu_ahead_of_time import LAYERS, Mode, compile_one, result, sources

from maxpipe.models.spec import LayerType, Model
from maxpipe.nn import block

UNIT = "unit"
PATTERNS = {
    "one type": "a",
    "two alternating": "ab",
    "five and one": "aaaaab",
    "three alternating": "abc",
    "units of two": UNIT,
}
MODES = [
    Mode("iteration", "full"),
    Mode("step", "names"),
    Mode("iteration", "names", "zb_h1", 1),
]
MICROBATCHES = 16
PREAMBLE = f"""\
# Cost of several layer types

> **Compiler estimate.** The compiler reports these figures; nothing ran on an accelerator.

`python benchmarks/unlike_layers.py --write`. No TPU was used. The 8B-class model of
[tpu_ahead_of_time.md](tpu_ahead_of_time.md) is compiled with M = {MICROBATCHES} and its {LAYERS}
layers declared as one type or as several types. The arithmetic is the same. If chunks of 4 layers
contain different numbers of layers of a type, the stacks of this type are padded to the largest
number. This increases the size of the arguments.

"""


def as_kinds(model: Model, pattern: str) -> Model:
    """Redeclare the layers with one layer type for each distinct letter of the pattern."""
    (kind,) = model.layer_types.values()
    layers = tuple(pattern[number % len(pattern)] for number in range(len(model.layers)))
    return Model(dict.fromkeys(layers, kind), layers, model.ends, model.values)


def as_units(model: Model) -> Model:
    """Redeclare each pair of layers as one layer, which is the repeated unit."""
    (kind,) = model.layer_types.values()
    second = tuple(
        replace(branch, name=f"second_{branch.name}", part=_second(branch.part))
        for branch in kind.branches
    )
    units = (UNIT,) * (len(model.layers) // 2)
    return Model({UNIT: LayerType((*kind.branches, *second))}, units, model.ends, model.values)


def _second(part: Any) -> Any:
    """Rename the activations of a sublayer, because names must be unique within a layer."""
    same = type(part)

    class Second(same):
        @property
        def activations(self) -> Any:
            return {f"second_{name}": dims for name, dims in super().activations.items()}

    cast("dict[type, Any]", block._MODULES)[Second] = block._MODULES[same]
    return Second(**{each.name: getattr(part, each.name) for each in fields(part)})


def measure(pattern: str, mode: Mode) -> dict[str, Any]:
    """Compile one program. This function runs in a separate process."""
    from maxpipe.nn import decoder

    whole = decoder.describe

    def declared(config: Any) -> Model:
        found = whole(config)
        return as_units(found) if pattern == UNIT else as_kinds(found, pattern)

    decoder.describe = declared  # type: ignore[assignment]
    return compile_one(mode, MICROBATCHES)


def in_process(pattern: str, mode: Mode, cache: Path) -> dict[str, Any]:
    """Return a cached result, or compile the program in a new process."""
    if pattern == "a":  # this row is also in tpu_ahead_of_time.md
        found = result(mode, MICROBATCHES, cache)
        assert found is not None, f"{mode.name} does not compile"
        return found
    key = hashlib.sha256(f"{sources()}{mode}{MICROBATCHES}{pattern}".encode()).hexdigest()[:24]
    path = cache / f"{key}.json"
    if not path.exists():
        task = json.dumps({"pattern": pattern, "mode": asdict(mode)})
        command = [sys.executable, __file__, "--one", task]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        path.write_text(printed.splitlines()[-1], encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))


def table(cache: Path) -> str:
    head = ["mode", "layers", "arguments GiB", "temp GiB", "peak GiB", "Gcycles", "TFLOP", "copies"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for mode in MODES:
        for name, pattern in PATTERNS.items():
            found = in_process(pattern, mode, cache)
            numbers = [found[key] for key in ("arguments", "temporary", "peak", "gigacycles")]
            cells = [mode.name, f"{name} ({pattern})", *(f"{number:.2f}" for number in numbers)]
            lines.append(f"| {' | '.join(cells)} | {found['teraflops']:.0f} | {found['copies']} |")
            print(lines[-1], file=sys.stderr)
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    cache = Path(tempfile.gettempdir()) / "maxpipe-ahead-of-time"
    parser.add_argument("--cache", type=Path, default=cache)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        task = json.loads(options.one)
        print(json.dumps(measure(task["pattern"], Mode(**task["mode"])), default=float))
        return
    options.cache.mkdir(parents=True, exist_ok=True)
    page = table(options.cache)
    print(page)
    if options.write:
        Path(__file__).with_suffix(".md").write_text(PREAMBLE + page, encoding="utf-8")


if __name__ == "__main__":
    main()
