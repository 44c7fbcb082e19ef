"""Traces of TPUs and GPUs in the layout of jax's profiler, constructed without such devices.

The layout follows `tsl/profiler/protobuf/xplane.proto` and `xplane_schema.cc`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from maxpipe.profiles.capture import Metadata, TableRecord
from maxpipe.schedule.catalog import make_schedule
from maxpipe.schedule.table import Schedule

STAGES, MICROBATCHES = 4, 4
FORWARD, BACKWARD, TICK, HEAD, SEND, UPDATE = 200.0, 400.0, 5.0, 20.0, 30.0, 100.0
"""Durations in microseconds."""
PROGRAM_ID = 7
MODULE = "jit__train_step"

_ORIGIN = "jit(_train_step)/shard_map/while/body/closed_call"
PROGRAM = f"""HloModule {MODULE}, is_scheduled=true, num_partitions={STAGES}

%layer.forward (p: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {{
  %p = (s32[], f32[8,8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8,8] get-tuple-element(%p), index=1
  %dot.f = f32[8,8] dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, metadata={{op_name="{_ORIGIN}/forward/while/body/part_mlp/dot_general"}}
  ROOT %t = (s32[], f32[8,8]) tuple(%i, %dot.f)
}}

%layer.backward (p.1: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {{
  %p.1 = (s32[], f32[8,8]) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %x.1 = f32[8,8] get-tuple-element(%p.1), index=1
  %dot.b = f32[8,8] dot(%x.1, %x.1), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, metadata={{op_name="{_ORIGIN}/backward/while/body/part_attention/dot_general"}}
  ROOT %t.1 = (s32[], f32[8,8]) tuple(%i.1, %dot.b)
}}

%cond (c: (s32[], f32[8,8])) -> pred[] {{
  %c = (s32[], f32[8,8]) parameter(0)
  ROOT %true = pred[] constant(true)
}}

%tick (q: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {{
  %q = (s32[], f32[8,8]) parameter(0)
  %n = s32[] get-tuple-element(%q), index=0
  %v = f32[8,8] get-tuple-element(%q), index=1
  %copy.t = f32[8,8] copy(%v), metadata={{op_name="{_ORIGIN}/dynamic_slice"}}
  %a = (s32[], f32[8,8]) tuple(%n, %copy.t)
  %while.f = (s32[], f32[8,8]) while(%a), condition=%cond, body=%layer.forward, metadata={{op_name="{_ORIGIN}/forward/while"}}
  %y = f32[8,8] get-tuple-element(%while.f), index=1
  %collective-permute-start.1 = (f32[8,8], f32[8,8]) collective-permute-start(%y), source_target_pairs={{{{0,1}},{{1,2}},{{2,3}},{{3,0}}}}, metadata={{op_name="{_ORIGIN}/send/ppermute"}}
  %dot.h = f32[8,8] dot(%y, %y), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, metadata={{op_name="{_ORIGIN}/head/dot_general"}}
  %b = (s32[], f32[8,8]) tuple(%n, %dot.h)
  %while.b = (s32[], f32[8,8]) while(%b), condition=%cond, body=%layer.backward, metadata={{op_name="{_ORIGIN}/backward/while"}}
  %collective-permute-done.1 = f32[8,8] collective-permute-done(%collective-permute-start.1), metadata={{op_name="{_ORIGIN}/send/ppermute"}}
  ROOT %r = (s32[], f32[8,8]) tuple(%n, %collective-permute-done.1)
}}

ENTRY %main (s: (s32[], f32[8,8])) -> f32[8,8] {{
  %s = (s32[], f32[8,8]) parameter(0)
  %while.t = (s32[], f32[8,8]) while(%s), condition=%cond, body=%tick, metadata={{op_name="jit(_train_step)/shard_map/while"}}
  %g = f32[8,8] get-tuple-element(%while.t), index=1
  ROOT %add.u = f32[8,8] add(%g, %g), metadata={{op_name="jit(_train_step)/update/add"}}
}}
"""  # noqa: E501
CATEGORIES = {
    "dot": "convolution",
    "copy": "copy",
    "while": "while",
    "add": "loop fusion",
    "collective-permute-start": "collective-permute-start",
    "collective-permute-done": "collective-permute-done",
}


_KERNEL = "regs:32 static_shared:0 dynamic_shared:0 grid:1,1,1 block:256,1,1 occ_pct:50.0"


@dataclass
class Span:
    """An executed operation, with times in microseconds; `inside` lists nested operations."""

    op: str
    start: float
    stop: float
    inside: list[Span] = field(default_factory=list)

    def walk(self) -> Iterator[Span]:
        yield self
        for each in self.inside:
            yield from each.walk()

    @property
    def own(self) -> float:
        return self.stop - self.start - sum(each.stop - each.start for each in self.inside)


def schedule() -> Schedule:
    return make_schedule("1f1b", stages=STAGES, microbatches=MICROBATCHES)


def metadata(platform: str, steps: int, seconds: float) -> Metadata:
    table = TableRecord.from_schedule(
        schedule(), np.ones((1, STAGES)), np.ones((1, STAGES), np.int64)
    )
    mesh = {"stage": STAGES, "data": 1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1}
    devices = [[0, index] for index in range(STAGES)]
    return Metadata(0, steps, "config", platform, MODULE, mesh, devices, False, table, seconds, 0.0)


def execute(
    *, slow_stage: int = -1, slow_link: int = -1, factor: float = 1.5, delay: float = 150.0
) -> list[list[Span]]:
    """Simulate one step on each stage, and return the top-level spans of each device.

    Stages advance in lockstep: a tick ends when all messages have arrived. Slots of `slow_stage`
    take longer, and messages from `slow_link` arrive later.
    """
    table, time = schedule(), 0.0
    ticks: list[list[Span]] = [[] for _ in range(STAGES)]
    for tick in range(table.num_ticks):
        ready, sent = [0.0] * STAGES, [0.0] * STAGES
        for stage in range(STAGES):
            scale = factor if stage == slow_stage else 1.0
            now = time
            spans = ticks[stage]
            spans.append(Span("copy.t", now, now := now + TICK))
            if table.forward.active[tick, stage]:
                end = now + FORWARD * scale
                spans.append(Span("while.f", now, end + 2, [Span("dot.f", now + 1, end + 1)]))
                now = end + 2
            sent[stage] = now
            spans.append(Span("collective-permute-start.1", now, now := now + 1))
            spans.append(Span("dot.h", now, now := now + HEAD))
            if table.backward.active[tick, stage]:
                end = now + BACKWARD * scale
                spans.append(Span("while.b", now, end + 2, [Span("dot.b", now + 1, end + 1)]))
                now = end + 2
            ready[stage] = now
        arrivals = []
        for stage in range(STAGES):
            sender = (stage - 1) % STAGES
            late = delay if sender == slow_link else 0.0
            # a transfer starts when both ends have reached it
            arrivals.append(max(ready[stage] + 1, sent[sender] + SEND, ready[stage] + late))
            ticks[stage].append(Span("collective-permute-done.1", ready[stage], arrivals[stage]))
        time = max(arrivals)
    return [
        [
            Span("while.t", 0.0, time, spans),
            Span("add.u", time, time + UPDATE),
        ]
        for spans in ticks
    ]


# The protocol buffer.


def _varint(value: int) -> bytes:
    out = bytearray()
    value &= (1 << 64) - 1
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _field(number: int, value: int | float | str | bytes) -> bytes:
    if isinstance(value, float):
        return _varint(number << 3 | 1) + struct.pack("<d", value)
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


class Plane:
    """An XPlane that is being written."""

    def __init__(self, number: int, name: str):
        self._head = _field(1, number) + _field(2, name)
        self._lines, self._events, self._stats = b"", {}, {}
        self._own_stats = b""

    def stat(self, name: str, value: int | float | str) -> bytes:
        number = self._stats.setdefault(name, len(self._stats) + 1)
        kind = {int: 4, float: 2, str: 5}[type(value)]
        return _field(1, number) + _field(kind, value)

    def add_stat(self, name: str, value: int | float | str) -> None:
        self._own_stats += _field(6, self.stat(name, value))

    def event(
        self,
        name: str,
        shown: str,
        start: float,
        stop: float,
        stats: Mapping[str, int | str],
        about: Mapping[str, int | str],
    ) -> bytes:
        """Return an event; `about` contains the statistics of its metadata."""
        if name not in self._events:
            listed = b"".join(_field(5, self.stat(*each)) for each in about.items())
            content = _field(2, name) + _field(4, shown) + listed
            self._events[name] = (len(self._events) + 1, content)
        number = self._events[name][0]
        listed = b"".join(_field(4, self.stat(*each)) for each in stats.items())
        times = _field(2, round(start * 1e6)) + _field(3, round((stop - start) * 1e6))
        return _field(1, number) + times + listed

    def add_line(self, number: int, name: str, events: Iterable[bytes]) -> None:
        content = _field(1, number) + _field(2, name) + _field(3, 1_000_000)
        self._lines += _field(3, content + b"".join(_field(4, each) for each in events))

    def encoded(self) -> bytes:
        events = b"".join(
            _field(4, _field(1, number) + _field(2, _field(1, number) + content))
            for number, content in self._events.values()
        )
        stats = b"".join(
            _field(5, _field(1, number) + _field(2, _field(1, number) + _field(2, name)))
            for name, number in self._stats.items()
        )
        return _field(1, self._head + self._lines + events + stats + self._own_stats)


def tpu_trace(steps: list[list[list[Span]]], period: float) -> bytes:
    """Return a trace of TPUs: `steps[i][device]` are the spans of step i, `period` apart."""
    out = b""
    for device in range(STAGES):
        plane = Plane(device + 1, f"/device:TPU:{device}")
        plane.add_stat("peak_teraflops_per_second", 459.0)
        plane.add_stat("peak_hbm_bw_gigabytes_per_second", 2765.0)
        plane.add_stat("device_type_string", "TPU v5p")
        modules, ops, numbers = [], [], []
        symbols: dict[str, int] = {}
        for number, spans in enumerate(each[device] for each in steps):
            begin = number * period
            end = begin + max(span.stop for span in spans)
            name = f"{MODULE}({PROGRAM_ID})"
            stats = {"run_id": number + 1, "program_id": PROGRAM_ID}
            modules.append(plane.event(name, MODULE, begin, end, stats, {}))
            numbers.append(plane.event(str(number), str(number), begin, end, {}, {}))
            for span in (inner for outer in spans for inner in outer.walk()):
                kind = span.op.rpartition(".")[0]
                text = f"%{span.op} = f32[8,8]{{1,0}} {kind}(f32[8,8]{{1,0}} %x)"
                about = {
                    "hlo_category": CATEGORIES[kind],
                    "program_id": PROGRAM_ID,
                    "symbol_id": symbols.setdefault(span.op, len(symbols) + 1),
                }
                times = (begin + span.start, begin + span.stop)
                ops.append(plane.event(text, span.op, *times, {}, about))
        plane.add_line(1, "Steps", numbers)
        plane.add_line(2, "XLA Modules", modules)
        plane.add_line(3, "XLA Ops", ops)
        out += plane.encoded()
    return out + Plane(99, "/host:CPU").encoded()


def gpu_trace(steps: list[list[list[Span]]], period: float) -> bytes:
    """Return a trace of GPUs: kernels on a compute stream, and transfers on another stream."""
    out = b""
    for device in range(STAGES):
        plane = Plane(device + 1, f"/device:GPU:{device}")
        plane.add_stat("compute_cap_major", 9)
        plane.add_stat("compute_cap_minor", 0)
        streams: dict[str, list[bytes]] = {"compute": [], "transfer": []}
        for number, spans in enumerate(each[device] for each in steps):
            starts: dict[str, float] = {}
            for span in (inner for outer in spans for inner in outer.walk()):
                if span.op.startswith("while"):
                    continue  # the host runs the loops
                op, begin = span.op, span.start
                if op.startswith("collective-permute-start"):
                    starts[op] = begin
                    continue
                stream = "compute"
                if op.startswith("collective-permute-done"):
                    # one kernel transfers the message, from the start to the end
                    op = op.replace("done", "start")
                    begin, stream = starts[op], "transfer"
                stats = {
                    "hlo_op": op,
                    "hlo_module": MODULE,
                    "program_id": PROGRAM_ID,
                    "correlation_id": len(streams[stream]),
                    "kernel_details": _KERNEL,
                }
                times = (number * period + begin, number * period + span.stop)
                streams[stream].append(
                    plane.event(f"kernel_{op}", f"kernel_{op}", *times, stats, {})
                )
        plane.add_line(13, "Stream #13(Compute)", streams["compute"])
        plane.add_line(14, "Stream #14(Compute)", streams["transfer"])
        out += plane.encoded()
    return out + Plane(99, "/host:CPU").encoded()
