"""Parameters and floating-point operations of a model, from its config alone.

No jax: the same numbers serve planning, the start-up screen and the MFU.
"""

from __future__ import annotations

from maxpipe.config.schema import ModelConfig


def layer_params(config: ModelConfig) -> int:
    """Parameters of one layer."""
    return _layer_matmul_params(config) + 2 * config.d_model


def num_params(config: ModelConfig) -> int:
    """Parameters of the whole model; a tied table counts once."""
    tables = 1 if config.tied_embeddings else 2
    vocabulary = tables * config.vocab_size * config.d_model
    return config.num_layers * layer_params(config) + vocabulary + config.d_model


def forward_flops_per_token(
    config: ModelConfig, sequence_length: int, *, causal: bool = True
) -> int:
    """Matmul operations of one token's forward pass, a multiply-add counting 2.

    `causal` counts the half of the attention matrix that is needed; without it the whole one,
    which is the most that a plain implementation computes.
    """
    weights = config.num_layers * _layer_matmul_params(config)
    weights += config.vocab_size * config.d_model
    pairs = sequence_length // 2 if causal else sequence_length
    attention = 2 * config.num_layers * config.num_heads * config.head_size * pairs
    return 2 * (weights + attention)


def train_flops_per_token(config: ModelConfig, sequence_length: int) -> int:
    """Forward and backward, without replays: what MFU counts (PaLM, arXiv:2204.02311)."""
    return 3 * forward_flops_per_token(config, sequence_length)


QUERY_BLOCK, MAX_BLOCKS = 256, 8
"""Queries whose scores plain attention holds at once, and into how many blocks it cuts a
sequence at most; a block skips its future's keys."""


def query_blocks(tokens: int, block: int = 0) -> list[tuple[int, int]]:
    """(start, stop) of each block of queries; it scores the keys up to `stop`. 0 chooses."""
    block = block or max(QUERY_BLOCK, tokens // MAX_BLOCKS)
    if tokens % block:
        block = tokens
    return [(start, start + block) for start in range(0, tokens, block)]


def scored_pairs(tokens: int) -> int:
    """Pairs of query and key of a sequence that plain attention scores."""
    return sum((stop - start) * stop for start, stop in query_blocks(tokens))


def _layer_matmul_params(config: ModelConfig) -> int:
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    return config.d_model * (heads * config.head_size + 3 * config.d_mlp)
