"""Estimate the cycles of TPU kernels from the compiler's instruction schedules, without a TPU.

    python benchmarks/kernel_schedules.py            # prints the tables
    python benchmarks/kernel_schedules.py --write    # and writes kernel_schedules.md
    python benchmarks/kernel_schedules.py --sparse   # prints the schedules of sparse attention

XLA's cycle estimates do not include custom kernels. The compiler for TPUs can write the instruction
schedule of each kernel, from which the number of instructions in each code block is known. The
script requires libtpu (`pip install '.[tpu]'`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

_BUNDLE = re.compile(r"\s*(0x[0-9a-f]+|0)\s+(?:[A-Z]{2}\s*)*: (>*)")
_REGION = re.compile(r"Start(?:/End)?(?: empty)? region (\d+)")
_BRANCH = re.compile(r"sbr\.rel.*target = \$region(\d+)")
_WINDOW = re.compile(
    r"window shape is \w+?(\d+)\[([\d,]+)\], while the full shape is \w+\[([\d,]+)\]"
)
_LOOP_END = 5
"""Number of instruction bundles from the branch at the end of a loop to the end of the loop."""
GROUPED = "grouped_(?:matmul|outer)"
"""Pattern of the names of grouped matmuls."""
_MIN_BLOCK = 30
"""Shorter blocks start transfers or wait for them. They count as overhead of a grid step."""


def write_schedules(folder: Path) -> None:
    """Configure libtpu, before it is loaded, to write the schedules of all kernels."""
    options = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {options}"


@dataclass
class Block:
    """A code block of a kernel that a branch can skip."""

    first: int
    last: int
    inner: list[Block]

    @property
    def length(self) -> int:
        """Return the number of instruction bundles in the block, including the blocks inside."""
        return self.last - self.first

    @property
    def bundles(self) -> int:
        """Return the number of instruction bundles in the block, without the blocks inside."""
        return self.length - sum(each.length for each in self.inner)


@dataclass(frozen=True)
class KernelSchedule:
    """Instruction schedule of one kernel."""

    name: str
    windows: list[tuple[list[int], list[int]]]
    """Shapes of the block and of the array for each operand in high-bandwidth memory."""
    block_bytes: list[int]
    """Size of each block."""
    step: Block
    """Instructions of one grid step, including its overhead."""
    loops: list[int]
    """Number of instruction bundles of each innermost loop, in the order of the program."""

    @property
    def active(self) -> Block:
        """Return the block that runs in grid steps with work."""
        return max(self.step.inner, key=lambda block: block.length)

    @property
    def overhead(self) -> int:
        """Return the number of instruction bundles of a grid step outside of inner blocks."""
        return self.step.length - self.active.length + self.active.bundles

    @classmethod
    def read_all(cls, folder: Path, names: str) -> Iterator[KernelSchedule]:
        """Read the schedules of all kernels whose name matches a pattern."""
        for path in sorted(folder.glob("*-final_bundles.txt")):
            name = re.search(rf"\d+-({names}[.\d]*)-\d+-final_bundles", path.name)
            if name:
                yield cls._parse(name[1], path.read_text(encoding="utf-8", errors="replace"))

    @classmethod
    def _parse(cls, name: str, text: str) -> KernelSchedule:
        start_of: dict[str, int] = {}
        loop: list[int] = []
        branches: list[tuple[int, str]] = []
        address, loop_start, loops = 0, None, []
        for line in text.splitlines():
            bundle = _BUNDLE.match(line)
            if bundle:
                address = int(bundle[1], 16)
                if " LB: " in line[:20]:
                    loop_start = address
                if loop_start is not None and "sbr.rel" in line:
                    loops.append(address + _LOOP_END - loop_start)
                    loop_start = None
                if bundle[2]:
                    loop.append(address)
                    branches += [(address, region) for region in _BRANCH.findall(line)]
            start_of |= dict.fromkeys(_REGION.findall(line), address)
        step = Block(loop[0], loop[-1] + 1, [])
        for first, region in branches:
            last = start_of.get(region, 0)
            if last - first >= _MIN_BLOCK:
                around = step
                while around.inner and around.inner[-1].last > first:
                    around = around.inner[-1]
                around.inner.append(Block(first, last, []))
        found = [(int(bits), *map(_numbers, shapes)) for bits, *shapes in _WINDOW.findall(text)]
        sizes = [bits * math.prod(block) // 8 for bits, block, _ in found]
        return cls(name, [(block, full) for _, block, full in found], sizes, step, loops)


def count_calls(text: str) -> dict[str, int]:
    """Return how often the program with this HLO text calls each kernel.

    The compiler writes one schedule for all calls of the same kernel.
    """
    calls = re.findall(rf'%({GROUPED}[.\d]*) = .*?"body":"([^"]+)"', text)
    bodies = [body for _, body in calls]
    return {name: bodies.count(body) for name, body in calls}


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def cycles(kernel: KernelSchedule, sizes: Any, hardware: Any, num_cores: int) -> float:
    """Return the cycles of a kernel for the given numbers of rows per expert.

    The time of a multiplication is at least the time that the matrix units need for its rows.
    Transfers overlap with it. Their time is their bytes divided by the published bandwidth.
    """
    outer = kernel.name.startswith("grouped_outer")
    count = _count_outer if outer else _count_matmul
    *inputs, (block, whole) = kernel.windows
    if outer:
        tile, columns = kernel.windows[0][0], block[-1]
        number = len(kernel.windows) // 2
    else:
        tile, columns = inputs[0][0], block[-1]
        number = len(inputs) // 2
    per_cycle = hardware.flops / 2 / hardware.clock_ghz / 1e9 / num_cores
    peak = number * tile[1] * columns / per_cycle
    inner_tiles = inputs[0][1][1] // tile[1]
    turns = -(-(whole[-1] // columns) // num_cores)
    busy, steps = count(kernel, sizes, tile[0], peak, inner_tiles)
    rate = hardware.memory_gb_per_second / hardware.clock_ghz / num_cores
    return turns * max(busy, _moved(kernel, sizes, steps, inner_tiles) / rate)


def _count_matmul(
    kernel: KernelSchedule, sizes: Any, rows: int, peak: float, inner_tiles: int
) -> tuple[float, float]:
    """Return the cycles and the grid steps of one column tile of `grouped_matmul`."""
    import numpy as np

    from maxpipe.nn.expert_backends.blocks import make_block_steps

    at = make_block_steps(sizes, int(sizes.sum()), rows)
    start, first, stop = (np.asarray(each) for each in (at.start, at.first, at.stop))
    used = first < stop
    first, stop = (first - start)[used], np.minimum(stop - start, rows)[used]
    part_sizes = [rows // 4, rows // 2, rows]
    total, left = 0.0, np.ones(len(first), bool)
    for part, size in zip(kernel.active.inner, part_sizes, strict=True):
        fits = left & (stop - np.minimum(first // 32 * 32, rows - size) <= size)
        left &= ~fits
        stores = sum(each.bundles for each in part.inner) / inner_tiles
        total += fits.sum() * max(part.bundles + stores, size * peak)
    return inner_tiles * (total + len(first) * kernel.overhead), float(len(first) * inner_tiles)


def _count_outer(
    kernel: KernelSchedule, sizes: Any, rows: int, peak: float, inner_tiles: int
) -> tuple[float, float]:
    """Return the cycles and the grid steps of one column tile of `grouped_outer`."""
    import numpy as np

    stops = np.cumsum(sizes)
    begins = (stops - sizes) // 16 * 16
    steps = float(np.maximum(1, -(-(stops - begins) // rows)).sum())
    stores = sum(each.bundles for each in kernel.active.inner)
    outside = kernel.step.length - kernel.active.length
    one = outside + max(kernel.active.bundles, rows * peak)
    return inner_tiles * (steps * one + len(sizes) * stores), steps * inner_tiles


def _moved(kernel: KernelSchedule, sizes: Any, steps: float, inner_tiles: int) -> float:
    """Return the bytes that one column tile of the output moves."""
    import numpy as np

    total = 0.0
    for block, full in kernel.windows:
        # The weights of an expert, and its gradients, remain in memory from one step to the next.
        once = len(full) == 3 and (inner_tiles == 1 or kernel.name.startswith("grouped_outer"))
        times = len(sizes) * (inner_tiles if once and inner_tiles > 1 else 1) if once else steps
        total += 2 * float(np.prod(block)) * times
    return total


RECURRENCE = r"recurrence_(?:convolution_)?(?:forward|backward)"


def recurrence_cycles(kernel: KernelSchedule, hardware: Any, num_cores: int) -> float:
    """Return the cycles of a recurrence kernel.

    The time of a grid step is the number of its instructions, but at least the time of its
    transfers at the published bandwidth. The cores process different heads.
    """
    block, whole = next(sizes for sizes in kernel.windows if len(sizes[1]) == 4)
    steps = math.prod(full // size for size, full in zip(block, whole, strict=True))
    moved = sum(kernel.block_bytes)
    rate = hardware.memory_gb_per_second / hardware.clock_ghz / num_cores
    return steps / num_cores * max(kernel.step.length, moved / rate)


SPLASH = r"splash_(?:forward|backward)"
MATMULS = {"forward": (1, 1), "backward": (3, 2)}
"""Number of matmuls of a block of scores with keys and with values, for each kernel."""
TWO_CORES = ("v4", "v5p")
"""Chips whose two cores are one device of jax, and process different heads or columns."""
CHIPS = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}
ATTENTION = [(8192, 128, 0), (8192, 64, 0), (8192, 256, 0), (2048, 128, 0), (4096, 192, 64)]
"""Sequence lengths, head dims of queries and keys, and the number of these dims that all heads
share, as in latent attention."""


def attention_rates(chip: str, tokens: int, head_dim: int, shared: int) -> dict[str, float]:
    """Return the fraction of the peak FLOP rate that the attention kernels of a chip reach, by
    kernel and in total. This function runs in a separate process.

    The time of a block of scores is at least the time that the matrix units need at their peak
    rate.
    """
    folder = tempfile.TemporaryDirectory()
    write_schedules(Path(folder.name))
    from maxpipe.planner import topology

    target = topology.parse_topology(CHIPS[chip])
    topology.prepare(target)

    import jax

    from maxpipe.distributed.runtime import compiler_options
    from maxpipe.nn.attention import splash, splash_kernels
    from maxpipe.nn.attention.interface import Mask

    devices = topology.topology_devices(target)
    mesh = jax.sharding.Mesh(devices[:1], ("data",))
    whole = jax.NamedSharding(mesh, jax.P())

    def run(query: Any, key: Any, value: Any, ids: Any) -> Any:
        def attend(query: Any, key: Any, value: Any) -> Any:
            return splash.attend(query, key, value, Mask(segments=ids, shared_dims=shared))

        mixed, pull = jax.vjp(attend, query, key, value)
        return mixed, pull(mixed)

    value_dim, key_heads = head_dim - shared, 8 if shared else 2
    array, keys, values = (
        jax.ShapeDtypeStruct((1, tokens, heads, size), "bfloat16", sharding=whole)
        for heads, size in ((8, head_dim), (key_heads, head_dim), (key_heads, value_dim))
    )
    ids = jax.ShapeDtypeStruct((1, tokens), "int32", sharding=whole)
    options = compiler_options("tpu", devices[0].device_kind)
    with jax.set_mesh(mesh):
        jax.jit(run).lower(array, keys, values, ids).compile(options)
    hardware, cores = target.hardware, 2 if chip in TWO_CORES else 1
    per_cycle = hardware.flops / 2 / hardware.clock_ghz / 1e9 / cores
    peaks, rates = 0.0, {}
    times = 0.0
    for kernel in KernelSchedule.read_all(Path(folder.name), SPLASH):
        kind = kernel.name.split("_")[1].partition(".")[0]
        (queries, keys) = (kernel.windows[index][0][-2] for index in (0, 2 if shared else 1))
        with_keys, with_values = MATMULS[kind]
        peak = queries * keys * (with_keys * head_dim + with_values * value_dim) / per_cycle
        # The largest blocks of instructions compute a pair without a mask, with a mask, and on the
        # diagonal, in this order. The others run for the first and for the last of the visible key
        # blocks.
        blocks = sorted(kernel.active.inner, key=lambda block: block.bundles)
        rest = sum(block.bundles for block in blocks[:-3])
        plain, _, diagonal = (
            block.bundles for block in sorted(blocks[-3:], key=lambda block: block.first)
        )
        share = splash_kernels.BlockSizes(queries, keys, keys).diagonal_share
        below = (tokens / queries - 1) / 2
        scores = below * max(plain, peak) + max(diagonal, share * peak) + rest
        computed = (below + share) * peak
        rates[kind] = computed / (scores + (below + 1) * kernel.overhead)
        peaks, times = peaks + computed, times + computed / rates[kind]
    return rates | {"all": peaks / times}


def table() -> str:
    head = ["chip", "T", "head dim", "shared dims", *(f"{kind} kernel" for kind in MATMULS), "all"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for chip in CHIPS:
        for sizes in ATTENTION:
            found = in_process(chip, *sizes)
            cells = [chip, *map(str, sizes)]
            cells += [f"{found[kind]:.0%}" for kind in (*MATMULS, "all")]
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join([*lines, ""])


def in_process(*task: Any) -> dict[str, float]:
    """Run `attention_rates` in a new process and return its result."""
    command = [sys.executable, __file__, "--one", json.dumps(task)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(found.stdout.splitlines()[-1])


SPARSE = r"(?:sparse_selection|compact_keys|gathered_\w+|add_rows)"


def sparse_table(chip: str) -> str:
    """Return the schedules of the kernels of sparse attention, with the sizes of DeepSeek-V3.2.

    A device has 16 heads and 8 index heads. Kernels declare their cycles with these numbers, which
    are instructions of a grid step, of the blocks inside that branches skip, and of the loops.
    """
    folder = tempfile.TemporaryDirectory()
    write_schedules(Path(folder.name))
    from maxpipe.planner import topology

    target = topology.parse_topology(CHIPS[chip])
    topology.prepare(target)

    import jax

    from maxpipe.distributed.runtime import compiler_options

    devices = topology.topology_devices(target)
    mesh = jax.sharding.Mesh(devices[:1], ("data",))
    whole = jax.NamedSharding(mesh, jax.P())

    def array(shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    options = compiler_options("tpu", devices[0].device_kind)
    with jax.set_mesh(mesh):
        for run, shapes in _sparse_programs():
            arrays = jax.tree.map(lambda x: array(x.shape, x.dtype), shapes)
            jax.jit(run).lower(*arrays).compile(options)
    head = ["kernel", "shapes", "grid step", "blocks", "innermost loops"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for kernel in KernelSchedule.read_all(Path(folder.name), SPARSE):
        shapes = {"x".join(map(str, block)) for block, _ in kernel.windows}
        blocks = [block.length for block in _all_blocks(kernel.step)]
        lists = (", ".join(map(str, lengths)) for lengths in (blocks, kernel.loops))
        cells = [kernel.name.partition(".")[0], ", ".join(sorted(shapes))]
        cells += [str(kernel.step.length), *lists]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _all_blocks(block: Block) -> Iterator[Block]:
    for inner in block.inner:
        yield inner
        yield from _all_blocks(inner)


def _sparse_programs() -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield calls of the kernels and the shapes of their arguments."""
    import jax

    from maxpipe.nn import gathered_attention, key_compaction, row_kernel, selection_kernel
    from maxpipe.parallel.tpu_kernels import tpu_cores

    shape: Any = jax.ShapeDtypeStruct
    tokens, size, heads, index_heads, width, latent = 8192, 2048, 16, 8, 576, 512
    blocks, options = tokens // 32, gathered_attention.BlockOptions(0.1, latent)
    inputs = selection_kernel.SelectionInputs(
        shape((blocks, 1, 32, index_heads, 128), "bfloat16"),
        shape((blocks, 1, 32, index_heads), "bfloat16"),
        shape((blocks, 1, 32), "int32"),
        shape((blocks, 32), "int32"),
        shape((1, tokens, 128), "bfloat16"),
        shape((1, tokens), "int32"),
    )
    yield lambda inputs: selection_kernel.select(inputs, 2048, 0.1, 32), (inputs,)
    members = shape((blocks, 1, 2**17), "uint32")
    yield partial(key_compaction.compact, size=size), (members, shape((), "int32"))
    rows = shape((tokens + 1, 1, width), "float32")
    yield row_kernel.add_rows, (rows, shape((size,), "int32"), shape((size, width), "float32"))
    query, output = (shape((1, heads, 32, dims), "bfloat16") for dims in (width, latent))
    keys, words = shape((1, size, width), "bfloat16"), shape((1, size), "uint32")
    sums, column = (shape((1, heads, 32, *dims), "float32") for dims in ((), (1,)))
    state = gathered_attention.Softmax(column, column, shape(output.shape, "float32"))
    block = (query, keys, words)
    yield partial(gathered_attention.add_keys, options=options), (state, *block)
    yield partial(gathered_attention.sum_shares, options=options), (*block, sums)
    d_query = shape((tpu_cores().number, *query.shape), "float32")
    gradient = gathered_attention.OutputGradient(output, sums, sums)
    yield partial(gathered_attention.gradients, options=options), (d_query, *block, gradient)


PREAMBLE = """\
# Rates of attention kernels on TPUs

> **Compiler estimate.** The compiler reports these figures; nothing ran on an accelerator.

`python benchmarks/kernel_schedules.py --write`. No TPU was used. XLA's cycle estimates do not
include custom kernels. The compiler for TPUs can write the instruction schedule of a kernel, with
the number of instructions in each code block. The table shows the fraction of the peak bfloat16
rate that splash attention kernels reach in computed blocks of scores, for 8 heads, 2 key/value
heads and a causal mask. Rows with shared dims are latent attention with 8 heads, in which the
values have as many dims as the other dims of a key. The time of a block of scores is the number of
its instructions, but at least the time that the matrix units need at their peak rate. Waits for
transfers are not included.

The matrix units of v6e and TPU7x have 256 x 256 elements. A head dim of 128 uses half of them in
most matmuls, and the softmax takes as long as on other chips. `kernel_efficiency` in the hardware
files is the column "all" for 8192 tokens and a head dim of 128. `expert_kernel_efficiency` is based
on [experts.md](experts.md).

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--sparse", action="store_true", help="print kernels of sparse attention")
    parser.add_argument("--chip", default="v5p", choices=CHIPS, help="chip of --sparse")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(attention_rates(*json.loads(options.one))))
        return
    if options.sparse:
        print(sparse_table(options.chip))
        return
    page = table()
    print(page)
    if options.write:
        Path(__file__).with_suffix(".md").write_text(PREAMBLE + page, encoding="utf-8")


if __name__ == "__main__":
    main()
