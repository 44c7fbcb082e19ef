"""The banner that a run prints at the start, and the config file that the run writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from maxpipe.checkpoint.lock import RunLock
from maxpipe.checkpoint.storage import checkpoint_home, run_folder
from maxpipe.config.load import to_yaml
from maxpipe.config.schema import Config
from maxpipe.data.loader import Datasets, Loader
from maxpipe.data.mixture import SourceSequences
from maxpipe.data.packing import packing_efficiency
from maxpipe.data.prompts import PromptSequences
from maxpipe.errors import StorageError
from maxpipe.io import files, redact
from maxpipe.io.formatting import format_count, pluralize
from maxpipe.models import registry, resolve_auto
from maxpipe.models.count import active_params, num_params, num_trained
from maxpipe.models.spec import Model
from maxpipe.parallel.mesh import describe_mesh
from maxpipe.step.step import Steps


def _parameters(model: Model) -> str:
    """Return the number of parameters as text, plus active and trained parameters if fewer."""
    count = num_params(model)
    parts = ((active_params(model), "per token"), (num_trained(model), "trained"))
    fewer = ", ".join(f"{format_count(some)} {words}" for some, words in parts if some < count)
    return f"{format_count(count)} parameters" + (f" ({fewer})" if fewer else "")


def write_config(path: Path, config: Config, locks: Sequence[RunLock]) -> None:
    """Write the config of the run to a file."""
    for lock in locks:
        lock.check()
    try:
        files.write(path, to_yaml(redact.redact_value(config)))
    except OSError as error:
        raise StorageError.unwritable(path, error) from error


def _sources(train: Loader, length: int) -> Iterator[tuple[str, str]]:
    """Yield a banner line on the packing of each source, and its share of the run in a mixture."""
    if isinstance(train.sequences, PromptSequences):
        return
    if train.stream.mixture is None:
        yield "packing", _describe_packing(train.stream.parts[0])
        return
    rows = train.ramp.sequences_before(length)
    counts = train.stream.samples_before(rows)
    width = max(map(len, counts))
    for part in train.stream.parts:
        count, size = counts[part.name], len(part.sequences)
        share, epochs = 100 * count / max(rows, 1), count / size
        yield (
            "",
            f"{part.name:{width}}  {share:.1f}%, {epochs:.2f} epochs of "
            f"{pluralize(size, 'sequence')}, {_describe_packing(part)}",
        )


def _describe_packing(part: SourceSequences) -> str:
    return f"{part.packing}, efficiency {packing_efficiency(part.sequences):.2%}"


def banner_lines(
    config: Config, steps: Steps, datasets: Datasets, length: int
) -> list[tuple[str, str]]:
    """Return the names and values of the banner lines."""
    mesh, schedule = steps.param_layout.mesh, steps.train_schedule
    tokens = config.train.sequence_length
    ramp = datasets.train.ramp
    sizes = [f"{rows * tokens:,} for {pluralize(each, 'step')}" for rows, each in ramp.stages]
    sizes.append(f"{ramp.batch_size * tokens:,}")
    device, processes = mesh.devices.flat[0], pluralize(jax.process_count(), "process")
    documents = pluralize(datasets.train.fingerprint()["documents"], "document")
    if datasets.unreadable:
        documents += f", {datasets.unreadable} of them unreadable and treated as empty"
    model, described = config.model, registry.describe(config.model)
    saved_in = checkpoint_home(run_folder(config.run), config.checkpoint)
    divided = resolve_auto.Divided.from_mesh(config.mesh, mesh.shape)
    chosen = resolve_auto.words(model, device.platform, config.train.sequence_length, divided)
    return [
        ("run", str(run_folder(config.run))),
        *([("saved in", saved_in)] if config.checkpoint.dir else []),
        (
            "devices",
            f"{mesh.size} x {device.device_kind} in {processes}",
        ),
        ("mesh", describe_mesh(mesh)),
        (
            "model",
            f"{_parameters(described)}, "
            f"{pluralize(model.num_layers, 'layer')}, "
            f"{model.compute_dtype} compute, {model.param_dtype} parameters",
        ),
        *(("layers", note) for note in described.notes),
        *([("attention", chosen)] if chosen else []),
        (
            "pipeline",
            f"{schedule.name}, {schedule.describe_sizes()}, "
            f"{pluralize(schedule.num_microbatches, 'microbatch')}, bubble "
            f"{100 * schedule.idle_fraction():.1f}%, "
            f"{pluralize(schedule.num_stash, 'saved chunk')}",
        ),
        (
            "data",
            f"{datasets.train.fingerprint()['source']}, {documents}, "
            f"{datasets.train.steps_per_epoch:.1f} steps per epoch",
        ),
        *_sources(datasets.train, length),
        (
            "training",
            f"{pluralize(length, 'step')} of {', '.join(sizes)} tokens, "
            f"{format_count(ramp.sequences_before(length) * tokens)} tokens",
        ),
    ]
