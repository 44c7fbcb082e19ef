"""Layer input that depends on the token: an embedding which a layer adds to the residual stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from maxpipe.models.layers.mlp import RMSNorm
from maxpipe.models.spec import Dims, Held, Matmul, Normal, Operation, Param, Part

EMBEDDING, SCALE = "embedding", "per_layer_scale"
"""Names of the carried arrays: the output of the embedding, and the scale of `input_norm`."""


@dataclass(frozen=True)
class PerLayerInput(Part):
    """Gated per-layer input `(gelu(x W_gate) * input) W_out`.

    The input is `(norm(e W_project) + t) / sqrt(2)`. Here, e is the output of the model's embedding
    and t is the token's row in a table that only this layer uses. All layers share the scale of the
    norm, which the first layer stores.
    """

    d_model: int
    size: int
    """Number of entries of the input."""
    vocab_size: int
    """Number of rows of the table."""
    out_gain: float
    """Gain of the output projection, which writes to the residual stream."""
    input_norm: RMSNorm
    is_first: bool = False
    """Whether the sublayer stores the scale of `input_norm`."""
    image_token_id: int | None = None
    """Token ID of image tokens, or None for a model without images."""
    pad_token_id: int = 0
    """Token ID whose row in the table image tokens use. They do not train this row."""

    @property
    def params(self) -> Mapping[str, Param]:
        embed, size = (self.d_model, "embed"), (self.size, "norm")
        rows = (self.vocab_size, "layer_vocab")
        params = {
            "table": Param((rows, (self.size, "embed")), Normal(self.size)),
            "project": Param((embed, size), Normal(self.d_model), linear=1),
            "gate": Param((embed, size), Normal(self.d_model), linear=1),
            "out": Param((size, embed), Normal(self.size, self.out_gain), linear=1),
        }
        if self.is_first:
            params["scale"] = self.input_norm.params["scale"]
        return params

    @property
    def activations(self) -> Mapping[str, Dims]:
        return {}

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Return the three projections."""
        return Matmul("project"), Matmul("gate"), Matmul("out")

    @property
    def traffic(self) -> Held:
        """Return the input, the output, the embedding, and the inputs of the gate."""
        return Held(compute_dtype=((3.0, self._width), (5.0, self._input)))

    @property
    def backward_peak(self) -> Held:
        """Return the inputs and the output of the gate, and their gradients."""
        return Held(compute_dtype=((6.0, self._input),))

    @property
    def residuals(self) -> Held:
        """Return the inputs of the matmuls and of the gate, and the arrays that the norm saves."""
        inputs = 3.0 if self.is_first else 4.0
        held = Held(compute_dtype=((2.0, self._width), (inputs, self._input)))
        held += Held(float32=((2.0, self._input),))
        return held + self.input_norm.residuals_of((), self._input)

    def deferred(self, *, recomputed: bool, normed: bool) -> Held:
        """Return the inputs of the matmuls, the cotangents of their outputs, and the cotangent of
        the table's rows.

        The embedding is the first layer's input, which is kept anyway. The first layer adds the
        cotangent of the scale.
        """
        del normed
        if not recomputed:
            inputs = 6.0 if self.is_first else 4.0
            return Held(compute_dtype=((3.0, self._width), (inputs, self._input)))
        if not self.is_first:
            return Held(compute_dtype=((2.0, self._width), (4.0, self._input)))
        arrays = ((1.0, self._width), (5.0, self._input))
        return Held(compute_dtype=arrays, token_independent=(self._input,))

    @property
    def carried(self) -> Mapping[str, Dims]:
        """Return the carried arrays that the sublayer sets or reads, keyed by name."""
        return {EMBEDDING: self._width, SCALE: self._input}

    @property
    def _width(self) -> Dims:
        return ((self.d_model, "embed"),)

    @property
    def _input(self) -> Dims:
        return ((self.size, "norm"),)
