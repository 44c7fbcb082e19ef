"""Read-only access to the model of a checkpoint or a Hugging Face folder."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from maxpipe.checkpoint.address import Address
from maxpipe.checkpoint.folder import CheckpointMetadata
from maxpipe.checkpoint.manager import CheckpointManager, open_address_folder, resolve_step
from maxpipe.checkpoint.storage import DamagedError, root_cause_text
from maxpipe.config.check import DEFAULT, error_location
from maxpipe.config.image_format import image_format
from maxpipe.config.load import LoadedConfig, load, to_dict
from maxpipe.config.plugins import check_plugins, with_needed_plugins
from maxpipe.data.chat_spec import ChatSpec, apply_chat_spec, parse_chat_spec
from maxpipe.data.tokenizer import Tokenizer, fit_tokenizer, suggest_tokenizer_action
from maxpipe.errors import Code, ConfigError, Problem, StorageError
from maxpipe.huggingface.config_json import lines
from maxpipe.huggingface.folder import open_folder
from maxpipe.models.huggingface import WITHOUT_MTP
from maxpipe.optim.state_spec import EMA
from maxpipe.pipeline.weights import replace_subtree
from maxpipe.restore.initial_weights import (
    check_adapter,
    check_model,
    read_base,
    read_folder_params,
    read_peft_adapters,
)
from maxpipe.step.step import Steps

_PROCESS_KEYS = ("num_processes", "process_id", "coordinator", "compiled_step")


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """An opened model and its config, including the user's overrides."""

    name: str
    loaded: LoadedConfig
    step: int | None
    """Step of the checkpoint, or None for a Hugging Face folder."""
    fingerprint: Mapping[str, Any]
    """Fingerprint of the model's training data; empty if unknown."""
    read: Callable[[LoadedConfig, Steps], Any]
    """Function that reads the parameters. See `params`."""
    conversation: ChatSpec | None = None
    """Chat format of the conversations on which the model was trained."""

    def is_overridden(self, *prefixes: str) -> bool:
        """Return whether the user set a key that starts with one of the prefixes."""
        return is_overridden(self.loaded, self.name, *prefixes)

    @property
    def is_trained(self) -> bool:
        """Return whether maxpipe trained the model on known data."""
        return "source" in self.fingerprint

    def prompt_tokenizer(self, tokenizer: Tokenizer) -> Tokenizer:
        """Return a tokenizer that formats prompts and documents like the model's training data.

        If maxpipe did not train the model, prompts and documents are formatted as in
        `transformers`.

        Raises:
            ConfigError: as in `fit_tokenizer`.
        """
        tokenizer = self.fit_tokenizer(tokenizer)
        if self.conversation is not None:
            return apply_chat_spec(tokenizer, self.conversation)
        if self.is_trained:
            return tokenizer
        return tokenizer.with_control(framing=tokenizer.control.published)

    def fit_tokenizer(self, tokenizer: Tokenizer) -> Tokenizer:
        """Check the tokenizer, and return a copy that is adapted to this model.

        Raises:
            ConfigError: the model was trained with another tokenizer, or token ids are outside the
                model's vocabulary.
        """
        self.check_tokenizer(tokenizer)
        config = self.loaded.config
        fitted = fit_tokenizer(tokenizer, config.model.vocab_size, model=self.name)
        return fitted.with_images(image_format(config))

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Check that the model was trained with this tokenizer.

        Raises:
            ConfigError: the fingerprints differ.
        """
        saved, config = self.fingerprint.get("tokenizer"), self.loaded.config.tokenizer
        if saved not in (None, tokenizer.fingerprint()):  # imported weights may have no fingerprint
            raise ConfigError.one(
                Code.TOK_MISMATCH,
                "tokenizer",
                config.path or config.kind,
                f"must be the tokenizer of {self.name}: that tokenizer has the fingerprint "
                f"{saved}, but this one has {tokenizer.fingerprint()}.",
                suggest_tokenizer_action(
                    tokenizer, saved, "Set tokenizer.kind and tokenizer.path to the run's values."
                ),
            )

    def params(self, steps: Steps) -> Any:
        """Read the parameters in checkpoint layout, sharded over the mesh on which `steps` runs the
        model.

        Raises:
            ConfigError: the config describes another model.
            StorageError: the parameters in the checkpoint are damaged.
        """
        return self.read(self.loaded, steps)


def is_overridden(loaded: LoadedConfig, name: str, *prefixes: str) -> bool:
    """Return whether the user set a key that starts with one of the prefixes.

    `name` is the origin of the keys that come from the checkpoint's config.
    """
    return any(
        key.startswith(prefixes) and origin not in (DEFAULT, name)
        for key, origin in loaded.origins.items()
    )


def open_address_or_folder(
    named: Address | Path,
    inputs: Sequence[str | Mapping[str, Any]],
    saved_of: Callable[[Mapping[str, Any]], dict[str, Any]],
) -> OpenedModel:
    """Open a checkpoint or a Hugging Face folder without using a device.

    `saved_of` selects the sections of the saved config that apply. `inputs` are config files and
    overrides that change this config.

    Raises:
        ConfigError: the checkpoint or folder does not exist, or the inputs do not match it.
        StorageError: the checkpoint is damaged or cannot be reached.
    """
    if isinstance(named, Path):
        return _open_folder(named, inputs, saved_of)
    return _open_checkpoint(named, inputs, saved_of)


def _open_checkpoint(
    address: Address,
    inputs: Sequence[str | Mapping[str, Any]],
    saved_of: Callable[[Mapping[str, Any]], dict[str, Any]],
) -> OpenedModel:
    folder = open_address_folder(address)
    step = resolve_step(folder, address)
    try:
        facts = folder.read_metadata(step)
        address.check_average(facts.config.get("optim"))
        conversation = _conversation(facts)
    except DamagedError as damage:
        others = [str(each) for each in folder.steps() if each != step]
        other = f"Use {address.address_at(int(others[-1]))}, or restore" if others else "Restore"
        raise StorageError(
            Code.CKPT_DAMAGED,
            f"{folder / step}: cannot be used\n  {damage}.\n  {other} the files of this step.",
        ) from damage
    except OSError as error:
        raise StorageError(
            Code.CKPT_STORAGE,
            f"{folder / step}: cannot be reached\n"
            f"  {root_cause_text(error)}.\n"
            "  Try again when the storage is available.",
        ) from error
    saved = with_needed_plugins(saved_of(_without_teacher(facts.config)), facts.config)
    if isinstance(own := saved.get("runtime"), Mapping):
        saved["runtime"] = {key: own[key] for key in own if key not in _PROCESS_KEYS}
    name = address.address_at(step)

    def params(loaded: LoadedConfig, steps: Steps) -> Any:
        def accept(facts: CheckpointMetadata) -> None:
            wanted, saved = to_dict(loaded.config)["model"], facts.config["model"]
            check_model(saved, wanted, loaded.origins, "omit the key", weights_alone=True)
            check_adapter(facts, loaded, own=True)

        params = steps.abstract_saved["params"]
        wanted = {"params": params}
        if address.average:  # frozen parameters have no EMA
            averages = steps.param_layout.select_trainable_saved(params)
            is_all = jax.tree.structure(averages) == jax.tree.structure(params)
            wanted = {} if is_all else wanted
            wanted["optimizer"] = {EMA: averages}
        with CheckpointManager(address.home, write=False) as checkpoints:
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
    loaded = load(inputs, saved, name)
    if is_overridden(loaded, name, "adapter.restore_from"):
        raise ConfigError.one(
            Code.CFG_CONFLICT,
            error_location("adapter.restore_from", loaded.origins),
            loaded.config.adapter.restore_from,
            f"applies to a base model in Hugging Face format, but {name} is a checkpoint.",
            f"Run `maxpipe export {name} BASE`, and use hf:BASE.",
        )
    for warning in check_plugins(facts.data, loaded, step):
        loaded = replace(
            loaded, warnings=(*loaded.warnings, Problem(Code.PLUG_CHANGED, name, "", warning, ""))
        )
    return OpenedModel(name, loaded, step, fingerprint, params, conversation)


def _conversation(facts: CheckpointMetadata) -> ChatSpec | None:
    """Parse the chat format that the checkpoint records.

    Raises:
        DamagedError: the record is invalid.
    """
    try:
        return parse_chat_spec(facts.data)
    except ValueError as error:
        raise DamagedError(f"the recorded chat format is invalid: {error}") from error


_TEACHING = ("distill", "grpo")
"""Config sections and objectives that evaluation and generation ignore."""


def _without_teacher(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's config without the teacher and reward settings, which inference ignores."""
    found = {section: keys for section, keys in config.items() if section not in _TEACHING}
    if isinstance(train := found.get("train"), Mapping) and train.get("objective") in _TEACHING:
        found["train"] = {key: value for key, value in train.items() if key != "objective"}
    return found


def _open_folder(
    folder: Path,
    inputs: Sequence[str | Mapping[str, Any]],
    saved_of: Callable[[Mapping[str, Any]], dict[str, Any]],
) -> OpenedModel:
    """Open a Hugging Face folder, which provides a model, a tokenizer and a sequence length."""
    source = open_folder(str(folder))
    # Multi-token prediction heads are only for training and are not read.
    model = {**source.model_dtypes, **source.description.section, **WITHOUT_MTP}
    known = {
        "model": model,
        "tokenizer": {"kind": "auto", "path": str(source.folder)},
        "train": {"steps": 1, "sequence_length": source.sequence_length},
    }
    name = str(source.folder)
    loaded = load(inputs, saved_of(known), name)
    adapter = loaded.config.adapter
    if (rank := adapter.rank) and not adapter.restore_from:
        rule = f"must be 0, because {name} holds a complete model without separate adapters."
        action = (
            "Omit the key, name the run that trained the adapters, or set adapter.restore_from "
        )
        action += "to a PEFT folder."
        raise ConfigError.one(
            Code.CFG_CONFLICT, error_location("adapter.rank", loaded.origins), rank, rule, action
        )
    wanted = to_dict(loaded.config)["model"]
    # A folder does not stack layers, so that any number of layers can be unquantized.
    free = {key: wanted[key] for key in ("matmul", "matmul_unquantized_layers")}
    check_model(model | free, wanted, loaded.origins, "omit the key", weights_alone=True)

    twice = [
        Problem(Code.HF_UNSUPPORTED, name, "", line, "")
        for line in lines(source.description.differences)
    ]
    loaded = replace(loaded, warnings=(*loaded.warnings, *twice))

    def params(loaded: LoadedConfig, steps: Steps) -> Any:
        params = read_folder_params(
            source.with_layer_types(loaded.config.model), steps.abstract_base
        )
        adapters = read_peft_adapters(loaded, steps, _SilentNotifier())
        return params if adapters is None else steps.merge_adapters(params, adapters)

    return OpenedModel(name, loaded, None, {}, params)


class _SilentNotifier:
    """Notifier that prints nothing: the run that trained the adapters has printed the messages."""

    def note(self, text: str) -> None:
        """Discard the message."""

    def warn(self, text: str) -> None:
        """Discard the message."""


@contextlib.contextmanager
def detect_interrupt() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed.

    The function is needed because C++ code that calls Python discards a KeyboardInterrupt.
    """
    asked = False

    def interrupt(number: int, frame: Any) -> None:
        nonlocal asked
        asked = True
        raise KeyboardInterrupt

    with _interrupt_handler(interrupt):
        yield lambda: asked


@contextlib.contextmanager
def defer_interrupt() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed. Only a second press raises
    KeyboardInterrupt.

    Python may crash if it exits while devices compute, so the caller waits for the devices.
    """
    asked = False

    def interrupt(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    with _interrupt_handler(interrupt):
        yield lambda: asked


@contextlib.contextmanager
def _interrupt_handler(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Handle Ctrl-C with `handler` inside the context. Python allows this only in the main thread;
    other threads do not receive Ctrl-C.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
