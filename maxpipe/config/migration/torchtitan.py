"""Convert a torchtitan job config in TOML."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from maxpipe.config.migration.conversion import Conversion, Peer
from maxpipe.config.migration.peer_files import (
    published,
    read_overrides,
    read_toml,
    split_overrides,
    tables,
    typed,
)
from maxpipe.config.migration.torchtitan_model import convert_model
from maxpipe.config.rules import folder_name
from maxpipe.config.translation import convert_value, infer_source
from maxpipe.config.yaml_values import Raw
from maxpipe.errors import Code, ConfigError, Problem

NAME = "torchtitan"
_DTYPES = ("bfloat16", "float32")
_SHARD = "parallelism.data_parallel_shard_degree"
_EXPERT = "parallelism.expert_parallel_degree"
_STAGE = "parallelism.pipeline_parallel_degree"
_TENSOR = "parallelism.tensor_parallel_degree"
_CONTEXT = "parallelism.context_parallel_degree"
_REPLICATE = "parallelism.data_parallel_replicate_degree"


def convert(file: str, overrides: Sequence[str], devices: int | None) -> Conversion:
    """Convert a TOML job config with `section.key=value` overrides.

    Overrides with keys of torchtitan replace values of the file, including earlier names of keys.
    Other overrides have keys of maxpipe, and replace converted values.

    `devices` is the number of devices of the run. If None, the smallest number that the mesh
    allows is used to compute the batch size.

    Raises:
        ConfigError: the file cannot be read, or a value cannot be represented.
    """
    path, peer = Path(file), published(NAME)
    if path.suffix == ".py":
        raise ConfigError.one(
            Code.CFG_PEER,
            file,
            None,
            "is Python code, which this command does not execute. torchtitan replaced its TOML "
            "configs with Python registries in February 2026.",
            "Convert the TOML config of an earlier commit, and set the changed keys as overrides.",
        )
    history = _History(tables(NAME))
    peer = history.extend(peer)
    theirs, ours = split_overrides(overrides, peer.known | history.renamed.keys())
    problems: list[Problem] = []
    in_file = read_toml(path)
    values = {**history.rename(in_file), **history.rename(read_overrides(theirs))}
    given = typed(values, peer.defaults, problems)
    if problems:
        raise ConfigError(problems)
    c = Conversion(peer, file, given)
    c.write("run.name", folder_name(path.stem))
    for source in (in_file, read_overrides(theirs)):
        history.report_renamed(c, source)
    history.report_removed(c)
    convert_model(c, tables(NAME), history.before(in_file))
    if not c.problems:
        _run(c)
        _batch(c, _mesh(c, devices), is_known=devices is not None)
        _schedule(c)
        _optimizer(c)
        _remat(c)
        _quantization(c)
        _data(c)
        _evaluation(c)
        _checkpoints(c)
        _profiles(c)
    c.finish()
    c.override(ours)
    return c


class _History:
    """Keys that torchtitan renamed or removed since the first supported job config."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.renamed: Mapping[str, Any] = data["renamed"]
        self.removed: Mapping[str, Any] = data["removed"]

    def extend(self, peer: Peer) -> Peer:
        """Return the peer with the removed keys and their defaults."""
        defaults = {key: entry["default"] for key, entry in self.removed.items()}
        return replace(
            peer, defaults={**peer.defaults, **defaults}, known=peer.known | defaults.keys()
        )

    def rename(self, entries: Mapping[str, tuple[Raw, str]]) -> dict[str, tuple[Raw, str]]:
        """Return the entries with current names of keys.

        If a published config sets both names, torchtitan uses the current one.
        """
        found: dict[str, tuple[Raw, str]] = {}
        for key, (raw, place) in entries.items():
            name = self.renamed[key]["name"] if key in self.renamed else key
            if name == key or name not in entries:
                found[name] = (raw, place if name == key else f"{place} ({key})")
        return found

    def before(self, keys: Iterable[str]) -> date | None:
        """Return a date before which torchtitan accepted these keys, or None."""
        entries = {**self.renamed, **self.removed}
        return min((entries[key]["date"] for key in keys if key in entries), default=None)

    def report_renamed(self, c: Conversion, keys: Collection[str]) -> None:
        """Report the earlier names in the keys of one file, or of the command line."""
        for key in keys:
            if entry := self.renamed.get(key):
                name = entry["name"]
                both = "; both names are set, and the value of the current name is used" * (
                    name in keys
                )
                c.renamed[key] = f"{name} since {entry['date']}{both}"

    def report_removed(self, c: Conversion) -> None:
        """Report removed keys, and reject values that change the model."""
        for key, entry in self.removed.items():
            if entry.get("is_required"):
                c.require(key, (entry["default"],), entry["why"])
            else:
                c.omit(f"{entry['why']} torchtitan removed the key on {entry['date']}.", key)


def _run(c: Conversion) -> None:
    seed = "debug.seed"
    if c[seed] is not None:
        if type(c[seed]) is not int:
            c.reject(seed, "must be an integer.", "Set debug.seed=0.")
        else:
            c.write("run.seed", c[seed], seed)
    c.write("train.sequence_length", c["training.seq_len"], "training.seq_len")
    c.write_trackers("metrics.enable_tensorboard", "metrics.enable_wandb")
    for ours, theirs in {
        "model.param_dtype": "training.dtype",
        "model.compute_dtype": "training.mixed_precision_param",
        "optim.reduce_dtype": "training.mixed_precision_reduce",
    }.items():
        c.require(theirs, _DTYPES, "other dtypes are not supported.")
        c.write(ours, c[theirs], theirs)


def _mesh(c: Conversion, devices: int | None) -> int:
    """Write the mesh, and return the number of devices along its batch axes."""
    sizes = {key: c[key] for key in (_REPLICATE, _TENSOR, _STAGE, _CONTEXT, _EXPERT)}
    for key, size in sizes.items():
        if size < 1:
            c.reject(key, "must be at least 1.", f"Set {key}=1.")
    if c[_SHARD] < 1 and c[_SHARD] != -1:
        c.reject(
            _SHARD, "must be at least 1, or -1 for the remaining devices.", f"Set {_SHARD}=-1."
        )
    if c.problems:
        return 1
    has_experts = any(key.endswith(".num_experts") for key in c.settings)
    experts = sizes[_EXPERT] if has_experts else 1
    others = sizes[_REPLICATE] * sizes[_TENSOR] * sizes[_STAGE] * sizes[_CONTEXT]
    shards = c[_SHARD] if c[_SHARD] > 0 else max(1, (devices or 0) // others, experts)
    total = others * shards
    if (devices is not None and devices != total) or shards % experts:
        fewest = others * (c[_SHARD] if c[_SHARD] > 0 else experts)
        rule = f"does not divide the devices: the other axes have {others} devices, and {experts} "
        rule += "experts shards must divide the data shards."
        c.reject(
            _SHARD, rule, f"Use --devices {fewest}, or another multiple of {others * experts}."
        )
        return 1
    c.write("mesh.ici_data", sizes[_REPLICATE], _REPLICATE)
    c.write("mesh.ici_fsdp", -1 if c[_SHARD] == -1 else shards // experts, _SHARD)
    c.write("mesh.ici_tensor", sizes[_TENSOR], _TENSOR)
    c.write("mesh.ici_stage", sizes[_STAGE], _STAGE)
    c.write("mesh.ici_context", sizes[_CONTEXT], _CONTEXT)
    why = (
        ""
        if experts == 1
        else "is a separate axis, whereas torchtitan reuses the devices of other axes."
    )
    c.write("mesh.ici_expert", experts, _EXPERT, differs=why)
    c.write("mesh.sequence_parallel", sizes[_TENSOR] > 1, _TENSOR)
    overlap = "parallelism.enable_async_tensor_parallel"
    if c[overlap] and sizes[_TENSOR] > 1 and sizes[_STAGE] == 1:
        c.write("mesh.collective_matmul", True, overlap)
    return sizes[_REPLICATE] * shards


def _batch(c: Conversion, ways: int, *, is_known: bool) -> None:
    """Write the batch size and the microbatches, for `ways` data-parallel shards."""
    local, total = "training.local_batch_size", "training.global_batch_size"
    if c[local] < 1:
        c.reject(local, "must be at least 1.", f"Set {local}=1.")
        return
    per_pass = c[local] * ways
    batch = per_pass if c[total] < 0 else c[total]
    if not batch or batch % per_pass:
        rule = f"must be a multiple of {per_pass}: {c[local]} sequences on {ways} shards."
        c.reject(total, rule, f"Set {total}={per_pass * max(1, round(batch / per_pass))}.")
        return
    unknown = "" if is_known else ", the fewest that the mesh allows: use --devices N for N devices"
    c.write(
        "train.batch_size",
        batch,
        local,
        total,
        differs=f"is the total, here for {ways} data-parallel shards{unknown}.",
    )
    accumulation = batch // per_pass
    if c[_STAGE] == 1:
        c.write("pipeline.microbatches", accumulation, total)
        return
    size = "parallelism.pipeline_parallel_microbatch_size"
    if c[size] < 1 or c[local] % c[size]:
        c.reject(size, f"must divide {local} ({c[local]}).", f"Set {size}=1.")
        return
    c.write("pipeline.microbatches", accumulation * (c[local] // c[size]), size, total)
    _pipeline(c)


def _pipeline(c: Conversion) -> None:
    theirs = "parallelism.pipeline_parallel_schedule"
    name, action = convert_value("pipeline.schedule", c[theirs])
    csv = c["parallelism.pipeline_parallel_schedule_csv"]
    if csv:
        key = "parallelism.pipeline_parallel_schedule_csv"
        c.omit("write the schedule in maxpipe's format, and set pipeline.schedule=file:FILE.", key)
    if name is None:
        action = action.replace("pipeline.schedule=", f"{theirs}=")
        c.reject(theirs, "is a schedule that maxpipe does not have.", action)
        return
    c.write("pipeline.schedule", name, theirs)
    is_looped = name not in ("gpipe", "1f1b", "zb_h1", "zb_h2")
    per_stage = "parallelism.pipeline_parallel_layers_per_stage"
    repeats, layers = 2 if is_looped else 1, c.settings["model.num_layers"].value
    if type(c[per_stage]) is int and c[per_stage] > 0:
        repeats = max(1, round(layers / (c[per_stage] * c[_STAGE])))
    c.write("pipeline.repeats", repeats, theirs, per_stage)
    fewer = "parallelism.pipeline_parallel_first_stage_less_layers"
    why = "layers are divided by cost; set pipeline.layers_per_chunk for another partition."
    c.differs(fewer, why)


def _schedule(c: Conversion) -> None:
    """Write the number of steps and the learning-rate schedule."""
    steps, total = c["training.steps"], c["lr_scheduler.total_steps"]
    if steps < 1:
        c.reject("training.steps", "must be at least 1.", "Set training.steps=1000.")
        return
    c.write("train.steps", steps, "training.steps")
    c.write("optim.learning_rate", c["optimizer.lr"], "optimizer.lr")
    warmup, ratio = c["lr_scheduler.warmup_steps"], c["lr_scheduler.decay_ratio"]
    shape, floor = c["lr_scheduler.decay_type"], c["lr_scheduler.min_lr_factor"]
    c.require("lr_scheduler.decay_type", ("linear", "cosine"), "other decays are not supported.")
    if total is None:
        total = steps
    if type(total) is not int or total < 1 or not (ratio is None or _is_share(ratio)) or warmup < 0:
        key = "lr_scheduler.decay_ratio"
        c.reject(key, "must be from 0 to 1, with positive numbers of steps.", f"Set {key}=0.8.")
        return
    warmup = min(warmup, total)
    decay = total - warmup if ratio is None else min(round(total * ratio), total - warmup)
    names = ("warmup_steps", "total_steps", "decay_ratio", "decay_type", "min_lr_factor")
    theirs = tuple(f"lr_scheduler.{name}" for name in names)
    is_simple = total == steps and (ratio is None or shape == "linear")
    if is_simple:
        kind = shape if ratio is None else "wsd"
        c.write("optim.schedule", kind, "lr_scheduler.decay_type", "lr_scheduler.decay_ratio")
        c.write("optim.warmup_steps", warmup, "lr_scheduler.warmup_steps")
        c.write("optim.min_lr_ratio", floor, "lr_scheduler.min_lr_factor")
        if ratio is not None:
            c.write("optim.decay_fraction", decay / total, "lr_scheduler.decay_ratio")
        return
    # The warm-up begins at peak / warmup, and the decay ends one step after the last step.
    phases: list[dict[str, Any]] = []
    if warmup > 1:
        start = {"from": 1 / warmup, "to": 1.0}
        phases.append({"steps": warmup - 1, "shape": "linear", **start})
    stable = total - decay - max(0, warmup - 1)
    if stable > 0:
        phases.append({"steps": stable, "shape": "linear", "from": 1.0, "to": 1.0})
    if decay:
        phases.append({"steps": decay, "shape": shape, "from": 1.0, "to": floor})
    c.write("optim.lr_phases", phases, *theirs)
    if total < steps:
        why = f"the learning rate is constant after {total} steps; torchtitan extends the decay."
        c.differs("lr_scheduler.total_steps", why)


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and 0 <= value <= 1


def _optimizer(c: Conversion) -> None:
    theirs = "optimizer.name"
    c.require(theirs, ("AdamW",), "other optimizers of torchtitan are not supported.")
    c.write("optim.name", "adamw", theirs)
    for ours, name in {"beta1": "beta1", "beta2": "beta2", "epsilon": "eps"}.items():
        c.write(f"optim.{ours}", c[f"optimizer.{name}"], f"optimizer.{name}")
    decay = "optimizer.weight_decay"
    c.write("optim.weight_decay", c[decay], decay)
    if c[decay]:
        c.write("optim.weight_decays", [{"pattern": "*", "weight_decay": c[decay]}], decay)
    c.write("optim.clip_norm", float(c["training.max_norm"]), "training.max_norm")


def _remat(c: Conversion) -> None:
    theirs, option = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
    mode = c[theirs]
    if mode in ("none", "full"):
        c.write("pipeline.remat", mode, theirs)
        return
    by_op = mode == "selective" and c[option] == "op"
    c.write("pipeline.remat", "names" if by_op else "full", theirs, option)
    if by_op:
        c.write("pipeline.saved_names", ["matmuls"], option)
        why = "pipeline.saved_names=[matmuls] saves all matmuls; torchtitan saves every other one."
    else:
        why = f"pipeline.remat has no {mode} mode of this kind; full is written."
    c.differs(theirs, why)


_UNQUANTIZED = "the output projection and the router always use model.compute_dtype."


def _quantization(c: Conversion) -> None:
    theirs = "model.converters"
    names = [str(name).removeprefix("quantize.linear.") for name in c[theirs]]
    if unknown := [name for name in names if name not in ("float8", "mx")]:
        rule = f"contains {unknown[0]}, which has no equivalent."
        c.reject(theirs, rule, "Set model.converters=[].")
    elif "float8" in names:
        recipe = "quantize.linear.float8.recipe_name"
        is_rowwise = str(c[recipe]).startswith("rowwise")
        c.write("model.matmul", "fp8", theirs)
        c.write("model.matmul_scales", "channel" if is_rowwise else "tensor", recipe)
        c.differs(theirs, _UNQUANTIZED)
    elif "mx" in names:
        recipe = "quantize.linear.mx.recipe_name"
        if not str(c[recipe]).startswith("mxfp8"):
            c.reject(
                recipe, "has no equivalent.", "Set quantize.linear.mx.recipe_name=mxfp8_cublas."
            )
        c.write("model.matmul", "mxfp8", theirs, recipe)
        c.write("model.matmul_weight_gradients", "same", theirs)
        c.differs(theirs, _UNQUANTIZED)
    else:
        keys = [key for key in c.given if key.startswith("quantize.")]
        c.omit("this key has no effect without model.converters.", *keys)


def _data(c: Conversion) -> None:
    path, folder = c["training.dataset_path"], c["model.hf_assets_path"]
    if path and isinstance(path, str) and infer_source(path):
        c.write("data.source", infer_source(path), "training.dataset_path")
        c.write("data.path", path, "training.dataset_path")
    else:
        why = "only `maxpipe fetch` downloads datasets; set data.source and data.path."
        c.omit(why, "training.dataset", "training.dataset_path")
    c.write("data.packing", "concatenate")
    folder = c["model.tokenizer_path"] or folder
    if c.if_given("model.hf_assets_path", "model.tokenizer_path"):
        c.write("tokenizer.kind", "auto", "model.hf_assets_path")
        theirs = c.if_given("model.hf_assets_path", "model.tokenizer_path")
        c.write("tokenizer.path", folder, *theirs)


def _evaluation(c: Conversion) -> None:
    if not c["validation.enable"]:
        keys = [key for key in c.given if key.startswith("validation.")]
        c.omit("this key has no effect with validation.enable=false.", *keys)
        return
    c.write("eval.every", c["validation.freq"], "validation.freq", "validation.enable")
    if c["validation.steps"] > 0:
        c.write("eval.batches", c["validation.steps"], "validation.steps")
    why = "validation uses data.validation_fraction, or the sets of data.validation."
    c.omit(why, "validation.dataset", "validation.dataset_path")


def _profiles(c: Conversion) -> None:
    every, active = "profiling.profile_freq", "profiling.profiler_active"
    if not c["profiling.enable_profiling"]:
        why = "this key has no effect with profiling.enable_profiling=false."
        return c.omit(why, every, active)
    names = ("profiling.enable_profiling", every)
    c.write("profile.at", [c[every]], *names, differs="lists each profile; this is the first one.")
    return c.write("profile.steps", c[active], active)


def _checkpoints(c: Conversion) -> None:
    if c["checkpoint.enable"]:
        names = ("checkpoint.interval", "checkpoint.enable")
        c.write("checkpoint.every", c["checkpoint.interval"], *names)
    else:
        c.write("checkpoint.every", 0, "checkpoint.enable", differs="is 0: the last step is saved.")
        c.omit("this key has no effect with checkpoint.enable=false.", "checkpoint.interval")
    path = c["checkpoint.initial_load_path"]
    if path and c["checkpoint.initial_load_in_hf"]:
        names = ("checkpoint.initial_load_path", "checkpoint.initial_load_in_hf")
        c.write("checkpoint.restore_from", f"hf:{path}", *names)
        c.write("checkpoint.restore", "weights", "checkpoint.initial_load_in_hf")
    else:
        why = "export the checkpoint to a Hugging Face folder, and set checkpoint.restore_from."
        c.omit(why, "checkpoint.initial_load_path", "checkpoint.initial_load_in_hf")
