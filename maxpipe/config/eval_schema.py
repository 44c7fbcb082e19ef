"""Declarations of the keys for evaluation during training."""

from __future__ import annotations

from dataclasses import dataclass, field

from maxpipe.io.typed_json import renamed_from


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
