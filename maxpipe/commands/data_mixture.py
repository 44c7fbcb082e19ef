"""`maxpipe data mixture`: which sources a run reads, in which shares, and those of any step."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from maxpipe.commands.data_look import (
    RUN_HELP,
    batch_of_step,
    named_inputs,
    opened,
    step_number,
)
from maxpipe.commands.parser import Commands, add_inputs, read_config
from maxpipe.errors import ConfigError, ExitCode
from maxpipe.io import redact
from maxpipe.io.text import counted

if TYPE_CHECKING:
    from maxpipe.data.loader import Loader


def _mixture(options: argparse.Namespace) -> int:
    from maxpipe.config.check import total_steps
    from maxpipe.config.training import check_length

    inputs, folder = named_inputs(options.inputs)
    loaded = read_config(inputs)
    config = loaded.config
    check_length(config, loaded.origins)
    if not config.data.mixture:
        raise ConfigError.one(
            "data.mixture",
            None,
            "must have a source: without a mixture all rows are of data.source.",
            "Set data.mixture.NAME.source and data.mixture.NAME.path of each source.",
        )
    datasets = opened(config, folder)
    try:
        train, steps = datasets.train, total_steps(config.train)
        found: dict[str, Any] = {"stages": stages(train)}
        found["sources"] = sources(train, min(steps, train.last_batch))
        if options.step is not None:
            batch = batch_of_step(folder, options.step)
            found["step"] = {"step": options.step, **rows(train, batch)}
    finally:
        datasets.close()
    print(json.dumps(found, indent=2) if options.json else redact.shown("\n".join(_page(found))))
    return ExitCode.DONE


def stages(train: Loader) -> list[dict[str, Any]]:
    """Shares of the sources by the first step that they hold for: its first row may be another's.

    Behind the last one there is nothing if it has no shares.
    """
    assert train.stream.mixture is not None
    found = []
    for stage in train.stream.mixture.stages:
        total = sum(stage.quotas)
        shares = [quota / total if total else 0.0 for quota in stage.quotas]
        first = train.ramp.batches(stage.first + 1)
        named = dict(zip(train.sources, shares, strict=True)) if total else {}
        found.append({"first_step": first, "first_sample": stage.first, "shares": named})
    return found


def sources(train: Loader, steps: float) -> list[dict[str, Any]]:
    """What a run of this length reads of each source."""
    samples = train.stream.counts(train.ramp.before(int(steps)))
    return [
        {
            "source": part.name,
            "sequences": len(part.sequences),
            "samples": samples[part.name],
            "epochs": samples[part.name] / len(part.sequences),
        }
        for part in train.stream.parts
    ]


def rows(train: Loader, batch: int) -> dict[str, Any]:
    """Where each row of a batch comes from."""
    found = [{"source": row.source, "sequence": row.sequence} for row in train.rows(batch)]
    return {"batch": batch, "rows": found}


def _page(found: dict[str, Any]) -> Iterator[str]:
    for each in found["stages"]:
        shares = ", ".join(f"{name} {share:.2%}" for name, share in each["shares"].items())
        yield f"from step {each['first_step']}: {shares or 'nothing, all sources have ended'}"
    width = max(len(each["source"]) for each in found["sources"])
    for each in found["sources"]:
        samples, sequences = (counted(each[key], key[:-1]) for key in ("samples", "sequences"))
        yield f"{each['source']:{width}}  {samples} of {sequences}, {each['epochs']:.2f} epochs"
    if "step" not in found:
        return
    step = found["step"]
    numbers = Counter(row["source"] for row in step["rows"])
    parts = ", ".join(f"{name} {numbers[name]}" for name in sorted(numbers))
    yield f"step {step['step']}: batch {step['batch']}, rows by source: {parts or 'none'}"
    for number, row in enumerate(step["rows"]):
        yield f"row {number}: sequence {row['sequence']} of {row['source']}"


def add_mixture(actions: Commands) -> None:
    """Adds the command."""
    mixture = actions.add_parser(
        "mixture",
        help="the sources of a mixture by stages, and of the rows of any step",
        description="Print in which shares a run reads the sources of its mixture, how often it\n"
        "reads each, and with --step which sequence of which source each row of a batch is. They\n"
        "are the same for any number of processes. Of a run, changes of weights are known.",
        epilog="examples:\n  maxpipe data mixture my-run.yml --step 100000\n"
        "  maxpipe data mixture runs/my-run --json",
    )
    add_inputs(mixture, "RUN|", RUN_HELP)
    mixture.add_argument(
        "--step", type=step_number, default=None, metavar="K", help="counted from 1"
    )
    mixture.add_argument("--json", action="store_true", help="print one JSON object")
    mixture.set_defaults(command=_mixture)
