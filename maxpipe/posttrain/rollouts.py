"""Rollouts: completions of prompts, sampled with the current parameters, and their rewards.

Random numbers depend only on the seed, the sample index and the position in the completion. The
sample index determines the step, the prompt and the group member. A resumed run, or a run with
another layout, therefore samples the same completions up to rounding.

`ReferenceParams` holds the initial parameters of the run for the KL term. The reference shares
frozen parameters with the current model. A checkpoint contains only a checksum of the reference
parameters. On resume, the reference parameters are loaded or initialized again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from maxpipe.config.sections.grpo import GrpoConfig
from maxpipe.data.loader import Batch, Datasets
from maxpipe.data.mixture import seed_of
from maxpipe.data.prompts import PromptRecord, PromptSequences
from maxpipe.errors import Code, ConfigError
from maxpipe.generation.completions import (
    Completion,
    GenerationLimits,
    Prompt,
    complete,
    parse_stops,
)
from maxpipe.generation.decoding import Sampling
from maxpipe.generation.pipeline_decoding import (
    build_decode_engine,
    decode_param_converter,
    decode_param_layout,
)
from maxpipe.objectives import ON_POLICY, advantages
from maxpipe.parallel.sharding import local_sequences, make_global_batch
from maxpipe.pipeline.loss_head import LossHead
from maxpipe.pipeline.weights import replace_subtree
from maxpipe.rewards.process import RewardFunction, RewardSettings
from maxpipe.step.step import Steps


class ReferenceParams:
    """Copies of the initial trainable parameters, with the same sharding.

    `saved_digest` is the checksum from the checkpoint of a resumed run.

    Raises:
        ConfigError: the parameters are not the initial parameters of the run.
    """

    def __init__(self, steps: Steps, params: Tree, saved_digest: str | None, where: str):
        mine = steps.param_layout.select_trainable(params)
        self._copies = jax.tree.map(jnp.copy, mine)  # a train step donates the original arrays
        self.digest = steps.digest(mine)
        if saved_digest not in (None, self.digest):
            raise ConfigError.one(
                Code.POST_REFERENCE,
                where,
                None,
                "must point to the initial weights of this run, which are the reference "
                "of grpo.kl_coef, but now points to other weights.",
                "Restore the initial weights, specify the step that holds them as RUN@STEP, or set "
                "run.name to a new name.",
            )

    def merge(self, params: Tree) -> Tree:
        """Return the reference parameters, with frozen parameters from the current `params`."""
        return replace_subtree(params, self._copies)


Tree = Any

_STREAM = "rollouts"
"""Name of the random stream from which the seed for sampling completions is derived."""
_NUM_ROW_IDS = 1 << 31
"""Number of distinct sample indices, which are int32 numbers."""


@dataclass(frozen=True)
class RewardedCompletion:
    """A completion with its reward and advantage."""

    prompt: PromptRecord
    tokens: Sequence[int]
    text: str
    finish: str
    reward: float
    advantage: float


class Rollouts:
    """Sample completions for `updates_per_rollout` steps at a time, and store them with their
    rewards.

    A position is the index of a batch, as in `BadStepMonitor.offset`.
    """

    def __init__(
        self,
        grpo_config: GrpoConfig,
        steps: Steps,
        datasets: Datasets,
        *,
        reference: ReferenceParams | None,
        same: Callable[[str, str], Mapping[str, Sequence[int]]],
    ):
        """Set up decoding; `same` is `ControlChannel.compare_across_processes`."""
        self._config, self._steps, self._loader = grpo_config, steps, datasets.train
        self._tokenizer, self._reference, self._same = datasets.tokenizer, reference, same
        rows = datasets.train.sequences
        assert isinstance(rows, PromptSequences)
        self._prompts = rows.prompts
        self._rewards = RewardFunction(RewardSettings.from_grpo(grpo_config))
        self._rewards.start()  # before any compilation
        self.close = self._rewards.close
        num_rows, self._length = steps.shape
        longest = int(rows.lengths.max())
        stops, stop_ids = parse_stops(grpo_config.stop, self._tokenizer, "grpo.stop")
        self._limits = GenerationLimits(
            grpo_config.max_tokens,
            self._length,
            stops,
            stop_ids=stop_ids,
            batch_size=num_rows,
            longest_prompt=longest,
        )
        parts = decode_param_layout(steps.param_layout)
        sampling = Sampling(temperature=grpo_config.temperature)
        seed = seed_of(_STREAM, steps.seed) % (1 << 32)
        self._decoding = build_decode_engine(parts, sampling, seed)
        self._convert = decode_param_converter(steps.param_layout, parts)
        self._scores = None
        self._first_position = -1
        """Position of the first batch of the latest rollout."""
        self._completions: list[list[RewardedCompletion]] = []
        """Completions for each step of the latest rollout."""
        self._batches: list[dict[str, Array]] = []

    def is_rollout_start(self, position: int) -> bool:
        """Whether a rollout starts at this batch, so a checkpoint can be saved before the batch."""
        return position % self._config.updates_per_rollout == 0

    def generate(self, params: Tree, position: int, stops: Callable[[], bool]) -> bool:
        """Generate the rollout that starts at `position`; return False if `stops` returns true.

        All processes of a run must call this method together.

        Raises:
            ConfigError: the reward of a completion cannot be computed.
            DivergenceError: the model returns non-finite values.
        """
        assert self.is_rollout_start(position)
        self._batches.clear()
        self._completions.clear()
        try:
            converted = self._convert(params)
            for each in range(position, position + self._config.updates_per_rollout):
                self._completions.append(
                    self._compute_rewards(self._complete_prompts(converted, each, stops))
                )
                if stops():
                    return False
        except KeyboardInterrupt:
            return False
        finally:
            converted = None
        self._check_same_rewards()
        self._first_position = position
        self._batches = [self._place_batch(each) for each in self._completions]
        self._add_logprobs(params)
        return True

    def batch(self, position: int) -> Mapping[str, Array]:
        """Return the device arrays of a batch of the latest rollout."""
        return self._batches[position - self._first_position]

    def metrics(self, position: int) -> dict[str, float]:
        """Return metrics of the completions in a batch."""
        drawn = self._completions[position - self._first_position]
        rewards = np.array([each.reward for each in drawn])
        groups = rewards.reshape(-1, self._config.group_size)
        return {
            "rollout/reward": float(rewards.mean()),
            "rollout/reward_std": float(rewards.std()),
            "rollout/flat_groups": float((groups.min(1) == groups.max(1)).mean()),
            "rollout/tokens": float(np.mean([len(each.tokens) for each in drawn])),
            "rollout/cut": float(np.mean([each.finish == "length" for each in drawn])),
        }

    def samples(self, position: int) -> list[Mapping[str, object]]:
        """Return the prompts, texts and rewards of the first group in a batch."""
        drawn = self._completions[position - self._first_position]
        return [
            {
                "prompt": each.prompt.text,
                "text": each.text,
                "tokens": [*each.tokens],
                "finish_reason": each.finish,
                "reward": each.reward,
            }
            for each in drawn[: self._config.group_size]
        ]

    # Sampling.

    def _complete_prompts(
        self, params: Tree, position: int, stops: Callable[[], bool]
    ) -> list[tuple[PromptRecord, Completion]]:
        """Return the prompt and completion of each sequence in a batch."""
        count, _ = self._steps.shape
        records = [
            self._prompts[row.documents[0]] for row in self._loader.sequence_origins(position)
        ]
        first = position * count
        prompts = [
            Prompt((first + number) % _NUM_ROW_IDS, each.text, each.ids.tolist())
            for number, each in enumerate(records)
        ]
        found: list[Completion] = []
        complete(
            self._decoding,
            params,
            self._tokenizer,
            prompts,
            self._limits,
            write=found.append,
            stops=stops,
        )
        return list(zip(records, found, strict=True))

    def _compute_rewards(
        self, completed: list[tuple[PromptRecord, Completion]]
    ) -> list[RewardedCompletion]:
        rewards = [
            self._rewards.compute(each.text, prompt.record, prompt.where)
            for prompt, each in completed
        ]
        groups = np.reshape(rewards, (-1, self._config.group_size))
        gains = advantages(groups, self._config.advantages).reshape(-1)
        return [
            RewardedCompletion(
                prompt, each.tokens, each.text, cast(str, each.finish_reason), reward, float(gain)
            )
            for (prompt, each), reward, gain in zip(completed, rewards, gains, strict=True)
        ]

    def _check_same_rewards(self) -> None:
        """Check that all processes computed the same rewards, which training requires."""
        values = json.dumps([[each.reward for each in drawn] for drawn in self._completions])
        if len(self._same("rewards", hashlib.sha256(values.encode()).hexdigest())) > 1:
            raise ConfigError.one(
                Code.POST_REWARD,
                "grpo.reward_file",
                self._config.reward_file,
                "must return the same reward for the same completion and record; processes of this "
                "run computed different rewards.",
                "Remove randomness and time dependence from the function.",
            )

    # Batches.

    def _place_batch(self, drawn: list[RewardedCompletion]) -> dict[str, Array]:
        names = set(self._steps.objective.batch_arrays)
        host = assemble_batch(
            drawn, self._length, self._tokenizer.pad_id, self._config.loss_aggregation
        )
        host |= {name: np.zeros_like(host["loss_mask"]) for name in names - host.keys()}
        sharding, count = self._steps.batch_sharding, len(drawn)
        rows = local_sequences(sharding, count)
        local = {name: each[rows] for name, each in host.items()}
        return make_global_batch(local, rows, count, sharding)

    def _add_logprobs(self, params: Tree) -> None:
        """Add the old and reference log-probabilities that the steps need.

        The first step of a rollout is on-policy, so it needs no old log-probabilities.
        """
        for number, batch in enumerate(self._batches):
            if number:
                batch["old_logp"] = self._logp(params, batch)
            if self._reference is not None:
                batch["reference_logp"] = self._logp(self._reference.merge(params), batch)

    def _logp(self, params: Tree, batch: Mapping[str, Array]) -> Array:
        if self._scores is None:
            self._scores = self._steps.compile_reader(LossHead.scores)
        (found,) = self._scores(params, batch)
        return found


def assemble_batch(
    drawn: Sequence[RewardedCompletion], length: int, pad_id: int, average: str
) -> Batch:
    """Return arrays `[B, T]` in which each sequence is a prompt and its completion.

    Loss is computed only on completion tokens. `average` determines the weight of each token.
    """
    shape = (len(drawn), length)
    tokens, targets = (np.full(shape, pad_id, np.int32) for _ in range(2))
    segments, positions = (np.zeros(shape, np.int32) for _ in range(2))
    mask, gains = (np.zeros(shape, np.float32) for _ in range(2))
    for row, each in enumerate(drawn):
        ids = np.concatenate([each.prompt.ids, each.tokens])
        end, begin = len(ids) - 1, len(each.prompt.ids) - 1
        tokens[row, :end], targets[row, :end] = ids[:-1], ids[1:]
        segments[row, :end], positions[row, :end] = 1, np.arange(end)
        mask[row, begin:end] = 1 / (end - begin) if average == "sequence" else 1
        gains[row, begin:end] = each.advantage
    return {
        "tokens": tokens,
        "targets": targets,
        "segment_ids": segments,
        "positions": positions,
        "loss_mask": mask,
        "example_ids": np.arange(len(drawn), dtype=np.int32),
        "advantages": gains,
        "old_logp": np.full(shape, ON_POLICY, np.float32),
    }
