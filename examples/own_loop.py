"""Train with a custom loss, data iterator, optimizer and loop: python examples/own_loop.py."""

import os
from itertools import islice
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax

import maxpipe

MESH = {"mesh.ici_stage": 2, "mesh.ici_fsdp": 4, "pipeline.repeats": 2, "pipeline.microbatches": 4}
SIZES = {"model.num_layers": 4, "model.d_model": 64, "train.sequence_length": 64, "train.steps": 60}


def focal_loss(log_probs, batch):
    """Return the loss of each token; certain tokens count less (arXiv:1708.02002)."""
    return -((1 - jnp.exp(log_probs)) ** 2) * log_probs


class RandomWindows:
    """Batches of random windows of a text. The position determines the next batch."""

    def __init__(self, text, shape, position=0):
        self.ids, self.shape, self.position = np.frombuffer(text, np.uint8), shape, position

    def __iter__(self):
        sequences, length = self.shape
        while True:
            random = np.random.default_rng(self.position)
            starts = random.integers(0, len(self.ids) - length, (sequences, 1))
            windows = self.ids[starts + np.arange(length + 1)]
            self.position += 1
            yield {"tokens": windows[:, :-1], "targets": windows[:, 1:]}


def main(last=60):
    """Train to step `last`. Evaluate and save every 20 steps."""
    text = b"".join(file.read_bytes() for file in sorted(Path(os.__file__).parent.glob("*.py")))
    sources = ("quickstart", MESH, SIZES, {"run.name": "own_loop"})
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))
    with maxpipe.build(*sources, loss=focal_loss, optimizer=optimizer) as trainer:
        train, saved = trainer.config.train, maxpipe.Checkpoint.newest(trainer)
        state = saved.restore(trainer) if saved else trainer.init()
        shape = train.batch_size, train.sequence_length
        windows = RandomWindows(text[100_000:], shape, saved.extra["position"] if saved else 0)
        for batch in islice(windows, last - int(state.step)):
            state, metrics = maxpipe.train_step(trainer, state, batch)
            if state.step % 20 == 0:
                tests = islice(RandomWindows(text[:100_000], shape), 4)
                found = maxpipe.evaluate(trainer, state, batches=tests)
                print(f"{state.step}: {metrics['train/loss']:.3f}, eval {found['eval/loss']:.3f}")
                extra = {"position": windows.position}
                maxpipe.Checkpoint.save(trainer, state, metrics=found, extra=extra)


if __name__ == "__main__":
    main()
