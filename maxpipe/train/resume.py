"""The start of a run: after its newest checkpoint, from another run, or at step 0.

What is read from a checkpoint is checked to fit the config.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

from maxpipe.boundary import redact
from maxpipe.boundary.files import records
from maxpipe.boundary.typed import AnyFloat, checked
from maxpipe.checkpoint.address import parse
from maxpipe.checkpoint.damage import Damaged
from maxpipe.checkpoint.folder import Facts, Folder
from maxpipe.checkpoint.manager import Checkpoints, Restored
from maxpipe.checkpoint.selection import chosen, opened
from maxpipe.checkpoint.storage import FOLDER, home, home_of, in_bucket, run_folder
from maxpipe.config.check import total_steps, where
from maxpipe.config.data import paths_of
from maxpipe.config.keys import (
    FAMILY,
    KEYS,
    MOVED,
    NAMED,
    before_of,
    declared_as,
    flat,
    is_of_another_family,
    section_of,
)
from maxpipe.config.load import Loaded, to_dict
from maxpipe.config.paths import EVENTS_FILE
from maxpipe.config.rules import shown
from maxpipe.config.schema import Config
from maxpipe.data.loader import Datasets, compare
from maxpipe.data.prepared.logits import TeacherEntry
from maxpipe.errors import ConfigError, Problem, StorageError
from maxpipe.exchange.incoming import WEIGHTS_ONLY, remarks
from maxpipe.exchange.source import WITHOUT_AHEAD, folder_of
from maxpipe.exchange.source import opened as open_folder
from maxpipe.model.families.registry import describe
from maxpipe.model.frozen import trained
from maxpipe.telemetry.console import Console
from maxpipe.train import weights
from maxpipe.train.guard import initial
from maxpipe.train.reference import Reference
from maxpipe.train.state import TrainState
from maxpipe.train.step import Steps

# Settings that may differ between processes.
OWN_SECTIONS = frozenset({"runtime", "log", "launch"})
OWN_KEYS = frozenset(
    {"run.dir", "data.path", "data.paths", "data.tfds_dir", "data.threads"}
    | {"data.prefetch_batches", "data.largest_unpacked_bytes", "tokenizer.path"}
)


def may_differ(key: str) -> bool:
    """Whether processes may have other values of a full key, one of a section by name included."""
    outer, _, inner = declared_as(key).rpartition(".")
    return (
        key.partition(".")[0] in OWN_SECTIONS
        or key in OWN_KEYS
        or (outer in NAMED and f"data.{inner}" in OWN_KEYS)
    )


_FROZEN = "model.frozen"
_OPTIMIZER, _STATE_TYPE, _AVERAGE = "optim.name", "optim.state_dtype", "optim.average_decay"
_HEADS_AHEAD, _AHEAD = "model.heads_ahead", "model.ahead"
"""The second is not read where the first is 0."""

# Model keys that may change between a checkpoint and the run that resumes it.
_FREE_MODEL_KEYS = frozenset(
    {"model.dropout", "model.attention", "model.compute_dtype", "model.ahead_loss_weight", _FROZEN}
    | {"model.matmul", "model.matmul_parts", "model.matmul_scales"}
    | {"model.matmul_weight_gradients"}
)
_FREE_FAMILY_KEYS = frozenset({"dispatch"})
"""Of those in a family's section, whatever the family."""

# That of the optimizer's state, too, which weights alone have none of: they are cast.
_TYPE = "model.param_dtype"

# Settings that may change of a finished run: how often it is saved and evaluated, its name, its
# machine, and the key that gives its length.
_FREE_WHEN_DONE = frozenset({"checkpoint", "eval"})
_FREE_KEYS_WHEN_DONE = frozenset(
    {"run.name", "train.steps", "train.tokens", "mesh.cpu_devices", "data.allow_change"}
    | {"guard.replica_check_every", "model.attention"}
)


class Guarded(TypedDict):
    """The guard's counts when a checkpoint was saved."""

    skipped: int
    spikes: int
    recent: tuple[list[AnyFloat], list[AnyFloat]]
    roll_backs: NotRequired[int]
    in_row: NotRequired[int]
    rows_left_out: NotRequired[int]


class Position(TypedDict):
    """The data position of a checkpoint."""

    step: int
    fingerprint: dict[str, Any]
    guard: NotRequired[Guarded | None]
    teacher: NotRequired[TeacherEntry]
    reference: NotRequired[str]


_NEW_START = "checkpoint.restore_from to a run with this model, or to '' for a fresh start"


class Start(NamedTuple):
    """The start of a run, or of its continuation."""

    state: TrainState
    words: str
    offset: int = 0
    """See `Watch.offset`."""
    facts: Mapping[str, Any] | None = None
    """The guard's counts."""
    reference: str | None = None
    """Digest of the parameters that a run which goes on began with, if it has kept one."""
    goes_on: bool = False
    """Whether these parameters are other ones than those."""


def restore_or_init(
    loaded: Loaded,
    steps: Steps,
    checkpoints: Checkpoints,
    datasets: Datasets,
    console: Console,
    teacher: TeacherEntry | None = None,
) -> Start:
    """The state to continue from; `teacher` is that of the run.

    Raises:
        ConfigError: the checkpoint is of another model, or other data.
        StorageError: it cannot be read.
    """
    config = loaded.config

    def accept(facts: Facts, *, own: bool = True) -> None:
        if own and facts.data.get(WEIGHTS_ONLY):
            raise _not_its_own(loaded)
        try:
            data = checked(facts.data, Position)
            model = facts.config["model"]
            frozen = checked(_as_known(model)[_FROZEN], list[str])
        except (ValueError, KeyError) as error:
            raise StorageError(
                f"step {facts.step}: is no checkpoint of a run\n"
                f"  its facts about model and data cannot be used: {error}.\n"
                "  Use the release of maxpipe that has saved it, or set run.name to a new name."
            ) from error
        otherwise = "run.name to a new name" if own else _NEW_START
        check_model(model, to_dict(config)["model"], loaded.origins, otherwise)
        _check_trained(frozen, loaded, facts.step, own=own)
        _check_optimizer(facts, loaded, own=own)
        _check_teacher(data.get("teacher"), teacher, loaded, facts.step, own=own)
        if own and facts.step == total_steps(config.train):
            _check_finished(facts, loaded)
        others = compare(data["fingerprint"], datasets.train.fingerprint(), data["step"])
        before, now = _data_path(facts.config), ", ".join(paths_of(config.data))
        if others and before != now:
            others = [("data.path", before or "''", now or "''"), *others]
        if others and own and not config.data.allow_change:
            raise _other_data(others, facts.step)
        words = f"when step {facts.step} was saved"
        for name, before, now in others:
            console.warn(f"data: {name} was {before} {words} and is {now}")
        if own:
            for name, before, now in _changed_keys(facts.config, config):
                console.note(f"config: {name} was {before} {words} and is {now}")

    found = checkpoints.restore_newest(steps.abstract_saved, accept)
    goes_on = found is not None
    if found is not None:
        words = f"resuming {run_folder(config.run)} after step {found.step}"
        if found.folder.parent != checkpoints.durable.path:
            words += f", from {found.folder}"
        if config.checkpoint.restore_from:
            words += ": its own checkpoints come before checkpoint.restore_from"
    elif config.checkpoint.restore_from:
        if (folder := folder_of(config.checkpoint.restore_from)) is not None:
            params, words = _of_folder(folder, loaded, steps, console)
            return Start(steps.with_weights(params), words)
        other = _of_other(loaded)
        if config.checkpoint.restore == "weights" or (other and other.data.get(WEIGHTS_ONLY)):
            params, words = _weights_of(loaded, steps, datasets, console, other)
            return Start(steps.with_weights(params), words)
        found = restore_other(loaded, steps.abstract_saved, partial(accept, own=False))
        words = f"starting from {config.checkpoint.restore_from} after step {found.step}"
    else:
        _must_be_new(loaded, checkpoints)
        return Start(steps.init(), f"starting a new run in {run_folder(config.run)}")
    data = found.facts.data
    if datasets.train.go_on(data["fingerprint"], data["step"]):
        console.note(f"data: weights of the mixture change with step {found.step + 1}")
    guarded = data.get("guard")
    state = steps.from_saved(found.state, initial(config.guard, guarded))
    reference = data.get("reference") if goes_on else None
    return Start(state, words, data["step"] - found.step, guarded, reference, goes_on)


def reference_of(
    loaded: Loaded, steps: Steps, datasets: Datasets, console: Console, begin: Start
) -> Reference | None:
    """The parameters that the run has begun with, where it is held near them.

    Raises:
        ConfigError, StorageError: as `restore_or_init`.
    """
    config = loaded.config
    if config.train.objective != "grpo" or not config.grpo.kl:
        return None
    params = begin.state.params
    if begin.goes_on:
        params = _first_params(loaded, steps, datasets, console)
    key = where("checkpoint.restore_from", loaded.origins)
    return Reference(steps, params, begin.reference, key)


def _first_params(loaded: Loaded, steps: Steps, datasets: Datasets, console: Console) -> Any:
    """Parameters alone, on the mesh, as those of a new start."""
    origin = loaded.config.checkpoint.restore_from
    if not origin:
        return steps.init_params()
    if (folder := folder_of(origin)) is not None:
        params, _ = _of_folder(folder, loaded, steps, console)
    else:
        params, _ = _weights_of(loaded, steps, datasets, console, _of_other(loaded))
    return steps.stack_params(params)


def _weights_of(
    loaded: Loaded, steps: Steps, datasets: Datasets, console: Console, other: Facts | None
) -> tuple[Any, str]:
    """The parameters of a checkpoint, of `other` as a rule, for a new run; and its first words."""
    config = loaded.config
    wanted = steps.abstract_saved["params"]
    said = other.config.get("model", {}).get("vocab_size") if other else None
    size = said if isinstance(said, int) else config.model.vocab_size
    grows = size < config.model.vocab_size

    def accept(facts: Facts) -> None:
        _check_weights(facts.config["model"], loaded)
        before, now = (
            each.get("tokenizer")
            for each in (facts.data["fingerprint"], datasets.train.fingerprint())
        )
        if before and before != now:
            console.warn(
                f"tokenizer: was {before} when step {facts.step} was saved and is {now}: "
                "the weights know other tokens by these ids"
            )

    abstract = weights.with_tokens(wanted, size) if grows else wanted
    found = restore_other(loaded, {"params": abstract}, accept)
    params = found.state["params"]
    if grows:
        console.note(weights.words(size, config.model.vocab_size))
        params = weights.grown(params, wanted)
    source = f"{config.checkpoint.restore_from}, step {found.step}"
    if found.facts.data.get(WEIGHTS_ONLY):
        source += ", which has nothing else"
    text = f"starting a new run in {run_folder(config.run)} with the weights of {source}"
    return params, text


def _of_folder(folder: str, loaded: Loaded, steps: Steps, console: Console) -> tuple[Any, str]:
    """The parameters of a Hugging Face folder for a new run, and its first words."""
    config = loaded.config
    source = open_folder(folder, where("checkpoint.restore_from", loaded.origins))
    wanted = to_dict(config)["model"]
    decided = {**WITHOUT_AHEAD, **source.described.section}
    if decided["heads_ahead"] and not config.model.heads_ahead:
        console.note(
            "model.heads_ahead=0: the folder's layers that predict further ahead are left out"
        )
        decided |= {**WITHOUT_AHEAD, "ahead": config.model.ahead}
    # config.json says nothing about other keys, such as dropout.
    own = {
        name: {**wanted.get(name, {}), **keys}
        for name, keys in decided.items()
        if isinstance(keys, dict)
    }
    _check_weights(wanted | decided | own, loaded)
    for line in remarks(source):
        console.note(line)
    if (before := source.config.vocab_size) < config.model.vocab_size:
        console.note(weights.words(before, config.model.vocab_size))
    params = weights.of_folder(source, steps.abstract_saved["params"])
    text = f"starting a new run in {run_folder(config.run)} with the weights of {source.folder}"
    return params, text


def _check_weights(saved: Mapping[str, Any], loaded: Loaded) -> None:
    """Compares the `model` sections; the run may have more tokens.

    Raises:
        ConfigError: with every key that must be as it was saved.
    """
    wanted = to_dict(loaded.config)["model"]
    key, before = "vocab_size", saved.get("vocab_size")
    if isinstance(before, int) and before < wanted[key]:
        wanted[key] = before
    check_model(saved, wanted, loaded.origins, _NEW_START, weights_alone=True)


def _of_other(loaded: Loaded) -> Facts | None:
    """The facts of the checkpoint that `checkpoint.restore_from` names, if they can be read."""
    config = loaded.config
    key = where("checkpoint.restore_from", loaded.origins)
    address = parse(config.checkpoint.restore_from, key, config.run.dir)
    with opened(address) as other:
        step = chosen(other, address)
        try:
            return other.durable.facts(step)
        except (Damaged, OSError):  # what restores it says so, or takes the one before
            return None


def _not_its_own(loaded: Loaded) -> ConfigError:
    """The run's folder is that of an import."""
    folder = run_folder(loaded.config.run)
    return ConfigError.one(
        where("run.name", loaded.origins),
        loaded.config.run.name,
        f"names {folder}, which holds imported weights and no run.",
        f"Set run.name to a new name, and checkpoint.restore_from={folder}.",
    )


def restore_other(loaded: Loaded, abstract: Any, accept: Callable[[Facts], None]) -> Restored:
    """The checkpoint that `checkpoint.restore_from` names, by default its run's newest good one.

    Raises:
        ConfigError: there is none, or `accept` refuses it.
        StorageError: it cannot be read.
    """
    config = loaded.config
    key = where("checkpoint.restore_from", loaded.origins)
    address = parse(config.checkpoint.restore_from, key, config.run.dir)
    with opened(address) as other:
        if address.step is None:
            found = other.restore_newest(abstract, accept)
            assert found is not None
            return found
        return other.restore(chosen(other, address), abstract, accept)


def _data_path(saved: Mapping[str, Mapping[str, Any]]) -> str:
    data = saved.get("data", {})
    return str(data.get("path", "")) or ", ".join(map(str, data.get("paths", ())))


def _must_be_new(loaded: Loaded, checkpoints: Checkpoints) -> None:
    """A run whose checkpoints are where `checkpoint.dir` led before does not start from scratch."""
    run_dir = run_folder(loaded.config.run)
    homes = [str(run_dir)]
    with contextlib.suppress(ConfigError):
        homes.append(home_of(run_dir))
    for each in homes:
        folder = Folder(os.path.join(each, FOLDER))
        if folder.path != checkpoints.durable.path and (saved := folder.steps()):
            raise ConfigError.one(
                where("checkpoint.dir", loaded.origins),
                loaded.config.checkpoint.dir or "''",
                f"leads to {checkpoints.durable.path}, which is empty; this run has checkpoints "
                f"up to step {saved[-1]} in {folder.path}.",
                "Copy them there, or set run.name to a new name.",
            )
    durable = checkpoints.durable.path
    if loaded.config.checkpoint.dir and (step := _saved_there(run_dir, os.fspath(durable))):
        raise StorageError(
            f"{durable}: holds no checkpoint\n"
            f"  {run_dir / EVENTS_FILE} says that step {step} was saved there. Nothing was "
            "changed.\n"
            f"  Bring it back, or mount what holds it. To start over, delete {run_dir}, or set "
            "run.name to a new name."
        )


class _Saved(TypedDict):
    event: Literal["checkpoint"]
    step: int
    folder: str


def _saved_there(run_dir: Path, folder: str) -> int:
    """The last step that the run has saved there, by its events; 0 for none."""
    try:
        steps = [r["step"] for r in records(run_dir / EVENTS_FILE, _Saved) if r["folder"] == folder]
    except OSError:
        return 0
    return steps[-1] if steps else 0


def _is_free(key: str) -> bool:
    section, _, name = key.rpartition(".")
    return key in _FREE_MODEL_KEYS or (name in _FREE_FAMILY_KEYS and section != "model")


def check_model(
    saved: Mapping[str, Any],
    wanted: Mapping[str, Any],
    origins: Mapping[str, str],
    otherwise: str = "run.name to a new name",
    *,
    weights_alone: bool = False,
) -> None:
    """Compares the `model` sections of a checkpoint and of a config.

    `otherwise` is the other action for the user. With `weights_alone` they may be of another type.

    Raises:
        ConfigError: with every key that must be as it was saved.
    """
    then, now = _as_known(saved), flat({"model": wanted})
    problems = [
        Problem(
            where(key, origins),
            shown(now.get(key, "not there")),
            f"must be {shown(then[key])}, the value of the checkpoint's model.",
            f"Set {key}={shown(then[key])}, or {otherwise}.",
        )
        for key in sorted(then)
        if not (_is_free(key) or (weights_alone and key == _TYPE))
        and then[key] != now.get(key)
        and not (key == _AHEAD and not then[_HEADS_AHEAD])
    ]
    if problems:
        raise ConfigError(problems)


def _check_trained(frozen: list[str], loaded: Loaded, step: int, *, own: bool) -> None:
    """A run goes on with the parameters that it has trained: of these it has optimizer state.

    Raises:
        ConfigError: `frozen`, the checkpoint's, leaves others than the config's.
    """
    model = loaded.config.model
    now, then = (
        trained(describe(each)) for each in (model, dataclasses.replace(model, frozen=frozen))
    )
    if now == then:
        return
    more, fewer = (", ".join(sorted(some)) for some in (now - then, then - now))
    changes = [f"{fewer} now frozen"] if fewer else []
    changes += [f"{more} now trained"] if more else []
    action = _from_weights(loaded, own=own)
    raise ConfigError.one(
        where(_FROZEN, loaded.origins),
        shown(model.frozen),
        f"must freeze what was frozen when step {step} was saved, as the optimizer's state is of "
        f"what was trained then: {'; '.join(changes)}.",
        f"Set {_FROZEN}=[{','.join(frozen)}], or {action}.",
    )


def _check_optimizer(facts: Facts, loaded: Loaded, *, own: bool) -> None:
    """A run goes on with its optimizer: another one keeps other things of each parameter.

    Raises:
        ConfigError: the checkpoint's is not the config's.
    """
    saved, optim = facts.config.get("optim", {}), loaded.config.optim
    param_dtype = loaded.config.model.param_dtype  # the checkpoint's, too
    for key in (_OPTIMIZER, _STATE_TYPE, _AVERAGE):
        field = key.partition(".")[2]
        then, now = saved.get(field, before_of(key)), getattr(optim, field)
        if key == _AVERAGE and bool(then) == bool(now):
            continue  # what it is averaged with may change
        if (then, now) in (("same", param_dtype), (param_dtype, "same")):
            continue  # the same type by another name
        if then != now:
            raise ConfigError.one(
                where(key, loaded.origins),
                shown(now),
                f"must be {shown(then)}, which step {facts.step} was saved with: the optimizer's "
                "state is of its own kind.",
                f"Set {key}={shown(then)}, or {_from_weights(loaded, own=own)}.",
            )


def _check_teacher(
    before: TeacherEntry | None, now: TeacherEntry | None, loaded: Loaded, step: int, *, own: bool
) -> None:
    """A student goes on with its teacher.

    Raises:
        ConfigError: it has other parameters than the one that taught before.
    """
    if before is None or now is None or before["digest"] == now["digest"]:
        return
    key = "distill.teacher" if loaded.config.distill.teacher else "distill.stored"
    raise ConfigError.one(
        where(key, loaded.origins),
        now["name"],
        f"must be the teacher that step {step} was saved with, {before['name']}: this one has "
        "other parameters.",
        f"Bring that one back, or set {_from_weights(loaded, own=own)}.",
    )


def _from_weights(loaded: Loaded, *, own: bool) -> str:
    """What to set to start a run from the parameters of a checkpoint alone."""
    action = "checkpoint.restore=weights to start from its parameters alone"
    if not own:
        return action
    run = loaded.config.run.name
    return f"run.name to a new name, checkpoint.restore_from={run} and {action}"


def _as_known(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Full key to value of a saved `model` section, in the keys of this release.

    A key that did not exist when it was saved has the meaning that it had then.
    """
    found = {MOVED.get(key, key): value for key, value in flat({"model": saved}).items()}
    family = found.get(FAMILY, before_of(FAMILY))
    known = (key for key in KEYS if key.startswith("model."))
    own = (key for key in known if not is_of_another_family(section_of(key), family))
    return {key: before_of(key) for key in own} | found


def _other_data(differences: Sequence[tuple[str, Any, Any]], step: int) -> ConfigError:
    listed = "; ".join(f"{name} was {before} and is {now}" for name, before, now in differences)
    return ConfigError.one(
        "data",
        None,
        f"must be what it was when step {step} was saved: {listed}.",
        "Put it back, or set data.allow_change=true to go on with other samples.",
    )


def _changed_keys(saved: Mapping[str, Any], config: Config) -> Iterator[tuple[str, Any, Any]]:
    """(key, saved, now) of settings that a run may change while it is stopped."""
    then = {MOVED.get(key, key): value for key, value in flat(saved).items()}
    for key, now in flat(to_dict(redact.within(config))).items():
        before = then.get(key, now)
        if before != now and not may_differ(key):
            yield key, before, now


def _check_finished(facts: Facts, loaded: Loaded) -> None:
    """Refuses a finished run with other settings: a new run is meant.

    Raises:
        ConfigError: with the settings, and the name of a run that is not there yet.
    """
    config = loaded.config
    changed = [
        (key, before, now)
        for key, before, now in _changed_keys(facts.config, config)
        if key.partition(".")[0] not in _FREE_WHEN_DONE
        and key not in _FREE_KEYS_WHEN_DONE | loaded.filled
    ]
    if not changed:
        return
    train = config.train
    listed = "; ".join(f"{key} was {shown(old)} and is {shown(new)}" for key, old, new in changed)
    more = f"train.steps={2 * train.steps}" if train.steps else f"train.tokens={2 * train.tokens}"
    raise ConfigError.one(
        str(run_folder(config.run)),
        None,
        f"is a finished run: all its {facts.step} steps are done, and nothing is left to train "
        f"with other settings than when step {facts.step} was saved: {listed}.",
        f"Set run.name={_free_name(config)} for a new run with them, {more} to go on with this "
        "one, or put them back.",
    )


def _free_name(config: Config) -> str:
    """The run's name with the first number behind it that no run has."""
    for number in itertools.count(2):
        named = dataclasses.replace(config.run, name=f"{config.run.name}-{number}")
        folder = run_folder(named)
        saved = home(folder, config.checkpoint)
        if not os.path.lexists(folder) and (in_bucket(saved) or not os.path.lexists(saved)):
            return named.name
    raise AssertionError("numbers end")
