"""Tables that map keys, values and commands of other trainers to their equivalents in maxpipe.

The names come from MaxText, torchtitan, `Trainer` of transformers, TRL, Axolotl, Megatron-LM,
nanoGPT, and configs of published models. An entry maps a name to its equivalent, or to a reason and
an action if there is no equivalent. Only the letters and digits of names are compared: `max_steps`,
`maxSteps` and `max-steps` are equal.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from maxpipe.config.foreign_features import ABSENT_KEY
from maxpipe.config.rules import did_you_mean, normalize_name

SAME_KEY = {
    "run.name": "run_name experiment experiment_name exp_name job_name",
    "run.dir": "output_dir out_dir output log_dir logging_dir base_output_directory "
    "job_dump_folder dump_folder",
    "run.seed": "random_seed data_seed init_weights_seed data_shuffle_seed debug_seed",
    "model.num_layers": "n_layer n_layers num_hidden_layers num_decoder_layers layers depth "
    "base_num_decoder_layers base_num_layers",
    "model.d_model": "hidden_size n_embd dim emb_dim embed_dim hidden_dim base_emb_dim width "
    "base_d_model",
    "model.num_heads": "n_head n_heads num_attention_heads num_query_heads heads "
    "base_num_query_heads base_num_heads",
    "model.num_kv_heads": "n_kv_heads num_key_value_heads kv_heads num_query_groups "
    "base_num_kv_heads",
    "model.head_dim": "d_head d_kv kv_channels",
    "model.d_mlp": "intermediate_size ffn_hidden_size d_ff ffn_dim mlp_dim n_inner base_mlp_dim",
    "model.vocab_size": "vocab n_vocab padded_vocab_size",
    "model.tied_embeddings": "tie_word_embeddings tie_embeddings weight_tying share_embeddings "
    "logits_via_embedding",
    "model.mtp_heads": "num_nextn_predict_layers mtp_num_layers mtp_num_heads medusa_num_heads",
    "model.mtp_loss_weight": "mtp_loss_scaling_factor mtp_loss_coef",
    "model.moe.num_experts": "experts n_experts num_local_experts n_routed_experts "
    "num_moe_experts moe_num_experts",
    "model.moe.top_k": "num_experts_per_tok num_experts_per_token experts_per_token "
    "num_selected_experts moe_top_k moe_router_topk",
    "model.moe.num_dense_layers": "first_k_dense_replace n_dense_layers first_num_dense_layers",
    "model.moe.d_expert": "moe_intermediate_size moe_ffn_hidden_size expert_dim moe_inter_dim "
    "base_moe_mlp_dim",
    "model.moe.load_balance_loss_weight": "router_aux_loss_coef aux_loss_coef moe_aux_loss_coeff "
    "aux_loss_alpha",
    "model.moe.norm_topk_prob": "moe_normalize_expert_weights",
    "model.moe.num_shared_experts": "n_shared_experts shared_experts",
    "model.moe.score_func": "scoring_func moe_router_score_function routed_score_func",
    "model.moe.num_expert_groups": "n_group n_expert_groups moe_router_num_groups n_routing_groups",
    "model.moe.expert_groups_per_token": "topk_group n_limited_groups moe_router_group_topk "
    "topk_routing_group",
    "model.moe.expert_bias": "e_score_correction_bias moe_router_enable_expert_bias routed_bias",
    "model.moe.expert_bias_update_rate": "moe_router_bias_update_rate bias_update_speed "
    "routed_bias_update_rate",
    "model.deepseek.qk_rope_head_dim": "qk_pos_emb_head_dim",
    "model.moe.z_loss_weight": "router_z_loss_coef moe_z_loss_coeff",
    "model.moe.capacity_factor": "moe_expert_capacity_factor expert_capacity_factor",
    "model.qwen3_next.linear_num_key_heads": "gdn_num_key_heads",
    "model.qwen3_next.linear_num_value_heads": "gdn_num_value_heads",
    "model.qwen3_next.linear_key_head_dim": "gdn_key_head_dim",
    "model.qwen3_next.linear_value_head_dim": "gdn_value_head_dim",
    "model.qwen3_next.linear_conv_kernel_dim": "conv_kernel conv_size gdn_conv_kernel_dim",
    "model.qwen3_next.d_shared_expert": "shared_expert_intermediate_size",
    "model.rope_theta": "rope_base rotary_base rope_max_timescale",
    "model.norm_epsilon": "rms_norm_eps norm_eps layer_norm_eps layernorm_epsilon "
    "normalization_layer_epsilon",
    "model.dropout": "dropout_rate hidden_dropout residual_dropout resid_pdrop",
    "model.attention": "attn_implementation attention_implementation attn_impl flash_attention "
    "use_flash_attention attention_backend",
    "model.matmul": "quantization quantize_type",
    "model.compute_dtype": "dtype precision mixed_precision amp activation_dtype torch_dtype "
    "mixed_precision_param",
    "model.param_dtype": "params_dtype weight_dtype training_dtype",
    "model.frozen": "freeze freeze_layers freeze_params freeze_modules frozen_layers "
    "frozen_params frozen_parameters frozen_modules",
    "adapter.rank": "lora_rank lora_r lora_dim r",
    "adapter.alpha": "lora_alpha",
    "adapter.dropout": "lora_dropout",
    "adapter.targets": "target_modules lora_target_modules lora_target",
    "adapter.base_quantization": "bnb_4bit_quant_type quantization_bit",
    "mesh.ici_stage": "pp pp_size pipeline_parallel pipeline_parallel_size stages num_stages "
    "pipeline_model_parallel_size pipeline_parallel_degree ici_pipeline_parallelism",
    "mesh.ici_tensor": "tp tp_size tensor_parallel tensor_parallel_size mp model_parallel_size "
    "tensor_model_parallel_size tensor_parallel_degree ici_tensor_parallelism",
    "mesh.ici_data": "dp_replicate_size "
    "dp dp_size ddp data_parallel data_parallel_size data_parallel_degree "
    "dp_replicate data_parallel_replicate_degree num_replicas ici_data_parallelism",
    "mesh.ici_fsdp": "dp_shard_size "
    "fsdp fsdp_size dp_shard data_parallel_shard_degree ici_fsdp_parallelism",
    "mesh.ici_expert": "ep ep_size expert_parallel expert_parallel_size "
    "expert_model_parallel_size expert_parallel_degree ici_expert_parallelism",
    "mesh.ici_context": "cp cp_size context_parallel context_parallel_size "
    "context_parallel_degree sequence_parallel_degree "
    "sp_size ici_context_parallelism ici_sequence_parallelism",
    "mesh.sequence_parallel": "sp enable_sequence_parallel",
    "mesh.dcn_stage": "dcn_pipeline_parallelism",
    "mesh.dcn_tensor": "dcn_tensor_parallelism",
    "mesh.dcn_data": "dcn_data_parallelism",
    "mesh.dcn_fsdp": "dcn_fsdp_parallelism",
    "mesh.dcn_expert": "dcn_expert_parallelism",
    "mesh.dcn_context": "dcn_context_parallelism dcn_sequence_parallelism",
    "mesh.cpu_devices": "num_cpu_devices host_device_count jax_num_cpu_devices",
    "pipeline.schedule": "pipeline_schedule pp_schedule pipeline_parallel_schedule",
    "pipeline.microbatches": "num_microbatches n_microbatches num_pipeline_microbatches "
    "gradient_accumulation gradient_accumulation_steps grad_accum grad_accum_steps "
    "accumulation_steps accumulate_grad_batches update_freq num_pp_microbatches",
    "pipeline.repeats": "virtual_stages num_model_chunks vpp virtual_pipeline_size "
    "virtual_pipeline_model_parallel_size num_pipeline_repeats circular_repeats",
    "pipeline.remat": "gradient_checkpointing activation_checkpointing activation_checkpoint "
    "checkpoint_activations remat_policy recompute recompute_granularity "
    "activation_checkpoint_mode activation_checkpointing_mode",
    "train.steps": "max_steps num_steps train_steps total_steps max_train_steps num_train_steps "
    "train_iters iterations max_iters num_iters iters",
    "train.tokens": "train_max_tokens total_tokens num_tokens train_tokens token_budget",
    "train.batch_size": "global_batch_size global_train_batch_size total_batch_size "
    "train_batch_size batch bsz",
    "train.sequence_length": "seq_len seq_length max_seq_len max_seq_length sequence_len "
    "context_length ctx_len n_ctx block_size max_length max_target_length max_context_length",
    "optim.name": "optimizer optimizer_name optimizer_type optim.type optim.optimizer opt_type "
    "optim.kind optim.algorithm",
    "optim.learning_rate": "lr max_lr peak_lr base_lr",
    "optim.schedule": "lr_scheduler lr_scheduler_type lr_schedule scheduler lr_decay_style "
    "lr_schedule_type decay_type wsd_decay_style",
    "optim.warmup_steps": "warmup num_warmup_steps warmup_num_steps "
    "warmup_iters lr_warmup_steps lr_warmup_iters",
    "optim.decay_fraction": "decay_ratio cooldown_fraction wsd_decay_steps_fraction",
    "optim.min_lr_ratio": "min_lr_factor cosine_learning_rate_final_fraction "
    "learning_rate_final_fraction cosine_min_lr_ratio",
    "optim.beta1": "adam_beta1 adam_b1 b1",
    "optim.beta2": "adam_beta2 adam_b2 b2",
    "optim.epsilon": "adam_epsilon adam_eps eps",
    "optim.weight_decay": "wd adam_weight_decay muon_weight_decay",
    "eval.patience": "early_stopping_patience",
    "optim.clip_norm": "grad_clip max_grad_norm clip_grad train_clip optim_clip "
    "gradient_clipping max_norm gradient_clip gradient_clip_val gradient_clipping_threshold "
    "clip_grad_norm",
    "data.source": "dataset_type dataset_format data_type grain_file_type",
    "data.path": "data_path data_dir data_files dataset dataset_name dataset_path train_data "
    "train_file train_files hf_train_files grain_train_files",
    "data.text_field": "text_column text_key dataset_text_field train_data_columns",
    "data.messages_field": "messages_column conversation_column conversation_field",
    "data.prompt_field": "prompt_column instruction_field",
    "data.response_field": "response_column completion_field completion_column",
    "data.chat_template": "chat_template_path chat_template_file chat_template_jinja",
    "data.trained_roles": "roles_to_train train_on_roles",
    "data.packing": "sequence_packing sample_packing packing_strategy pack_sequences "
    "packing_type packing_method grain_packing_type",
    "data.validation_fraction": "val_split val_set_size "
    "validation_split val_fraction eval_fraction test_size",
    "data.prefetch_batches": "prefetch prefetch_factor grain_prefetch_buffer_size "
    "dataloader_prefetch_factor",
    "data.threads": "num_workers workers dataloader_num_workers grain_worker_count "
    "grain_num_threads",
    "tokenizer.path": "tokenizer tokenizer_path tokenizer_name tokenizer_file tokenizer_model "
    "tokenizer_name_or_path hf_assets_path",
    "tokenizer.split_pattern": "pat_str",
    "checkpoint.every": "save_every save_steps save_interval save_freq checkpoint_period "
    "checkpoint_interval checkpointing_steps ckpt_every",
    "checkpoint.keep": "save_total_limit keep_last keep_last_n max_to_keep "
    "max_num_checkpoints_to_keep keep_latest_k keep_last_k",
    "checkpoint.dir": "checkpoint_dir ckpt_dir save_dir checkpoint_folder",
    "checkpoint.restore_from": "resume_from_checkpoint init_from load_path load_from "
    "restore_path finetune_from load_full_state_path",
    "eval.every": "eval_interval eval_every val_check_interval validate_every validation_freq",
    "eval.sample_every": "sample_interval sample_steps generate_every generate_steps",
    "eval.sample_prompts": "sample_prompt generation_prompts",
    "eval.batches": "eval_iters eval_batches limit_val_batches validation_steps",
    "log.every": "log_every logging_steps log_interval log_freq log_steps report_every log_period",
    "log.tensorboard": "use_tensorboard tb enable_tensorboard",
    "log.progress": "progress_bar",
    "runtime.platform": "device accelerator backend hardware",
    "runtime.num_processes": "world_size nnodes num_nodes num_hosts nproc",
    "runtime.process_id": "machine_rank runtime_rank process_index node_rank local_rank",
    "distill.teacher": "teacher_model teacher_path teacher_model_name_or_path distillation_teacher",
    "distill.temperature": "distillation_temperature distill_temperature kd_temperature",
    "distill.weight": "distillation_weight distill_weight distill_alpha kd_weight kd_ratio",
    "distill.top_k": "distillation_top_k distill_top_k teacher_top_k",
    "runtime.coordinator": "master_addr coordinator_address rdzv_endpoint",
    "runtime.compilation_cache": "compilation_cache_dir jax_cache_dir",
    "launch.slices": "num_slices compile_topology_num_slices",
    "launch.topology": "tpu_type accelerator_type compile_topology",
    "model.family": "decoder_block model_type",
    "model.llama.rope_factor": "rope_linear_scaling_factor",
    "model.mistral.sliding_window": "sliding_window_size",
    "model.gemma2.attn_logit_softcapping": "attn_logits_soft_cap",
    "model.gemma2.final_logit_softcapping": "final_logits_soft_cap",
    "model.gemma3.local_rope_theta": "local_rope_max_timescale rope_local_base_freq",
    "model.qwen3_moe.moe_layer_interval": "interleave_moe_layer_step decoder_sparse_step",
    "mesh.context_attention": "context_parallel_strategy context_parallel_rotate_method",
    "mesh.collective_matmul": "enable_async_tensor_parallel",
    "pipeline.delayed_forwarding": "pipeline_delay_activation_forwarding",
    "pipeline.weight_gather": "pipeline_fsdp_ag_once fsdp_reshard_after_forward "
    "reshard_after_forward",
    "train.objective": "training_objective",
    "optim.momentum": "muon_beta muon_momentum",
    "optim.state_dtype": "mu_dtype",
    "optim.reduce_dtype": "grad_dtype mixed_precision_reduce",
    "optim.zero1": "shard_optimizer_over_data use_distributed_optimizer",
    "optim.offload_state": "optimizer_memory_host_offload",
    "guard.on_spike": "skip_step_on_spikes",
    "guard.spike_window": "skip_step_interval",
    "guard.spike_sigmas": "skip_step_scaling_factor",
    "guard.bad_steps": "abort_on_nan_loss abort_on_inf_loss",
    "tokenizer.kind": "tokenizer_type",
    "checkpoint.local_dir": "local_checkpoint_directory",
    "checkpoint.local_every": "local_checkpoint_period",
    "checkpoint.best_metric": "metric_for_best_model",
    "checkpoint.best_mode": "greater_is_better",
    "runtime.init_timeout_seconds": "jax_distributed_initialization_timeout",
    "runtime.heartbeat_timeout_seconds": "ddp_timeout train_timeout_seconds "
    "heartbeat_reporting_interval_in_seconds",
    "runtime.compiled_step": "compiled_trainstep_file",
}
"""Maps each key to its names in other trainers."""


_ZERO_BUBBLE = (
    "Set pipeline.schedule=zb_h1 (the memory of 1f1b), zb_h2 (twice that, no bubble), or zb_v with "
    "pipeline.repeats=2 (the memory of 1f1b, no bubble)."
)
_DTYPES = {
    "bf16 bfloat brain true yes on": "bfloat16",
    "fp32 f32 float single tf32 full no false off": "float32",
    "fp16 f16 float16 half": "float16 is not supported. Set KEY=bfloat16.",
    "fp8 float8 int8 e4m3": "8-bit types are not supported. Set KEY=bfloat16.",
}
VALUES: dict[str, dict[str, str]] = {
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
        "csv tsv": "CSV is not supported. Write one JSON object per line, and set "
        "data.source=jsonl.",
        "json jsonlines ndjson json_lines": "jsonl",
        "txt file files folder": "text",
        "riegeli array_record grain": "arrayrecord",
        "tensorflow_datasets tfrecord": (
            "Set data.source=tfds for a dataset that TFDS prepared as ArrayRecord. TFRecord has no "
            "random access: convert such files to ArrayRecord or JSON lines."
        ),
        "webdataset mosaic mds streaming": (
            "This format is not supported. Write one JSON object per line, and set "
            "data.source=jsonl."
        ),
        "random dummy fake mock": "synthetic",
        "prepared tokenized token ids": "tokens",
        "mmap bin idx indexed_dataset": "megatron",
        "memmap npy": (
            "Files of token ids without document boundaries are not supported. Set "
            "data.source=jsonl with the text, or data.source=megatron with .bin and .idx files."
        ),
    },
    "data.packing": {
        "concat concatenate concat_and_split wrapped greedy": "cut",
        # With packing enabled, other trainers do not split conversations.
        "true on yes bfd best_fit_decreasing ffd first_fit_decreasing multipack": "best_fit",
        "ff first_fit_shuffle": "first_fit",
        "false off no none padding padded": "pad",
    },
    "data.long_pairs": {"stop raise": "error", "skip left_out": "drop", "cut": "truncate"},
    "data.long_conversations": {"stop raise": "error", "skip left_out": "drop", "cut": "truncate"},
    "tokenizer.kind": {
        "hf tokenizers fast json": "huggingface",
        "byte utf8 bytelevel char": "bytes",
        "spm sp unigram": "sentencepiece",
        "openai ranks": "tiktoken",
        "auto_tokenizer llama_tokenizer llama_tokenizer_fast pre_trained_tokenizer_fast "
        "qwen2_tokenizer gemma_tokenizer gpt2_tokenizer": "auto",
        "bpe gpt2 llama llama3 qwen cl100k o200k wordpiece": (
            "Set tokenizer.kind=auto and tokenizer.path to the model's folder, or to its "
            "tokenizer.json or tokenizer.model."
        ),
    },
    "optim.name": {
        "adam adam_pax adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused adamw_bnb_8bit "
        "adamw_8bit paged_adamw paged_adamw_8bit paged_adamw_32bit fused_adamw": "adamw",
        "lion_8bit lion_32bit paged_lion_8bit": "lion",
        "sgd shampoo soap sophia": (
            "This optimizer is not supported. Set optim.name=adamw, or muon for orthogonalized "
            "updates."
        ),
    },
    "optim.schedule": {
        "warmup_cosine cosine_decay cosine_with_warmup cosine_with_min_lr "
        "cosine_annealing": "cosine",
        "warmup_linear linear_decay linear_with_warmup warmup_decay_lr": "linear",
        "warmup_cosine_lr": "cosine",
        "warmup_lr": "constant",
        "none constant_with_warmup fixed": "constant",
        "warmup_stable_decay trapezoidal": "wsd",
        "inverse_sqrt inverse_square_root rsqrt sqrt noam polynomial exponential step multistep "
        "cosine_with_restarts cosine_warmup_with_min_lr reduce_lr_on_plateau greedy": (
            "This schedule is not supported. Set optim.schedule=cosine, or wsd for a long constant "
            "phase."
        ),
    },
    "model.compute_dtype": _DTYPES,
    "model.matmul": {
        "bf16 bfloat16 fp32 float32 none false no off": "default",
        "true yes on w8a8 aqt_int8": "int8",
        "float8 e4m3 fp8_full fp8_gpu nanoo_fp8 hybrid": "fp8",
        "int4 fp4 nvfp4 mxfp8 w4a8": "This type is not supported. Set model.matmul=int8 or fp8.",
    },
    "model.param_dtype": _DTYPES,
    "model.attention": {
        "flash flash_attention flash_attention_2 fa2 fa3 fused": (
            "Set model.attention=auto, which selects the best implementation, cudnn on an NVIDIA "
            "GPU, or splash on a TPU."
        ),
        "eager plain reference dot_product false no off": "xla",
        "sdpa default best autoselected true yes on": "auto",
        "cudnn_flash_te cudnn_flash_jax": "cudnn",
        "blocked chunked memory_efficient": "blockwise",
        "splash_attention pallas tokamax": "splash",
        "ring": "Set mesh.context_attention=ring and model.attention=auto.",
    },
    "adapter.targets": {
        "q_proj wq": "layers.attention.query",
        "k_proj wk": "layers.attention.key",
        "v_proj wv": "layers.attention.value",
        "o_proj wo out_proj": "layers.attention.out",
        "gate_proj w1": "layers.mlp.gate",
        "up_proj w3": "layers.mlp.up",
        "down_proj w2": "layers.mlp.down",
    },
    "data.chat_template": {
        "tokenizer_default": "Leave it out to use the template in the tokenizer's folder.",
        "chatml llama3 llama3_2_vision llama4 gemma gemma3 qwen3 qwen_25 mistral_v1 mistral_v2v3 "
        "mistral_v3_tekken mistral_v7_tekken phi_3 phi_35 deepseek_v2 deepseek_v3 command_a "
        "cohere alpaca inst jinja jamba exaone metharme": (
            "Leave it out to use the template in the tokenizer's folder, or set "
            "data.chat_template=FILE.jinja."
        ),
    },
    "runtime.platform": {
        "gpu nvidia gpu_multiprocess": "cuda",
        "rocm amd mps metal xpu": "This platform is not supported. Set runtime.platform=cpu.",
        "": "auto",
    },
    "pipeline.remat": {
        "true all yes on block layer": "full",
        "false no off nothing": "none",
        "minimal minimal_flash save_dot_except_mlp save_dot_except_mlpwi save_qkv_proj "
        "save_dot_with_context_except_mlp save_out_proj minimal_with_context "
        "memory_budget": "names",
        "minimal_offloaded qkv_proj_offloaded": (
            "Set pipeline.remat=names, and pipeline.offloaded_names to the names to offload."
        ),
        "selective dots matmul custom": (
            "Set pipeline.remat=names, and pipeline.saved_names to the saved activations."
        ),
    },
    "pipeline.weight_gather": {
        "zero3 layer false always default": "iteration",
        "zero2 zero1 once true never": "step",
    },
    "guard.bad_steps": {
        "ignore drop false no off": "skip",
        "raise error abort true yes on": "stop",
    },
    "guard.on_spike": {"ignore warn log false no off": "note", "drop true yes on": "skip"},
    "model.family": {
        "llama2 llama3 llama4 default code_llama": "llama",
        "mixtral": "moe",
        "deepseek2 deepseek3 deepseek_v2 deepseek_v3": "deepseek",
        "gemma2_text": "gemma2",
        "gemma3_text": "gemma3",
        "qwen qwen2_5": "qwen2",
        "llama_for_causal_lm": "llama",
        "mistral_for_causal_lm": "mistral",
        "qwen2_for_causal_lm": "qwen2",
        "qwen3_for_causal_lm": "qwen3",
        "gemma2_for_causal_lm": "gemma2",
        "gemma3_for_causal_lm": "gemma3",
        "mixtral_for_causal_lm": "moe",
        "auto_model_for_causal_lm": (
            "Leave it out, and write `model: NAME` (`maxpipe configs list`)."
        ),
    },
    "mesh.context_attention": {"all_gather allgather": "gather", "alltoall ulysses": "heads"},
    "mesh.ici_fsdp": {"full_shard shard_grad_op hybrid_shard true yes on auto_wrap": "-1"},
    "train.objective": {
        "causal_lm clm lm pretraining": "pretrain",
        "dpo ipo orpo": "preference",
        "rl ppo": "grpo",
        "kd distillation": "distill",
    },
    "optim.state_dtype": _DTYPES,
    "optim.reduce_dtype": _DTYPES,
    "checkpoint.best_mode": {
        "true yes max maximize higher": "largest",
        "false no min minimize lower": "smallest",
    },
    "checkpoint.best_metric": {"loss eval_loss val_loss": "eval/loss"},
    "log.progress": {"rich bar tqdm true": "live", "lines text none false off": "plain"},
}
"""Maps each key to a table from values of other trainers to the equivalent value or an action."""

LISTS = {
    "data.path": "Set data.paths to the list, or write a glob pattern such as 'data/*.jsonl' or "
    "'data/**/part-[0-4]*'.",
}
"""Suggested actions for keys that may be lists in other trainers."""

COMMANDS = {
    "train": "fit pretrain finetune run start sft dpo",
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
"""Maps each command to its names in other programs."""

NO_COMMAND = {
    "serve api": "maxpipe does not serve models; `maxpipe generate RUN --interactive` reads "
    "prompts from the terminal.",
    "convert hf": "Use `maxpipe import` to read a Hugging Face folder, and `maxpipe export` to "
    "write one.",
    "resume restart continue": "Repeat the command that started the run, or run "
    "`maxpipe train runs/NAME/config.yml`; the run resumes automatically.",
    "sweep": "Start one run per setting, each with a different run.name.",
}


_PREFERRED = "model.moe."
"""Section that is preferred if several families have the same key."""


class NameMatch(NamedTuple):
    """Equivalent of a name of another trainer. Either `name` or `action` is empty."""

    name: str = ""
    """The equivalent key."""
    why: str = ""
    action: str = ""
    is_exact: bool = True
    """Whether a table contains this exact name rather than a similar name."""


def match_key(path: Sequence[str], keys: Collection[str]) -> NameMatch:
    """Return the key that an unknown key refers to. `path` contains its section (if any) and its
    name.
    """
    guess = NameMatch(_similar_key(path, keys), is_exact=False)
    return match_exact_key(path, keys) or guess


def match_exact_key(path: Sequence[str], keys: Collection[str]) -> NameMatch | None:
    """Return the entry for exactly this name, ignoring similar names."""
    full, tail = normalize_name("".join(path)), normalize_name(path[-1])
    if full in _foreign_keys():
        return _foreign_keys()[full]
    if found := [key for key in keys if normalize_name(key) == full]:
        return NameMatch(found[0])
    if len(path) > 1 and (answer := _match_pattern(path)):
        return answer
    if found := [key for key in keys if normalize_name(key.rpartition(".")[2]) == tail]:
        # Keys in the same section take precedence.
        found = [key for key in found if key.startswith(f"{path[0]}.")] or found
        found.sort(key=lambda key: (key.count(".") > 1, not key.startswith(_PREFERRED)))
        return NameMatch(found[0])
    for part in (tail, normalize_name(path[0])):
        if part in _foreign_keys():
            return _foreign_keys()[part]
    return _match_pattern(path[-1:])


def _match_pattern(path: Sequence[str]) -> NameMatch | None:
    word = re.sub(r"[^a-z0-9]+", "_", ".".join(path).lower())
    return next((found for each, found in _patterns() if fnmatchcase(word, each)), None)


def join_reason(rule: str, why: str) -> str:
    """Append the reason to the rule, if the reason is not empty."""
    return f"{rule.removesuffix('.')}: {why}" if why else rule


def _similar_key(path: Sequence[str], keys: Collection[str]) -> str:
    """Return the most similar key, preferably in the same section."""
    if len(path) > 1:
        prefix = f"{path[0]}."
        names = [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
        if guess := did_you_mean(".".join(path[1:]), names):
            return prefix + guess
    return did_you_mean(".".join(path), keys)


def match_exact_value(key: str, value: str, choices: Iterable[str]) -> str:
    """Return the choice that is equivalent to a value, or an action. Return an empty string if no
    table contains the value.
    """
    exact = [choice for choice in choices if normalize_name(choice) == normalize_name(value)]
    return exact[0] if exact else _foreign_values(key).get(normalize_name(value), "")


def value_action(key: str, value: str, choices: Iterable[str]) -> str:
    """Return the suggested action for an invalid value, or an empty string."""
    choices = list(choices)
    found = match_exact_value(key, value, choices) or did_you_mean(value, choices)
    return f"Set {key}={found}." if found in choices else found.replace("KEY", key)


def list_action(key: str) -> str:
    """Return the suggested action for a list in place of a single text, or an empty string."""
    return LISTS.get(key, "")


def match_command(word: str, commands: Collection[str]) -> NameMatch:
    """Return the command that an unknown command refers to."""
    if exact := [
        command for command in commands if normalize_name(command) == normalize_name(word)
    ]:
        return NameMatch(exact[0])
    for command, names in COMMANDS.items():
        if command in commands and normalize_name(word) in map(normalize_name, names.split()):
            return NameMatch(command)
    for names, action in NO_COMMAND.items():
        if normalize_name(word) in map(normalize_name, names.split()):
            return NameMatch(action=action)
    return NameMatch(did_you_mean(word, commands))


@functools.cache
def _foreign_keys() -> dict[str, NameMatch]:
    same = {
        normalize_name(name): NameMatch(key)
        for key, names in SAME_KEY.items()
        for name in names.split()
    }
    return same | {
        normalize_name(name): NameMatch("", *said)
        for names, said in ABSENT_KEY.items()
        for name in names.split()
        if "*" not in name
    }


@functools.cache
def _patterns() -> list[tuple[str, NameMatch]]:
    return [
        (name, NameMatch("", *said))
        for names, said in ABSENT_KEY.items()
        for name in names.split()
        if "*" in name
    ]


@functools.cache
def _foreign_values(key: str) -> dict[str, str]:
    table = VALUES.get(key, {})
    return {normalize_name(name): found for names, found in table.items() for name in names.split()}
