"""Compare a train step's CPU time and losses before and after a change.

    python benchmarks/cpu_step.py                  # prints the table
    python benchmarks/cpu_step.py --write          # and writes benchmarks/cpu_step.md
    python benchmarks/cpu_step.py --before REV     # compares with another git revision

Each of the two revisions runs in a separate process with 8 virtual CPU devices. The two processes
alternate steps, so that other load on the machine affects both. Times are CPU times of a process,
summed over all cores. A ratio is the median over pairs of adjacent steps.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import typing
from functools import partial
from pathlib import Path
from typing import Any

BEFORE = "f0c6ded"
"""The last commit before CPU matmuls merged the sequence and token dims."""
ROOT = Path(__file__).parents[1]
DEVICES, TOKENS, ROWS, STEPS, MOST = 8, 256, 16, 12, 1e-6
MODEL: dict[str, Any] = {
    "num_layers": 8,
    "d_model": 256,
    "num_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 64,
    "d_mlp": 1024,
    "vocab_size": 512,
    "compute_dtype": "float32",
}
_STAGES = {"schedule": "interleaved", "repeats": 2, "microbatches": 8}
_KEPT = _STAGES | {"remat": "names", "weight_gather": "step"}
REFERENCE = "no pipeline, autodiff, fsdp 8, value and gradients"
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any], float]] = {
    "fsdp 8": ({"ici_fsdp": 8}, {}, 0.70),
    "stage 4 x fsdp 2": ({"ici_stage": 4, "ici_fsdp": 2}, _STAGES, 0.78),
    "stage 4 x fsdp 2, activations saved": ({"ici_stage": 4, "ici_fsdp": 2}, _KEPT, 0.70),
    REFERENCE: ({"ici_fsdp": 8}, {}, 1.0),
}
"""Mesh sizes, `pipeline` keys and the maximum ratio of after to before, keyed by layout name."""


NOTE = """
The reference without a pipeline fails in f0c6ded, because it does not match the decoder of that
revision. Relative to revision 73af47b, the time ratio of the reference was 0.95. The ratios depend
on the processor, because memory bandwidth limited the copies that were removed. One day earlier,
the ratios were 0.69, 0.75 and 0.74 on another machine, where every step took 1.6 times as long. The
last of these ratios exceeded its limit.
"""


def processor() -> str:
    """Return the CPU model name and whether the CPU supports AVX-512."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = next(
        (line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line), ""
    )
    return f"{name or 'unknown'}, {'with' if 'avx512f' in text else 'without'} AVX-512"


# Functions that run in the child process of one revision.


def work(platform_devices: int) -> None:
    """Serve requests from standard input: the name of a layout to compile, or `step`."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", platform_devices)
    import maxpipe

    tree = str(Path(maxpipe.__file__).parents[1])
    sys.path.insert(0, f"{tree}/benchmarks")  # import `references` from this revision
    step: Any = None
    for line in sys.stdin:
        asked = json.loads(line)
        if asked != "step":
            try:
                step = _compiled(asked)
            except TypeError as error:  # `references` does not support this revision's decoder
                print(json.dumps({"error": str(error)}), flush=True)
                continue
            print(json.dumps({"tree": tree}), flush=True)
            continue
        start = time.process_time()
        loss = step()
        print(json.dumps([time.process_time() - start, loss]), flush=True)


def _compiled(name: str) -> Any:
    import jax
    import numpy as np
    from references import sharded_loss

    from maxpipe.config.schema import Config
    from maxpipe.models.config import ModelConfig
    from maxpipe.parallel.axes import MeshConfig
    from maxpipe.parallel.mesh import build_mesh
    from maxpipe.parallel.sharding import AxisRules
    from maxpipe.step.build import build_steps

    # The modules that declare the config sections differ between revisions.
    sections = typing.get_type_hints(Config)
    mesh, pipeline, _ = LAYOUTS[name]
    sizes, vocab = MeshConfig(**mesh), MODEL["vocab_size"]
    steps = build_steps(
        build_mesh(sizes, jax.devices()),
        model=ModelConfig(**MODEL),
        pipeline=sections["pipeline"](**{"microbatches": 1} | pipeline),
        optim=sections["optim"](),
        train=sections["train"](batch_size=ROWS, sequence_length=TOKENS),
        total_steps=1000,
        rules=AxisRules.from_config(sizes),
        seed=0,
        byte_lengths=np.ones(vocab, np.int32),
    )
    state, random = steps.init(), np.random.default_rng(0)
    places = np.broadcast_to(np.arange(TOKENS, dtype=np.int32), (ROWS, TOKENS))

    def batch() -> Any:
        ids = random.integers(0, vocab, (ROWS, TOKENS + 1), dtype=np.int32)
        arrays = {
            "tokens": ids[:, :-1],
            "targets": ids[:, 1:],
            "segment_ids": np.ones_like(places),
            "positions": places,
            "loss_mask": np.ones(places.shape, np.float32),
            "example_ids": np.arange(ROWS, dtype=np.int32),
        }
        return jax.device_put(arrays, steps.batch_sharding)

    if name == REFERENCE:
        known = {name: getattr(steps.param_layout, name) for name in ("decoder", "mesh", "specs")}
        asked = inspect.signature(
            sharded_loss
        ).parameters  # early revisions accept only the decoder
        loss = jax.value_and_grad(
            partial(sharded_loss, *(known[name] for name in asked if name in known))
        )
        out = (None, steps.state_sharding.params)
        with jax.set_mesh(steps.param_layout.mesh):
            lowered = jax.jit(loss, out_shardings=out).lower(state.params, batch())
            compiled = lowered.compile(steps.compiler_options)
        return lambda: float(jax.block_until_ready(compiled(state.params, batch()))[0])
    compiled = steps.compile_train()

    def step() -> float:
        nonlocal state
        state, metrics = jax.block_until_ready(compiled(state, batch()))
        return float(metrics["train/loss"])

    return step


# Functions that control the child processes of both revisions.


class Tree:
    """A child process that runs one git revision."""

    def __init__(self, folder: Path):
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--work"],
            env=os.environ | {"PYTHONPATH": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.folder = folder

    def ask(self, what: str) -> Any:
        """Send a request and return the response."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.folder}: the process has ended, see above")
        return json.loads(line)

    def compile(self, layout: str) -> bool:
        """Compile a layout for later steps, and return whether this revision supports it."""
        found = self.ask(layout)
        if error := found.get("error"):
            print(f"{self.folder}: {error}", file=sys.stderr)
            return False
        tree = found["tree"]
        assert Path(tree).samefile(self.folder), f"{tree} was imported, not {self.folder}"
        return True


def checked_out(revision: str, folder: Path) -> Path:
    """Extract a git revision into a folder, and return that folder."""
    archive = subprocess.run(
        ["git", "archive", revision, "maxpipe", "benchmarks"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout
    subprocess.run(["tar", "-x"], cwd=folder, input=archive, check=True)
    return folder


def row(layout: str, before: Tree, after: Tree, steps: int) -> tuple[str, bool]:
    """Measure a layout, and return its table row and whether a limit is exceeded."""
    seconds: list[tuple[float, float]] = []
    worst = 0.0
    if not after.compile(layout):
        raise SystemExit(f"{layout} does not run in this revision")
    if not before.compile(layout):
        new = statistics.median(after.ask("step")[0] for _ in range(steps))
        line = f"| {layout} | fails | {new:.2f} s | - | {LAYOUTS[layout][2]:.2f} | - |"
        print(line, flush=True)
        return line, False
    for number in range(steps):
        (old, old_loss), (new, new_loss) = before.ask("step"), after.ask("step")
        worst = max(worst, abs(new_loss - old_loss) / abs(old_loss))
        if number:  # the first step is a warm-up
            seconds.append((old, new))
    old, new = (statistics.median(each) for each in zip(*seconds, strict=True))
    ratio, most = statistics.median(b / a for a, b in seconds), LAYOUTS[layout][2]
    line = f"| {layout} | {old:.2f} s | {new:.2f} s | {ratio:.2f} | {most:.2f} | {worst:.1e} |"
    print(line, flush=True)
    return line, ratio > most or worst > MOST


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--before", default=BEFORE, help=f"git revision to compare with (default: {BEFORE})"
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--write", action="store_true", help="write benchmarks/cpu_step.md")
    parser.add_argument("--only", default="", help="run only layouts whose name contains TEXT")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(DEVICES)
    with tempfile.TemporaryDirectory() as folder:
        before, after = Tree(checked_out(options.before, Path(folder))), Tree(ROOT)
        names = [name for name in LAYOUTS if options.only in name]
        found = [row(name, before, after, options.steps) for name in names]
        for tree in (before, after):
            assert tree.process.stdin
            tree.process.stdin.close()
            tree.process.wait()
    if options.write:
        import jax

        text = (
            "# Train step on CPUs before and after a change\n\n"
            f"`python benchmarks/cpu_step.py --write`, {time.strftime('%Y-%m-%d')}, jax "
            f"{jax.__version__}, {DEVICES} virtual CPU devices on {os.cpu_count()} cores "
            f"({processor()}), compared with {options.before}.\n\n"
            f"Model: {MODEL['num_layers']} layers, D {MODEL['d_model']}, F {MODEL['d_mlp']}, "
            f"{MODEL['num_heads']} heads, T {TOKENS}, V {MODEL['vocab_size']}, float32, {ROWS} "
            f"sequences. Layouts with stages use the interleaved schedule with 2 repeats and 8 "
            f"microbatches. Times are the processor time per step, as medians of "
            f"{options.steps - 1} steps. The last column is the largest relative difference "
            f"between the losses of {options.steps} steps, with a limit of {MOST:.0e}.\n\n"
            "| layout | before | after | ratio | limit | loss difference |\n"
            "| --- | --- | --- | --- | --- | --- |\n"
        )
        lines = [line for line, _ in found]
        Path(__file__).with_suffix(".md").write_text(text + "\n".join(lines) + "\n" + NOTE)
    if any(broken for _, broken in found):
        sys.exit("a limit is exceeded")
    return None


if __name__ == "__main__":
    main()
