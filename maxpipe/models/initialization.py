"""Initial values of parameters. The module does not import jax."""

from __future__ import annotations

from typing import Any, NamedTuple


class Normal(NamedTuple):
    """Normal distribution with mean 0 and variance `gain**2 / fan_in`."""

    fan_in: int
    gain: float = 1.0


class Constant(NamedTuple):
    """Initialization that sets all entries to one constant."""

    value: float


class Made(NamedTuple):
    """Initialization derived from other parameters of the layer (`maxpipe.models.adapters`)."""

    of: tuple[str, str]


class Entries(NamedTuple):
    """Initialization that sets each entry, in row-major order, to a separate value."""

    values: tuple[float, ...]


class TokenHash(NamedTuple):
    """Initialization of a table that assigns several different experts to each token ID.

    The first expert is the token ID modulo the number of experts, and the others follow at equal
    distances. The table does not depend on the seed.
    """

    num_experts: int

    def experts(self, token: Any, choice: Any) -> Any:
        """Return the expert of a token ID and a choice; both can be arrays, which broadcast. The
        number of choices is the size of the array `choice`.
        """
        return (token + choice * (self.num_experts // len(choice))) % self.num_experts
