"""Declarations of the keys of evaluation during training."""

from __future__ import annotations

from dataclasses import dataclass, field

from maxpipe.io.typed_json import renamed_from


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskConfig:
    """Multiple-choice task that is scored in each evaluation, as in `maxpipe eval --choices`."""

    path: str = ""
    """File of JSON lines with `context`, `choices` and `answer`. It is read once, at the start."""
    separator: str = " "
    """Text between context and choice if there is no white space between them."""
    chat: bool = False
    """Render each context as a user message with the tokenizer's chat template. No separator is
    added between context and choice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Evaluation during training: validation loss, tasks, samples and early stopping."""

    every: int = 0
    """Number of steps between evaluations. 0 evaluates only after the last step."""
    batches: int = 8
    """Number of batches per evaluation. With 0, training evaluates no documents, and `maxpipe eval`
    uses all batches."""
    batch_size: int = 0
    """Number of sequences per evaluation batch over all devices, a multiple of data x fsdp x
    expert. 0 uses `train.batch_size`."""
    tasks: dict[str, TaskConfig] = field(default_factory=dict)
    """Multiple-choice tasks by name: `eval.tasks.sums.path=sums.jsonl` adds the metric
    `eval/sums/accuracy`. Each evaluation scores all tasks."""
    patience: int = 0
    """Early stopping: number of consecutive evaluations without a better `checkpoint.best_metric`
    after which the run evaluates, saves and ends. Only the periodic evaluations of `eval.every`
    count. 0 disables early stopping."""
    min_delta: float = field(default=0.0, metadata=renamed_from("min_gain"))
    """Minimum improvement of `checkpoint.best_metric` over the best value so far that resets
    `eval.patience`."""
    sample_every: int = 0
    """Number of steps between samples of generated text, which are written to the console,
    TensorBoard and `samples.jsonl`. 0 disables samples."""
    sample_prompts: list[str] = field(default_factory=lambda: [""])
    """Prompts of the samples, each after the BOS token."""
    sample_prompts_file: str = field(default="", metadata=renamed_from("sample_file"))
    """File of prompts, one per line; in a `.jsonl` file each line is an object with `prompt`.
    Replaces `eval.sample_prompts`. With `eval.sample_chat`, the objects may have `messages`
    instead."""
    sample_chat: bool = False
    """Render each prompt as a user message with the tokenizer's chat template; the model generates
    the response."""
    sample_conversations: int = field(default=0, metadata=renamed_from("sample_documents"))
    """Number of validation conversations that are also sampled. The model generates the last
    trained message, and the original message is written next to the sample. Requires
    `data.chat`."""
    sample_max_tokens: int = field(default=64, metadata=renamed_from("sample_tokens"))
    """Maximum number of generated tokens per sample. Prompt and sample together have at most
    `train.sequence_length` tokens."""
    sample_temperature: float = 1.0
    """Sampling temperature: logits are divided by it. 0 selects the most likely token."""
