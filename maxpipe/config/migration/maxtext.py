"""Convert a MaxText config: model file, run config, and command-line overrides."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maxpipe.config.migration.conversion import Conversion
from maxpipe.config.migration.maxtext_files import NAME, read_source
from maxpipe.config.migration.maxtext_model import convert_model
from maxpipe.config.rules import folder_name

__all__ = ["NAME", "convert"]

_AXES = {
    "data": "data",
    "fsdp": "fsdp",
    "pipeline": "stage",
    "tensor": "tensor",
    "context": "context",
    "expert": "expert",
}
"""Mesh axes of MaxText that maxpipe also has, and their names in maxpipe."""

_OTHER_AXES = (
    *("diloco", "fsdp_transpose", "sequence", "context_autoregressive"),
    *("tensor_sequence", "autoregressive"),
)

_REMAT: Mapping[str, tuple[str, ...]] = {
    "minimal": ("matmuls",),
    "minimal_with_context": ("matmuls", "context"),
    "minimal_flash": ("matmuls", "context"),
    "save_dot_with_context_except_mlp": ("attention", "context"),
    "save_dot_except_mlp": ("attention",),
    "save_qkv_proj": ("query", "key", "value"),
    "save_out_proj": ("attention_out",),
}
"""Activations that each value of `remat_policy` saves, by their names in maxpipe."""


def convert(file: str, overrides: Sequence[str], devices: int | None) -> Conversion:
    """Convert a MaxText config with `key=value` overrides of MaxText's keys or maxpipe's keys.

    `devices` is the number of devices of the run. If None, the smallest number that the mesh
    allows is used to compute the batch size.

    Raises:
        ConfigError: a file cannot be read, or a value cannot be represented.
    """
    source = read_source(file, overrides)
    c = Conversion(source.peer, file, source.given)
    convert_model(c, source.model_name)
    _objective(c)
    _run(c, source.model_name)
    if not c.problems:
        count = _mesh(c, devices)
        _batch(c, count, is_known=devices is not None)
        _schedule(c)
        _optimizer(c)
        _remat(c)
        _adapter(c)
        _data(c)
        _tokenizer(c)
        _evaluation(c, count)
        _checkpoints(c)
        _profiles(c)
    c.finish()
    for key, (value, _) in source.shadowed.items():
        c.differs(
            key,
            f"the value {value} of the file has no effect in MaxText, because model_name="
            f"{source.model_name} sets {c[key]}; to use it, add {key}={value} to this command.",
        )
    c.override(source.ours)
    return c


def _run(c: Conversion, model_name: str) -> None:
    name = c["run_name"] or (model_name if model_name != "default" else Path(c.origin).stem)
    c.write("run.name", folder_name(name), *c.if_given("run_name"))
    seed = "init_weights_seed"
    c.write("run.seed", c[seed], seed)
    if c["data_shuffle_seed"] != c[seed]:
        why = "run.seed also determines the order of the documents."
        c.differs("data_shuffle_seed", why)
    c.write("train.sequence_length", c["max_target_length"], "max_target_length")
    c.write_trackers("enable_tensorboard", "enable_wandb")
    c.write("model.compute_dtype", c["dtype"], "dtype")
    c.write("model.param_dtype", c["weight_dtype"], "weight_dtype")
    for key in ("dtype", "weight_dtype"):
        c.require(key, ("bfloat16", "float32"), "other dtypes are not supported.")
    kernel = c["attention"]
    backends = {"autoselected": "auto", "dot_product": "xla", "cudnn_flash_te": "cudnn"}
    backend = backends.get(kernel) or ("cudnn" if kernel.startswith("cudnn") else "auto")
    c.write("model.attention", backend, "attention")
    if kernel not in backends:
        c.differs("attention", f"model.attention has no {kernel}; {backend} is written.")
    platform = {"gpu": "cuda", "gpu_multiprocess": "cuda", "tpu": "tpu", "cpu": "cpu"}
    if not c.is_default("hardware"):
        c.write("runtime.platform", platform.get(c["hardware"], "auto"), "hardware")


def _objective(c: Conversion) -> None:
    """Write the training objective, or record that it cannot be converted."""
    c.require("training_objective", ("causal_lm",), "other objectives are not supported.")
    c.require("model_call_mode", ("",), "the config is for inference.")
    if "rl" in c.given:
        rule = "configures reinforcement learning, whose prompts and reward are Python code."
        action = "Write a config with train.objective=grpo, grpo.prompts and grpo.reward."
        c.reject("rl", rule, action)
    for key in ("student_overrides", "teacher_overrides"):
        if key in c.given:
            rule = "configures one of two models, but a converted config describes one model."
            action = "Import the teacher (`maxpipe import maxtext:DIR`), and write a config with "
            c.reject(key, rule, f"{action}train.objective=distill and distill.teacher.")
    if not c.is_default("use_sft"):
        c.write("train.objective", "sft", "use_sft")
        c.write("data.chat", "messages", "use_sft")
        theirs = "sft_train_on_completion_only"
        roles = ["assistant"] if c[theirs] else ["user", "assistant"]
        c.write("data.trained_roles", roles, theirs)
    elif not c.is_default("use_dpo"):
        c.write("train.objective", "preference", "use_dpo")
        c.write("data.chat", "pairs", "use_dpo")
        _preference(c)


def _preference(c: Conversion) -> None:
    values = c["dpo"] if "dpo" in c.given else {}
    if not isinstance(values, dict):
        c.reject("dpo", "must be a mapping.", "Write `dpo: {algo: dpo, dpo_beta: 0.1}`.")
        return
    names = {
        "algo": ("preference.loss", "dpo"),
        "dpo_beta": ("preference.beta", 0.1),
        "dpo_label_smoothing": ("preference.label_smoothing", 0.0),
        "orpo_lambda": ("preference.odds_weight", 0.1),
    }
    for name, (ours, default) in names.items():
        c.write(ours, values.get(name, default), "dpo")
    if values.get("max_prompt_length") is not None:
        c.differs("dpo", "max_prompt_length has no equivalent; see data.long_pairs.")
    if unknown := values.keys() - names.keys() - {"max_prompt_length"}:
        c.reject("dpo", f"has unknown keys: {', '.join(sorted(unknown))}.", "Remove these keys.")


def _mesh(c: Conversion, devices: int | None) -> int:
    """Write the mesh, and return the number of devices for which the config is written."""
    fixed = 1
    for link in ("ici", "dcn"):
        for theirs, ours in _AXES.items():
            key = f"{link}_{theirs}_parallelism"
            size = c[key]
            if size < 1 and size != -1:
                c.reject(key, "must be at least 1, or -1.", f"Set {key}=1.")
            if key == "ici_context_parallelism":
                exchanging = _ulysses_size(c)
                size = size * exchanging if size > 0 else size
            fixed *= max(1, size)
            if key == "dcn_data_parallelism" and size == -1:
                size = 1 if c.is_default(key) else -1
            c.write(f"mesh.{link}_{ours}", size, key)
        for theirs in _OTHER_AXES:
            key = f"{link}_{theirs}_parallelism"
            c.require(key, (1,), "maxpipe's mesh has no such axis.")
    if not c.is_default("context_parallel_strategy"):
        strategy = {name: name for name in ("all_gather", "ring", "ulysses")}
        strategy["usp"] = "ulysses_ring"
        theirs = "context_parallel_strategy"
        c.require(theirs, tuple(strategy), "other strategies are not supported.")
        c.write("mesh.context_attention", strategy.get(c[theirs], "auto"), theirs)
    if devices is not None and devices % fixed:
        key = "ici_fsdp_parallelism"
        rule = f"leaves a mesh whose other axes have {fixed} devices, which must divide {devices}."
        c.reject(key, rule, f"Use --devices {fixed * math.ceil(devices / fixed)}.")
    return devices or fixed


def _ulysses_size(c: Conversion) -> int:
    """Write and return the number of devices that exchange heads. maxpipe's context axis includes
    these devices.
    """
    theirs, across = (f"{link}_context_usp_ulysses_parallelism" for link in ("ici", "dcn"))
    c.require(across, (1,), "devices of several slices do not exchange heads.")
    if c["context_parallel_strategy"] != "usp":
        c.require(theirs, (1,), "is only used with context_parallel_strategy=usp.")
        return 1
    if c[theirs] < 1:
        c.reject(theirs, "must be at least 1.", f"Set {theirs}=1.")
        return 1
    c.write("mesh.ulysses_size", c[theirs], theirs)
    return c[theirs]


def _batch(c: Conversion, count: int, *, is_known: bool) -> None:
    """Write the batch size and the number of microbatches."""
    theirs, steps = "per_device_batch_size", c["gradient_accumulation_steps"]
    if steps < 1 or c[theirs] <= 0:
        key = "gradient_accumulation_steps" if steps < 1 else theirs
        c.reject(key, "must be greater than 0.", f"Set {key}=1.")
        return
    batch = int(count * c[theirs]) * steps
    if not batch:
        rule = f"results in less than one sequence on {count} devices."
        c.reject(theirs, rule, f"Use --devices {math.ceil(1 / c[theirs])} or more.")
    unknown = "" if is_known else ", the fewest that the mesh allows: use --devices N for N devices"
    c.write(
        "train.batch_size",
        batch,
        theirs,
        "gradient_accumulation_steps",
        differs=f"is the total, here for {count} x {c[theirs]:g} x {steps} sequences{unknown}.",
    )
    stages = c["ici_pipeline_parallelism"] * c["dcn_pipeline_parallelism"]
    if stages <= 1:
        c.write("pipeline.microbatches", steps, "gradient_accumulation_steps")
        return
    per_step = c["num_pipeline_microbatches"]
    if per_step < 1:
        per_step = stages * (2 if c["pipeline_delay_activation_forwarding"] else 1)
    both = ("num_pipeline_microbatches", "gradient_accumulation_steps")
    c.write("pipeline.microbatches", per_step * steps, *both)
    _pipeline(c, stages)


def _pipeline(c: Conversion, stages: int) -> None:
    layers = c.settings["model.num_layers"].value
    inside = c["pipeline_parallel_layers"]
    inside = layers if inside < 0 else inside
    if layers > inside:
        c.write(
            "pipeline.prologue_layers",
            layers - inside,
            "pipeline_parallel_layers",
            differs="are the first layers of the model; MaxText leaves out the last ones.",
        )
    repeats = c["num_pipeline_repeats"]
    if repeats < 1:
        repeats = max(1, inside // (stages * c["num_layers_per_pipeline_stage"]))
    c.write(
        "pipeline.repeats",
        repeats,
        *("num_pipeline_repeats", "num_layers_per_pipeline_stage", "base_num_decoder_layers"),
    )
    c.write("pipeline.schedule", "circular" if repeats > 1 else "gpipe", "num_pipeline_repeats")
    delay = "pipeline_delay_activation_forwarding"
    c.write("pipeline.delayed_forwarding", c[delay], delay)
    gather = "step" if c["pipeline_fsdp_ag_once"] else "iteration"
    gather = "window" if c["pipeline_fsdp_ag_per_repeat"] else gather
    theirs = ("pipeline_fsdp_ag_once", "pipeline_fsdp_ag_per_repeat")
    c.write("pipeline.weight_gather", gather, *theirs)


def _schedule(c: Conversion) -> None:
    """Write the number of steps, and the learning-rate schedule as phases.

    The phases reproduce `create_learning_rate_schedule` of MaxText step by step: the warm-up starts
    at 0, the decay reaches its end at the last step, and the rate is 0 after the schedule.
    """
    total, steps = c["learning_rate_schedule_steps"], c["steps"]
    if steps == -1:
        steps = total
    if steps < 1:
        c.reject("steps", "must be at least 1.", "Set steps=1000.")
        return
    c.write("train.steps", steps, "steps")
    total = steps if total < 0 else total
    warmup = int(total * c["warmup_steps_fraction"])
    final = c["learning_rate_final_fraction"]
    is_wsd = c["lr_schedule_type"] == "wsd"
    c.require("lr_schedule_type", ("cosine", "wsd"), "other schedules are not supported.")
    decay = int(total * c["wsd_decay_steps_fraction"]) if is_wsd else total - warmup
    stable = total - warmup - decay
    shape = c["wsd_decay_style"] if is_wsd else "cosine"
    if not 0 <= warmup <= total or stable < 0 or not 0 <= final <= 1:
        rule = f"results in {warmup} warm-up, {stable} constant and {decay} decay steps."
        c.reject("warmup_steps_fraction", rule, "Set fractions whose sum is at most 1.")
        return
    phases: list[dict[str, Any]] = []
    if warmup:
        phases.append({"steps": warmup, "shape": "linear", "from": 0.0, "to": 1.0})
    if stable:
        phases.append({"steps": stable, "shape": "linear", "from": 1.0, "to": 1.0})
    if decay > 1:
        phases.append({"steps": decay - 1, "shape": shape, "from": 1.0, "to": final})
    if decay:
        phases.append({"steps": 1, "shape": "linear", "from": final, "to": final})
    if steps > total:
        phases.append({"steps": steps - total, "shape": "linear", "from": 0.0, "to": 0.0})
    theirs = [
        *("lr_schedule_type", "warmup_steps_fraction", "learning_rate_final_fraction"),
        *("learning_rate_schedule_steps", "steps"),
        *(("wsd_decay_steps_fraction", "wsd_decay_style") if is_wsd else ()),
    ]
    c.write("optim.learning_rate", c["learning_rate"], "learning_rate")
    c.write("optim.lr_phases", phases, *theirs)


def _optimizer(c: Conversion) -> None:
    kind = c["opt_type"]
    c.require("opt_type", ("adamw", "adam_pax", "muon"), "this optimizer is not supported.")
    c.write("optim.name", "muon" if kind == "muon" else "adamw", "opt_type")
    if kind == "adam_pax":
        c.differs("opt_type", "adam_pax clips and decays differently; optim.name is adamw.")
    for ours, theirs in {
        "beta1": "adam_b1",
        "beta2": "adam_b2",
        "epsilon": "adam_eps",
        "clip_norm": "gradient_clipping_threshold",
    }.items():
        c.write(f"optim.{ours}", c[theirs], theirs)
    decay = "muon_weight_decay" if kind == "muon" else "adam_weight_decay"
    c.write("optim.weight_decay", float(c[decay]), decay)
    masked = c["adamw_mask"]
    if masked and kind != "muon":
        c.differs(
            "adamw_mask",
            "optim.weight_decay never applies to normalization scales and biases; write other "
            f"exceptions than {', '.join(map(str, masked))} as optim.weight_decays.",
        )
        if any("embed" in str(each) for each in masked):
            c.write(
                "optim.weight_decays", [{"pattern": "embedding", "weight_decay": 0.0}], "adamw_mask"
            )
    elif c[decay]:
        everything = [{"pattern": "*", "weight_decay": float(c[decay])}]
        c.write("optim.weight_decays", everything, decay, "adamw_mask")
    if kind == "muon":
        c.write("optim.momentum", c["muon_beta"], "muon_beta")
    if c["skip_step_on_spikes"]:
        c.write("guard.on_spike", "skip", "skip_step_on_spikes")
        c.write("guard.spike_sigmas", c["skip_step_scaling_factor"], "skip_step_scaling_factor")
        c.write("guard.spike_window", c["skip_step_interval"], "skip_step_interval")
    c.omit("the loss has no z-loss on the logits.", "z_loss_multiplier")
    c.omit("the denominator has no term inside the square root.", "adam_eps_root")


def _remat(c: Conversion) -> None:
    theirs, policy = "remat_policy", c["remat_policy"]
    if policy in ("full", "none"):
        c.write("pipeline.remat", policy, theirs)
    elif policy in _REMAT:
        c.write("pipeline.remat", "names", theirs)
        names = list(_REMAT[policy])
        if c.settings["model.family"].value in ("deepseek", "deepseek_v32", "qwen3_next"):
            names = [name for name in names if name in ("matmuls", "attention", "mlp")] or [
                "matmuls"
            ]
        c.write("pipeline.saved_names", names, theirs)
    else:
        c.write("pipeline.remat", "full", theirs)
        why = f"pipeline.remat has no {policy}; full is written, which recomputes more."
        c.differs(theirs, f"{why} List activations in pipeline.saved_names or offloaded_names.")


def _adapter(c: Conversion) -> None:
    if "lora" not in c.given:
        return
    values = c["lora"]
    if not isinstance(values, dict):
        c.reject("lora", "must be a mapping.", "Write `lora: {enable_lora: false}`.")
        return
    if not values.get("enable_lora"):
        c.needless.append("lora")
        return
    c.write("adapter.rank", values.get("lora_rank", 0), "lora")
    c.write("adapter.alpha", float(values.get("lora_alpha") or 0.0), "lora")
    if values.get("lora_weight_qtype") == "nf4":
        c.write("adapter.base_quantization", "nf4", "lora")
    if values.get("lora_module_path"):
        c.differs("lora", "lora_module_path is a regular expression; set adapter.targets instead.")


_NO_DOWNLOAD = (
    "Only `maxpipe fetch` downloads datasets. Run `maxpipe fetch hf:datasets/NAME --out DIR`, and "
    "set data.source=parquet (or jsonl) data.path=DIR."
)


def _data(c: Conversion) -> None:
    kind, has_chat = c["dataset_type"], "data.chat" in c.settings
    if kind == "synthetic":
        c.write("data.source", "synthetic", "dataset_type")
    elif kind == "grain" and c["grain_train_files"] and not set(";,") & set(c["grain_train_files"]):
        c.write("data.source", c["grain_file_type"], "dataset_type", "grain_file_type")
        c.write("data.path", c["grain_train_files"], "grain_train_files")
    elif kind == "hf" and c["hf_path"] in ("parquet", "json") and c["hf_train_files"]:
        source = "jsonl" if c["hf_path"] == "json" else "parquet"
        c.write("data.source", source, "dataset_type", "hf_path")
        c.write("data.path", c["hf_train_files"], "hf_train_files")
    elif kind == "tfds" and c["dataset_path"]:
        c.write("data.source", "tfds", "dataset_type")
        c.write("data.path", c["dataset_name"], "dataset_name")
        c.write("data.tfds_dir", c["dataset_path"], "dataset_path")
    elif has_chat:
        name = c["hf_path"].rpartition("/")[2] or "dataset"
        c.write("data.source", "huggingface", "dataset_type")
        c.write("data.path", f"data/{name}", "hf_path", differs=f"is a folder: {_NO_DOWNLOAD}")
    else:
        why = _NO_DOWNLOAD if kind == "hf" else "set data.source and data.path to the documents."
        c.omit(why, "dataset_type", "hf_path", "hf_train_files", "grain_train_files")
    _columns(c, has_chat)
    packing = "best_fit" if c["packing"] else "pad"
    c.write("data.packing", packing, "packing")
    if c["packing"]:
        why = "data.packing=best_fit splits documents that are longer than a sequence; MaxText "
        c.differs("packing", f"{why}truncates them.")


def _columns(c: Conversion, has_chat: bool) -> None:
    columns = c["train_data_columns"]
    if c.is_default("train_data_columns"):
        return
    if c["use_dpo"] and len(columns) == 2:
        c.write("data.chosen_field", columns[0], "train_data_columns")
        c.write("data.rejected_field", columns[1], "train_data_columns")
    elif has_chat and len(columns) == 2:
        c.write("data.chat", "prompt", "use_sft", "train_data_columns")
        c.write("data.prompt_field", columns[0], "train_data_columns")
        c.write("data.response_field", columns[1], "train_data_columns")
    elif len(columns) == 1:
        ours = "data.messages_field" if has_chat else "data.text_field"
        c.write(ours, columns[0], "train_data_columns")


def _tokenizer(c: Conversion) -> None:
    path = c["tokenizer_path"]
    if not path:
        c.omit("set tokenizer.kind and tokenizer.path.", "tokenizer_type")
        return
    kinds = ("sentencepiece", "huggingface", "tiktoken")
    c.require("tokenizer_type", kinds, "other formats are not supported.")
    c.write("tokenizer.kind", c["tokenizer_type"], "tokenizer_type")
    c.write("tokenizer.path", path, "tokenizer_path")
    if c["tokenizer_type"] == "tiktoken":
        c.write("tokenizer.preset", "llama3", "tokenizer_type")


def _evaluation(c: Conversion, count: int) -> None:
    if c["eval_interval"] > 0:
        c.write("eval.every", c["eval_interval"], "eval_interval")
    if c["eval_steps"] > 0:
        c.write("eval.batches", c["eval_steps"], "eval_steps")
    if c["eval_per_device_batch_size"] > 0:
        theirs = "eval_per_device_batch_size"
        size = int(c[theirs] * count)
        c.write("eval.batch_size", size, theirs, differs=f"is the total for {count} devices.")


def _profiles(c: Conversion) -> None:
    skipped, count = "skip_first_n_steps_for_profiler", "profiler_steps"
    if c["profiler"] != "xplane":
        why = "this key has no effect without profiler=xplane."
        return c.omit(why, skipped, count, "profile_periodically_period")
    c.write("profile.at", [c[skipped] + 1], "profiler", skipped, differs="counts steps from 1.")
    c.write("profile.steps", c[count], count)
    return c.omit("profile.at lists each profile.", "profile_periodically_period")


def _checkpoints(c: Conversion) -> None:
    if c["enable_checkpointing"]:
        c.write("checkpoint.every", c["checkpoint_period"], "checkpoint_period")
    else:
        theirs = "enable_checkpointing"
        c.write("checkpoint.every", 0, theirs, differs="is 0: only the last step is saved.")
    if c["load_parameters_path"] or c["load_full_state_path"]:
        why = "import the checkpoint (`maxpipe import maxtext:DIR --out CKPT`), and set "
        why += "checkpoint.restore_from=CKPT checkpoint.restore=weights."
        c.omit(why, "load_parameters_path", "load_full_state_path")
