"""The range of each number in a config: one row per key."""

from __future__ import annotations

from maxpipe.models.bounds import LARGEST, SMALLEST, Bound
from maxpipe.models.registry import FAMILIES

BYTES_VOCABULARY = 259
"""256 bytes, begin, end and pad."""

_SHARE_LEFT = "1 would leave nothing"
_INT32 = 2**31 - 1
MOST_STEPS = 10**11
"""Of a run: the numbers of its rows have 63 bits."""
_RANGES = (
    Bound("run.seed", 0, 0, 2**32 - 1, "the random generator takes 32 bits"),
    Bound("model.num_layers", 1, 1, 2048, "plans and cuts look at every layer"),
    *(Bound(f"model.{name}", 1, 1) for name in ("d_model", "num_heads", "num_kv_heads", "d_mlp")),
    Bound("model.head_size", 2, 2),
    Bound("model.vocab_size", BYTES_VOCABULARY, 2, _INT32, "token ids are int32"),
    Bound("model.heads_ahead", 2, 0),
    Bound("model.ahead_loss_weight", 0.3, 0, LARGEST, "devices compute in float32"),
    Bound(
        "model.rope_theta", 10000.0, 1, LARGEST, "devices compute in float32", low_is_inside=False
    ),
    Bound("model.norm_epsilon", 1e-5, SMALLEST, LARGEST, "it keeps a root away from 0 in float32"),
    Bound("model.dropout", 0.1, 0, 1, _SHARE_LEFT, high_is_inside=False),
    *(
        bound._replace(key=f"model.{family.name}.{bound.key}")
        for family in FAMILIES.values()
        for bound in family.bounds
    ),
    Bound("mesh.largest_copy_bytes", 2**27, 0, why="0 is no limit"),
    Bound("mesh.cpu_devices", 1, 1, 4096, "each has threads and memory of its own"),
    Bound("pipeline.microbatches", 1, 1),
    Bound("pipeline.repeats", 1, 1),
    Bound("pipeline.group", 0, 0, why="0 means the number of stages"),
    Bound("pipeline.layers_outside", 0, 0),
    Bound("pipeline.loss_block_tokens", -1, -1, why="-1 takes blocks where logits are large"),
    Bound("train.steps", 100, 0, MOST_STEPS, "0 takes the length from train.tokens"),
    Bound("train.tokens", 1000000, 0, 10**18, "0 takes the length from train.steps"),
    Bound("train.batch_size", 8, 1, 2**24, "a step lists its rows"),
    Bound(
        "train.sequence_length",
        1024,
        2,
        _INT32,
        "the last token has no target, and positions are int32",
    ),
    Bound("optim.learning_rate", 3e-4, 1e-30, LARGEST, "devices compute in float32"),
    Bound("adapter.rank", 16, 0, why="0 trains the whole model"),
    Bound("adapter.alpha", 16.0, SMALLEST, LARGEST, "devices compute in float32"),
    Bound("adapter.dropout", 0.1, 0, 1, _SHARE_LEFT, high_is_inside=False),
    Bound("optim.warmup_steps", 0, 0),
    Bound("optim.decay_fraction", 0.2, 0, 1),
    Bound("optim.final_fraction", 0.1, 0, 1),
    Bound("optim.beta1", 0.9, 0, 1, "1 would never decay", high_is_inside=False),
    Bound("optim.beta2", 0.95, 0, 1, "1 would never decay", high_is_inside=False),
    Bound("optim.momentum", 0.95, 0, 1, "1 would never decay", high_is_inside=False),
    Bound("optim.average_decay", 0.999, 0, 1, "1 would never follow", high_is_inside=False),
    Bound("optim.epsilon", 1e-8, SMALLEST, LARGEST, "it keeps a divisor away from 0 in float32"),
    Bound("optim.weight_decay", 0.1, 0, LARGEST, "devices compute in float32"),
    Bound("optim.clip_norm", 1.0, 0, LARGEST, "0 turns clipping off; devices compute in float32"),
    Bound("grpo.group_size", 8, 2, why="a completion is compared with others"),
    Bound("grpo.max_tokens", 64, 1),
    Bound("grpo.temperature", 1.0, 0.01, 100, "probabilities of what was drawn are compared"),
    Bound("grpo.reward_seconds", 10.0, 0, 86400, low_is_inside=False),
    Bound("grpo.clip", 0.2, 0, 1, "no probability is negative", low_is_inside=False),
    Bound("grpo.clip_high", 0.0, 0, LARGEST, "0 takes grpo.clip; devices compute in float32"),
    Bound("grpo.kl", 0.04, 0, LARGEST, "0 takes no reference; devices compute in float32"),
    Bound("grpo.updates_per_rollout", 1, 1, 1024, "their completions are drawn at once"),
    Bound(
        "data.mixture_temperature",
        1.0,
        0,
        LARGEST,
        "1 takes weights as they are",
        low_is_inside=False,
    ),
    Bound("data.validation_fraction", 0.05, 0, 0.5),
    Bound("data.pairs_per_row", 16, 1, 4096, "each batch has room for as many in every row"),
    Bound("data.unreadable_limit", 100, 1),
    Bound("data.largest_unpacked_bytes", 2**36, 1),
    Bound("data.prefetch_batches", 4, 1),
    Bound("data.threads", 2, 1, 1024, "each is a thread of this process"),
    Bound("checkpoint.every", 1000, 0, why="0 saves the last step only"),
    Bound("checkpoint.keep", 3, 1, why="the newest checkpoint is never deleted"),
    Bound("distill.temperature", 1.0, 1e-3, 1e3, "logits are divided by it in float32"),
    Bound("distill.top_k", 32, 1),
    Bound("distill.weight", 0.5, 0, 1, "0 would leave the teacher out", low_is_inside=False),
    Bound("distill.devices", 0, 0, why="0 takes turns on all devices"),
    Bound("guard.max_bad_steps", 5, 1),
    Bound("guard.spike_sigmas", 6.0, 0, LARGEST, "0 looks for none; devices compute in float32"),
    Bound("guard.spike_window", 128, 2, why="fewer steps have no deviation"),
    Bound("guard.max_roll_backs", 3, 0),
    Bound("guard.replica_check_every", 100, 0, why="0 turns it off"),
    Bound("checkpoint.keep_every_steps", 0, 0, why="0 keeps none for that"),
    Bound("checkpoint.keep_every_hours", 0.0, 0, why="0 keeps none for that"),
    Bound("checkpoint.keep_best", 0, 0, why="0 keeps none for that"),
    Bound("checkpoint.retries", 3, 0, why="0 tries once"),
    Bound("checkpoint.local_every", 0, 0),
    Bound("eval.every", 100, 0, why="0 evaluates after the last step only"),
    Bound("eval.batch_size", 8, 0, why="0 takes train.batch_size"),
    Bound("eval.batches", 8, 0, why="0 reads no documents"),
    Bound("eval.patience", 3, 0, why="0 never ends the run for that"),
    Bound("eval.min_gain", 0.0, 0, LARGEST, "a gain of less than 0 is a loss"),
    Bound("eval.sample_documents", 4, 0, why="0 takes none"),
    Bound("eval.sample_every", 100, 0, why="0 takes no samples"),
    Bound("eval.sample_tokens", 64, 1),
    Bound("eval.sample_temperature", 1.0, 0, LARGEST, "devices compute in float32"),
    Bound("preference.beta", 0.1, 0, LARGEST, "devices compute in float32", low_is_inside=False),
    Bound("preference.label_smoothing", 0.1, 0, 0.5, "0.5 says nothing", high_is_inside=False),
    Bound("preference.odds_weight", 0.1, 0, LARGEST, "devices compute in float32"),
    Bound("log.every", 10, 1),
    Bound("runtime.num_processes", 1, 0, why="0 asks the cluster"),
    Bound("runtime.process_id", 0, 0),
    Bound("runtime.init_timeout_seconds", 300, 1),
    Bound("runtime.heartbeat_timeout_seconds", 100, 1),
    Bound("runtime.stall_timeout_seconds", 1800, 0, why="0 waits forever"),
    Bound("runtime.stop_grace_seconds", 120, 0, why="0 is no limit"),
    Bound("launch.slices", 1, 1),
    Bound("launch.restarts", 3, 0),
    Bound("launch.grace_seconds", 120, 1),
    Bound("launch.time_limit_minutes", 0, 0, why="0 takes the partition's"),
)


BOUNDS = {bound.key: bound for bound in _RANGES}
"""Full key to the range of its value."""
