"""maxpipe: train decoder language models through a circular pipeline, on JAX.

Shape letters, one legend for the whole package (signatures, einsum strings and
docstrings):

    B  examples of one microbatch on one device      V  vocabulary
    T  tokens (query side)                            M  microbatches
    S  key tokens                                     P  stages
    D  model width                                    R  repeats
    N  query heads                                    L  layers per chunk
    G  key/value heads                                K  ticks
    H  head size
    F  mlp width

A *chunk* is the run of layers one stage executes in one visit; `axis` always
means a mesh or logical axis, `dim` a tensor dimension.

Importing this package imports nothing else: `import maxpipe`, `maxpipe --help`,
`maxpipe config` and `maxpipe schedule` never load jax.
"""

__version__ = "0.1.0"
