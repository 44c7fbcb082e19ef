"""Train a byte-level tokenizer on a corpus and write it as a Hugging Face tokenizer folder.

The same documents in the same order produce the same file. The tokenizer can encode any text,
because the vocabulary contains all 256 byte values.
"""

from __future__ import annotations

import collections
import io
import itertools
import json
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from maxpipe.config.sections.data import DataConfig
from maxpipe.data.sources import Source, infer_source, open_source
from maxpipe.data.tokenizers.byte_bpe import LLAMA3
from maxpipe.data.tokenizers.files import missing_package_error
from maxpipe.errors import Code, ConfigError, StorageError

VocabularyKind = Literal["bpe", "unigram"]
MIN_VOCAB_SIZE = 256 + 3
MAX_VOCAB_SIZE = 1 << 20

_ROLES = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>", "pad_token": "<|pad|>"}
_FILE = "command line: FILE"
_THREADS = 2
_LONGEST_WORD_BYTES = 1 << 20

ProgressCallback = Callable[[str, int, int], object]
"""Function that is called with a task name, the number of processed items and the total (0 if
unknown)."""


def open_training_files(paths: Sequence[str], field: str) -> list[Source]:
    """Open files, folders and glob patterns as sources. File names determine the formats."""
    return [
        open_source(DataConfig(source=infer_source(path, _FILE), path=path, text_field=field), 0)
        for path in paths
    ]


def train(
    sources: Sequence[Source], kind: VocabularyKind, vocab_size: int, report: ProgressCallback
) -> str:
    """Train a tokenizer and return the content of the file `tokenizer.json`. The vocabulary has
    `vocab_size` ids, or fewer for a small corpus.

    Raises:
        ConfigError: a required package is missing, or the sources contain no text.
    """
    texts = _texts(sources, report)
    stopped = threading.Event()
    result: dict[str, Any] = {}

    def work() -> None:
        try:
            until_stopped = itertools.takewhile(lambda _: not stopped.is_set(), texts)
            result["text"] = _LEARN[kind](until_stopped, vocab_size)
        except BaseException as error:
            result["error"] = error

    # The library's training loop ignores Ctrl-C, so it runs in a daemon thread.
    thread = threading.Thread(target=work, name="tokenizer", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.2)
            report("", 0, 0)
    finally:
        stopped.set()
    if "error" in result:
        raise result["error"]
    return result["text"]


def _texts(sources: Sequence[Source], report: ProgressCallback) -> Iterator[str]:
    total, number, characters = sum(map(len, sources)), 0, 0
    for source in sources:
        for i in range(len(source)):
            text = source[i]
            number, characters = number + 1, characters + len(text)
            report("reading documents", number, total)
            yield text
    if not characters:
        rule = f"must contain text: found {total} documents, all of them empty."
        raise ConfigError.one(Code.DATA_EMPTY, _FILE, None, rule, "Choose other files.")
    report("computing the vocabulary", 0, 0)


def _byte_level(model: Any) -> Any:
    import tokenizers
    from tokenizers import decoders, pre_tokenizers

    tokenizer: Any = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _learn_bpe(texts: Iterator[str], vocab_size: int) -> str:
    try:
        from tokenizers import models, pre_tokenizers, trainers
    except ImportError as error:
        raise missing_package_error("huggingface", error) from error
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_ROLES.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str(pretty=True)


def _learn_unigram(texts: Iterator[str], vocab_size: int) -> str:
    """Train with sentencepiece, because the `tokenizers` unigram trainer is not deterministic."""
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
        vocab_size=vocab_size + 1 - len(_ROLES) - len(unseen),  # one extra for the unknown token
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
    tokenizer = _byte_level(models.Unigram([*control, *learned.items()]))
    tokenizer.add_special_tokens(list(_ROLES.values()))
    return tokenizer.to_str(pretty=True)


_LEARN: dict[VocabularyKind, Callable[[Iterator[str], int], str]] = {
    "bpe": _learn_bpe,
    "unigram": _learn_unigram,
}


def check_free(folder: Path) -> None:
    """Raise ConfigError if `folder` exists, unless it is an empty folder."""
    if os.path.lexists(folder) and not (folder.is_dir() and not any(folder.iterdir())):
        action = f"Choose another folder, such as --out {folder}-2."
        rule = "must not exist, or must be an empty folder."
        raise ConfigError.one(Code.CLI_OUTPUT, "command line: --out", folder, rule, action)


def write(folder: Path, content: str) -> None:
    """Atomically write a tokenizer folder in the format of `transformers`.

    Raises:
        ConfigError: the output folder already exists.
        StorageError: the folder cannot be written.
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
        action = "Set --out to a writable folder."
        raise StorageError.unwritable(folder, error, action) from error
