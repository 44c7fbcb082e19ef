"""A model that a user named, opened for its parameters alone; nothing is written."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from maxpipe.checkpoint.address import Address
from maxpipe.checkpoint.folder import CheckpointFolder, CheckpointMetadata
from maxpipe.checkpoint.manager import CheckpointManager, open_run, resolve_step
from maxpipe.checkpoint.storage import CHECKPOINTS_FOLDER, DamagedError, root_cause_text
from maxpipe.config.check import DEFAULT, error_location
from maxpipe.config.load import LoadedConfig, load, to_dict
from maxpipe.data.chat_spec import ChatSpec, apply_chat_spec, parse_chat_spec
from maxpipe.data.tokenizer import Tokenizer, fit_tokenizer, suggest_tokenizer_action
from maxpipe.errors import ConfigError, Problem, StorageError
from maxpipe.huggingface.normalize_config import lines
from maxpipe.huggingface.source import WITHOUT_MTP, open_folder
from maxpipe.optim.state_spec import EMA
from maxpipe.pipeline.weights import replace_subtree
from maxpipe.restore.initial_weights import (
    check_adapter,
    check_model,
    read_base,
    read_folder_params,
)
from maxpipe.step.step import Steps

_PROCESS_KEYS = ("num_processes", "process_id", "coordinator", "compiled_step")


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model and its own config, changed by what the user gave."""

    name: str
    loaded: LoadedConfig
    step: int | None
    """Of a checkpoint."""
    fingerprint: Mapping[str, Any]
    """Of the data that it was trained on, as far as that is known."""
    read: Callable[[LoadedConfig, Steps], Any]
    """See `params`."""
    conversation: ChatSpec | None = None
    """How the conversations that it was trained on are written."""

    def is_overridden(self, *prefixes: str) -> bool:
        """Whether the user gave a key that begins so."""
        return is_overridden(self.loaded, self.name, *prefixes)

    @property
    def is_trained(self) -> bool:
        """Whether it was trained here, on documents that are known."""
        return "source" in self.fingerprint

    def prompt_tokenizer(self, tokenizer: Tokenizer) -> Tokenizer:
        """The tokenizer with which prompts begin and texts end as this model was trained.

        Of weights that were not trained here, as `transformers` encodes a prompt.

        Raises:
            ConfigError: as `fitted`.
        """
        tokenizer = self.fit_tokenizer(tokenizer)
        if self.conversation is not None:
            return apply_chat_spec(tokenizer, self.conversation)
        if self.is_trained:
            return tokenizer
        return tokenizer.with_control(framing=tokenizer.control.published)

    def fit_tokenizer(self, tokenizer: Tokenizer) -> Tokenizer:
        """The tokenizer as this model needs it.

        Raises:
            ConfigError: it was trained with another one, or text would give ids without a row.
        """
        self.check_tokenizer(tokenizer)
        return fit_tokenizer(tokenizer, self.loaded.config.model.vocab_size, model=self.name)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raises ConfigError unless it was trained with this tokenizer."""
        saved, config = self.fingerprint.get("tokenizer"), self.loaded.config.tokenizer
        if saved not in (None, tokenizer.fingerprint()):  # imported weights may know of none
            raise ConfigError.one(
                "tokenizer",
                config.path or config.kind,
                f"must be the one that {self.name} was trained with: it was {saved}, and this is "
                f"{tokenizer.fingerprint()}.",
                suggest_tokenizer_action(
                    tokenizer, saved, "Set tokenizer.kind and tokenizer.path to that of the run."
                ),
            )

    def params(self, steps: Steps) -> Any:
        """Its parameters in the form that a checkpoint holds, on the mesh of the steps.

        Raises:
            ConfigError: they are of another model than the config.
            StorageError: they are damaged.
        """
        return self.read(self.loaded, steps)


def is_overridden(loaded: LoadedConfig, name: str, *prefixes: str) -> bool:
    """Whether the user gave a key that begins so; `name` is that of the checkpoint's config."""
    return any(
        key.startswith(prefixes) and origin not in (DEFAULT, name)
        for key, origin in loaded.origins.items()
    )


def open_address_or_folder(
    named: Address | Path,
    inputs: Sequence[str],
    saved_of: Callable[[Mapping[str, Any]], dict[str, Any]],
) -> OpenedModel:
    """Opens a checkpoint, or a Hugging Face folder, before any device is used: its config says
    which.

    `saved_of` takes of its config what counts now; `inputs` are files and overrides that change it.

    Raises:
        ConfigError: there is no such checkpoint or folder, or the inputs do not fit it.
        StorageError: it is damaged, or cannot be reached.
    """
    if isinstance(named, Path):
        return _open_folder(named, inputs, saved_of)
    return _open_checkpoint(named, inputs, saved_of)


def _open_checkpoint(
    address: Address,
    inputs: Sequence[str],
    saved_of: Callable[[Mapping[str, Any]], dict[str, Any]],
) -> OpenedModel:
    home = address.home
    folder = CheckpointFolder(os.path.join(home, CHECKPOINTS_FOLDER))
    if not folder.steps():
        open_run(address.run_dir, address.where, address.parent)  # says so
    step = resolve_step(folder, address)
    try:
        facts = folder.read_metadata(step)
        address.check_average(facts.config.get("optim"))
        conversation = _conversation(facts)
    except DamagedError as damage:
        others = [str(each) for each in folder.steps() if each != step]
        other = f"Take {address.address_at(int(others[-1]))}, or bring" if others else "Bring"
        raise StorageError(
            f"{folder / step}: cannot be used\n  {damage}.\n  {other} its files back."
        ) from damage
    except OSError as error:
        raise StorageError(
            f"{folder / step}: cannot be reached\n"
            f"  {root_cause_text(error)}.\n"
            "  Try again when the storage answers."
        ) from error
    saved = saved_of(_without_teacher(facts.config))
    if isinstance(own := saved.get("runtime"), Mapping):
        saved["runtime"] = {key: own[key] for key in own if key not in _PROCESS_KEYS}
    name = address.address_at(step)

    def params(loaded: LoadedConfig, steps: Steps) -> Any:
        def accept(facts: CheckpointMetadata) -> None:
            wanted, saved = to_dict(loaded.config)["model"], facts.config["model"]
            check_model(saved, wanted, loaded.origins, "leave it out", weights_alone=True)
            check_adapter(facts, loaded, own=True)

        params = steps.abstract_saved["params"]
        wanted = {"params": params}
        if address.average:  # frozen parameters have none
            averages = steps.param_layout.select_trainable_saved(params)
            is_all = jax.tree.structure(averages) == jax.tree.structure(params)
            wanted = {} if is_all else wanted
            wanted["optimizer"] = {EMA: averages}
        with CheckpointManager(home, write=False) as checkpoints:
            found = checkpoints.restore(step, wanted, accept).state
        if loaded.config.adapter.rank:
            base, _ = read_base(facts, loaded, steps, _SilentNotifier())
            mine = found["optimizer"][EMA] if address.average else found["params"]
            return steps.merge_adapters(base, mine)
        if not address.average:
            return found["params"]
        averages = found["optimizer"][EMA]
        return replace_subtree(found["params"], averages) if "params" in found else averages

    fingerprint = facts.data.get("fingerprint", {})
    return OpenedModel(name, load(inputs, saved, name), step, fingerprint, params, conversation)


def _conversation(facts: CheckpointMetadata) -> ChatSpec | None:
    """Raises Damaged if what the checkpoint records is not that."""
    try:
        return parse_chat_spec(facts.data)
    except ValueError as error:
        raise DamagedError(f"its record of conversations is wrong: {error}") from error


_TEACHING = ("distill", "grpo")
"""Sections, each with the objective of its name, that evaluation and generation do not read."""


def _without_teacher(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a run without its teacher or rewards: what a model has learned from does not
    matter.
    """
    found = {section: keys for section, keys in config.items() if section not in _TEACHING}
    if isinstance(train := found.get("train"), Mapping) and train.get("objective") in _TEACHING:
        found["train"] = {key: value for key, value in train.items() if key != "objective"}
    return found


def _open_folder(
    folder: Path,
    inputs: Sequence[str],
    saved_of: Callable[[Mapping[str, Any]], dict[str, Any]],
) -> OpenedModel:
    """The same of a Hugging Face folder, which has a model, a tokenizer and a length of rows."""
    source = open_folder(str(folder))
    # Heads ahead are for training: they are not read.
    model = {**source.model_dtypes, **source.description.section, **WITHOUT_MTP}
    known = {
        "model": model,
        "tokenizer": {"kind": "auto", "path": str(source.folder)},
        "train": {"steps": 1, "sequence_length": source.sequence_length},
    }
    name = str(source.folder)
    loaded = load(inputs, saved_of(known), name)
    if rank := loaded.config.adapter.rank:
        rule = f"must be 0: {name} holds a whole model, and no adapters beside it."
        action = "Leave it out, or name the run of the adapters."
        raise ConfigError.one(error_location("adapter.rank", loaded.origins), rank, rule, action)
    wanted = to_dict(loaded.config)["model"]
    check_model(model, wanted, loaded.origins, "leave it out", weights_alone=True)

    twice = [Problem(name, "", line, "") for line in lines(source.description.differences)]
    loaded = replace(loaded, warnings=(*loaded.warnings, *twice))

    def params(loaded: LoadedConfig, steps: Steps) -> Any:
        return read_folder_params(source, steps.abstract_base)

    return OpenedModel(name, loaded, None, {}, params)


class _SilentNotifier:
    """Says nothing: a base was talked about when adapters were trained beside it."""

    def note(self, text: str) -> None:
        """Nothing."""

    def warn(self, text: str) -> None:
        """Nothing."""


@contextlib.contextmanager
def detect_interrupt() -> Iterator[Callable[[], bool]]:
    """Tells whether Ctrl-C came: where C++ calls Python, the exception is lost."""
    asked = False

    def interrupt(number: int, frame: Any) -> None:
        nonlocal asked
        asked = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def defer_interrupt() -> Iterator[Callable[[], bool]]:
    """Tells whether Ctrl-C came, which raises nothing inside but at the second time.

    Python that ends while devices compute may crash: the caller waits for them first.
    """
    asked = False

    def interrupt(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
