"""The declaration of the keys on evaluation beside training, as `schema.py` has the others."""

from __future__ import annotations

from dataclasses import dataclass, field

from maxpipe.io.typed_json import renamed_from


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskConfig:
    """Questions with choices that each evaluation asks, as `maxpipe eval --choices` does."""

    path: str = ""
    """A file of JSON lines with `context`, `choices` and `answer`. It is read once, at the
    start."""
    separator: str = " "
    """Put between context and choice where neither has white space."""
    chat: bool = False
    """Whether a context is what a user says, of which the tokenizer's chat template makes the text
    in front of the model's answer. Nothing is put in between then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Loss on the validation documents, questions and samples, beside training."""

    every: int = 0
    """Steps between evaluations. 0 evaluates only after the last step."""
    batches: int = 8
    """Batches per evaluation. 0 reads no documents; `maxpipe eval` takes all then."""
    batch_size: int = 0
    """Sequences per batch over all devices, any multiple of data x fsdp x expert. 0 takes
    `train.batch_size`."""
    tasks: dict[str, TaskConfig] = field(default_factory=dict)
    """Questions with choices, by name: `eval.tasks.sums.path=sums.jsonl` gives
    `eval/sums/accuracy`. They are asked at each evaluation."""
    patience: int = 0
    """Evaluations in a row without a better `checkpoint.best_metric` after which the run ends,
    evaluated and saved, and is done. Those that `eval.every` asks for count. 0: it never ends for
    that."""
    min_delta: float = field(default=0.0, metadata=renamed_from("min_gain"))
    """What `checkpoint.best_metric` must be better by than the best one so far to count for
    `eval.patience`."""
    sample_every: int = 0
    """Steps between samples of text, to the console, TensorBoard and `samples.jsonl`. 0: none."""
    sample_prompts: list[str] = field(default_factory=lambda: [""])
    """What samples begin with, after the begin token."""
    sample_prompts_file: str = field(default="", metadata=renamed_from("sample_file"))
    """A file with a prompt a line, or with `prompt` in each line if it ends in `.jsonl`, instead of
    `eval.sample_prompts`. With `eval.sample_chat` lines of `.jsonl` may have `messages`."""
    sample_chat: bool = False
    """Whether prompts are what a user says, of which the tokenizer's chat template makes the text
    that the model goes on with."""
    sample_conversations: int = field(default=0, metadata=renamed_from("sample_documents"))
    """Number of conversations held out for validation that are continued as well, each from its
    last trained message on; what that message is stands beside the sample. With `data.chat`."""
    sample_max_tokens: int = field(default=64, metadata=renamed_from("sample_tokens"))
    """Tokens of a sample at most. Prompt and sample have at most `train.sequence_length`."""
    sample_temperature: float = 1.0
    """Logits are divided by it. 0 takes the most likely token."""
