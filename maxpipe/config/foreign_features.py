"""Keys of other trainers that have no equivalent in maxpipe, with reasons and suggested actions.

This module contains only data. A name may be a glob pattern. Patterns are matched with the section
and key as lower-case words, joined by `_`. `{value}` in an action is replaced by the value in the
file.
"""

from __future__ import annotations

ABSENT_KEY = {
    "fp8 use_fp8 enable_fp8 float8 use_float8": (
        "8-bit matmuls are set by their type.",
        "Set model.matmul=fp8.",
    ),
    "int8 use_int8 enable_int8": (
        "8-bit matmuls are set by their type.",
        "Set model.matmul=int8.",
    ),
    "num_vocab_tiling num_output_chunks ce_chunks loss_num_chunks": (
        "the loss is computed in blocks of a given size.",
        "Set pipeline.loss_block_tokens to the tokens of a microbatch on a device divided by this "
        "number, or leave it out: long sequences use blocks by default.",
    ),
    "chunked_cross_entropy chunked_ce cut_cross_entropy linear_cross_entropy "
    "fused_linear_cross_entropy use_liger_kernel liger": (
        "large logits are computed in blocks of tokens.",
        "Leave it out, or set pipeline.loss_block_tokens to the number of tokens.",
    ),
    "fp32": (
        "types are set by name.",
        "Set model.compute_dtype=float32.",
    ),
    "loss_scale": (
        "bfloat16 and float32 need no loss scale.",
        "Leave it out; guard.bad_steps defines the response to NaN.",
    ),
    "moe mixture_of_experts": (
        "layers with experts belong to a model family.",
        "Set model.family=moe; `maxpipe config explain model.moe` lists its keys.",
    ),
    "adam adamw lion muon adafactor": (
        "the optimizer is set by name.",
        "Set optim.name to one of them; `maxpipe config explain optim` lists their keys.",
    ),
    "sgd shampoo soap sophia": (
        "the supported optimizers are AdamW, Lion, Adafactor and Muon.",
        "Set optim.name=adamw, or muon for orthogonalized updates.",
    ),
    "zero zero_stage zero_optimization deepspeed sharding_strategy fsdp_config "
    "parallelism_config strategy": (
        "the mesh defines the sharding.",
        "Set mesh.ici_fsdp to the number of shards of parameters, gradients and optimizer state.",
    ),
    "num_gpus gpus ngpu n_gpus gpus_per_node num_devices": (
        "a run uses all devices that jax finds.",
        "Leave it out; CUDA_VISIBLE_DEVICES hides GPUs, and mesh.cpu_devices sets the number of "
        "virtual CPU devices.",
    ),
    "streaming": (
        "documents are always read from disk on demand.",
        "Leave it out; `jsonl` and `arrayrecord` files may be larger than memory.",
    ),
    "z_loss muon_lr": (
        "is not supported.",
        "Leave it out.",
    ),
    "ema": (
        "the decay enables the average.",
        "Set optim.ema_decay=0.999.",
    ),
    "epochs num_epochs num_train_epochs max_epochs n_epochs num_epoch": (
        "the length of a run is a number of steps or tokens.",
        "Set train.steps or train.tokens; a run prints at its start how many steps an epoch has.",
    ),
    "rampup_batch_size batch_size_rampup batch_size_warmup batch_size_schedule batch_schedule "
    "per_device_batch_size_start per_device_batch_size_increment global_rampup_samples "
    "enable_rampup_batch_size": (
        "the batch grows in stages of steps or tokens.",
        'Set train.batch_ramp to the stages, such as "train.batch_ramp=[{batch_size: 16, steps: '
        '1000}]"; train.batch_size applies after the last stage.',
    ),
    "wandb wandb_project wandb_run_name wandb_entity use_wandb weights_and_biases enable_wandb "
    "wandb_project_name metrics_enable_wandb wandb_*": (
        "Weights & Biases is not supported.",
        "Leave it out; log.tensorboard=true writes TensorBoard files, and metrics.jsonl contains "
        "all metrics as JSON lines.",
    ),
    "mlflow comet neptune clearml aim swanlab trackio report_to loggers logger project trackio_*": (
        "a run writes TensorBoard files and metrics.jsonl.",
        "Leave it out; other tools can read metrics.jsonl, which contains all metrics as JSON "
        "lines.",
    ),
    "model_name model_name_or_path pretrained pretrained_model_name_or_path hf_model "
    "hf_checkpoint model_flavor": (
        "the shape and the weights of the model are separate settings.",
        "Give a model for the shape (`maxpipe configs list`), and set "
        "checkpoint.restore_from=hf:DIR to start from the weights in a Hugging Face folder.",
    ),
    "resume auto_resume resume_training continue overwrite_output_dir checkpoint_load_step "
    "load_step": (
        "a run whose folder has a checkpoint resumes automatically.",
        "Leave it out, or set run.name to a new name to start a new run.",
    ),
    "shuffle shuffle_seed shuffle_buffer_size enable_data_shuffling train_sampling_strategy "
    "length_column_name group_by_length shuffle_dataset grain_shuffle_buffer_size": (
        "documents are always shuffled with run.seed.",
        "Leave it out, or set run.seed.",
    ),
    "evals_per_epoch eval_per_epoch": (
        "the period of evaluations is a number of steps.",
        "Set eval.every to the steps of an epoch divided by {value}; a run prints the steps of an "
        "epoch at its start.",
    ),
    "saves_per_epoch": (
        "the period of checkpoints is a number of steps.",
        "Set checkpoint.every to the steps of an epoch divided by {value}; a run prints the steps "
        "of an epoch at its start.",
    ),
    "special_tokens_* additional_special_tokens added_tokens_overrides "
    "eot_tokens pad_token bos_token eos_token unk_token tokenizer_use_* tokenizer_legacy "
    "tokenizer_save_jinja_files processor_type cls_model_config resize_token_embeddings* "
    "mean_resizing_embeddings shrink_embeddings embeddings_skip_upcast fix_untrained_tokens "
    "use_fast_tokenizer": (
        "the tokenizer files define the control tokens, and padding is not trained.",
        "Leave it out; tokenizer.path sets the files.",
    ),
    "trust_remote_code is_*_derived_model strict plugins low_cpu_mem_usage device_map max_memory "
    "gpu_memory_limit lora_on_cpu use_kernels axolotl_config_path is_preprocess bnb_config_kwargs "
    "qlora_sharded_model_loading loftq* unsloth_* lora_*_kernel flash_attn_* flash_optimum "
    "flex_attn_* experimental_* llama4_linearized_experts gc_steps profiler_steps torchdistx_path "
    "steps_per_print wall_clock_breakdown flops_profiler* comms_logger* prescale_gradients "
    "gradient_predivide_factor communication_data_type sparse_gradients zero_allow_* "
    "zero_force_* dataloader_pin_memory multipack_* heads_k_stride ring_attn_func "
    "compute_environment downcast_bf16 enable_cpu_affinity main_training_function rdzv_backend "
    "same_network tpu_env tpu_use_* tpu_name tpu_zone tpu_vm commands command_file dynamo_* "
    "ipex_config* mpirun_config* megatron_lm_config*": (
        "this is an option of the other trainer's libraries or launcher.",
        "Leave it out.",
    ),
    "distributed_type num_machines gpu_ids": (
        "one command trains on all devices of a machine; `maxpipe launch` starts several machines.",
        "Leave it out and set the axes of the mesh: mesh.ici_fsdp=-1 shards parameters, gradients "
        "and optimizer state over all devices.",
    ),
    "main_process_ip main_process_port master_port": (
        "the processes of a run connect to one address with a port.",
        "Set runtime.coordinator=HOST:PORT for a run on several machines, or leave it out.",
    ),
    "offload_param_* zero_optimization_offload_param_* *_offload_params offload_params": (
        "optimizer state can be kept in host memory, but parameters cannot.",
        "Set optim.offload_state=true, or leave it out.",
    ),
    "offload_optimizer_* zero_optimization_offload_optimizer_*": (
        "a single key offloads optimizer state to host memory.",
        "Set optim.offload_state=true, or leave it out.",
    ),
    "zero_optimization_* zero3_* fsdp_config_* fsdp_*": (
        "the mesh defines the sharding.",
        "Set mesh.ici_fsdp to the number of shards of parameters, gradients and optimizer state; "
        "-1 uses all devices.",
    ),
    "lora_target_linear lora_fan_in_fan_out init_lora_weights peft_init_lora_weights "
    "lora_on_linear modules_to_save lora_modules_to_save layers_to_transform "
    "peft_layers_to_transform peft_layers_pattern peft_layer_replication "
    "peft_trainable_token_indices peft_ensure_weight_tying peft_autocast_adapter_dtype "
    "lora_target_parameters loraplus_* relora* lisa_* galore* merge_lora merge_method gptq": (
        "adapters apply to every matrix of the layers unless adapter.targets is set.",
        "Leave it out; `maxpipe config explain adapter` lists the keys.",
    ),
    "lora_model_dir": (
        "adapters are part of a run's checkpoint.",
        "Set checkpoint.restore_from to the run that trained them.",
    ),
    "xformers_attention sdp_attention flex_attention s2_attention eager_attention sage_attention": (
        "a single key selects the attention implementation.",
        "Leave it out; model.attention=auto uses the best one for the device.",
    ),
    "loss_watchdog_*": (
        "a run detects spikes of the loss.",
        "Leave it out, or set guard.on_spike; `maxpipe config explain guard` lists its keys.",
    ),
    "dataset_prepared_path skip_prepare_dataset dataset_processes dataset_shard_* "
    "dataset_keep_in_memory dataset_exact_deduplication shuffle_merged_datasets "
    "pad_to_sequence_len eval_sample_packing sample_packing_* pretrain_multipack_* "
    "pretraining_sample_concatenation batch_flattening curriculum_sampling min_sample_len "
    "push_dataset_to_hub hf_use_auth_token pose_* use_pose total_num_tokens "
    "total_supervised_tokens preprocess_iterable": (
        "documents are indexed at the first start and packed; no preparation is required.",
        "Leave it out; `maxpipe data prepare` tokenizes once for many runs.",
    ),
    "test_datasets": (
        "validation sets have names and the keys of a source.",
        "Set data.validation.held_out.source=jsonl data.validation.held_out.path=FILE.",
    ),
    "default_system_message": (
        "a system prompt is a message of the records, or part of the chat template.",
        "Leave it out, or add it to a copy of the template and set data.chat_template to the copy.",
    ),
    "eval_table_size eval_max_new_tokens eval_causal_lm_metrics do_causal_lm_eval do_bench_eval "
    "bench_*": (
        "evaluation computes the loss; the section eval configures samples and tasks.",
        "Leave it out; `maxpipe config explain eval` lists the keys.",
    ),
    "lr_quadratic_warmup cosine_constant_lr_ratio lr_div_factor lr_groups embedding_lr "
    "embedding_lr_scale adam_epsilon2 adam_beta3 warmup_min_lr warmup_max_lr": (
        "the schedule is a warm-up to optim.learning_rate, followed by a decay.",
        "Leave it out; `maxpipe config explain optim` lists the keys.",
    ),
    "dpo_use_weighting dpo_use_logits_to_keep kto_* simpo_gamma cpo_alpha orpo_alpha rpo_alpha "
    "reward_model process_reward_model num_labels trl vllm": (
        "preference.loss selects the preference loss.",
        "Leave it out; `maxpipe config explain preference` lists the keys.",
    ),
    "unfrozen_parameters": (
        "frozen parameters are listed, not trained ones.",
        "Set model.frozen to the patterns of parameters that are not trained.",
    ),
    "torch_compile compile jit torch_compile_* compile_enable compile_components compile_backend "
    "scan_layers* internal_compile* compile_xla_flags": (
        "the step is always compiled.",
        "Leave it out.",
    ),
    "profile profiler profiling *profil* xprof_* save_traces_* upload_all_profiler_results "
    "tpu_num_* managed_mldiagnostics* trace_buf_size *memory_snapshot*": (
        "a run does not record profiles.",
        "Leave it out; `maxpipe goodput RUN` shows where the time of a run went.",
    ),
    "early_stopping target_eval_loss": (
        "a run stops early after consecutive evaluations without improvement.",
        "Set eval.patience=5 to stop after five of them.",
    ),
    "bf16 bf16_full_eval": (
        "types are set by name.",
        "Set model.compute_dtype=bfloat16, which is the default.",
    ),
    "fp16 half fp16_full_eval": (
        "float16 is not supported.",
        "Set model.compute_dtype=bfloat16, which needs no loss scale.",
    ),
    "eval_strategy evaluation_strategy validation_enable do_eval": (
        "the period of evaluations is a number of steps.",
        "Set eval.every to the number of steps; 0 evaluates only after the last step.",
    ),
    "save_strategy enable_checkpointing checkpoint_enable": (
        "the period of checkpoints is a number of steps.",
        "Set checkpoint.every to the number of steps; 0 saves only the last step.",
    ),
    "lora peft qlora peft_type peft_config model_converters": (
        "the section adapter configures adapters.",
        "Set adapter.rank=16; `maxpipe config explain adapter` lists its keys.",
    ),
    "load_parameters_path initial_load_path pretrained_checkpoint finetune_path": (
        "a run starts from the weights of a checkpoint.",
        "Set checkpoint.restore_from={value} checkpoint.restore=weights.",
    ),
    "config_file job_config_file config_path cfg yaml config_name": (
        "a config is a YAML file without an option; TOML files of other trainers are translated.",
        "Write {value} on the command line, without this name.",
    ),
    "base_config": (
        "a config file cannot include another one: files are merged from left to right.",
        "Leave it out, and give both files to the command.",
    ),
    "override_model_config override_logical_axis_rules": (
        "values in later files and on the command line always take precedence.",
        "Leave it out.",
    ),
    "save_checkpoint_on_start enable_first_step_checkpoint create_seed_checkpoint": (
        "a run starts from its seed; step 0 is not saved.",
        "Leave it out.",
    ),
    "save_checkpoint_on_completion last_save_model_only last_save_in_hf export_dtype "
    "save_only_model": (
        "the last step is always saved, with optimizer state; `maxpipe export` writes a Hugging "
        "Face folder.",
        "Leave it out.",
    ),
    "async_checkpointing async_mode checkpoint_async_mode enable_continuous_checkpointing "
    "max_inflight_computations": (
        "checkpoints are always written asynchronously.",
        "Leave it out.",
    ),
    "enable_single_replica_ckpt_restoring checkpoint_todelete_* checkpoint_storage_* "
    "enable_orbax_v1 checkpoint_conversion_fn source_checkpoint_layout "
    "colocated_python_checkpointing enable_autocheckpoint checkpoint_is_quantized "
    "save_quantized_params_path enable_checkpoint_cloud_logger enable_jit_checkpoint "
    "exclude_from_loading enable_ft_dataloader_checkpoints load_only save_on_each_node "
    "initial_load_in_hf_quantized": (
        "checkpoints have one format, which every layout can read.",
        "Leave it out.",
    ),
    "initial_load_model_only": (
        "checkpoint.restore selects whether only weights are restored.",
        "Set checkpoint.restore=weights with checkpoint.restore_from=CHECKPOINT.",
    ),
    "initial_load_in_hf": (
        "the prefix `hf:` denotes a Hugging Face folder.",
        "Set checkpoint.restore_from=hf:DIR.",
    ),
    "enable_multi_tier_checkpointing multi_tier_checkpointing_* mtc_data_parallelism "
    "enable_emergency_checkpoint": (
        "local checkpoints on the hosts are configured by a folder and a period.",
        "Set checkpoint.local_dir and checkpoint.local_every, or leave it out.",
    ),
    "lora_input_adapters_path hf_lora_adapter_path lora_adapter_path": (
        "adapters are part of a run's checkpoint.",
        "Set checkpoint.restore_from to the run that trained them.",
    ),
    "force_unroll param_scan_axis scan_pipeline_* scan_layers_per_stage set_remat_policy_on_* "
    "fused_qkv fused_mlp force_q_layout reshape_q use_sliced_mla_proj mla_naive_kvcache "
    "mla_qk_head_chunk_size float32_weight_sum float32_gate_logits float32_logits "
    "float32_qk_product logits_dot_in_fp32 cast_logits_to_fp32 activations_in_float32 "
    "matmul_precision shardy check_vma remove_size_one_mesh_axis_from_type "
    "allow_split_physical_axes optimize_mesh_for_tpu_v6e use_iota_embed enable_nnx pure_nnx* "
    "enable_padding_causal_mask max_segments_per_seq causal_block_size": (
        "this is an implementation detail, which maxpipe determines automatically.",
        "Leave it out.",
    ),
    "reuse_example_batch max_checkify autoselect auto_find_batch_size torch_empty_cache_steps "
    "gc_freq gc_debug seed_worker dump_* debug_sharding jax_debug_log_modules debug "
    "debug_print_config print_config save_config_file print_after_conversion log_config "
    "disable_color_printing detect_anomaly spmd_typechecking enable_structured_logging "
    "visualize_memory_budget_pareto determinism_check activation_checkpoint_debug description "
    "job_description memory_estimation_* moe_force_load_balance use_random_routing early_stop "
    "preserve_rng_state skip_jax_distributed_system": (
        "this is a debugging option of the other trainer; `maxpipe doctor`, `plan` and `compile` "
        "check a run before it starts.",
        "Leave it out.",
    ),
    "metrics_file gcs_metrics save_config_to_gcs save_tb_folder save_for_all_ranks "
    "logging_strategy logging_first_step log_on_each_node logging_nan_inf_filter log_level "
    "log_level_replica include_num_input_tokens_seen skip_memory_metrics include_for_metrics "
    "batch_eval_metrics record_internal_nn_metrics prometheus_port monitor_* "
    "step_deviation_interval_seconds enable_goodput_recording goodput_upload_interval_seconds "
    "enable_*goodput* enable_gcp_* report_*_monitoring use_vertex_tensorboard "
    "vertex_tensorboard_* write_estimator_result include_tokens_per_second": (
        "a run always writes metrics.jsonl, events.jsonl and goodput to its folder.",
        "Leave it out; log.every is the period in steps.",
    ),
    "constant_bound_config replicate_quant_scale quant_cfg_path quantize_kvcache kv_quant_* "
    "use_qwix_quantization use_manual_quantization *_quantization_calibration_method "
    "quantization_local_shard_count quantize_* enable_fsdp_float8_all_gather precompute_float8_* "
    "filter_fqns emulate mxfp8_*": (
        "8-bit matmuls are configured by type and scales.",
        "Set model.matmul=fp8 or int8, or leave it out.",
    ),
    "weight_sparsity_* te_comm_gemm_overlap use_batch_split_schedule batch_split_factor "
    "inhomogeneous_layer_cycle_interval use_qk_clip qk_clip_threshold neftune_noise_alpha "
    "label_smoothing_factor moba* use_indexer indexer_* engram* mhc_* enable_mhc_lite "
    "use_mhc_pallas_kernel sinkhorn_iterations hidden_size_per_layer_input "
    "vocab_size_per_layer_input num_kv_shared_layers use_double_wide_mlp first_num_hash_layers "
    "o_lora_rank o_groups compress_ratios compressed_rope_max_timescale chunk_attn_window_size "
    "temperature_tuning use_mrope mrope_section position_id_per_seconds block_diffusion_* "
    "enable_diloco diloco_* enable_streaming_diloco num_diloco_fragments use_sequential_layers "
    "num_communication_overlapping_steps communication_overlapping_alpha *_diloco_parallelism "
    "elastic_* fault_tolerance_* process_group_timeout_ms semi_sync_method min_replica_size "
    "olmo_* average_tokens_across_devices": (
        "maxpipe does not have this feature.",
        "Leave it out.",
    ),
    "model_call_mode global_parameter_scale dense_init_scale attention_output_dim global_head_dim "
    "global_num_kv_heads mlp_activations* normalize_embedding_logits mlp_bias "
    "share_kv_projections attention_bias attention_sink attention_type use_post_attn_norm "
    "use_post_ffw_norm v_norm_with_scale qk_norm_with_scale use_qk_norm use_qk_norm_in_gdn "
    "nope_layer_interval use_untrainable_positional_embedding trainable_position_size "
    "rope_use_scale rope_min_timescale global_rope_* local_rope_proportion "
    "max_position_embeddings beta_fast beta_slow rope_interleave "
    "rope_attention_scaling rope_pairwise partial_rotary_factor qk_nope_head_dim "
    "moe_expert_input_dim hidden_act bos_token_id eos_token_id initializer_range use_cache": (
        "the model family defines the details of its layers.",
        "Set model.family, or leave it out; `maxpipe config explain model` lists keys and "
        "families.",
    ),
    "megablox sparse_matmul num_moe_token_chunks moe_chunk_barrier ragged_* use_custom_sort_vjp "
    "use_ring_of_experts num_moe_emb_chunks moe_dispatch_no_expert_sharding use_ragged_sort "
    "use_gather_mosaic_kernel wi_tile_* wo_tile_* merge_gating_gmm use_tokamax_gmm use_gmm_v2 "
    "moe_fsdp_use_two_stage_all_gather shard_exp_on_fsdp use_2d_fsdp_sharding "
    "dense_fsdp_use_two_stage_all_gather expert_parallel_comm_backend "
    "pipeline_parallel_expert_parallel_overlap router_jitter_noise": (
        "kernels and dispatch of experts depend on the devices.",
        "Leave it out; model.moe.dispatch can be set with model.family=moe.",
    ),
    "pipeline_fsdp_ag_per_repeat": (
        "weights are gathered per iteration, chunk visit or step.",
        "Set pipeline.weight_gather=visit.",
    ),
    "num_layers_per_pipeline_stage pipeline_parallel_layers module_fqns_per_model_part "
    "pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers "
    "pipeline_parallel_layers_per_stage": (
        "layers are divided evenly among stages x repeats.",
        "Leave it out, or set pipeline.layers_per_chunk to the number of layers of each chunk.",
    ),
    "pipeline_parallel_microbatch_size": (
        "the config sets the number of microbatches, not their size.",
        "Set pipeline.microbatches to train.batch_size divided by this size.",
    ),
    "pipeline_parallel_schedule_csv": (
        "a schedule may be read from a file.",
        "Set pipeline.schedule=file:{value}.",
    ),
    "decoder_layer_input indexer_cutoff_threshold context mlpwi* mlpwo moe_mlpwi* moe_mlpwo "
    "query_proj key_proj value_proj kv_proj qkv_proj out_proj query_wa_proj kv_wa_proj mla_q "
    "mla_kv attention_out selective_ac_option per_op_sac_* memory_budget "
    "activation_checkpoint_memory_budget gradient_checkpointing_kwargs "
    "activation_checkpointing_kwargs recompute_modules": (
        "saved and offloaded activations are lists of names.",
        "Set pipeline.remat=names, with pipeline.saved_names or pipeline.offloaded_names; "
        "`maxpipe config explain pipeline.saved_names` lists the names.",
    ),
    "parameter_memory_host_offload enable_cpu_offload cpu_offload": (
        "optimizer state can be kept in host memory, but parameters cannot.",
        "Set optim.offload_state=true.",
    ),
    "custom_mesh* mesh_axes data_sharding input_data_sharding_logical_axes context_sharding "
    "ulysses_context_sharding sharding_tolerance spmd_backend logical_axis_rules "
    "logical_axis_rules_for_eval": (
        "the sizes of the axes define the mesh, and axis rules define the sharding.",
        "Leave it out, or set entries of mesh.axis_rules; `maxpipe config explain "
        "mesh.axis_rules` lists them.",
    ),
    "*_fsdp_transpose_parallelism *_context_autoregressive_parallelism "
    "*_context_usp_ulysses_parallelism *_tensor_sequence_parallelism *_autoregressive_parallelism "
    "tensor_transpose disable_loss_parallel enable_fsdp_symm_mem expert_tensor_parallel_degree "
    "context_parallel_load_bal* context_parallel_reorder_strategy context_parallel_ptrr_mask_key "
    "ddp_* subslice_shape": (
        "the mesh has no such axis or option: its axes are data, fsdp, stage, tensor, context and "
        "expert.",
        "Leave it out.",
    ),
    "vocab_tiling_ag_once": (
        "the loss is computed in blocks of tokens.",
        "Leave it out.",
    ),
    "add_bos add_eos tokenize_train_data tokenize_eval_data use_truncation max_corpus_chars "
    "add_special_tokens truncation padding padding_side expansion_factor_real_data "
    "generate_padding_batch_* dataloader_drop_last remove_unused_columns label_names "
    "dataset_num_proc dataset_kwargs dataset_batch_size": (
        "documents are tokenized with BOS or EOS and packed; every batch is full.",
        "Leave it out; data.packing selects how documents are packed into sequences.",
    ),
    "use_chat_template": (
        "data.chat selects the format of conversations.",
        "Set data.chat=messages, or leave it out.",
    ),
    "train_image_column eval_image_column use_multimodal use_audio* freeze_vision_encoder_params "
    "freeze_audio_encoder_params dtype_mm *_for_vit *_for_audio image_* video_* audio_* "
    "max_num_images_per_example vision_output_length": (
        "models support text only.",
        "Leave it out.",
    ),
    "default_prompt prompt max_prefill_predict_length load_from_prefill_dir prefill_* "
    "autoregressive_decode_assert decode_sampling_* inference_* generate_slice "
    "enable_model_warmup enable_llm_inference_pool multi_sampling return_log_prob "
    "stack_prefill_result_cache ar_cache_axis_order compute_axis_order use_ragged_attention "
    "use_chunked_prefill enable_prefix_caching prefix_caching_* vllm_* do_predict "
    "predict_with_generate generation_max_length generation_num_beams": (
        "a separate command generates text.",
        "Leave it out; `maxpipe generate RUN --prompt TEXT` has options for generation, and "
        "eval.sample_every samples during training.",
    ),
    "use_sft sft_train_on_completion_only completion_only_loss assistant_only_loss": (
        "supervised fine-tuning is an objective that trains only the responses.",
        "Set train.objective=sft data.chat=messages, with data.source and data.path.",
    ),
    "use_dpo dpo_beta": (
        "preference optimization is an objective.",
        "Set train.objective=preference data.chat=pairs, with data.source and data.path.",
    ),
    "hf_path hf_name hf_data_dir hf_access_token hub_* push_to_hub hf_token use_auth_token "
    "dataset_config_name dataset_config": (
        "maxpipe downloads and uploads nothing: data and models are files.",
        "Save the dataset with load_dataset(...).save_to_disk('saved') of `datasets`, and set "
        "data.source=huggingface data.path=saved.",
    ),
    "train_split split": (
        "a source reads all files of its path.",
        "Set data.path to the files of that split.",
    ),
    "eval_split hf_eval_split": (
        "evaluation uses a fraction of the documents, or separate sets.",
        "Set data.validation_fraction=0.05.",
    ),
    "eval_dataset_name eval_dataset hf_eval_files grain_eval_files validation_dataset "
    "validation_dataset_path val_data validation_file eval_data eval_file val_file": (
        "validation sets have names and the keys of a source.",
        "Set data.validation.held_out.source=text data.validation.held_out.path={value}.",
    ),
    "eval_data_columns": (
        "each validation set has a separate key for its column.",
        "Set data.validation.held_out.field=text, or leave it out.",
    ),
    "validation_seq_len validation_dataloader_* eval_accumulation_steps eval_start_step "
    "eval_delay eval_on_start eval_do_concat_batches eval_use_gather_object prediction_loss_only "
    "eval_packing": (
        "evaluation uses the same sequence length and packing as training.",
        "Leave it out; eval.every, eval.batches and eval.batch_size can be set.",
    ),
    "grain_train_mixture_config_path dataset_mixer": (
        "several sources form a mixture.",
        "Set data.mixture.NAME.path and data.mixture.NAME.weight for each source.",
    ),
    "grain_* colocated_python_data_input dataloader_* persistent_workers pin_memory "
    "ignore_data_skip accelerator_config": (
        "threads of the run prefetch the data.",
        "Leave it out; data.threads and data.prefetch_batches can be set.",
    ),
    "total_num_steps learning_rate_schedule_steps lr_decay_steps lr_decay_iters "
    "lr_scheduler_total_steps": (
        "the schedule has the length of the run.",
        "Leave it out, or set train.steps={value}.",
    ),
    "lr_scheduler_kwargs optim_args optim_target_modules adam_eps_root adamw_mask "
    "muon_consistent_rms optimizer_implementation early_step_in_backward amsgrad foreach fused "
    "lr_decay_rate": (
        "the optimizer has no keys other than those of the section optim.",
        "Leave it out; `maxpipe config explain optim` lists the keys.",
    ),
    "z_loss_multiplier": (
        "a z-loss of the output logits is not supported.",
        "Leave it out.",
    ),
    "trainable_parameters_mask trainable_params": (
        "frozen parameters are listed, not trained ones.",
        "Set model.frozen to the patterns of parameters that are not trained.",
    ),
    "enable_dropout": (
        "dropout is a fraction.",
        "Set model.dropout=0.0 to disable dropout.",
    ),
    "tf32 use_tokamax_splash use_jax_splash use_max_logit_estimate cost_estimate_flops_* "
    "dq_reduction_steps sa_* local_sa_* local_use_splash_scheduler use_splash_scheduler "
    "experimental_sa_* ring_scan_unroll": (
        "the attention implementation determines block sizes and kernels.",
        "Leave it out; model.attention selects the implementation.",
    ),
    "mtp_eval_target_module distill_beta* distill_feature_loss_type distill_layer_indices "
    "distill_alpha_* distill_temperature_*": (
        "there is no equivalent: distillation and multi-token prediction have constant weights.",
        "Leave it out; `maxpipe config explain distill` lists the keys.",
    ),
    "dcn_bandwidth_* enable_single_controller elastic custom_import custom_args_module "
    "custom_config_module override override_imports comm_mode save_traces_file_prefix override_* "
    "use_ipex use_mps_device jit_mode_eval": (
        "maxpipe has no equivalent.",
        "Leave it out.",
    ),
    "full_determinism deterministic deterministic_warn_only batch_invariant debug_deterministic": (
        "a run gives the same result for the same config and devices.",
        "Leave it out.",
    ),
    "load_best_model_at_end": (
        "the best checkpoints can be kept, and RUN@best denotes the best one.",
        "Set checkpoint.keep_best=1.",
    ),
    "restore_callback_states_from_checkpoint": (
        "a resumed run restores its entire state.",
        "Leave it out.",
    ),
    "do_train": (
        "`maxpipe train` trains.",
        "Leave it out.",
    ),
    "liger_kernel_config enable_tpu_profiling_options disable_cuda_graphs": (
        "the compiler selects kernels.",
        "Leave it out.",
    ),
    "num_tokens_per_microbatch_per_dp_rank num_tokens_per_train_step": (
        "the batch size is a number of sequences.",
        "Set train.batch_size to the tokens of a step divided by train.sequence_length.",
    ),
    "attention_dropout attn_pdrop lora_bias": (
        "there is no equivalent; model.dropout applies to the residual stream.",
        "Leave it out, or set model.dropout.",
    ),
}
"""Maps each name to the reason why it has no equivalent, and to a suggested action."""
