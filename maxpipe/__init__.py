"""maxpipe: train decoder language models with a circular pipeline in JAX.

Shape letters in signatures, einsum strings and docstrings of the package:

    B  examples of one microbatch on one device      V  vocabulary
    T  tokens (query side)                            M  microbatches
    S  key tokens                                     P  stages
    D  model width                                    R  repeats
    N  query heads                                    L  layers per chunk
    G  key/value heads                                K  ticks
    H  head size
    F  MLP width

A *chunk* is the group of consecutive layers that a stage runs in one repeat. `axis`
always means a mesh or logical axis, and `dim` a tensor dimension.

Importing this package imports no other module: `import maxpipe`, `maxpipe --help`,
`maxpipe config` and `maxpipe schedule` do not load jax.
"""

__version__ = "0.1.0"
