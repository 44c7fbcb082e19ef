"""Names of other trainers, and the names here.

One table for keys, one for values and one for commands. An entry leads to the name
of the same thing here, or says why there is none and what to do. Names are compared by their
letters and digits only: `max_steps`, `maxSteps` and `max-steps` are one.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from maxpipe.config.rules import did_you_mean, squashed

_SAME_KEY = {
    "run.name": "run_name experiment experiment_name exp_name job_name",
    "run.dir": "output_dir out_dir output log_dir logging_dir",
    "run.seed": "random_seed data_seed",
    "model.num_layers": "n_layer n_layers num_hidden_layers num_decoder_layers layers depth",
    "model.d_model": "hidden_size n_embd dim emb_dim embed_dim hidden_dim base_emb_dim width",
    "model.num_heads": "n_head n_heads num_attention_heads num_query_heads heads",
    "model.num_kv_heads": "n_kv_heads num_key_value_heads kv_heads num_query_groups",
    "model.head_size": "head_dim d_head d_kv kv_channels",
    "model.d_mlp": "intermediate_size ffn_hidden_size d_ff ffn_dim mlp_dim n_inner",
    "model.vocab_size": "vocab n_vocab padded_vocab_size",
    "model.tied_embeddings": "tie_word_embeddings tie_embeddings weight_tying share_embeddings",
    "model.heads_ahead": "num_nextn_predict_layers mtp_num_layers mtp_num_heads medusa_num_heads",
    "model.ahead_loss_weight": "mtp_loss_scaling_factor mtp_loss_weight mtp_loss_coef",
    "model.moe.num_experts": "experts n_experts num_local_experts n_routed_experts "
    "num_moe_experts moe_num_experts",
    "model.moe.top_k": "num_experts_per_tok num_experts_per_token experts_per_token "
    "num_selected_experts moe_top_k moe_router_topk",
    "model.moe.num_dense_layers": "first_k_dense_replace n_dense_layers first_num_dense_layers",
    "model.moe.d_expert": "moe_intermediate_size moe_ffn_hidden_size expert_dim moe_inter_dim",
    "model.moe.balance_weight": "router_aux_loss_coef aux_loss_coef moe_aux_loss_coeff "
    "aux_loss_alpha load_balance_loss_weight",
    "model.moe.normalised_weights": "norm_topk_prob moe_normalize_expert_weights",
    "model.moe.num_shared_experts": "n_shared_experts shared_experts",
    "model.moe.weight_scale": "routed_scaling_factor",
    "model.moe.scores": "scoring_func moe_router_score_function",
    "model.moe.num_groups": "n_group n_expert_groups moe_router_num_groups",
    "model.moe.groups_per_token": "topk_group n_limited_groups moe_router_group_topk",
    "model.moe.router_bias": "e_score_correction_bias moe_router_enable_expert_bias",
    "model.moe.balance_rate": "moe_router_bias_update_rate bias_update_speed",
    "model.deepseek.kv_rank": "kv_lora_rank",
    "model.deepseek.query_rank": "q_lora_rank",
    "model.deepseek.rope_size": "qk_rope_head_dim qk_pos_emb_head_dim",
    "model.deepseek.value_size": "v_head_dim",
    "model.moe.z_weight": "router_z_loss_coef moe_z_loss_coeff",
    "model.moe.capacity_factor": "moe_expert_capacity_factor expert_capacity_factor",
    "model.qwen3_next.attention_period": "full_attention_interval",
    "model.qwen3_next.num_key_heads": "linear_num_key_heads",
    "model.qwen3_next.num_value_heads": "linear_num_value_heads",
    "model.qwen3_next.key_size": "linear_key_head_dim",
    "model.qwen3_next.value_size": "linear_value_head_dim",
    "model.qwen3_next.kernel": "linear_conv_kernel_dim conv_kernel conv_size",
    "model.qwen3_next.d_shared": "shared_expert_intermediate_size",
    "model.rope_theta": "rope_base rotary_base",
    "model.norm_epsilon": "rms_norm_eps norm_eps layer_norm_eps layernorm_epsilon",
    "model.dropout": "dropout_rate hidden_dropout residual_dropout resid_pdrop",
    "model.attention": "attn_implementation attention_implementation attn_impl flash_attention "
    "use_flash_attention attention_backend",
    "model.matmul": "quantization quantize_type fp8 int8 use_fp8 use_int8 enable_fp8",
    "model.compute_dtype": "dtype precision mixed_precision amp activation_dtype torch_dtype",
    "model.param_dtype": "params_dtype weight_dtype",
    "model.frozen": "freeze freeze_layers freeze_params freeze_modules frozen_layers frozen_params "
    "frozen_parameters frozen_modules",
    "adapter.rank": "lora_rank lora_r lora_dim r",
    "adapter.alpha": "lora_alpha",
    "adapter.dropout": "lora_dropout",
    "adapter.targets": "target_modules lora_target_modules lora_target",
    "adapter.base": "bnb_4bit_quant_type quantization_bit",
    "mesh.ici_stage": "pp pp_size pipeline_parallel pipeline_parallel_size stages num_stages "
    "pipeline_model_parallel_size pipeline_parallel_degree ici_pipeline_parallelism",
    "mesh.ici_tensor": "tp tp_size tensor_parallel tensor_parallel_size mp model_parallel_size "
    "tensor_model_parallel_size tensor_parallel_degree ici_tensor_parallelism",
    "mesh.ici_data": "dp dp_size ddp data_parallel data_parallel_size data_parallel_degree "
    "dp_replicate data_parallel_replicate_degree num_replicas ici_data_parallelism",
    "mesh.ici_fsdp": "fsdp fsdp_size dp_shard data_parallel_shard_degree ici_fsdp_parallelism",
    "mesh.ici_expert": "ep ep_size expert_parallel expert_parallel_size expert_model_parallel_size "
    "expert_parallel_degree ici_expert_parallelism",
    "mesh.ici_context": "cp cp_size context_parallel context_parallel_size context_parallel_degree "
    "sp_size ici_context_parallelism ici_sequence_parallelism",
    "mesh.sequence_parallel": "sp",
    "mesh.dcn_stage": "dcn_pipeline_parallelism",
    "mesh.dcn_tensor": "dcn_tensor_parallelism",
    "mesh.dcn_data": "dcn_data_parallelism",
    "mesh.dcn_fsdp": "dcn_fsdp_parallelism",
    "mesh.dcn_expert": "dcn_expert_parallelism",
    "mesh.dcn_context": "dcn_context_parallelism dcn_sequence_parallelism",
    "mesh.cpu_devices": "num_cpu_devices host_device_count jax_num_cpu_devices",
    "pipeline.schedule": "pipeline_schedule pp_schedule pipeline_parallel_schedule",
    "pipeline.microbatches": "num_microbatches n_microbatches "
    "num_pipeline_microbatches gradient_accumulation gradient_accumulation_steps grad_accum "
    "grad_accum_steps accumulation_steps accumulate_grad_batches update_freq",
    "pipeline.repeats": "virtual_stages num_model_chunks vpp virtual_pipeline_size "
    "virtual_pipeline_model_parallel_size num_pipeline_repeats circular_repeats",
    "pipeline.remat": "gradient_checkpointing activation_checkpointing activation_checkpoint "
    "checkpoint_activations remat_policy recompute recompute_granularity",
    "train.steps": "max_steps num_steps train_steps total_steps max_train_steps "
    "num_train_steps train_iters iterations max_iters num_iters iters",
    "train.tokens": "train_max_tokens total_tokens num_tokens train_tokens token_budget",
    "train.batch_size": "global_batch_size global_train_batch_size total_batch_size "
    "train_batch_size batch bsz",
    "train.sequence_length": "seq_len seq_length max_seq_len max_seq_length sequence_len "
    "context_length ctx_len n_ctx block_size max_length max_target_length",
    "optim.name": "optimizer optimizer_name optimizer_type optim.type optim.optimizer",
    "optim.learning_rate": "lr max_lr peak_lr base_lr",
    "optim.schedule": "lr_scheduler lr_scheduler_type lr_schedule scheduler lr_decay_style",
    "optim.warmup_steps": "warmup num_warmup_steps warmup_iters lr_warmup_steps lr_warmup_iters",
    "optim.decay_fraction": "decay_ratio cooldown_fraction",
    "optim.final_fraction": "min_lr_ratio min_lr_factor cosine_learning_rate_final_fraction",
    "optim.beta1": "adam_beta1 adam_b1 b1",
    "optim.beta2": "adam_beta2 adam_b2 b2",
    "optim.epsilon": "adam_epsilon adam_eps eps",
    "optim.weight_decay": "wd adam_weight_decay",
    "optim.average_decay": "ema_decay",
    "eval.patience": "early_stopping_patience",
    "optim.clip_norm": "grad_clip max_grad_norm clip_grad train_clip optim_clip gradient_clipping "
    "max_norm gradient_clip gradient_clip_val gradient_clipping_threshold clip_grad_norm",
    "data.source": "dataset_type dataset_format data_type",
    "data.path": "data_path data_dir data_files dataset dataset_name dataset_path train_data "
    "train_file train_files",
    "data.field": "text_field text_column text_key dataset_text_field",
    "data.messages_field": "messages_column conversation_column conversation_field",
    "data.prompt_field": "prompt_column instruction_field",
    "data.response_field": "response_column completion_field completion_column",
    "data.chat_template": "chat_template_path chat_template_file chat_template_jinja",
    "data.trained_roles": "roles_to_train train_on_roles",
    "data.packing": "sequence_packing sample_packing packing_strategy pack_sequences "
    "packing_type packing_method",
    "data.validation_fraction": "val_split validation_split val_fraction eval_fraction test_size",
    "data.prefetch_batches": "prefetch prefetch_factor",
    "data.threads": "num_workers workers dataloader_num_workers",
    "tokenizer.path": "tokenizer tokenizer_path tokenizer_name tokenizer_file tokenizer_model "
    "tokenizer_name_or_path",
    "tokenizer.split_pattern": "pat_str",
    "checkpoint.every": "save_every save_steps save_interval save_freq checkpoint_period "
    "checkpoint_interval checkpointing_steps ckpt_every",
    "checkpoint.keep": "save_total_limit keep_last keep_last_n max_to_keep",
    "checkpoint.dir": "checkpoint_dir ckpt_dir save_dir",
    "checkpoint.restore_from": "resume_from_checkpoint init_from load_path load_from "
    "restore_path finetune_from",
    "eval.every": "eval_interval eval_steps eval_every val_check_interval validate_every",
    "eval.sample_every": "sample_interval sample_steps generate_every generate_steps",
    "eval.sample_prompts": "sample_prompt generation_prompts",
    "eval.batches": "eval_iters eval_batches limit_val_batches",
    "log.every": "log_every logging_steps log_interval log_freq log_steps report_every",
    "log.tensorboard": "use_tensorboard tb enable_tensorboard",
    "log.progress": "progress_bar disable_tqdm",
    "runtime.platform": "device accelerator backend",
    "runtime.num_processes": "world_size nnodes num_nodes num_hosts nproc",
    "runtime.process_id": "runtime_rank process_index node_rank",
    "distill.teacher": "teacher_model teacher_path teacher_model_name_or_path distillation_teacher",
    "distill.temperature": "distillation_temperature distill_temperature kd_temperature",
    "distill.weight": "distillation_weight distill_weight distill_alpha kd_weight kd_ratio",
    "distill.top_k": "distillation_top_k distill_top_k teacher_top_k",
    "runtime.coordinator": "master_addr coordinator_address rdzv_endpoint",
    "runtime.compilation_cache": "compilation_cache_dir jax_cache_dir",
    "launch.slices": "num_slices",
    "launch.topology": "tpu_type accelerator_type",
}
"""A key to its names elsewhere."""

_NOT_SAME_KEY = {
    "epochs num_epochs num_train_epochs max_epochs n_epochs": (
        "the length of a run is in steps or tokens.",
        "Set train.steps or train.tokens; a run says at its start how many steps an epoch has.",
    ),
    "per_device_batch_size per_device_train_batch_size micro_batch_size local_batch_size "
    "device_batch_size train_micro_batch_size_per_gpu": (
        "train.batch_size counts the sequences of a step over all devices and microbatches.",
        "Set train.batch_size to this number x data x fsdp x pipeline.microbatches.",
    ),
    "per_device_eval_batch_size": (
        "eval.batch_size counts the sequences of a batch over all devices.",
        "Set eval.batch_size to this number x data x fsdp.",
    ),
    "eval_strategy evaluation_strategy": (
        "evaluations are some steps apart.",
        "Set eval.every to the number of steps; 0 evaluates after the last one only.",
    ),
    "num_vocab_tiling num_output_chunks ce_chunks loss_num_chunks": (
        "the blocks of the loss are given by their size.",
        "Set pipeline.loss_block_tokens to the tokens of a microbatch on a device divided by this "
        "number, or leave it out: long sequences are in blocks by themselves.",
    ),
    "chunked_cross_entropy chunked_ce cut_cross_entropy linear_cross_entropy "
    "fused_linear_cross_entropy use_liger_kernel liger": (
        "logits are made of a block of tokens at a time where they are large.",
        "Leave it out, or set pipeline.loss_block_tokens to the number of tokens.",
    ),
    "rampup_batch_size batch_size_rampup batch_size_warmup batch_size_schedule batch_schedule "
    "per_device_batch_size_start per_device_batch_size_increment global_rampup_samples": (
        "the batch grows in stages of steps or tokens.",
        "Set train.batch_ramp to its stages, such as \"train.batch_ramp=['16 for 1000 steps', "
        "'32 for 50000000 tokens']\"; train.batch_size follows the last one.",
    ),
    "save_strategy": (
        "checkpoints are some steps apart.",
        "Set checkpoint.every to the number of steps; 0 saves after the last one only.",
    ),
    "warmup_ratio warmup_fraction warmup_steps_fraction lr_warmup_fraction": (
        "the warm-up is in steps.",
        "Set optim.warmup_steps to this fraction of train.steps.",
    ),
    "min_lr final_lr end_lr": (
        "the last rate is a fraction of the peak.",
        "Set optim.final_fraction to this rate divided by optim.learning_rate.",
    ),
    "bf16": ("types are named.", "Set model.compute_dtype=bfloat16, which is the default."),
    "fp32": ("types are named.", "Set model.compute_dtype=float32."),
    "fp16 half": (
        "float16 is not supported.",
        "Set model.compute_dtype=bfloat16, which needs no loss scale.",
    ),
    "load_in_8bit load_in_4bit": (
        "8 and 4 bits hold the frozen base of adapters.",
        "Set adapter.base=int8 or nf4, with adapter.rank=16.",
    ),
    "loss_scale": (
        "bfloat16 and float32 need no loss scale.",
        "Leave it out; guard.bad_steps says what happens to a step with NaN.",
    ),
    "wandb wandb_project wandb_run_name wandb_entity use_wandb weights_and_biases": (
        "Weights & Biases is not supported.",
        "Leave it out; log.tensorboard=true writes for TensorBoard, and metrics.jsonl has every "
        "number as JSON, a line per record.",
    ),
    "mlflow comet neptune clearml aim swanlab trackio report_to loggers logger": (
        "TensorBoard files and metrics.jsonl are what a run writes.",
        "Leave it out; metrics.jsonl has every number as JSON, a line per record, for other tools.",
    ),
    "moe mixture_of_experts": (
        "layers with experts are those of a model family.",
        "Set model.family=moe; `maxpipe config explain model.moe` lists its keys.",
    ),
    "adam adamw lion muon adafactor": (
        "an optimizer is chosen by its name.",
        "Set optim.name to one of them; `maxpipe config explain optim` lists what they take.",
    ),
    "sgd shampoo soap sophia": (
        "is no optimizer that there is: AdamW, Lion, Adafactor and Muon are.",
        "Set optim.name=adamw, or muon for updates that are orthogonal.",
    ),
    "zero zero_stage zero_optimization deepspeed sharding_strategy fsdp_config strategy": (
        "sharding is said by the mesh.",
        "Set mesh.ici_fsdp to the number of shards of parameters, gradients and optimizer state.",
    ),
    "lora peft qlora peft_type peft_config": (
        "adapters have a section of their own.",
        "Set adapter.rank=16; `maxpipe config explain adapter` lists its keys.",
    ),
    "model_name model_name_or_path pretrained pretrained_model_name_or_path hf_model "
    "hf_checkpoint": (
        "the model is described by its own keys, and its weights are a checkpoint.",
        "Name a model for the shape (`maxpipe configs list`), and set "
        "checkpoint.restore_from=hf:DIR to start from the weights in a Hugging Face folder.",
    ),
    "resume auto_resume resume_training continue overwrite_output_dir": (
        "a run whose folder has a checkpoint resumes by itself.",
        "Leave it out, or set run.name to a new name for a new run.",
    ),
    "num_gpus gpus ngpu n_gpus gpus_per_node num_devices": (
        "a run takes every device that jax finds.",
        "Leave it out; CUDA_VISIBLE_DEVICES hides GPUs, mesh.cpu_devices makes virtual devices of "
        "a CPU.",
    ),
    "shuffle shuffle_seed shuffle_buffer_size": (
        "documents are always shuffled, by run.seed.",
        "Leave it out, or set run.seed.",
    ),
    "streaming": (
        "documents are read from disk as they are needed.",
        "Leave it out; `jsonl` and `arrayrecord` files may be larger than memory.",
    ),
    "torch_compile compile jit": ("the step is always compiled.", "Leave it out."),
    "profile profiler profiling": (
        "a run takes no profiles.",
        "Leave it out; `maxpipe goodput` says where its time went, `maxpipe compile` what a step "
        "does.",
    ),
    "z_loss z_loss_weight muon_lr": ("is not supported.", "Leave it out."),
    "ema": ("an average is kept by its decay.", "Set optim.average_decay=0.999."),
    "early_stopping": (
        "a run ends early after evaluations in a row without a better one.",
        "Set eval.patience=5 for five of them.",
    ),
}
"""Names to the reason that there is no such key here, and the action."""

_ZERO_BUBBLE = (
    "Set pipeline.schedule=zb_h1 (the memory of 1f1b), zb_h2 (twice that, no bubble), or zb_v with "
    "pipeline.repeats=2 (the memory of 1f1b, no bubble)."
)
_DTYPES = {
    "bf16 bfloat brain": "bfloat16",
    "fp32 f32 float single tf32 full": "float32",
    "fp16 f16 float16 half": "float16 is not supported. Set KEY=bfloat16.",
    "fp8 float8 int8 e4m3": "8-bit types are not supported. Set KEY=bfloat16.",
}
_VALUES = {
    "pipeline.schedule": {
        "zerobubble zb zerobubblepipeline zbpp zbh": _ZERO_BUBBLE,
        "one_forward_one_backward pipedream pipedream_flush schedule1f1b": "1f1b",
        "interleaved_1f1b interleaved1f1b vpp virtual looped megatron schedule_interleaved1f1b": (
            "interleaved"
        ),
        "afab fill_drain fthenb schedule_gpipe": "gpipe",
        "bfs looped_bfs schedule_looped_bfs": "breadth_first",
        "zbv schedule_zbv_zero_bubble": "zb_v",
        "dualpipe dual_pipe schedule_dual_pipe_v": "dualpipe_v",
    },
    "data.source": {
        "pq pyarrow": "parquet",
        "hf hub datasets arrow load_from_disk save_to_disk": "huggingface",
        "csv tsv": "CSV is not read. Write one JSON object per line, and set data.source=jsonl.",
        "json jsonlines ndjson json_lines": "jsonl",
        "txt file files folder": "text",
        "riegeli array_record grain": "arrayrecord",
        "tensorflow_datasets tfrecord": (
            "Set data.source=tfds for a dataset that TFDS prepared as ArrayRecord; TFRecord files "
            "cannot be read at a position, so write them as ArrayRecord or JSON lines."
        ),
        "webdataset mosaic mds streaming": (
            "It is not supported. Write one JSON object per line, and set data.source=jsonl."
        ),
        "random dummy fake mock": "synthetic",
        "prepared tokenized token ids": "tokens",
        "mmap bin idx indexed_dataset": "megatron",
        "memmap npy": (
            "Files of bare ids are not read: where documents end is not in them. Set "
            "data.source=jsonl with the text, or megatron with .bin and .idx files."
        ),
    },
    "data.packing": {
        "true on yes concat concatenate concat_and_split wrapped greedy": "cut",
        "bfd best_fit_decreasing ffd first_fit_decreasing multipack": "best_fit",
        "ff first_fit_shuffle": "first_fit",
        "false off no none padding padded": "pad",
    },
    "tokenizer.kind": {
        "hf tokenizers fast json": "huggingface",
        "byte utf8 bytelevel char": "bytes",
        "spm sp unigram": "sentencepiece",
        "openai ranks": "tiktoken",
        "bpe gpt2 llama llama3 qwen cl100k o200k wordpiece": (
            "Set tokenizer.kind=auto and tokenizer.path to the model's folder, or to its "
            "tokenizer.json or tokenizer.model."
        ),
    },
    "optim.name": {
        "adam adamw_torch adamw_torch_fused fused_adamw": "adamw",
        "sgd shampoo soap sophia": (
            "It is not supported. Set optim.name=adamw, or muon for updates that are orthogonal."
        ),
    },
    "optim.schedule": {
        "warmup_cosine cosine_decay cosine_with_warmup cosine_annealing": "cosine",
        "warmup_linear linear_decay linear_with_warmup": "linear",
        "none constant_with_warmup fixed": "constant",
        "warmup_stable_decay trapezoidal": "wsd",
        "inverse_sqrt inverse_square_root rsqrt noam polynomial exponential step multistep": (
            "It is not supported. Set optim.schedule=cosine, or wsd for a long constant part."
        ),
    },
    "model.compute_dtype": _DTYPES,
    "model.matmul": {
        "bf16 bfloat16 fp32 float32 none false no off": "default",
        "true yes on w8a8 aqt_int8": "int8",
        "float8 e4m3 fp8_full fp8_gpu nanoo_fp8 hybrid": "fp8",
        "int4 fp4 nvfp4 mxfp8 w4a8": "It is not supported. Set model.matmul=int8 or fp8.",
    },
    "model.param_dtype": _DTYPES,
    "model.attention": {
        "flash flash_attention flash_attention_2 fa2 fa3 fused": (
            "Set model.attention=auto, which takes what the device has, cudnn on an NVIDIA GPU, or "
            "splash on a TPU."
        ),
        "eager plain reference dot_product": "xla",
        "sdpa default best": "auto",
        "blocked chunked memory_efficient": "blockwise",
        "splash_attention pallas tokamax": "splash",
        "ring": "It is not supported. Set model.attention=auto.",
    },
    "runtime.platform": {
        "gpu nvidia": "cuda",
        "rocm amd mps metal xpu": "It is not supported. Set runtime.platform=cpu.",
        "": "auto",
    },
    "pipeline.remat": {
        "true all yes on block layer minimal": "full",
        "false no off nothing": "none",
        "selective dots matmul custom": (
            "Set pipeline.remat=names, and pipeline.saved_names to what is kept."
        ),
    },
    "pipeline.weight_gather": {
        "zero3 layer": "iteration",
        "zero2 zero1 once": "step",
    },
    "guard.bad_steps": {"ignore drop": "skip", "raise error abort": "stop"},
    "guard.on_spike": {"ignore warn log": "note", "drop": "skip"},
    "log.progress": {"rich bar tqdm true": "live", "lines text none false off": "plain"},
}
"""Key to names of its values elsewhere: the value here, or an action."""

_LISTS = {
    "data.path": "Set data.paths to the list, or write a glob pattern such as 'data/*.jsonl' or "
    "'data/**/part-[0-4]*'.",
}
"""Keys that elsewhere may be lists."""

_COMMANDS = {
    "train": "fit pretrain finetune run start resume restart continue",
    "launch": "submit srun sbatch torchrun accelerate mpirun",
    "plan": "estimate memory simulate autotune tune search predict",
    "config": "configs conf cfg settings show print schema",
    "schedule": "schedules draw pipeline timeline compare",
    "checkpoints": "checkpoint ckpt ckpts list ls runs prune verify diff",
    "goodput": "time report stats",
    "eval": "evaluate validate validation test evals",
    "generate": "sample samples decode infer inference complete chat prompt predict_text",
    "env": "info versions version bugreport",
    "doctor": "check diagnose health lint",
    "compile": "aot hlo",
    "init": "new create quickstart",
    "board": "tensorboard tb watch dashboard",
}
"""A command to its names elsewhere."""

_NO_COMMAND = {
    "serve api": "maxpipe serves no models; `maxpipe generate RUN --interactive` asks for prompts.",
    "convert hf": "Take `maxpipe import` for a Hugging Face folder, `maxpipe export` to write one.",
    "sweep": "Start one run per setting, each with its own run.name.",
}


class Answer(NamedTuple):
    """The entry for a name from elsewhere: one of the two is empty."""

    name: str = ""
    """Ours."""
    why: str = ""
    action: str = ""


def key_meant(path: Sequence[str], keys: Collection[str]) -> Answer:
    """The key meant by one that does not exist; `path` is its section, if any, and name."""
    return same_key(path, keys) or Answer(_resembling(path, keys))


def same_key(path: Sequence[str], keys: Collection[str]) -> Answer | None:
    """The entry for exactly this name, without guesses."""
    full, tail = squashed("".join(path)), squashed(path[-1])
    if full in _foreign_keys():
        return _foreign_keys()[full]
    for key in keys:
        if squashed(key) == full:
            return Answer(key)
    if found := [key for key in keys if squashed(key.rpartition(".")[2]) == tail]:
        # A key of the section that was meant comes before those of others.
        found = [key for key in found if key.startswith(f"{path[0]}.")] or found
        if len(found) == 1 or found[0].count(".") == 1:
            return Answer(found[0])
        return Answer(action=f"Write it in full: {' or '.join(found)}.")  # of several families
    for part in (tail, squashed(path[0])):
        if part in _foreign_keys():
            return _foreign_keys()[part]
    return None


def override_meant(argument: str, rule: str, keys: Collection[str]) -> tuple[str, str]:
    """Rule and action for `name=value`, or a name alone, that should have been an override.

    The rule is the one given, with a reason if there is one. The action may be empty.
    """
    name, _, text = argument.partition("=")
    answer = Answer(name) if name in keys else key_meant(name.split("."), keys)
    if answer.name:
        return rule, f"Write {answer.name}={text or 'VALUE'}."
    return because(rule, answer.why), answer.action


def because(rule: str, why: str) -> str:
    """The rule with its reason, if there is one."""
    return f"{rule.removesuffix('.')}: {why}" if why else rule


def _resembling(path: Sequence[str], keys: Collection[str]) -> str:
    """Choices of the same section if it is known: its keys resemble each other."""
    if len(path) > 1:
        prefix = f"{path[0]}."
        names = [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
        if guess := did_you_mean(".".join(path[1:]), names):
            return prefix + guess
    return did_you_mean(".".join(path), keys)


def value_meant(key: str, value: str, choices: Iterable[str]) -> str:
    """The action for a value that is none of the choices; empty if there is none."""
    choices = list(choices)
    if exact := [choice for choice in choices if squashed(choice) == squashed(value)]:
        return f"Set {key}={exact[0]}."
    found = _foreign_values(key).get(squashed(value), "") or did_you_mean(value, choices)
    return f"Set {key}={found}." if found in choices else found.replace("KEY", key)


def list_meant(key: str) -> str:
    """The action for a list in place of one text; empty if there is none."""
    return _LISTS.get(key, "")


def command_meant(word: str, commands: Collection[str]) -> Answer:
    """The command meant by one that does not exist."""
    if exact := [command for command in commands if squashed(command) == squashed(word)]:
        return Answer(exact[0])
    for command, names in _COMMANDS.items():
        if command in commands and squashed(word) in map(squashed, names.split()):
            return Answer(command)
    for names, action in _NO_COMMAND.items():
        if squashed(word) in map(squashed, names.split()):
            return Answer(action=action)
    return Answer(did_you_mean(word, commands))


@functools.cache
def _foreign_keys() -> dict[str, Answer]:
    same = {
        squashed(name): Answer(key) for key, names in _SAME_KEY.items() for name in names.split()
    }
    return same | {
        squashed(name): Answer("", *said)
        for names, said in _NOT_SAME_KEY.items()
        for name in names.split()
    }


@functools.cache
def _foreign_values(key: str) -> dict[str, str]:
    table = _VALUES.get(key, {})
    return {squashed(name): found for names, found in table.items() for name in names.split()}
