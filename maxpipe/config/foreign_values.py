"""Values and commands of other trainers, and the values and commands here. Data only."""

from __future__ import annotations

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
        "concat concatenate concat_and_split wrapped greedy": "cut",
        # Other trainers keep conversations whole where packing is on.
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
            "It is not supported. Set optim.name=adamw, or muon for updates that are orthogonal."
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
        "eager plain reference dot_product false no off": "xla",
        "sdpa default best autoselected true yes on": "auto",
        "cudnn_flash_te cudnn_flash_jax": "cudnn",
        "blocked chunked memory_efficient": "blockwise",
        "splash_attention pallas tokamax": "splash",
        "ring": "It is not supported. Set model.attention=auto.",
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
        "tokenizer_default": "Leave it out: the template of the tokenizer's folder is used.",
        "chatml llama3 llama3_2_vision llama4 gemma gemma3 qwen3 qwen_25 mistral_v1 mistral_v2v3 "
        "mistral_v3_tekken mistral_v7_tekken phi_3 phi_35 deepseek_v2 deepseek_v3 command_a "
        "cohere alpaca inst jinja jamba exaone metharme": (
            "Leave it out for the template of the tokenizer's folder, or set "
            "data.chat_template=FILE.jinja."
        ),
    },
    "runtime.platform": {
        "gpu nvidia gpu_multiprocess": "cuda",
        "rocm amd mps metal xpu": "It is not supported. Set runtime.platform=cpu.",
        "": "auto",
    },
    "pipeline.remat": {
        "true all yes on block layer": "full",
        "false no off nothing": "none",
        "minimal minimal_flash save_dot_except_mlp save_dot_except_mlpwi save_qkv_proj "
        "save_dot_with_context_except_mlp save_out_proj minimal_with_context "
        "memory_budget": "names",
        "minimal_offloaded qkv_proj_offloaded": (
            "Set pipeline.remat=names, and pipeline.offloaded_names to the names in host memory."
        ),
        "selective dots matmul custom": (
            "Set pipeline.remat=names, and pipeline.saved_names to what is kept."
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
            "Leave it out: `model: NAME` names a model (`maxpipe configs list`)."
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
    "checkpoint.best_is": {
        "true yes max maximize higher": "largest",
        "false no min minimize lower": "smallest",
    },
    "checkpoint.best_metric": {"loss eval_loss val_loss": "eval/loss"},
    "log.progress": {"rich bar tqdm true": "live", "lines text none false off": "plain"},
}
"""Key to names of its values elsewhere: the value here, or an action."""

LISTS = {
    "data.path": "Set data.paths to the list, or write a glob pattern such as 'data/*.jsonl' or "
    "'data/**/part-[0-4]*'.",
}
"""Keys that elsewhere may be lists."""

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
"""A command to its names elsewhere."""

NO_COMMAND = {
    "serve api": "maxpipe serves no models; `maxpipe generate RUN --interactive` asks for prompts.",
    "convert hf": "Take `maxpipe import` for a Hugging Face folder, `maxpipe export` to write one.",
    "resume restart continue": "Repeat the command that started the run: it resumes by itself. "
    "`maxpipe train runs/NAME/config.yml` is such a command.",
    "sweep": "Start one run per setting, each with its own run.name.",
}
