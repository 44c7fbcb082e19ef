"""From a whole config to the documents that a run reads. No jax: data is looked at without it."""

from __future__ import annotations

from collections.abc import Callable

from maxpipe.boundary.files import full
from maxpipe.config.ramp import Ramp
from maxpipe.config.schema import Config
from maxpipe.data.loader import Datasets, build
from maxpipe.data.tokenizer import check_vocab


def datasets_of(config: Config, moved: Callable[[], object]) -> Datasets:
    """The documents that a config names, and its tokenizer; `moved` is called during reading.

    Raises:
        ConfigError: they cannot be used, or have ids that the model does not know.
    """
    datasets = build(
        config.data,
        config.tokenizer,
        seed=config.run.seed,
        batch_size=config.train.batch_size,
        batch_ramp=Ramp.of(config.train),
        sequence_length=config.train.sequence_length,
        eval_batch_size=config.eval.batch_size,
        cache_dir=str(full(config.run.dir, "run.dir") / ".index"),
        moved=moved,
    )
    check_vocab(datasets.tokenizer, config.model.vocab_size)
    return datasets
