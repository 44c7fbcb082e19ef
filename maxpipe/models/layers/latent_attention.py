"""Multi-head latent attention: keys and values of all heads from one small vector per token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from maxpipe.models.layers.attention import CANNOT, Rope, kept_with_context, stands
from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.models.spec import Dims, Held, Matmul, Normal, Operation, Param, Part, Scores


@dataclass(frozen=True)
class LatentAttention(Part):
    """Causal attention within segments, of latents (arXiv:2405.04434, section 2.1).

    A token's latent gives keys and values of each head. Positions are in further entries of a head,
    which turn: of a query they are the head's own, of a key one vector is for all heads.
    """

    d_model: int
    num_heads: int
    head_dim: int
    """Of queries and keys, the entries that turn included."""
    value_size: int
    """Of a head's values."""
    rank: int
    """Size of a token's latent."""
    q_lora_rank: int
    """Size of the vector that queries are made of. 0: they are made of the input."""
    out_gain: float
    """Of the output projection, which writes to the residual stream."""
    backend: str
    rope: Rope
    """Its `turned` are the last entries of a head as projections have them, in pairs (2i, 2i+1)."""
    scale: float
    """Of the scores."""
    epsilon: float
    """Of the norms of latents."""

    @property
    def options(self) -> frozenset[str]:
        """What it asks of a backend that not all of them can compute."""
        return frozenset({"value_size"})

    @property
    def unsupported(self) -> frozenset[str]:
        """Options that its backend cannot compute."""
        return CANNOT[self.backend] & self.options

    @property
    def rope_size(self) -> int:
        """Entries of a head that turn."""
        return self.rope.rotary_dims

    @property
    def rest_size(self) -> int:
        """Entries of a query or key that do not."""
        return self.head_dim - self.rope_size

    @cached_property
    def norm(self) -> RMSNorm:
        """Of latents."""
        return RMSNorm(self.rank, self.epsilon)

    @cached_property
    def query_norm(self) -> RMSNorm:
        """Of what queries are made of."""
        return RMSNorm(self.q_lora_rank, self.epsilon)

    @property
    def params(self) -> Mapping[str, Param]:
        """Projections down, their norms, and projections up to the heads.

        Of `key_value_up` the first entries of a head are those of its key, without what turns.
        """
        embed, heads = (self.d_model, "embed"), (self.num_heads, "heads")
        size, into = (self.head_dim, "head_dim"), Normal(self.d_model)
        both = (self.rest_size + self.value_size, "head_dim")
        found: dict[str, Param] = {"query": Param((embed, heads, size), into, linear=1)}
        if self.q_lora_rank:
            rank = (self.q_lora_rank, "latent")
            found = {
                "query_down": Param((embed, (self.q_lora_rank, "norm")), into, linear=1),
                "query_norm": self.query_norm.params["scale"],
                "query_up": Param((rank, heads, size), Normal(self.q_lora_rank), linear=1),
            }
        rank = (self.rank, "latent")
        out_of = self.num_heads * self.value_size
        return found | {
            "key_value_down": Param((embed, (self.rank, "norm")), into, linear=1),
            "rope_key": Param((embed, (self.rope_size, "head_dim")), into, linear=1),
            "key_value_norm": self.norm.params["scale"],
            "key_value_up": Param((rank, heads, both), Normal(self.rank), linear=1),
            "out": Param((heads, self._value[1], embed), Normal(out_of, self.out_gain), linear=2),
        }

    @property
    def activations(self) -> Mapping[str, Dims]:
        """Latents before their norms; `query` and `key` are rotated, `context` is what is mixed."""
        latents = {"query_latent": self._query_latent} if self.q_lora_rank else {}
        return latents | {
            "query": self._query,
            "latent": self._latent,
            "key": self._query,
            "value": self._value,
            "context": self._value,
            "attention_out": self._width,
        }

    @property
    def saved_with(self) -> Mapping[str, Mapping[str, Dims]]:
        """Of `context` its sums, where its backward starts from them."""
        return kept_with_context(self.backend, ((self.num_heads, "heads"),))

    @property
    def operations(self) -> tuple[Operation, ...]:
        """All projections and the two products with the scores."""
        mean = (self.head_dim + self.value_size) / 2
        scores = Scores(
            self.num_heads,
            "heads",
            mean,
            storage=stands(self.backend),
            query=self._query,
            keys=(self._query, self._value),
            mixed=self._value,
        )
        weights = [name for name in self.params if not name.endswith("norm") and name != "out"]
        return *map(Matmul, weights), scores, Matmul("out")

    @property
    def traffic(self) -> Held:
        """Input and output, latents with their norms, and queries and what is mixed."""
        latents = tuple((4.0, dims) for _, dims in self._normed)
        mixed = ((1.0, self._query), (1.0, self._value))
        return Held(compute_dtype=((2.0, self._width), *latents, *mixed))

    @property
    def backward_peak(self) -> Held:
        """Of each pair its score and its probability; by blocks arrays in their order, too.

        Behind a mask of numbers a kernel's gradients.
        """
        if stands(self.backend) == "mask":
            return Held(pairs=(1.0, 0.0, 0.0), documents=((4.0, self._query),))
        found = Held(pairs=(1.0, 1.0, 0.0))
        if stands(self.backend) == "block":
            narrow = ((1.5, self._query), (1.5, self._value))
            found += Held(compute_dtype=narrow, float32=((1.0, self._value),))
        return found

    @property
    def residuals(self) -> Held:
        """Inputs of all matmuls; angles, and two statistics of each softmax, in float32.

        Of each pair whether it counts, its score in float32 and its probability. Each block of
        queries keeps the keys and values that it reads. What computes its scores again keeps one
        statistic and nothing of pairs.
        """
        narrow = ((1.0, self._width), (1.0, self._query), (1.0, self._value))
        keys = ((1.0, self._query), (1.0, self._value))
        turned, heads = (2.0, ((self.rope_size, ""),)), ((self.num_heads, "heads"),)
        if stands(self.backend) == "scores":
            wide, pairs = (turned, (2.0, heads)), (1.0, 1.0, 1.0)
            found = Held(compute_dtype=narrow, float32=wide, blocks=keys, pairs=pairs)
        else:
            found = Held(compute_dtype=(*narrow, *keys), float32=(turned, (1.0, heads)))
        for norm, dims in self._normed:
            found += norm.residuals_of((), dims) + Held(compute_dtype=((1.0, dims),))
        return found

    def deferred(self, *, recomputed: bool, normed: bool) -> Held:
        """Inputs of the projections and cotangents of their outputs; what norms wait for."""
        del normed
        rest = ((self.num_heads, "heads"), (self.rest_size, "head_dim"))
        turned = ((self.rope_size, "head_dim"),)
        width = (1.0 if recomputed else 2.0, self._width)
        found = Held(compute_dtype=(width, (2.0, self._value)))
        found += Held(compute_dtype=((1.0, self._query), (1.0, rest), (1.0, turned)))
        for norm, dims in self._normed:
            # Recomputed, what a norm's output is made of stands for that.
            found += norm.deferred_of((), dims, recomputed=recomputed)
            found += Held(compute_dtype=((2.0, dims),))
        return found

    @property
    def _normed(self) -> tuple[tuple[RMSNorm, Dims], ...]:
        """Norms of latents, and what they norm."""
        own = ((self.query_norm, self._query_latent),) if self.q_lora_rank else ()
        return (*own, (self.norm, self._latent))

    @property
    def _width(self) -> Dims:
        return ((self.d_model, "embed"),)

    @property
    def _latent(self) -> Dims:
        return ((self.rank, "norm"),)

    @property
    def _query_latent(self) -> Dims:
        return ((self.q_lora_rank, "norm"),)

    @property
    def _query(self) -> Dims:
        return ((self.num_heads, "heads"), (self.head_dim, "head_dim"))

    @property
    def _value(self) -> Dims:
        return ((self.num_heads, "heads"), (self.value_size, "head_dim"))
