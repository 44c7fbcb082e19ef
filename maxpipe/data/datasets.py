"""From a whole config to the documents that a run reads. No jax: data is looked at without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from maxpipe.config.ramp import Ramp
from maxpipe.config.schema import Config
from maxpipe.data.chat import first_day, spoken
from maxpipe.data.conversation import (
    Conversation,
    conversation_record,
    of_prompts,
    speaking,
)
from maxpipe.data.loader import Datasets, build
from maxpipe.data.overlap import left_out, overlaps
from maxpipe.data.prompts import build_prompts
from maxpipe.data.tokenizer import Tokenizer, fitted, open_tokenizer
from maxpipe.data.tokenizers.chat import ChatTemplate
from maxpipe.errors import ConfigError, Problem
from maxpipe.io.files import full
from maxpipe.rewards.process import Rewards, check


def datasets_of(config: Config, moved: Callable[[], object]) -> Datasets:
    """The documents that a config names, and its tokenizer; `moved` is called during reading.

    Raises:
        ConfigError: they cannot be used, or have ids that the model does not know.
    """
    if config.train.objective == "grpo":
        return _prompts(config)
    datasets = build(
        config.data,
        config.tokenizer,
        seed=config.run.seed,
        batch_size=config.train.batch_size,
        batch_ramp=Ramp.of(config.train),
        sequence_length=config.train.sequence_length,
        eval_batch_size=config.eval.batch_size,
        cache_dir=_index_folder(config),
        moved=moved,
        fit=partial(fitted, rows=config.model.vocab_size),
    )
    assert datasets.corpora is not None
    train, _ = datasets.corpora
    chats = [each.documents for each in train.indexed if each.is_chat]
    return _speaking(datasets, conversation_record(config.data, datasets.tokenizer, chats))


def _speaking(datasets: Datasets, conversation: Conversation | None) -> Datasets:
    tokenizer = speaking(datasets.tokenizer, conversation)
    return replace(datasets, tokenizer=tokenizer, conversation=conversation)


def _prompts(config: Config) -> Datasets:
    tokenizer = fitted(open_tokenizer(config.tokenizer), config.model.vocab_size)
    template = spoken_in_run(config, tokenizer)
    found = build_prompts(
        config.grpo,
        config.data,
        tokenizer,
        seed=config.run.seed,
        batch_size=config.train.batch_size,
        sequence_length=config.train.sequence_length,
        check=partial(check, config.grpo),
        reward=Rewards(config.grpo).fingerprint(),
        template=template,
    )
    return _speaking(found, of_prompts(template, tokenizer))


def spoken_in_run(config: Config, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template of prompts, samples and questions; its date is that of the first start.

    Raises:
        ConfigError: its file cannot be read.
    """
    template = spoken(config.data, tokenizer)
    if template is None or not template.reads_date:
        return template
    return template.on(
        first_day(str(full(config.run.dir, "run.dir") / config.run.name), _index_folder(config))
    )


def _index_folder(config: Config) -> str:
    return str(full(config.run.dir, "run.dir") / ".index")


def check_overlap(
    config: Config,
    datasets: Datasets,
    warn: Callable[[str], object],
    moved: Callable[[], object] = lambda: None,
) -> None:
    """Warns of documents for evaluation that are also trained on, as the config says.

    Sources of more documents than are shuffled as a whole are compared if there must be no copies:
    all their digests have to be read for that. `moved` is called meanwhile.

    Raises:
        ConfigError: there are some, and the config says that there must be none.
    """
    how = config.data.validation_overlap
    if how == "ignore" or not config.eval.batches or not datasets.evaluated():
        return
    assert datasets.corpora is not None
    train, sets = datasets.corpora
    large = how == "stop"
    problems = []
    for each in overlaps(train, sets, large=large, moved=moved):
        key = f"data.validation.{each.name}" if each.name else "data.validation_fraction"
        rule = (
            f"has documents that are also trained on, {each.count} of {each.total}: the first is "
            f"{each.first}, which is trained on as {each.trained}."
        )
        action = "Remove such documents, or set data.validation_overlap=ignore."
        problems.append(Problem(key, "", rule, action))
    if problems and how == "stop":
        raise ConfigError(problems)
    for each in problems:
        warn(f"{each.where}: {each.rule} {each.action}")
    for section, why in left_out([train, *sets.values()], large=large):
        warn(
            f"{section}: documents for evaluation are not compared with these: {why}. Set "
            f"data.validation_overlap={'ignore' if large else 'stop to compare them, or ignore'}."
        )
