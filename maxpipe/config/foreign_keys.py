"""Keys of other trainers that have the meaning of a key here. Data only.

MaxText, torchtitan, `Trainer` of transformers, TRL, Axolotl, Megatron-LM, nanoGPT, and configs of
published models.
"""

from __future__ import annotations

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
    "model.head_size": "head_dim d_head d_kv kv_channels",
    "model.d_mlp": "intermediate_size ffn_hidden_size d_ff ffn_dim mlp_dim n_inner base_mlp_dim",
    "model.vocab_size": "vocab n_vocab padded_vocab_size",
    "model.tied_embeddings": "tie_word_embeddings tie_embeddings weight_tying share_embeddings "
    "logits_via_embedding",
    "model.heads_ahead": "num_nextn_predict_layers mtp_num_layers mtp_num_heads medusa_num_heads",
    "model.ahead_loss_weight": "mtp_loss_scaling_factor mtp_loss_weight mtp_loss_coef",
    "model.moe.num_experts": "experts n_experts num_local_experts n_routed_experts "
    "num_moe_experts moe_num_experts",
    "model.moe.top_k": "num_experts_per_tok num_experts_per_token experts_per_token "
    "num_selected_experts moe_top_k moe_router_topk",
    "model.moe.num_dense_layers": "first_k_dense_replace n_dense_layers first_num_dense_layers",
    "model.moe.d_expert": "moe_intermediate_size moe_ffn_hidden_size expert_dim moe_inter_dim "
    "base_moe_mlp_dim",
    "model.moe.balance_weight": "router_aux_loss_coef aux_loss_coef moe_aux_loss_coeff "
    "aux_loss_alpha load_balance_loss_weight",
    "model.moe.normalised_weights": "norm_topk_prob moe_normalize_expert_weights",
    "model.moe.num_shared_experts": "n_shared_experts shared_experts",
    "model.moe.weight_scale": "routed_scaling_factor",
    "model.moe.scores": "scoring_func moe_router_score_function routed_score_func",
    "model.moe.num_groups": "n_group n_expert_groups moe_router_num_groups n_routing_groups",
    "model.moe.groups_per_token": "topk_group n_limited_groups moe_router_group_topk "
    "topk_routing_group",
    "model.moe.router_bias": "e_score_correction_bias moe_router_enable_expert_bias routed_bias",
    "model.moe.balance_rate": "moe_router_bias_update_rate bias_update_speed "
    "routed_bias_update_rate",
    "model.deepseek.kv_rank": "kv_lora_rank",
    "model.deepseek.query_rank": "q_lora_rank",
    "model.deepseek.rope_size": "qk_rope_head_dim qk_pos_emb_head_dim",
    "model.deepseek.value_size": "v_head_dim",
    "model.moe.z_weight": "router_z_loss_coef moe_z_loss_coeff",
    "model.moe.capacity_factor": "moe_expert_capacity_factor expert_capacity_factor",
    "model.qwen3_next.attention_period": "full_attention_interval",
    "model.qwen3_next.num_key_heads": "linear_num_key_heads gdn_num_key_heads",
    "model.qwen3_next.num_value_heads": "linear_num_value_heads gdn_num_value_heads",
    "model.qwen3_next.key_size": "linear_key_head_dim gdn_key_head_dim",
    "model.qwen3_next.value_size": "linear_value_head_dim gdn_value_head_dim",
    "model.qwen3_next.kernel": "linear_conv_kernel_dim conv_kernel conv_size gdn_conv_kernel_dim",
    "model.qwen3_next.d_shared": "shared_expert_intermediate_size",
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
    "adapter.base": "bnb_4bit_quant_type quantization_bit",
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
    "optim.final_fraction": "min_lr_ratio min_lr_factor cosine_learning_rate_final_fraction "
    "learning_rate_final_fraction cosine_min_lr_ratio",
    "optim.beta1": "adam_beta1 adam_b1 b1",
    "optim.beta2": "adam_beta2 adam_b2 b2",
    "optim.epsilon": "adam_epsilon adam_eps eps",
    "optim.weight_decay": "wd adam_weight_decay muon_weight_decay",
    "optim.average_decay": "ema_decay",
    "eval.patience": "early_stopping_patience",
    "optim.clip_norm": "grad_clip max_grad_norm clip_grad train_clip optim_clip "
    "gradient_clipping max_norm gradient_clip gradient_clip_val gradient_clipping_threshold "
    "clip_grad_norm",
    "data.source": "dataset_type dataset_format data_type grain_file_type",
    "data.path": "data_path data_dir data_files dataset dataset_name dataset_path train_data "
    "train_file train_files hf_train_files grain_train_files",
    "data.field": "text_field text_column text_key dataset_text_field train_data_columns",
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
    "model.llama.rope_scaling": "rope_factor rope_linear_scaling_factor",
    "model.llama.rope_original_tokens": "original_max_position_embeddings",
    "model.mistral.window": "sliding_window_size sliding_window",
    "model.gemma2.score_cap": "attn_logits_soft_cap attn_logit_softcapping",
    "model.gemma2.logit_cap": "final_logits_soft_cap final_logit_softcapping",
    "model.gemma3.local_rope_theta": "local_rope_max_timescale rope_local_base_freq",
    "model.qwen3_next.chunk": "gdn_chunk_size",
    "model.qwen3_moe.expert_period": "interleave_moe_layer_step decoder_sparse_step",
    "mesh.context_attention": "context_parallel_strategy context_parallel_rotate_method",
    "mesh.collective_matmul": "enable_async_tensor_parallel",
    "pipeline.delayed_forwarding": "pipeline_delay_activation_forwarding",
    "pipeline.weight_gather": "pipeline_fsdp_ag_once fsdp_reshard_after_forward "
    "reshard_after_forward",
    "train.objective": "training_objective",
    "optim.momentum": "muon_beta muon_momentum",
    "optim.state_dtype": "mu_dtype",
    "optim.reduce_dtype": "grad_dtype mixed_precision_reduce",
    "optim.shard_over_data": "shard_optimizer_over_data use_distributed_optimizer",
    "optim.offload_state": "optimizer_memory_host_offload",
    "guard.on_spike": "skip_step_on_spikes",
    "guard.spike_window": "skip_step_interval",
    "guard.spike_sigmas": "skip_step_scaling_factor",
    "guard.bad_steps": "abort_on_nan_loss abort_on_inf_loss",
    "tokenizer.kind": "tokenizer_type",
    "checkpoint.local_dir": "local_checkpoint_directory",
    "checkpoint.local_every": "local_checkpoint_period",
    "checkpoint.best_metric": "metric_for_best_model",
    "checkpoint.best_is": "greater_is_better",
    "runtime.init_timeout_seconds": "jax_distributed_initialization_timeout",
    "runtime.heartbeat_timeout_seconds": "ddp_timeout train_timeout_seconds "
    "heartbeat_reporting_interval_in_seconds",
    "runtime.executable": "compiled_trainstep_file",
}
"""A key to its names elsewhere."""
