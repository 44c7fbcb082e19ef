"""The declaration of every config key: its type, its default and its meaning.

Each field is followed by a string that documents it: `maxpipe config explain`,
`docs/config.md`, the JSON schema and error messages are rendered from these
strings. The classes hold values only; rules live in `check.py`. What is read is declared in
`data_schema.py`, evaluation in `eval_schema.py`. The keys of one model
family are declared in its file in `maxpipe/models`. Nothing here imports jax, so
that `maxpipe --help` stays fast.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from maxpipe.config.data_schema import DataConfig
from maxpipe.config.eval_schema import EvalConfig
from maxpipe.config.tuning_schema import DistillConfig, GrpoConfig, PreferenceConfig
from maxpipe.io.typed_json import legacy_value, renamed_from
from maxpipe.models.config import AdapterConfig, ModelConfig
from maxpipe.parallel.axes import MeshConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Which run this is, and where its files go."""

    name: str = "run"
    """Name of the run's folder below `run.dir`. Letters, digits, `.`, `_` and `-`. When it is not
    set, the name of the last config file: `my-run` for `my-run.yml`."""
    dir: str = "runs"
    """Folder that holds all runs. Starting a run that has a checkpoint resumes it."""
    seed: int = 0
    """Seed of parameters, data order and dropout. The same seed gives the same loss curve
    under every mesh, schedule and number of processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig:
    """How the layer stack is cut and in which order its pieces run."""

    schedule: str = "interleaved"
    """Order of forward and backward work; `maxpipe schedule` draws each one. Whole backwards:
    `gpipe`, `circular`, `breadth_first`, and with memory independent of the number of microbatches
    `1f1b`, `interleaved`; with two or more `pipeline.repeats` these two are the same schedule.
    Split backwards, which pay with `pipeline.remat` `names` or `none`: `zb_h1`, `zb_h2`, and with
    two repeats in a V `zb_v`, `v_half`, `v_min`, `dualpipe_v`. `file:PATH` runs the schedule that a
    CSV file describes."""
    microbatches: int = 1
    """Number of pieces the batch is cut into. On one stage this is gradient accumulation."""
    repeats: int = 1
    """Visits of a microbatch to each stage. More repeats shrink the bubble and add messages."""
    group: int = 0
    """Microbatches that a stage runs back to back before it turns to the next repeat. Read by
    `interleaved`. 0 means the number of stages, the least memory."""
    delayed_forwarding: bool = False
    """Give each message a whole tick to travel behind work. Doubles the bubble of `gpipe` and
    `circular`, which read it; the 1F1B schedules hide their messages without it."""
    layers_per_chunk: list[int] = field(default_factory=list, metadata=renamed_from("cut"))
    """Layers of each chunk in network order, stages x repeats numbers. Empty cuts as evenly as
    possible."""
    prologue_layers: int = field(default=0, metadata=renamed_from("layers_outside"))
    """The network's first layers that run outside the ring: on all stages at once, each with its
    own microbatch. Leaves the ring a number of layers that divides evenly, so that no chunk waits
    for a longer one. Every stage holds their weights."""
    weight_gather: Literal["iteration", "visit", "step"] = "iteration"
    """When weights sharded over fsdp are gathered: `iteration` for every layer of every forward
    and backward (least memory), `visit` each time a stage turns to another chunk (a window of
    chunks, `pipeline.group` microbatches share a gather), `step` once per step (least traffic)."""
    remat: Literal["full", "chunk", "names", "none"] = "full"
    """What is kept for the backward pass: `full` keeps each layer's input and recomputes a layer
    once, `chunk` keeps only the input of each chunk and recomputes twice (least memory), `names`
    keeps inputs and the activations of `pipeline.saved_names`, `none` keeps everything and
    recomputes nothing."""
    saved_names: list[str] = field(default_factory=lambda: ["matmuls"])
    """Activations kept with `pipeline.remat=names`: `matmuls` (all), those of one part of a layer
    (`attention`, `mlp`), or single ones (of every family: `query`, `key`, `value`, `context`,
    `attention_out`, `gate`, `up`)."""
    offloaded_names: list[str] = field(default_factory=list)
    """Activations that `pipeline.remat=names` keeps in host memory instead of on the device; the
    same names and presets."""
    idle: Literal["skip", "compute"] = "skip"
    """What a stage does in an empty slot: `skip` branches around the work, `compute` runs it on
    zeros and discards the result (no control flow that differs between stages)."""
    loss_block_tokens: int = field(default=-1, metadata=legacy_value(0))
    """Tokens of a device whose logits are in memory at once, of each microbatch in turn. 0: all of
    them. -1: all, but 2048 where the logits of all would take more than 512 MiB, as with long
    sequences or few stages. Changes memory, and the loss in its last digits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """What is learned, length of the run and shape of a step."""

    objective: Literal["pretrain", "sft", "preference", "distill", "grpo"] = "pretrain"
    """What is learned: `pretrain`, the next token of documents; `sft` (supervised fine-tuning),
    what an assistant says in conversations, which insists on documents that say which tokens that
    is: `data.chat`. Both are a cross entropy, the mean over all tokens of a batch that are trained.
    `preference`: which of two responses is preferred, as `preference.loss` says. `distill`: besides
    the next token what a teacher says of it, as the section `distill` says. `grpo`: completions of
    prompts that a function rewards (reinforcement learning), as the section `grpo` says."""
    steps: int = 0
    """Number of optimizer steps. 0 takes the length from `train.tokens`."""
    tokens: int = 0
    """Number of tokens to train on, rounded up to whole steps. Read when `train.steps` is 0."""
    batch_size: int = 8
    """Sequences per step over all devices."""
    batch_ramp: list[str] = field(default_factory=list, hash=False)  # a list has no hash
    """Smaller batches at the start, such as `['16 for 1000 steps', '32 for 50000000 tokens']`, in
    stages that grow up to `train.batch_size`; tokens are rounded up to whole steps. Batches follow
    each other in the data without gaps. Microbatches stay as large, and there are fewer of them.
    What a run has done of its ramp cannot change."""
    sequence_length: int = 1024
    """Tokens per sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """The optimizer and its learning-rate schedule."""

    name: Literal["adamw", "lion", "adafactor", "muon"] = "adamw"
    """`adamw` (arXiv:1711.05101) keeps two moments of each parameter; `lion` (arXiv:2302.06675)
    keeps one, and moves each entry by the learning rate, up or down. Its rate is 3 to 10 times
    smaller than AdamW's, and its weight decay as much larger. `adafactor` (arXiv:1804.04235) keeps
    a number for each row and each column of a matrix, and no first moment. `muon`
    (arXiv:2502.16982) makes the update of each matrix of a layer orthogonal and keeps one moment;
    embedding, output projection and all that is no matrix are AdamW's. Its updates are as large as
    AdamW's: rate and decay can stay. A run keeps its optimizer."""
    learning_rate: float = 3e-4
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape after the warm-up: down to `optim.min_lr_ratio` along a cosine or a line over the
    whole run, no change, or `wsd`: stable, then linear over the last `optim.decay_fraction`."""
    warmup_steps: int = 0
    """Steps over which the rate rises from 0 to its peak."""
    lr_phases: list[str] = field(
        default_factory=list, hash=False, metadata=renamed_from("phases")
    )  # a list has no hash
    """The rate's phases, in place of `optim.schedule` and what it reads, such as `['10% linear 0 ->
    1', '3 x 20% cosine 1 -> 0.1', 'rest linear 0']`: a number of steps, a share of the run or its
    `rest`, `3 x` in front for restarts; `linear` or `cosine`; and fractions of the peak. A phase
    without `FROM ->` goes on where the one before it ends."""
    decay_fraction: float = 0.2
    """Share of the run, at its end, in which `wsd` decays."""
    min_lr_ratio: float = field(default=0.1, metadata=renamed_from("final_fraction"))
    """Learning rate at the end as a fraction of the peak. Not read by `constant`."""
    beta1: float = 0.9
    """Decay of the first moment; of `lion`, share of the moment in what is updated by. Not read by
    `adafactor`."""
    beta2: float = 0.95
    """Decay of the second moment; of `lion`, of its only one. Not read by `adafactor`, whose decay
    at step t is 1 - t^-0.8."""
    momentum: float = 0.95
    """Decay of the moment of matrices with `muon`, in Nesterov's form. Read by it alone."""
    epsilon: float = 1e-8
    """Added to the root of the second moment. Not read by `lion` and `adafactor`."""
    weight_decay: float = 0.1
    """Decoupled weight decay. Normalisation scales and biases are not decayed."""
    lr_multipliers: list[str] = field(
        default_factory=list, hash=False, metadata=renamed_from("rate_factors")
    )
    """Factors of the learning rate for some parameters, such as `['embedding 0.1', '*.router 0']`:
    patterns over names as in `model.frozen`, each with a number. Of several that match the last
    one counts."""
    weight_decays: list[str] = field(default_factory=list, hash=False)
    """Weight decay of some parameters in place of `optim.weight_decay`, such as `['embedding 0',
    '*norm* 0.01']`, in the same form; of normalisation scales and biases, too."""
    clip_norm: float = 1.0
    """Largest norm of the whole gradient, over all stages. 0 turns clipping off."""
    ema_decay: float = field(default=0.0, metadata=renamed_from("average_decay"))
    """Decay of an exponential moving average of the parameters, such as 0.999, in float32 beside
    them. It starts as the parameters, changes nothing in training, and can be evaluated and
    exported. 0: there is none."""
    state_dtype: Literal["same", "float32", "bfloat16"] = "same"
    """Type in which moments are stored; `same`: that of `model.param_dtype`. All arithmetic is
    in float32."""
    zero1: bool = field(default=False, metadata=renamed_from("shard_over_data"))
    """Whether devices along `data` divide moments and averages instead of each having all (ZeRO-1,
    arXiv:1910.02054): each sums and updates its part, and updated parameters are gathered. Of a
    parameter with no dim that divides evenly each keeps all."""
    offload_state: bool = False
    """Whether moments and averages are kept in host memory: a layer of each goes to the device for
    its update and back, which no work of the step hides. The results are the same bits."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients are sent to be summed over devices; what is added up on a device is
    float32."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """How parameters and moments are rounded to bfloat16, where that is their type. `stochastic`
    (arXiv:1502.02551): up or down by chance, right in the mean, so that small updates are not
    lost. What is drawn follows from seed, step and place in the model: it is the same under every
    layout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerConfig:
    """How text becomes token ids."""

    kind: Literal["bytes", "auto", "huggingface", "sentencepiece", "tiktoken"] = "bytes"
    """`bytes`: the 256 bytes and three control ids, built in. `huggingface`: a `tokenizer.json`.
    `sentencepiece`: a `.model` file. `tiktoken`: a file of ranks, one `BASE64 RANK` a line. `auto`
    finds out which of the three `tokenizer.path` is. All but `bytes` need
    `pip install 'maxpipe[tokenizers]'`."""
    path: str = ""
    """The file of the tokenizer, or a Hugging Face folder with one. `tokenizer_config.json`,
    `special_tokens_map.json`, `generation_config.json` and `chat_template.jinja` beside it name
    control tokens, the ends of generated text, and the chat template."""
    preset: Literal[
        "none", "gpt2", "p50k", "cl100k", "o200k", "o200k_harmony", "llama3", "qwen"
    ] = "none"
    """The published vocabulary that a `tiktoken` file holds: gives the pattern that splits text,
    and control tokens with their ids. The file must have its number of ranks."""
    split_pattern: str = ""
    """Of a `tiktoken` file without a preset: the regular expression that splits text into words,
    which tokens never cross."""
    special_tokens: list[str] = field(default_factory=list)
    """With `tokenizer.split_pattern`: control tokens. Their ids follow the largest rank, in this
    order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When state is saved and what a new run starts from."""

    every: int = 1000
    """Steps between checkpoints. The last step is always saved. 0 saves only then."""
    keep: int = 3
    """Number of newest checkpoints to keep. The other `keep_*` keys keep more of them."""
    keep_every_steps: int = 0
    """Keep also each checkpoint whose step this number divides. 0 keeps none for that."""
    keep_every_hours: float = 0.0
    """Keep also the first checkpoint in each period of this many hours. 0 keeps none for that."""
    keep_best: int = 0
    """Keep also this number of the best checkpoints by `checkpoint.best_metric`, of those that were
    evaluated at the step at which they were saved."""
    best_metric: str = "eval/loss"
    """The metric of evaluations by which `RUN@best`, `checkpoint.keep_best` and `eval.patience`
    compare: `eval/loss`, `eval/nats_per_byte`, and of a set of documents or of a task
    `eval/NAME/loss` or `eval/NAME/accuracy`."""
    best_mode: Literal["smallest", "largest"] = field(
        default="smallest", metadata=renamed_from("best_is")
    )
    """Which value of it is the best: of a loss the smallest, of an accuracy the largest."""
    retries: int = 3
    """How often a save that failed is tried again, with pauses of 1, 2, 4 ... seconds. While
    training goes on that is a save of a later step. A full or read-only disk is not tried again."""
    on_failure: Literal["stop", "go_on"] = "stop"
    """When all attempts at a save have failed: `stop` the run, or `go_on` training until the next
    one is due. The last save must succeed. A run of several processes always stops."""
    dir: str = ""
    """Folder, or `gs://BUCKET/PATH`, that holds the durable checkpoints of all runs: a run's are in
    `<checkpoint.dir>/<run.name>/checkpoints`. Buckets need `pip install 'maxpipe[gcs]'`. Empty
    means the run's own folder."""
    local_dir: str = ""
    """Folder on a fast disk for checkpoints between the durable ones; with several processes one
    that all see. It holds the newest one only. A run resumes from the newest of both: to start
    from scratch, delete both. Empty turns it off."""
    local_every: int = 0
    """Steps between checkpoints in `checkpoint.local_dir`."""
    restore_from: str = ""
    """Checkpoint of another run that starts this one: `RUN@STEP`, `RUN@newest`, `RUN@best` (by its
    own `checkpoint.best_metric`) or the path to its folder; `RUN` alone is the newest. `RUN` is a
    folder, the name of one in `run.dir`, or `gs://BUCKET/PATH/NAME`. `hf:DIR` starts with the
    weights of a Hugging Face folder. When this run has a checkpoint of its own it goes on from
    that, and this is not read."""
    restore: Literal["all", "weights"] = "all"
    """What is taken from `checkpoint.restore_from`: `all` goes on with parameters, optimizer state,
    step and data position; `weights` begins at step 0 with its parameters only, on any data, and
    perhaps with more tokens. What holds weights alone gives no more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardConfig:
    """What happens when numbers go wrong.

    A step whose loss or gradient norm is not finite never changes parameters or optimizer state,
    whatever these keys say.
    """

    bad_steps: Literal["stop", "skip", "roll_back"] = "stop"
    """After a step whose loss or gradient norm is NaN or infinite: `stop` ends the run, `skip` goes
    on with the next batch, `roll_back` returns to the newest checkpoint and goes on behind the
    batch that did it. `events.jsonl` names the sequences and documents of each bad batch."""
    max_bad_steps: int = 5
    """Steps in a row that `skip` may leave out; one more stops the run."""
    spike_sigmas: float = 0.0
    """A step is a spike when its loss or gradient norm is more than this many standard deviations
    above the mean of recent steps; 6 is usual. 0 looks for none."""
    spike_window: int = 128
    """Number of recent updates that spikes are measured against; looked for once half are there."""
    on_spike: Literal["note", "skip", "roll_back"] = "note"
    """After a spike: `note` takes the update and records an event, `skip` leaves the update out,
    `roll_back` as in `guard.bad_steps`. Read when `guard.spike_sigmas` is not 0."""
    max_rollbacks: int = field(default=3, metadata=renamed_from("max_roll_backs"))
    """Times that a run may roll back; one more stops it."""
    replica_check_every: int = 0
    """Steps between comparisons, bit for bit, of the copies of parameters and optimizer state that
    devices hold; one that differs stops the run. Made before each checkpoint, too. 0 turns both
    off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    """What is written while training."""

    every: int = 10
    """Steps between records in `metrics.jsonl`, TensorBoard and the console."""
    progress: Literal["auto", "live", "plain"] = "auto"
    """Console output: a `live` view, or `plain` lines. `auto` picks by whether it is a terminal."""
    tensorboard: bool = True
    """Write TensorBoard event files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeConfig:
    """How processes start."""

    platform: Literal["auto", "cpu", "tpu", "cuda"] = "auto"
    """Kind of device. `auto` takes the best that jax finds."""
    num_processes: int = 1
    """Number of processes of the run. 0 lets jax find processes, ids and coordinator from the
    cluster (Cloud TPU, SLURM, Open MPI)."""
    process_id: int = 0
    """Rank of this process, from 0 to `runtime.num_processes` - 1."""
    coordinator: str = ""
    """`host:port` of process 0. Read when `runtime.num_processes` is more than 1."""
    cpu_collectives: Literal["auto", "gloo"] = "auto"
    """How CPU devices exchange values: `auto` takes shared memory in one process and gloo between
    several. With `gloo` one process adds up in the order that several do, so that a run gives the
    same bits in any number of processes; it is slower."""
    init_timeout_seconds: int = 300
    """How long a process waits for the others at the start."""
    heartbeat_timeout_seconds: int = 100
    """How long a process may stay silent before all others end, with exit code 71."""
    stall_timeout_seconds: int = 1800
    """How long no process may get anything done before all print where they are and end, with exit
    code 71: a step, read, evaluation or save; in set-up the reading of a checkpoint, or of a part
    of the documents. While one process compiles no limit applies, as compiling may take long. 0
    waits forever."""
    stop_grace_seconds: int = 0
    """Time from SIGTERM, SIGHUP or Ctrl-C to the end of the process, in which the running step ends
    and is saved. When it is over the run is left as it is, to go on from its newest checkpoint. 0
    is no limit."""
    compilation_cache: str = "~/.cache/maxpipe/compiled"
    """Folder in which compiled programs are kept between runs. Empty turns the cache off. Not used
    by several CPU devices: XLA loses the order in which such a program's devices meet."""
    memory_check: Literal["stop", "warn"] = "stop"
    """What happens when a step is predicted, or compiled, to take more memory than the devices
    have, or the host has for CPU devices: the run does not start, or starts with a warning. A
    prediction of less than 1.2 times the memory only warns."""
    compiled_step: str = field(default="", metadata=renamed_from("executable"))
    """Folder with a train step that `maxpipe compile --save` compiled ahead of time. It must have
    been made for this config, these devices and this version of jax. Several CPU devices cannot
    load one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """Where `maxpipe launch` runs it. Training itself does not read this section."""

    topology: str = ""
    """Kind of device and size of one slice, as `maxpipe plan` takes it: `v5p:2x4x4`, `h100:8`. Of
    GPUs and CPUs a slice is what fast links join, as a rule one node. `launch local` needs none."""
    slices: int = 1
    """Number of slices, joined by the data-centre network."""
    project: str = ""
    """Google Cloud project. Empty takes the one that `gcloud config` names."""
    zone: str = ""
    """Google Cloud zone or region of the devices, or of the cluster."""
    cluster: str = ""
    """GKE cluster. Empty submits to the cluster that `kubectl` uses."""
    queue: str = ""
    """SLURM partition, or Kueue's queue in a GKE cluster: `multislice-queue` where XPK made it."""
    image: str = ""
    """Container image with maxpipe, for GKE."""
    volume: str = ""
    """What the hosts of GKE share: `gs://BUCKET`, or the name of a persistent volume claim. It is
    mounted at `launch.workdir`."""
    workdir: str = ""
    """Folder on the hosts in which the run starts; relative paths begin there. Empty means the
    current folder for SLURM, the home folder for `gcloud` and /workdir for GKE."""
    program: str = "maxpipe"
    """The `maxpipe` command on the hosts; a path when it is not on their PATH."""
    environment: list[str] = field(default_factory=list)
    """Names of environment variables that the run needs on the hosts. Values are written nowhere:
    SLURM takes them from the shell that submits, GKE from a secret that is named like the job;
    hosts of `gcloud` must have them."""
    spot: bool = False
    """Take spot capacity of Google Cloud, which may be taken away."""
    restarts: int = 3
    """How often in a row a run is started again that was killed or hung, and got no newer
    checkpoint. One that was stopped and saved is always started again. GKE cannot count in a row:
    there it is ten times as often in all."""
    grace_seconds: int = 120
    """Time to save between the request to stop and the end: when SLURM's time is over, or GKE takes
    the node."""
    time_limit_minutes: int = 0
    """Time of one SLURM job; the run goes on in the next. 0 takes the partition's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A whole run."""

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
        """The model is described by its own section: it has that of adapters."""
        adapter = self.adapter if self.adapter.rank else None
        if self.model.adapter != adapter:
            object.__setattr__(self, "model", replace(self.model, adapter=adapter))
