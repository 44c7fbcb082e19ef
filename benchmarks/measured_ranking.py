"""Compare how `maxpipe plan --search` ranks layouts with their ranking by measured step time.

    python benchmarks/measured_ranking.py            # prints the tables
    python benchmarks/measured_ranking.py --write    # and writes measured_ranking.md
    python benchmarks/measured_ranking.py --only wide

The script uses 8 virtual CPU devices and three models. For each model, it calibrates the devices
with the model's layers, ranks all layouts, and runs a search with `--measure 8`. It then measures
the layouts at selected ranks and the layouts that the search measured, each in a separate process.
The layouts alternate steps, and the median step time of each layout is compared.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import jax

from maxpipe.config.load import from_dict
from maxpipe.config.schema import Config
from maxpipe.hardware import Hardware, published_hardware
from maxpipe.planner.calibrate import calibrate
from maxpipe.planner.compile import build_steps
from maxpipe.planner.rerank import CANDIDATES, build_synthetic_step, rerank_by_measurement
from maxpipe.planner.search import Candidate, search

NUM_DEVICES = 8
ROUNDS = 9
"""Number of timed steps per layout."""
MEASURED = 8
"""Number of layouts that the search itself measures."""
RANKS = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233)
"""Predicted ranks of the layouts that are always measured."""
MODELS = {
    "deep": {
        "model": {"num_layers": 16, "d_model": 128, "d_mlp": 384, "vocab_size": 512},
        "train": {"batch_size": 64, "sequence_length": 128},
    },
    "wide": {
        "model": {"num_layers": 8, "d_model": 384, "d_mlp": 1024, "vocab_size": 512},
        "train": {"batch_size": 32, "sequence_length": 128},
    },
    "large vocabulary": {
        "model": {"num_layers": 8, "d_model": 128, "d_mlp": 384, "vocab_size": 16384},
        "train": {"batch_size": 32, "sequence_length": 128},
    },
}
HEADS = {"num_heads": 4, "num_kv_heads": 4, "compute_dtype": "float32"}


def config_of(name: str) -> Config:
    values = MODELS[name]
    model = {**values["model"], **HEADS, "head_dim": values["model"]["d_model"] // 4}
    train = {**values["train"], "steps": 1}
    return from_dict({"model": model, "train": train})


def measured(layouts: list[Candidate]) -> list[float]:
    """Return the median step time of each layout in seconds, measured in separate processes.

    In a shared process, the heap state that one program leaves would determine which other programs
    must allocate new memory in every step.
    """
    spawned, runs = multiprocessing.get_context("spawn"), []
    for candidate in layouts:
        parent, child = spawned.Pipe()
        spawned.Process(target=_serve, args=(child, candidate.config), daemon=True).start()
        parent.recv()  # wait until the process has compiled its step
        runs.append(parent)
    taken: list[list[float]] = [[] for _ in runs]
    for _ in range(ROUNDS):
        for run, times in zip(runs, taken, strict=True):
            run.send(True)
            times.append(run.recv())
    for run in runs:
        run.send(False)
    return [statistics.median(times) for times in taken]


def _serve(requests: Connection, config: Config) -> None:
    """Run one step of this config for each request on standard input."""
    _on_virtual_devices()
    step = build_synthetic_step(build_steps(config, jax.devices()))
    for _ in range(2):
        jax.block_until_ready(step())
    requests.send(True)
    while requests.recv():
        start = time.perf_counter()
        jax.block_until_ready(step())
        requests.send(time.perf_counter() - start)


def _on_virtual_devices() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)


def calibrated(config: Config) -> Hardware:
    """Calibrate the devices with the model's layers and four sequences per microbatch."""
    rows = NUM_DEVICES * 4
    train = replace(config.train, batch_size=rows)
    mesh = replace(config.mesh, ici_data=NUM_DEVICES)
    probe = replace(config, train=train, mesh=mesh)
    return calibrate(probe, published_hardware()["cpu"], jax.devices())[0]


@dataclass(frozen=True)
class Ranking:
    """Measured ranks, among all measured layouts, of the layouts that a search selects."""

    predicted: int
    chosen: int
    """Measured rank of the layout that a search with `--measure` selects."""
    over: float
    """Excess step time of the layout predicted to be fastest, relative to the fastest layout."""
    layouts: int
    correlation: float
    """Spearman correlation between the predicted and the measured order."""


def correlation(orders: list[int]) -> float:
    """Return the Spearman correlation between these ranks and ascending ranks."""
    count = len(orders)
    apart = sum((rank - order) ** 2 for rank, order in enumerate(orders, 1))
    return 1 - 6 * apart / (count * (count**2 - 1))


def table(name: str) -> tuple[str, Ranking]:
    """Return a model's table, and the measured ranks of the selected layouts."""
    config = config_of(name)
    hardware = calibrated(config)
    ranked = search(config, hardware, num_devices=NUM_DEVICES, keep=CANDIDATES)
    ran = rerank_by_measurement(ranked.best, MEASURED, jax.devices(), print)
    tried = {ranked.best.index(entry.candidate) + 1 for entry in ran if entry.fits}
    choice = ranked.best.index(ran[0].candidate) + 1
    ranks = sorted(tried | {rank for rank in RANKS if rank <= len(ranked.best)})
    seconds = dict(zip(ranks, measured([ranked.best[rank - 1] for rank in ranks]), strict=True))
    orders = {rank: order for order, rank in enumerate(sorted(ranks, key=seconds.__getitem__), 1)}
    lines = [
        f"## {name}",
        "",
        f"The search ranked {ranked.considered:,} layouts. The following layouts were measured:",
        "",
        "| predicted rank | predicted ms | measured ms | measured rank | in the search | layout |",
        "|---|---|---|---|---|---|",
    ]
    for rank in ranks:
        candidate = ranked.best[rank - 1]
        keys = " ".join(
            f"{key.partition('.')[2]}={value}" for key, value in candidate.layout_keys.items()
        )
        times = f"{1e3 * candidate.cost.seconds:.0f} | {1e3 * seconds[rank]:.0f}"
        by = "selected" if rank == choice else "measured" if rank in tried else ""
        lines.append(f"| {rank} | {times} | {orders[rank]} | {by} | {keys} |")
    alike = correlation([orders[rank] for rank in ranks])
    over = seconds[1] / min(seconds.values()) - 1
    return "\n".join([*lines, ""]), Ranking(orders[1], orders[choice], over, len(ranks), alike)


PREAMBLE = """\
# Predicted and measured ranking of layouts

`python benchmarks/measured_ranking.py --write`, on 8 virtual CPU devices and 2 cores, calibrated
before each table. Each layout runs in a separate process. The layouts run their steps alternately,
and times are medians. The column "excess time" is the additional step time of the layout that is
predicted to be fastest, relative to the layout that is measured to be fastest.

"""


NOTE = """
The differences between layouts near the top are smaller than the variation of a single layout over
time, so their order changes between runs of this benchmark. The correlations cover only the best
few percent of the layouts in a search. The predictions have the following known errors:

- For tensor parallelism without sequence parallelism (`sequence_parallel=False`), predicted times
  are up to 25% too long. The cost of splitting layers is measured only with sequence parallelism,
  but is also used without it.
- With one gather per small layer, predicted times are too short (`deep`, `ici_fsdp=8
  weight_gather=iteration`). With 2 and 4 microbatches, the error is 20%. Devices that share CPU
  cores wait for each other at each gather, but the calibration measures only the wait times of
  complete ticks.
- With `remat=none`, predicted times are up to 10% too long.
- The loss head is not measured separately.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="run only models whose name contains TEXT"
    )
    options = parser.parse_args()
    _on_virtual_devices()
    tables, first = [], {}
    for name in MODELS:
        if options.only in name:
            text, orders = table(name)
            print(text, flush=True)
            tables.append(text)
            first[name] = orders
    verdict = "\n".join(
        [
            "The first table shows the measured rank of the selected layout:",
            "",
            "| model | layouts | prediction only | excess time "
            f"| with `--measure {MEASURED}` | Spearman correlation |",
            "|---|---|---|---|---|---|",
            *(
                f"| {name} | {order.layouts} | {order.predicted} | {order.over:.0%} "
                f"| {order.chosen} | {order.correlation:.2f} |"
                for name, order in first.items()
            ),
        ]
    )
    print(verdict)
    if options.write:
        page = PREAMBLE + "\n".join([verdict, NOTE, *tables])
        Path(__file__).with_suffix(".md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
