"""Declarations of all config keys: type, default and documentation of each.

The string below each field documents the field. `maxpipe config explain`, `docs/config.md`, the
JSON schema and error messages are generated from these strings. The classes contain only values;
`check.py` contains the rules. `data_schema.py` declares the data keys and `tuning_schema.py` the
fine-tuning keys. Each file in `maxpipe/models` declares the keys of its model family. This module
does not import jax, so that `maxpipe --help` starts quickly.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from maxpipe.config.data_schema import DataConfig
from maxpipe.config.former_items import (
    upgrade_batch_ramp,
    upgrade_lr_multipliers,
    upgrade_lr_phases,
    upgrade_weight_decays,
)
from maxpipe.config.items import (
    BatchRampStageConfig,
    LRMultiplierConfig,
    LRPhaseConfig,
    WeightDecayConfig,
)
from maxpipe.config.tuning_schema import DistillConfig, GrpoConfig, PreferenceConfig
from maxpipe.io.typed_json import legacy_value, renamed_from
from maxpipe.models.config import AdapterConfig, ModelConfig
from maxpipe.parallel.axes import MeshConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskConfig:
    """Multiple-choice task that each evaluation scores, in the same way as `maxpipe eval
    --choices`.
    """

    path: str = ""
    """File of JSON lines with the fields `context`, `choices` and `answer`. The file is read once,
    at the start of the run."""
    separator: str = " "
    """Text inserted between context and choice, unless the context ends or the choice begins with
    white space."""
    chat: bool = False
    """Render each context as a user message with the tokenizer's chat template. No separator is
    added between context and choice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Evaluation during training: validation loss, tasks, samples and early stopping."""

    every: int = 0
    """Number of steps between evaluations. 0 evaluates only after the last step."""
    batches: int = 8
    """Number of batches per evaluation. With 0, evaluations during training use no documents, and
    `maxpipe eval` uses all batches."""
    batch_size: int = 0
    """Number of sequences per evaluation batch, summed over all devices. Must be a multiple of data
    x fsdp x expert. 0 uses `train.batch_size`."""
    tasks: dict[str, TaskConfig] = field(default_factory=dict)
    """Multiple-choice tasks by name: `eval.tasks.sums.path=sums.jsonl` adds the metric
    `eval/sums/accuracy`. Each evaluation scores all tasks."""
    patience: int = 0
    """Patience of early stopping: the run ends after this number of consecutive evaluations without
    an improvement of `checkpoint.best_metric`. The run evaluates and saves a checkpoint before it
    ends. Only the periodic evaluations of `eval.every` count. 0 disables early stopping."""
    min_delta: float = field(default=0.0, metadata=renamed_from("min_gain"))
    """Minimum improvement of `checkpoint.best_metric` over its best value so far that early
    stopping counts as an improvement."""
    sample_every: int = 0
    """Number of steps between samples of generated text, which are written to the console,
    TensorBoard and `samples.jsonl`. 0 disables samples."""
    sample_prompts: list[str] = field(default_factory=lambda: [""])
    """Prompts of the samples. Each prompt follows the BOS token."""
    sample_prompts_file: str = field(default="", metadata=renamed_from("sample_file"))
    """File with one prompt per line. In a `.jsonl` file, each line is an object with the field
    `prompt`. Replaces `eval.sample_prompts`. With `eval.sample_chat`, an object may contain
    `messages` instead of `prompt`."""
    sample_chat: bool = False
    """Render each prompt as a user message with the tokenizer's chat template. The model then
    generates the response."""
    sample_conversations: int = field(default=0, metadata=renamed_from("sample_documents"))
    """Number of validation conversations that are also used as prompts. The model generates the
    last trained message, and the sample is written together with the original message. Requires
    `data.chat`."""
    sample_max_tokens: int = field(default=64, metadata=renamed_from("sample_tokens"))
    """Maximum number of generated tokens per sample. Prompt and sample together have at most
    `train.sequence_length` tokens."""
    sample_temperature: float = 1.0
    """Sampling temperature, by which logits are divided. 0 always selects the most likely token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Name, output folder and seed of the run."""

    name: str = "run"
    """Name of the run, which is also the name of its folder inside `run.dir`. It may contain
    letters, digits, `.`, `_` and `-`. The default is the name of the last config file: `my-run` for
    `my-run.yml`."""
    dir: str = "runs"
    """Folder that contains the run folders. If the folder of a run contains a checkpoint, the run
    resumes from this checkpoint."""
    seed: int = 0
    """Random seed of parameters, data order and dropout. The same seed gives the same loss curve
    for every mesh, schedule and number of processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig:
    """Partition of the layers into pipeline chunks, and the schedule that runs them."""

    schedule: str = "interleaved"
    """Pipeline schedule. `maxpipe schedule` draws each schedule. Schedules with unsplit backward
    passes are `gpipe`, `circular`, `breadth_first`, `1f1b` and `interleaved`. The memory use of
    `1f1b` and `interleaved` does not depend on the number of microbatches. With two or more
    `pipeline.repeats`, both are the same schedule. Schedules with split backward passes are `zb_h1`
    and `zb_h2`, and, with two repeats in a V-shaped placement, `zb_v`, `v_half`, `v_min` and
    `dualpipe_v`. Split schedules are efficient only with little recomputation: set `pipeline.remat`
    to `names` or `none`. `file:PATH` runs the schedule in a CSV file."""
    microbatches: int = 1
    """Number of microbatches per batch. With one stage, this is the number of gradient accumulation
    steps."""
    repeats: int = 1
    """Circular repeats: number of chunks per stage (virtual stages in Megatron). More repeats make
    the pipeline bubble smaller but send more messages."""
    group: int = 0
    """Number of consecutive microbatches that a stage runs before it switches to the next repeat. 0
    uses the number of stages, which minimizes memory. Ignored unless `pipeline.schedule` is
    `interleaved`."""
    delayed_forwarding: bool = False
    """Allow each message one extra tick, so that communication overlaps with compute. This doubles
    the pipeline bubble. Only for `gpipe` and `circular`; the 1F1B schedules overlap communication
    without extra ticks."""
    layers_per_chunk: list[int] = field(default_factory=list, metadata=renamed_from("cut"))
    """Layer partition: the number of layers in each chunk, as a list of stages x repeats integers
    in network order. If empty, layers are divided as evenly as possible."""
    prologue_layers: int = field(default=0, metadata=renamed_from("layers_outside"))
    """Number of prologue layers, which are the first layers of the network and run outside the
    pipeline. All stages run the prologue layers at the same time, each on a different microbatch.
    Use prologue layers if the number of layers is not divisible by the number of chunks. Every
    stage stores the weights of the prologue layers."""
    weight_gather: Literal["iteration", "visit", "step"] = "iteration"
    """How often weights that are sharded over fsdp are all-gathered. `iteration`: for every layer
    in every forward and backward pass (least memory). `visit`: each time a stage switches to
    another chunk. The microbatches of one `pipeline.group` then share one all-gather, and each
    stage keeps a prefetch window of gathered chunks in memory. `step`: once per step (least
    communication)."""
    remat: Literal["full", "chunk", "names", "none"] = "full"
    """Activations saved for the backward pass. `full`: the input of each layer; each layer is
    recomputed once. `chunk`: the input of each chunk; each layer is recomputed twice (least
    memory). `names`: the input of each layer and the activations in `pipeline.saved_names`. `none`:
    all activations; nothing is recomputed."""
    saved_names: list[str] = field(default_factory=lambda: ["matmuls"])
    """Activations saved with `pipeline.remat=names`. `matmuls` saves the outputs of all matmuls;
    `attention` and `mlp` save the matmul outputs of one part of a layer. Activations can also be
    listed by name: `query`, `key`, `value`, `context`, `attention_out`, `gate`, `up`, and those of
    the model family."""
    offloaded_names: list[str] = field(default_factory=list)
    """Activations that `pipeline.remat=names` offloads to host memory. Accepts the names and
    presets of `pipeline.saved_names`."""
    idle: Literal["skip", "compute"] = "skip"
    """Behavior of a stage in an empty slot of the schedule. `skip` branches around the computation.
    `compute` runs the computation on zeros and discards the result, so that all stages have the
    same control flow."""
    loss_block_tokens: int = field(default=-1, metadata=legacy_value(0))
    """Number of tokens per device for which the loss computes logits at once, within one
    microbatch. 0 computes all logits of a microbatch at once. -1 does the same unless the logits
    exceed 512 MiB, as with long sequences or few stages, and then uses blocks of 2048 tokens. The
    block size affects memory, and changes the loss only by rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Training objective, length of the run and batch shape."""

    objective: Literal["pretrain", "sft", "preference", "distill", "grpo"] = "pretrain"
    """Training objective. `pretrain`: next-token cross-entropy on documents. `sft`: supervised
    fine-tuning, with the cross-entropy of the assistant's tokens in conversations. It requires
    documents with a loss mask; see `data.chat`. `pretrain` and `sft` average the loss over all
    trained tokens of a batch. `preference`: preference optimization on pairs of responses; see
    `preference.loss`. `distill`: the next-token loss plus a divergence from a teacher; see the
    section `distill`. `grpo`: reinforcement learning on completions with rewards; see the section
    `grpo`."""
    steps: int = 0
    """Number of optimizer steps. With 0, `train.tokens` determines the length of the run."""
    tokens: int = 0
    """Number of training tokens, rounded up to complete steps. Ignored unless `train.steps` is
    0."""
    batch_size: int = 8
    """Number of sequences per step, summed over all devices."""
    batch_ramp: list[BatchRampStageConfig] = field(
        default_factory=list, hash=False, metadata=renamed_from(values=upgrade_batch_ramp)
    )  # a list has no hash
    """Batch size warm-up: stages with smaller batches at the start of the run, such as
    `[{batch_size: 16, steps: 1000}, {batch_size: 32, tokens: 50000000}]`. Batch sizes must increase
    up to `train.batch_size`. No data is skipped between stages. The microbatch size is constant, so
    smaller batches have fewer microbatches. When a run resumes, the completed part of the ramp must
    not change."""
    sequence_length: int = 1024
    """Number of tokens per sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw", "lion", "adafactor", "muon"] = "adamw"
    """Optimizer. `adamw` (arXiv:1711.05101) stores two moments per parameter. `lion`
    (arXiv:2302.06675) stores one moment, and changes each entry by plus or minus the learning rate.
    Lion needs a learning rate that is 3 to 10 times smaller than with AdamW, and a weight decay
    that is larger by the same factor. `adafactor` (arXiv:1804.04235) has no first moment. Its
    second moment is factored, with one value per row and one per column of each matrix. `muon`
    (arXiv:2502.16982) orthogonalizes the update of each matrix in the layers and stores one moment.
    AdamW updates the embedding, the output projection and all parameters that are not matrices.
    Muon's updates are scaled to match AdamW, so the learning rate and weight decay of AdamW apply.
    A resumed run must use the same optimizer."""
    learning_rate: float = 3e-4
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape of the learning-rate schedule after the warm-up. `cosine` and `linear` decay to
    `optim.min_lr_ratio` over the entire run. `constant` does not decay. `wsd` (warm-up, stable,
    decay) is constant, followed by a linear decay in the last `optim.decay_fraction` of the run."""
    warmup_steps: int = 0
    """Number of steps in which the learning rate increases from 0 to its peak."""
    lr_phases: list[LRPhaseConfig] = field(
        default_factory=list,
        hash=False,  # a list has no hash
        metadata=renamed_from("phases", values=upgrade_lr_phases),
    )
    """Phases of the learning-rate schedule, such as `[{percent: 10, shape: linear, from: 0, to: 1},
    {shape: cosine, to: 0.1}]`. Replaces `optim.schedule`, `optim.decay_fraction` and
    `optim.min_lr_ratio`. Phases include the warm-up, so `optim.warmup_steps` must be 0. After the
    last phase, the learning rate is constant."""
    decay_fraction: float = 0.2
    """Fraction of the run in which `wsd` decays the learning rate, at the end of the run. Ignored
    unless `optim.schedule` is `wsd`."""
    min_lr_ratio: float = field(default=0.1, metadata=renamed_from("final_fraction"))
    """Learning rate at the end of the run, as a fraction of the peak. Ignored by `constant`."""
    beta1: float = 0.9
    """Decay rate of the first moment. For `lion`, the weight of the moment in the update direction.
    Ignored by `adafactor`."""
    beta2: float = 0.95
    """Decay rate of the second moment. For `lion`, the decay rate of its only moment. Ignored by
    `adafactor`, which uses 1 - t^-0.8 at step t."""
    momentum: float = 0.95
    """Decay rate of the Nesterov momentum that Muon applies to matrices. Ignored unless
    `optim.name` is `muon`."""
    epsilon: float = 1e-8
    """Constant added to the square root of the second moment. Ignored by `lion` and `adafactor`."""
    weight_decay: float = 0.1
    """Decoupled weight decay. It does not apply to normalization scales and biases."""
    lr_multipliers: list[LRMultiplierConfig] = field(
        default_factory=list,
        hash=False,
        metadata=renamed_from("rate_factors", values=upgrade_lr_multipliers),
    )
    """Learning-rate multipliers of selected parameters, such as `[{pattern: embedding, multiplier:
    0.1}, {pattern: '*.router', multiplier: 0}]`. If several patterns match a parameter, the last
    one applies."""
    weight_decays: list[WeightDecayConfig] = field(
        default_factory=list, hash=False, metadata=renamed_from(values=upgrade_weight_decays)
    )
    """Weight decay of selected parameters, such as `[{pattern: embedding, weight_decay: 0}]`.
    Overrides `optim.weight_decay`, and also applies to normalization scales and biases. If several
    patterns match a parameter, the last one applies."""
    clip_norm: float = 1.0
    """Maximum gradient norm, computed over the parameters of all stages. 0 disables clipping."""
    ema_decay: float = field(default=0.0, metadata=renamed_from("average_decay"))
    """Decay rate of an exponential moving average (EMA) of the parameters, such as 0.999. The EMA
    is stored in float32 in addition to the parameters, and starts with the initial parameters. The
    EMA does not affect training, and can be evaluated and exported. 0 disables the EMA."""
    state_dtype: Literal["same", "float32", "bfloat16"] = "same"
    """Dtype of the stored moments. `same` uses `model.param_dtype`. Updates are always computed in
    float32."""
    zero1: bool = field(default=False, metadata=renamed_from("shard_over_data"))
    """Shard optimizer state and the EMA over the data axis (ZeRO-1, arXiv:1910.02054). Gradients
    are reduce-scattered, each device updates its shard of the parameters, and the updated
    parameters are all-gathered. The state of a parameter without an evenly divisible dimension is
    replicated."""
    offload_state: bool = False
    """Offload optimizer state and the EMA to host memory. The state is copied to the device,
    updated and copied back, one layer at a time. These copies do not overlap with compute. Results
    are bitwise identical to those without offloading."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of gradients in reductions across devices. Each device accumulates gradients in
    float32."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """Rounding of parameters and moments that are stored in bfloat16. `stochastic`
    (arXiv:1502.02551) rounds up or down at random with the correct mean, so that small updates are
    not lost. The random bits depend only on the seed, the step and the position in the model, so
    they are the same for every layout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerConfig:
    """Conversion of text to token ids."""

    kind: Literal["bytes", "auto", "huggingface", "sentencepiece", "tiktoken"] = "bytes"
    """Tokenizer format. `bytes`: the built-in tokenizer, with 256 byte tokens and three control
    tokens. `huggingface`: a `tokenizer.json` file. `sentencepiece`: a `.model` file. `tiktoken`: a
    file of ranks, one `BASE64 RANK` per line. `auto`: one of `huggingface`, `sentencepiece` and
    `tiktoken`, detected from the file at `tokenizer.path`. All formats except `bytes` require `pip
    install 'maxpipe[tokenizers]'`."""
    path: str = ""
    """Tokenizer file, or a Hugging Face folder that contains a tokenizer file.
    `tokenizer_config.json`, `special_tokens_map.json`, `generation_config.json` and
    `chat_template.jinja` in the same folder define control tokens, stop tokens and the chat
    template."""
    preset: Literal[
        "none", "gpt2", "p50k", "cl100k", "o200k", "o200k_harmony", "llama3", "qwen"
    ] = "none"
    """Name of the published vocabulary in a `tiktoken` file. The preset defines the split pattern,
    and the control tokens with their ids. The number of ranks in the file must match the preset."""
    split_pattern: str = ""
    """Regular expression that splits text into words. No token spans two words. Only for `tiktoken`
    files without a preset."""
    special_tokens: list[str] = field(default_factory=list)
    """Control tokens, in the order of their ids. The ids follow the largest rank. Ignored unless
    `tokenizer.split_pattern` is set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Saving and retention of checkpoints, and the checkpoint that starts a new run."""

    every: int = 1000
    """Number of steps between checkpoints. The last step is always saved. 0 saves only the last
    step."""
    keep: int = 3
    """Number of newest checkpoints to keep. The keys `keep_every_steps`, `keep_every_hours` and
    `keep_best` keep additional checkpoints."""
    keep_every_steps: int = 0
    """Interval in steps for additional checkpoints: those whose step is a multiple of this number
    are also kept. 0 keeps no additional checkpoints."""
    keep_every_hours: float = 0.0
    """Interval in hours for additional checkpoints: the first checkpoint in each interval is also
    kept. 0 keeps no additional checkpoints."""
    keep_best: int = 0
    """Number of best checkpoints to keep in addition to the newest ones, compared by
    `checkpoint.best_metric`. Only checkpoints of steps with an evaluation are compared."""
    best_metric: str = "eval/loss"
    """Evaluation metric that `RUN@best`, `checkpoint.keep_best` and `eval.patience` compare.
    Examples are `eval/loss`, `eval/nats_per_byte`, `eval/NAME/loss` of a validation set, and
    `eval/NAME/accuracy` of a task."""
    best_mode: Literal["smallest", "largest"] = field(
        default="smallest", metadata=renamed_from("best_is")
    )
    """Direction of `checkpoint.best_metric`: whether the smallest or the largest value is the best.
    Use `smallest` for losses and `largest` for accuracies."""
    retries: int = 3
    """Number of retries after a failed save, with pauses of 1, 2, 4, ... seconds. During training,
    a retry saves the state of a later step. A save is not retried if the disk is full or
    read-only."""
    on_failure: Literal["stop", "continue"] = field(
        default="stop", metadata=renamed_from(values={"go_on": "continue"})
    )
    """Behavior after all attempts to save a checkpoint have failed. `stop` ends the run. `continue`
    continues training until the next checkpoint is due. The save at the end of the run must
    succeed. Multi-process runs always stop."""
    dir: str = ""
    """Folder, or `gs://BUCKET/PATH`, for the durable checkpoints of all runs. The checkpoints of
    each run are in `<checkpoint.dir>/<run.name>/checkpoints`. Buckets require `pip install
    'maxpipe[gcs]'`. If empty, checkpoints are saved in the run folder."""
    local_dir: str = ""
    """Folder on a fast disk for additional checkpoints between the durable ones. The folder keeps
    only the newest checkpoint, and must be shared by all processes. A run resumes from its newest
    checkpoint, which may be local or durable. To start from scratch, delete both checkpoints. If
    empty, no local checkpoints are saved."""
    local_every: int = 0
    """Number of steps between checkpoints in `checkpoint.local_dir`."""
    restore_from: str = ""
    """Checkpoint of another run from which this run starts: `RUN@STEP`, `RUN@newest`, `RUN@best`
    (by that run's `checkpoint.best_metric`), or the path of a checkpoint folder. `RUN` without a
    step means the newest checkpoint. `RUN` is a folder, the name of a run in `run.dir`, or
    `gs://BUCKET/PATH/NAME`. `hf:DIR` starts with the weights in a Hugging Face folder. Ignored if
    this run already has a checkpoint, because it then resumes from that checkpoint."""
    restore: Literal["all", "weights"] = "all"
    """State that is restored from `checkpoint.restore_from`. `all` restores parameters, optimizer
    state, step and data position. `weights` restores only parameters and starts at step 0; the data
    and tokenizer may be different, and the vocabulary may be larger. A run that starts from a
    source with only weights always starts at step 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardConfig:
    """Response to non-finite values, loss spikes and corrupted replicas.

    A step whose loss or gradient norm is not finite never changes parameters or optimizer state,
    regardless of these keys.
    """

    bad_steps: Literal["stop", "skip", "roll_back"] = "stop"
    """Response to a bad step, whose loss or gradient norm is NaN or infinite. `stop` ends the run.
    `skip` continues with the next batch. `roll_back` restores the newest checkpoint and skips the
    batch that caused the bad step. `events.jsonl` lists the sequences and documents of that
    batch."""
    max_bad_steps: int = 5
    """Maximum number of consecutive bad steps with `guard.bad_steps=skip`. One more bad step stops
    the run."""
    spike_sigmas: float = 0.0
    """Threshold of the spike detector, in standard deviations above the mean of recent steps. A
    step counts as a spike if its loss or gradient norm exceeds the threshold. A common value is 6.
    0 disables detection."""
    spike_window: int = 128
    """Number of recent updates over which the spike detector computes the mean and standard
    deviation. Detection starts after half of this number of updates."""
    on_spike: Literal["note", "skip", "roll_back"] = "note"
    """Response to a spike. `note` applies the update and records an event. `skip` discards the
    update. `roll_back` restores the newest checkpoint, as in `guard.bad_steps`. Ignored if
    `guard.spike_sigmas` is 0."""
    max_rollbacks: int = field(default=3, metadata=renamed_from("max_roll_backs"))
    """Maximum number of rollbacks in a run. The next rollback stops the run instead."""
    replica_check_every: int = 0
    """Number of steps between bitwise comparisons of replicated parameters and optimizer state
    across devices. If replicas differ, the run stops. Replicas are also compared before each
    checkpoint. 0 disables both comparisons."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    """Output during training."""

    every: int = 10
    """Number of steps between records in `metrics.jsonl`, TensorBoard and the console."""
    progress: Literal["auto", "live", "plain"] = "auto"
    """Console output: a `live` view or `plain` lines. `auto` uses `live` if the output is a
    terminal."""
    tensorboard: bool = True
    """Write TensorBoard event files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeConfig:
    """Devices, processes and timeouts."""

    platform: Literal["auto", "cpu", "tpu", "cuda"] = "auto"
    """Device platform. `auto` uses jax's default platform, which prefers accelerators."""
    num_processes: int = 1
    """Number of processes of the run. With 0, the number of processes, the process ids and the
    coordinator are detected from the cluster (Cloud TPU, SLURM, Open MPI)."""
    process_id: int = 0
    """Rank of this process, from 0 to `runtime.num_processes` - 1."""
    coordinator: str = ""
    """Address of process 0, as `host:port`. Ignored unless `runtime.num_processes` is more than
    1."""
    cpu_collectives: Literal["auto", "gloo"] = "auto"
    """Implementation of collectives between CPU devices. `auto` uses shared memory in a single
    process and gloo between processes. `gloo` reduces in the same order for any number of
    processes, so that results are bitwise identical, but is slower in a single process."""
    init_timeout_seconds: int = 300
    """Time in seconds that a process waits for all other processes to connect at the start."""
    heartbeat_timeout_seconds: int = 100
    """Heartbeat timeout in seconds. If a process sends no heartbeat for this time, all other
    processes exit with code 71."""
    stall_timeout_seconds: int = 1800
    """Stall timeout in seconds. If no process makes progress for this time, all processes print
    their stack traces and exit with code 71. A step, batch, evaluation or save counts as progress.
    During set-up, reading a checkpoint or a part of the documents also counts. The timeout does not
    apply while a process compiles. 0 waits forever."""
    stop_grace_seconds: int = 0
    """Maximum time in seconds between SIGTERM, SIGHUP or Ctrl-C and the exit of the process. After
    the signal, the process finishes the current step and saves a checkpoint. If this exceeds the
    limit, the process exits without saving, and the run can resume from its newest checkpoint. 0
    means no limit."""
    compilation_cache: str = "~/.cache/maxpipe/compiled"
    """Folder in which compiled programs are cached between runs. If empty, the cache is disabled.
    Ignored with several CPU devices, because cached CPU programs do not preserve the order of
    collectives."""
    memory_check: Literal["stop", "warn"] = "stop"
    """Behavior when the memory forecast or the compiler reports that a step needs more memory than
    is available. For CPU devices, the available memory is that of the host. `stop` ends the run
    before training starts, and `warn` prints a warning. A forecast below 1.2 times the available
    memory causes only a warning."""
    compiled_step: str = field(default="", metadata=renamed_from("executable"))
    """Folder with a train step that `maxpipe compile --save` compiled ahead of time. The config,
    the devices and the version of jax must be the same as during compilation. Not supported with
    several CPU devices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """Cluster on which `maxpipe launch` starts the run. Training ignores this section."""

    topology: str = ""
    """Device type and size of one slice, as in `maxpipe plan`: `v5p:2x4x4`, `h100:8`. For GPUs and
    CPUs, a slice is a group of devices that fast links connect, usually one node. Optional for
    `launch local`."""
    slices: int = 1
    """Number of slices, which the data-center network connects."""
    project: str = ""
    """Google Cloud project. If empty, the default project of `gcloud config` is used."""
    zone: str = ""
    """Google Cloud zone or region of the devices or the cluster."""
    cluster: str = ""
    """GKE cluster. If empty, the current cluster of `kubectl` is used."""
    queue: str = ""
    """SLURM partition, or Kueue queue in a GKE cluster. The queue is `multislice-queue` in clusters
    that XPK created."""
    image: str = ""
    """Container image that contains maxpipe, for GKE."""
    volume: str = ""
    """Shared storage of the GKE hosts: `gs://BUCKET`, or the name of a persistent volume claim. The
    storage is mounted at `launch.workdir`."""
    workdir: str = ""
    """Working directory of the run on the hosts. Relative paths are resolved against this
    directory. If empty, the run starts in the current folder (SLURM), the home folder (`gcloud`) or
    /workdir (GKE)."""
    program: str = "maxpipe"
    """The `maxpipe` command on the hosts. Must be a path if the command is not on the hosts'
    PATH."""
    environment: list[str] = field(default_factory=list)
    """Names of environment variables that the run needs on the hosts. The values of these variables
    are never written to files. SLURM reads the values from the submitting shell, and GKE from a
    secret with the same name as the job. With `gcloud`, the variables must already be defined on
    the hosts."""
    spot: bool = False
    """Use spot capacity on Google Cloud, which Google can preempt."""
    restarts: int = 3
    """Maximum number of consecutive restarts without a newer checkpoint, after a run was killed or
    hung. A run that saved a checkpoint before it stopped is always restarted. GKE cannot count
    consecutive restarts: on GKE, the total number of restarts is limited to ten times this
    value."""
    grace_seconds: int = 120
    """Time in seconds between the stop signal and the end of the job. The run saves a checkpoint
    during this time. The signal is sent before SLURM's time limit is reached, and when GKE evicts
    the node."""
    time_limit_minutes: int = 0
    """Time limit of one SLURM job in minutes. The run resumes in the next job. 0 uses the time
    limit of the partition."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Complete config of a run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig
    mesh: MeshConfig = field(default_factory=MeshConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    log: LogConfig = field(default_factory=LogConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    def __post_init__(self) -> None:
        """Copy the adapter section into the model section, so that the model section describes the
        complete model.
        """
        adapter = self.adapter if self.adapter.rank else None
        if self.model.adapter != adapter:
            object.__setattr__(self, "model", replace(self.model, adapter=adapter))
