"""Config section `eval`: evaluation during training, samples and early stopping."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from maxpipe.config.rules import BATCH_AXES, add_ranges, axis_keys, batch_shards, did_you_mean, rule
from maxpipe.config.sections.data import all_sources, is_synthetic
from maxpipe.config.sections.grpo import is_function_in_file
from maxpipe.errors import Code, RuleViolation
from maxpipe.io.formatting import round_up
from maxpipe.io.typed_json import renamed_from
from maxpipe.models.config import LARGEST, Bound

if TYPE_CHECKING:
    from maxpipe.config.schema import Config


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskConfig:
    """Multiple-choice task that is scored in each evaluation, as in `maxpipe eval --choices`."""

    path: str = ""
    """JSON Lines file with the fields `context`, `choices` and `answer`. The file is read once, at
    the start of the run."""
    separator: str = " "
    """String inserted between context and choice, unless the context ends with whitespace or the
    choice begins with it."""
    chat: bool = False
    """Render each context as a user message with the tokenizer's chat template. No separator is
    added between context and choice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerativeTaskConfig:
    """Generative task: the model completes prompts in each evaluation, and a scorer rates the
    completions.
    """

    path: str = ""
    """JSON Lines file that contains the prompts. Each object contains either a string in `prompt`,
    or `messages`, which are rendered by the chat template. Each object also contains the fields
    that the scorer reads, such as `answer`. The file is read once, at the start of the run."""
    scorer: Literal["exact", "number", "regex", "arithmetic"] = "exact"
    """Built-in scorer, which returns 1 or 0, as in `grpo.reward`. Ignored if `scorer_file` is
    set."""
    scorer_field: str = ""
    """Name of the record field that the scorer reads. If empty, the default field of the scorer is
    used."""
    scorer_file: str = ""
    """Python scorer, as `FILE.py:FUNCTION`. Replaces `scorer`. The function is called once per
    completion with the completion (a string) and the prompt's record (a dict), and must return a
    number. The function runs in a separate process. If it fails, the completion's score is 0."""
    allow_code: bool = False
    """Allow the code in `scorer_file` to run. The code runs with your permissions."""
    timeout_seconds: float = 10.0
    """Time limit in seconds for one call to the scorer."""
    samples: int = 1
    """Number of completions per prompt. With more than one, the metrics include pass@k: the
    probability that at least one of k completions has a score of at least 1."""
    temperature: float = 0.0
    """Sampling temperature of completions. If 0, the most likely token is always selected (greedy
    decoding)."""
    max_tokens: int = 256
    """Maximum number of tokens per completion. Prompt and completion together are limited to
    `train.sequence_length` tokens."""
    stop: list[str] = field(default_factory=list)
    """Stop strings. A completion ends at the first stop string, which is removed before the
    completion is scored."""
    chat: bool = False
    """Render each string in `prompt` as a user message with the tokenizer's chat template."""
    num_prompts: int = 0
    """Number of prompts in each evaluation, counted from the start of the file. 0 uses all
    prompts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Evaluation during training: validation loss, tasks, samples and early stopping."""

    every: int = 0
    """Number of steps between evaluations. 0 evaluates only after the last step."""
    batches: int = 8
    """Number of batches per evaluation. If 0, evaluations during training compute no loss on
    documents, and `maxpipe eval` uses all batches."""
    batch_size: int = 0
    """Number of sequences per evaluation batch, summed over all devices. Must be a multiple of the
    product of the mesh axis sizes data x fsdp x expert. 0 selects `train.batch_size`."""
    tasks: dict[str, TaskConfig] = field(default_factory=dict)
    """Multiple-choice tasks, keyed by name: `eval.tasks.sums.path=sums.jsonl` adds the metric
    `eval/sums/accuracy`. All tasks are scored in each evaluation."""
    generative_tasks: dict[str, GenerativeTaskConfig] = field(default_factory=dict)
    """Generative tasks, keyed by name: `eval.generative_tasks.gsm8k.path=gsm8k.jsonl` adds the
    metric `eval/gsm8k/score`. All tasks are scored in each evaluation, and the completions are
    written to `evaluations/` in the run folder."""
    harness_tasks: list[str] = field(default_factory=list)
    """Tasks of lm-evaluation-harness, which `pip install 'maxpipe[harness]'` installs. The metrics
    are `harness/TASK/METRIC`. Datasets are downloaded at the start of the run, unless they are in
    the cache of the `datasets` package."""
    harness_every: int = 0
    """Number of steps between evaluations of `eval.harness_tasks`; a multiple of `eval.every`. 0
    selects all evaluations."""
    harness_limit: int = 0
    """Number of examples of each task in `eval.harness_tasks`. 0 uses all examples."""
    harness_fewshot: int = -1
    """Number of solved examples before each question in `eval.harness_tasks`. -1 uses the default
    of each task."""
    harness_path: str = ""
    """Folder with YAML files of further tasks for `eval.harness_tasks`."""
    patience: int = 0
    """Patience for early stopping: the run ends after this number of consecutive evaluations
    without an improvement in `checkpoint.best_metric`. Before it ends, the run performs a final
    evaluation and saves a checkpoint. Only the periodic evaluations scheduled by `eval.every`
    count. 0 disables early stopping."""
    min_delta: float = field(default=0.0, metadata=renamed_from("min_gain"))
    """Early stopping counts an evaluation as an improvement only if `checkpoint.best_metric` is
    better than its best value so far by more than this amount."""
    sample_every: int = 0
    """Number of steps between text samples generated by the model, which are written to the
    console, TensorBoard and `samples.jsonl`. 0 disables samples."""
    sample_prompts: list[str] = field(default_factory=lambda: [""])
    """Prompts for which samples are generated. The BOS token is prepended to each prompt."""
    sample_prompts_file: str = field(default="", metadata=renamed_from("sample_file"))
    """File with one prompt per line. In a `.jsonl` file, each line is an object with the field
    `prompt`. Replaces `eval.sample_prompts`. With `eval.sample_chat`, an object may contain
    `messages` instead of `prompt`."""
    sample_chat: bool = False
    """Render each prompt as a user message with the tokenizer's chat template. The model then
    generates the response."""
    sample_conversations: int = field(default=0, metadata=renamed_from("sample_documents"))
    """Number of validation conversations that are also used as prompts. The model regenerates the
    last message that contributes to the loss, and the sample is written together with the original
    message. Requires `data.chat`."""
    sample_max_tokens: int = field(default=64, metadata=renamed_from("sample_tokens"))
    """Maximum number of generated tokens per sample. Prompt and generated tokens together are
    limited to `train.sequence_length`."""
    sample_temperature: float = 1.0
    """Sampling temperature, by which logits are divided. If 0, the most likely token is always
    selected (greedy decoding)."""


add_ranges(
    Bound("eval.every", 100, 0, why="0 evaluates only after the last step"),
    Bound("eval.batch_size", 8, 0, why="0 uses train.batch_size"),
    Bound("eval.batches", 8, 0, why="0 evaluates no documents"),
    Bound("eval.harness_every", 1000, 0, why="0 selects all evaluations"),
    Bound("eval.harness_limit", 100, 0, why="0 uses all examples"),
    Bound("eval.harness_fewshot", 5, -1, 1000, "-1 uses the default of each task"),
    Bound("eval.patience", 3, 0, why="0 disables early stopping"),
    Bound("eval.min_delta", 0.0, 0, LARGEST, "a negative improvement is a deterioration"),
    Bound("eval.sample_conversations", 4, 0, why="0 samples no conversations"),
    Bound("eval.sample_every", 100, 0, why="0 disables samples"),
    Bound("eval.sample_max_tokens", 64, 1),
    Bound("eval.sample_temperature", 1.0, 0, LARGEST, "the value must fit in float32"),
    Bound("eval.generative_tasks.NAME.samples", 4, 1, 1024),
    Bound("eval.generative_tasks.NAME.temperature", 0.8, 0, 100),
    Bound("eval.generative_tasks.NAME.max_tokens", 256, 1),
    Bound("eval.generative_tasks.NAME.num_prompts", 100, 0, why="0 uses all prompts"),
    Bound("eval.generative_tasks.NAME.timeout_seconds", 10.0, 0, 86400, low_is_inside=False),
)


LOSS = "eval/loss"


BestMode = Literal["min", "max"]


_LOSSES, _ACCURACIES = ("loss", "nats_per_byte"), ("accuracy", "accuracy_by_bytes")
PAIR_METRICS: dict[str, BestMode] = {
    "margin": "max",
    "accuracy": "max",
    "reward_chosen": "max",
    "reward_rejected": "min",
    "nats_chosen": "min",
    "nats_rejected": "max",
}
"""Metrics of preference evaluations other than the loss."""
_MODES: dict[str, BestMode] = {**PAIR_METRICS, "accuracy_by_bytes": "max", "score": "max"}


def pass_counts(samples: int) -> list[int]:
    """Return the values of k for which pass@k is reported: powers of two and the number of samples;
    none with a single sample.
    """
    powers = [2**power for power in range(samples.bit_length())]
    return sorted({*powers, samples}) if samples > 1 else []


def best_mode_of(metric: str) -> BestMode:
    """Return `max` if larger values of an evaluation metric (a tag) are better, else `min`."""
    name = metric.rpartition("/")[2]
    return "max" if name.startswith("pass_at_") else _MODES.get(name, "min")


def metrics_of(config: Config) -> dict[str, BestMode]:
    """Return `min` (smaller is better) or `max` for each evaluation metric, keyed by tag."""
    data, tags = config.data, list[str]()
    has_documents = data.validation_fraction or data.validation or is_synthetic(data)
    if config.eval.batches and has_documents and config.train.objective != "grpo":
        pairs = config.train.objective == "preference"
        losses = _LOSSES[:1] if pairs else _LOSSES
        names = (*losses, *PAIR_METRICS) if pairs else losses
        for inner in ("eval/", *(f"eval/{name}/" for name in sorted(data.validation))):
            tags += [inner + name for name in names]
        for name in sorted(data.mixture):
            tags += [f"source/{name}/eval_{loss}" for loss in losses]
    for name in sorted(config.eval.tasks):
        tags += [f"eval/{name}/{accuracy}" for accuracy in _ACCURACIES]
    for name, task in sorted(config.eval.generative_tasks.items()):
        tags.append(f"eval/{name}/score")
        tags += [f"eval/{name}/pass_at_{count}" for count in pass_counts(task.samples)]
    return {tag: best_mode_of(tag) for tag in tags}


@rule("eval.tasks")
def _tasks_have_files(config: Config) -> Iterator[RuleViolation]:
    for name, task in config.eval.tasks.items():
        if not task.path:
            key = f"eval.tasks.{name}.path"
            yield RuleViolation(
                Code.DATA_MISSING,
                key,
                "must be a file of multiple-choice examples.",
                f"Set {key}={name}.jsonl.",
            )


@rule("eval.tasks", "eval.generative_tasks")
def _generative_tasks_are_complete(config: Config) -> Iterator[RuleViolation]:
    for name, task in config.eval.generative_tasks.items():
        key = f"eval.generative_tasks.{name}"
        if not task.path:
            rule = "must be a file of prompts."
            yield RuleViolation(
                Code.DATA_MISSING, f"{key}.path", rule, f"Set {key}.path={name}.jsonl."
            )
        if name in (*config.eval.tasks, *config.data.validation):
            rule = "must differ from the names in eval.tasks and data.validation, whose metrics "
            action = f"Rename the task to eval.generative_tasks.{name}_text."
            yield RuleViolation(Code.CFG_VALUE, key, f"{rule}are eval/{name}/...", action)
        if task.samples > 1 and task.temperature == 0:
            rule = f"must be more than 0 with {key}.samples={task.samples}: "
            rule += "greedy completions of one prompt are equal."
            action = f"Set {key}.temperature=0.8, or {key}.samples=1."
            yield RuleViolation(Code.CFG_VALUE, f"{key}.temperature", rule, action)
        if task.scorer_file and not is_function_in_file(task.scorer_file):
            rule = "must be a Python file and the name of a function in it, as FILE.py:FUNCTION."
            action = f"Set {key}.scorer_file=scorer.py:score."
            yield RuleViolation(Code.POST_REWARD, f"{key}.scorer_file", rule, action)
        elif task.scorer_file and not task.allow_code:
            rule = f"requires {key}.allow_code=true: the run executes this code with your "
            rule += "permissions."
            action = f"Read the file, and set {key}.allow_code=true if you trust it."
            yield RuleViolation(Code.POST_REWARD, f"{key}.scorer_file", rule, action)


@rule("eval.harness_every", "eval.every", "eval.harness_tasks")
def _harness_runs_during_evaluations(config: Config) -> Iterator[RuleViolation]:
    section = config.eval
    if section.harness_tasks and section.every and section.harness_every % section.every:
        yield RuleViolation(
            Code.CFG_SIZES,
            "eval.harness_every",
            f"must be a multiple of eval.every ({section.every}).",
            f"Set eval.harness_every={round_up(section.harness_every, section.every)}.",
        )


@rule(
    "eval.sample_every",
    "eval.sample_prompts",
    "eval.sample_prompts_file",
    "eval.sample_conversations",
)
def _samples_have_prompts(config: Config) -> Iterator[RuleViolation]:
    section = config.eval
    prompts = section.sample_prompts or section.sample_prompts_file or section.sample_conversations
    if section.sample_every and not prompts:
        yield RuleViolation(
            Code.CFG_MISSING,
            "eval.sample_prompts",
            "must contain a prompt if eval.sample_every is more than 0.",
            "Set eval.sample_prompts=['Once upon a time'], or eval.sample_every=0.",
        )


def check_eval_during_training(config: Config) -> Iterator[RuleViolation]:
    """Yield rule violations in the settings for evaluation, early stopping and samples during
    training.

    These checks are not config rules because they do not apply to `maxpipe eval`, which reads the
    same section but evaluates other documents.
    """
    section, best = config.eval, config.checkpoint
    if section.patience > 0 and not section.every:
        rule = (
            f"must be more than 0 with eval.patience={section.patience}, which counts evaluations."
        )
        yield RuleViolation(
            Code.CFG_CONFLICT, "eval.every", rule, "Set eval.every=100, or eval.patience=0."
        )
    if section.patience > 0 or (best.best_metric, best.best_mode) != (LOSS, "min"):
        yield from _check_best_metric(config)
    chats = [source for source in all_sources(config.data).values() if source.chat != "off"]
    if section.sample_conversations and not chats:
        rule = "requires conversations, but no source sets data.chat."
        action = "Set eval.sample_conversations=0, or data.chat=messages."
        yield RuleViolation(Code.CFG_CONFLICT, "eval.sample_conversations", rule, action)


def _check_best_metric(config: Config) -> Iterator[RuleViolation]:
    metric, known = config.checkpoint.best_metric, metrics_of(config)
    if metric not in known:
        key, guess = "checkpoint.best_metric", did_you_mean(metric, known)
        if not known:
            rule = "requires an evaluation metric, but evaluation is disabled (eval.batches=0)."
            yield RuleViolation(
                Code.CFG_CONFLICT,
                key,
                rule,
                "Set eval.batches=8, or eval.tasks.mine.path=questions.jsonl.",
            )
            return
        rule = f"must be an evaluation metric of this run: {', '.join(known)}."
        yield RuleViolation(Code.CFG_VALUE, key, rule, f"Set {key}={guess or next(iter(known))}.")
    elif config.checkpoint.best_mode != known[metric]:
        key = "checkpoint.best_mode"
        rule = f"must be {known[metric]} with checkpoint.best_metric={metric}."
        yield RuleViolation(Code.CFG_CONFLICT, key, rule, f"Set {key}={known[metric]}.")


@rule("eval.batch_size", *axis_keys(*BATCH_AXES))
def _eval_batch_divides(config: Config) -> Iterator[RuleViolation]:
    size = config.eval.batch_size
    shards, sizes = batch_shards(config.mesh)
    if size % shards:
        yield RuleViolation(
            Code.CFG_SIZES,
            "eval.batch_size",
            f"must be a multiple of {' x '.join(sizes)} = {shards}: each device gets the same "
            "number of sequences.",
            f"Set eval.batch_size={round_up(size, shards)}, or 0 to use train.batch_size.",
        )
