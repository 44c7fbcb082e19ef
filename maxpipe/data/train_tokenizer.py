"""A tokenizer of one's own: a byte-level vocabulary learned from a corpus, as a folder.

The same documents in the same order give the same file. Any text can be encoded: all 256 bytes are
in the vocabulary.
"""

from __future__ import annotations

import collections
import io
import json
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from maxpipe.config.schema import DataConfig
from maxpipe.data.sources import Source, infer_source, open_source
from maxpipe.data.tokenizers.files import missing_package_error
from maxpipe.data.tokenizers.tiktoken_presets import LLAMA3
from maxpipe.errors import ConfigError, StorageError

VocabularyKind = Literal["bpe", "unigram"]
MIN_VOCAB_SIZE = 256 + 3
MAX_VOCAB_SIZE = 1 << 20

_ROLES = {
    "bos_token": "<|begin_of_text|>",
    "eos_token": "<|end_of_text|>",
    "pad_token": "<|pad|>",
}
_FILE = "command line: FILE"
_THREADS = 2
_LONGEST_WORD_BYTES = 1 << 20

ProgressCallback = Callable[[str, int, int], object]
"""Called with a task, what is done of it and its total; 0 as total if it is not known."""


def open_training_files(paths: Sequence[str], field: str) -> list[Source]:
    """The documents of files, folders and patterns: text, or JSON lines and ArrayRecord by name.

    Raises:
        ConfigError: a path without files, or with files of several kinds.
    """
    return [
        open_source(DataConfig(source=infer_source(path, _FILE), path=path, text_field=field), 0)
        for path in paths
    ]


def train(
    sources: Sequence[Source], kind: VocabularyKind, vocab_size: int, report: ProgressCallback
) -> str:
    """The content of a tokenizer.json with at most `vocab_size` ids: a small corpus gives fewer.

    Raises:
        ConfigError: a package is missing, or there is no text.
    """
    texts = _texts(sources, report)
    stopped = threading.Event()
    done: dict[str, Any] = {}

    def work() -> None:
        try:
            done["text"] = _LEARN[kind](_stop_when_set(texts, stopped), vocab_size)
        except BaseException as error:
            done["error"] = error

    # A library's loop hears no Ctrl-C: it runs in a thread that ends with the process.
    thread = threading.Thread(target=work, name="tokenizer", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.2)
            report("", 0, 0)
    finally:
        stopped.set()
    if "error" in done:
        raise done["error"]
    return done["text"]


def _stop_when_set(texts: Iterator[str], stopped: threading.Event) -> Iterator[str]:
    for text in texts:
        if stopped.is_set():
            return
        yield text


def _texts(sources: Sequence[Source], report: ProgressCallback) -> Iterator[str]:
    total, number, characters = sum(map(len, sources)), 0, 0
    for source in sources:
        for i in range(len(source)):
            text = source[i]
            number, characters = number + 1, characters + len(text)
            report("reading documents", number, total)
            yield text
    if not characters:
        rule = f"must hold text: {total} documents with nothing inside."
        raise ConfigError.one(_FILE, None, rule, "Name other files.")
    report("computing the vocabulary", 0, 0)


def _byte_level(model: Any) -> Any:
    """A tokenizer that splits text into words, and these into bytes."""
    import tokenizers
    from tokenizers import decoders, pre_tokenizers

    found: Any = tokenizers.Tokenizer(model)
    found.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    found.decoder = decoders.ByteLevel()
    return found


def _learn_bpe(texts: Iterator[str], vocab_size: int) -> str:
    try:
        from tokenizers import models, pre_tokenizers, trainers
    except ImportError as error:
        raise missing_package_error("huggingface", error) from error
    found = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_ROLES.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    found.train_from_iterator(texts, trainer)
    return found.to_str(pretty=True)


def _learn_unigram(texts: Iterator[str], vocab_size: int) -> str:
    """Pieces and scores by sentencepiece: the trainer of `tokenizers` gives others each time."""
    try:
        from tokenizers import models, pre_tokenizers
    except ImportError as error:
        raise missing_package_error("huggingface", error) from error
    try:
        import sentencepiece
    except ImportError as error:
        raise missing_package_error("sentencepiece", error) from error
    splitter = _byte_level(models.Unigram()).pre_tokenizer
    words: collections.Counter[str] = collections.Counter()
    for text in texts:
        words.update(word for word, _ in splitter.pre_tokenize_str(text))
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    unseen = sorted(alphabet.difference(*words))
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(  # type: ignore[attr-defined]
        sentence_iterator=(f"{word}\t{count}" for word, count in sorted(words.items())),
        input_format="tsv",
        model_writer=model,
        model_type="unigram",
        vocab_size=vocab_size + 1 - len(_ROLES) - len(unseen),  # and one for what is unknown
        hard_vocab_limit=False,
        character_coverage=1.0,
        max_sentence_length=_LONGEST_WORD_BYTES,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        split_by_whitespace=False,
        split_by_unicode_script=False,
        split_by_number=False,
        bos_id=-1,
        eos_id=-1,
        pad_id=-1,
        num_threads=_THREADS,
        minloglevel=2,
    )
    pieces: Any = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    learned = {
        pieces.id_to_piece(i): pieces.get_score(i)
        for i in range(pieces.get_piece_size())
        if not pieces.is_unknown(i)
    }
    rare = min(learned.values()) - 1
    learned |= dict.fromkeys(sorted(alphabet - learned.keys()), rare)
    control = [(text, 0.0) for text in _ROLES.values()]
    found = _byte_level(models.Unigram([*control, *learned.items()]))
    found.add_special_tokens(list(_ROLES.values()))
    return found.to_str(pretty=True)


_LEARN: dict[VocabularyKind, Callable[[Iterator[str], int], str]] = {
    "bpe": _learn_bpe,
    "unigram": _learn_unigram,
}


def check_free(folder: Path) -> None:
    """Raises ConfigError if something is at `folder` that is no empty folder."""
    if os.path.lexists(folder) and not (folder.is_dir() and not any(folder.iterdir())):
        action = f"Name another folder, such as --out {folder}-2."
        raise ConfigError.one("command line: --out", folder, "is there already.", action)


def write(folder: Path, content: str) -> None:
    """Writes a folder as `transformers` has it, whole or not at all.

    Raises:
        ConfigError: it is there already.
        StorageError: it cannot be written.
    """
    check_free(folder)
    settings = {**_ROLES, "tokenizer_class": "PreTrainedTokenizerFast"}
    partial = folder.parent / f".{folder.name}.{secrets.token_hex(8)}"
    try:
        partial.mkdir(parents=True)
        try:
            (partial / "tokenizer.json").write_text(content, encoding="utf-8")
            (partial / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
            os.rename(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        action = "Name a folder that can be written with --out."
        raise StorageError.unwritable(folder, error, action) from error
