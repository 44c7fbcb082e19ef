"""Format compile reports, plans and search results as text or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from maxpipe.config.schema import Config
from maxpipe.config.sections.train import BatchRamp, RampStage, total_steps
from maxpipe.hardware import Hardware
from maxpipe.io.formatting import format_count, format_duration, format_si, pluralize
from maxpipe.models.count import active_params, num_params, num_trained, total
from maxpipe.models.resolve_auto import words
from maxpipe.optim.state_spec import saved_bytes
from maxpipe.parallel.axes import ContextAttention
from maxpipe.planner import instruction_costs
from maxpipe.planner.memory import REFERENCE, prologue_bytes
from maxpipe.planner.memory_terms import TERMS, gib, verdict
from maxpipe.planner.search import (
    NUM_RESULTS,
    Candidate,
    SearchResult,
    suggest_changes,
)
from maxpipe.planner.sizes import Sizes
from maxpipe.planner.topology import Topology

if TYPE_CHECKING:
    from maxpipe.planner.calibrate import Measurements
    from maxpipe.planner.compile import CollectiveTraffic, CompileReport
    from maxpipe.planner.rerank import RankedCandidate


def format_compile_report(report: CompileReport, num_entries: int = 0) -> str:
    """Format a compile report for a terminal, including the `num_entries` most expensive
    operations.
    """
    mesh = " x ".join(f"{axis} {size}" for axis, size in report.mesh.items()) or "one device"
    mesh += f", attention {report.attention}"
    slices = f"{report.num_slices} slices of " if report.num_slices > 1 else ""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    fits = "fits" if report.fits else "does not fit"
    share = report.total_bytes / report.memory_bytes
    lines = [
        f"compiled for {slices}{report.topology}: {pluralize(report.num_devices, 'device')}, "
        f"{mesh}",
        f"  with {versions}; traced in {report.lower_seconds:.1f} s, compiled in "
        f"{report.compile_seconds:.1f} s",
        "",
        f"memory of one device: {gib(report.total_bytes)} of {gib(report.memory_bytes)} "
        f"({share:.0%}): {fits}",
        f"  arguments {gib(report.argument_bytes)}, temporary {gib(report.working_bytes)}, "
        f"new outputs {gib(report.output_bytes - report.alias_bytes)}, program "
        f"{gib(report.program_bytes)}",
    ]
    if report.beside_bytes:
        about = TERMS[REFERENCE].about
        lines.append(f"  outside the step (calculated): {gib(report.beside_bytes)}, {about}")
    if report.host_bytes:
        lines.append(f"  in host memory {gib(report.host_bytes)}")
    held = {name: size for name, size in report.buffers.items() if size > 2**10}
    ordered = sorted(held.items(), key=lambda item: -item[1])
    lines.append("  temporary buffers: " + ", ".join(f"{name} {gib(s)}" for name, s in ordered))
    lines += ["", f"operations: {format_si(report.flops, 'FLOP')} per step; the model requires "]
    lines[-1] += (
        f"{format_si(report.model_flops, 'FLOP')} ({report.flops / report.model_flops:.2f} x)"
    )
    if report.cycles:
        busy = f"{report.cycles / 1e9:.3g} Gcycles"
        lines.append(f"compute: {busy}, {format_duration(report.seconds)} (compiler estimate)")
        if report.kernel_flops:
            lines.append(
                "  including kernels without an estimate: "
                f"{format_si(report.kernel_flops, 'FLOP')}, expected to run at "
                f"{report.kernel_efficiency:.0%} of the peak"
            )
    lines += ["", *_table([*report.collectives, *report.transfers])]
    if report.transfers and report.seconds:
        lines += _hidden_transfers(report)
    if report.copies:
        lines.append(f"copies of complete buffers inside loops: {report.copies}")
    if report.unknown_loops:
        lines.append(f"loops without trip counts, counted once: {', '.join(report.unknown_loops)}")
    if num_entries:
        lines += ["", *instruction_costs.table(report.entries, num_entries)]
    if report.unknown:
        lines += ["", "unknown without a GPU:", *(f"  {each}" for each in report.unknown)]
    return "\n".join(lines)


def _table(traffic: Sequence[CollectiveTraffic]) -> list[str]:
    if not traffic:
        return ["no collectives"]
    head = ("collective", "axes", "link", "times", "sent", "asynchronous", "overlap")
    rows = [
        (
            entry.kind,
            entry.axes,
            entry.link,
            f"{entry.count:.0f}",
            gib(entry.total_bytes),
            "yes" if entry.asynchronous else "no",
            _overlapped_work(entry),
        )
        for entry in traffic
    ]
    return instruction_costs.align_columns(head, rows)


def _hidden_transfers(report: CompileReport) -> list[str]:
    """Return the host-link bandwidth at which transfers fully overlap with compute."""
    lines = []
    for transfer in report.transfers:
        if meanwhile := transfer.cycles_behind / report.cycles * report.seconds:
            rate = transfer.total_bytes / meanwhile / 1e9
            work = f"{gib(transfer.total_bytes)} overlapped with {meanwhile:.3g} s of compute"
            lines.append(f"  {transfer.kind}: {work}, fully hidden at {rate:.3g} GB/s or more")
    return lines


def _overlapped_work(traffic: CollectiveTraffic) -> str:
    """Format the overlapped compute: cycles if the compiler estimates them, otherwise FLOPs."""
    if traffic.cycles_behind:
        return f"{traffic.cycles_behind / 1e6:.0f} Mcycles"
    return format_si(traffic.flops_behind, "FLOP") if traffic.flops_behind else "-"


def plan_values(candidate: Candidate, hardware: Hardware) -> dict[str, Any]:
    """Return a plan as JSON-compatible data."""
    config, schedule = candidate.config, candidate.schedule
    sizes = Sizes(config).on_platform(hardware.platform)
    method = ContextAttention.from_config(config.mesh, sizes.mesh.axes)
    chosen = words(config.model, hardware.platform, config.train.sequence_length, method)
    parameters, trained = num_params(sizes.model), num_trained(sizes.model)
    tokens = config.train.batch_size * config.train.sequence_length
    trained_only = config.adapter.rank > 0
    dtype = config.model.param_dtype
    saved = partial(saved_bytes, config.optim, param_dtype=dtype, trained_only=trained_only)
    per_stage = []
    for stage in range(sizes.mesh.stages):
        chunks = [schedule.ring.chunk(stage, repeat) for repeat in range(config.pipeline.repeats)]
        layers = [sizes.layers.partition[chunk] for chunk in chunks]
        deepest = int(schedule.stash_depth()[:, stage].max())
        per_stage.append({"chunks": chunks, "layers": sum(layers), "chunks_in_flight": deepest})
    return {
        "hardware": hardware.name,
        "measured": hardware.measured,
        "num_devices": sizes.mesh.num_devices,
        "num_slices": sizes.mesh.num_slices,
        "layout": candidate.layout_keys,
        "parameters": parameters,
        "active_parameters": active_params(sizes.model),
        "trained_parameters": trained,
        "notes": [
            *sizes.model.notes,
            *([f"attention: {chosen}"] if chosen else []),
            *_host_note(candidate, hardware),
        ],
        "tokens_per_step": tokens,
        "steps": total_steps(config.train),
        "ramp": _ramp(config),
        "flops_per_step": candidate.cost.model_flops * sizes.mesh.num_devices,
        "checkpoint_bytes": int(total(sizes.model, saved)),
        "memory_bytes": hardware.memory_bytes,
        "argument_bytes": candidate.memory.arguments,
        "working_bytes": candidate.memory.temporary,
        "total_bytes": candidate.memory.total,
        "fits": verdict(candidate.memory.total, hardware.memory_bytes) == "fits",
        "terms": dict(candidate.memory.largest),
        "host_bytes": candidate.memory.host,
        "stages": per_stage,
        "outside": {
            "layers": config.pipeline.prologue_layers,
            "bytes": prologue_bytes(sizes, schedule),
            "seconds": candidate.cost.parts.get("outside", 0.0),
        },
        "ticks": schedule.num_ticks,
        "bubble": schedule.idle_fraction(),
        "traffic": [
            {"axis": axis, "link": link, "bytes": sent}
            for (axis, link), sent in candidate.cost.traffic.items()
        ],
        "seconds": candidate.cost.seconds,
        "parts": candidate.cost.parts,
        "mfu": candidate.cost.mfu,
        "tokens_per_second": tokens / candidate.cost.seconds,
    }


def _host_note(candidate: Candidate, hardware: Hardware) -> list[str]:
    """Return a note if the predicted time excludes copies from and to host memory."""
    copies = any(link == "host" for _, link in candidate.cost.traffic)
    if not copies or hardware.host_gb_per_second:
        return []
    return ["the step time excludes copies from and to host memory: no bandwidth is published"]


def forecast_values(candidate: Candidate, topology: Topology) -> tuple[dict[str, Any], list[str]]:
    """Return the plan as JSON-compatible data, and the smallest config changes that would make the
    plan fit in memory, if any.
    """
    values = plan_values(candidate, topology.hardware)
    return values, [] if values["fits"] else suggest_changes(candidate, topology)


def _ramp(config: Config) -> list[dict[str, int]]:
    """Return the phases of `train.batch_ramp` and the steps after the ramp, if there is a ramp."""
    train, ramp = config.train, BatchRamp.from_config(config.train)
    last = RampStage(ramp.batch_size, max(0, total_steps(train) - ramp.steps))
    return [
        {
            "rows": rows,
            "steps": steps,
            "tokens": rows * steps * train.sequence_length,
            "microbatches": rows * config.pipeline.microbatches // train.batch_size,
        }
        for rows, steps in ((*ramp.stages, last) if config.train.batch_ramp else ())
    ]


def format_plan(values: dict[str, Any], nearest: Sequence[str] = ()) -> str:
    """Format the result of `plan_values` for a terminal.

    `nearest` lists the smallest config changes that make the plan fit in memory.
    """
    layout = " ".join(f"{key}={value}" for key, value in values["layout"].items())
    slices = f" in {values['num_slices']} slices" if values["num_slices"] > 1 else ""
    measured = f", measured {values['measured']}" if values["measured"] else ""
    parts = (("active_parameters", "per token"), ("trained_parameters", "trained"))
    fewer = ", ".join(
        f"{format_count(values[name])} {words}"
        for name, words in parts
        if values[name] < values["parameters"]
    )
    of_them = f" ({fewer})" if fewer else ""
    share = values["total_bytes"] / values["memory_bytes"]
    fits = verdict(values["total_bytes"], values["memory_bytes"])
    lines = [
        f"{pluralize(values['num_devices'], 'device')} of {values['hardware']}{slices}{measured}",
        f"  {layout or 'one device'}",
        "",
        f"{format_count(values['parameters'])} parameters{of_them}, "
        f"{values['tokens_per_step']:,} tokens and "
        f"{format_si(values['flops_per_step'], 'FLOP')} per step, "
        f"{gib(values['checkpoint_bytes'])} per checkpoint",
        *(f"  {note}" for note in values["notes"]),
        *(
            f"  {pluralize(stage['steps'], 'step')} with batches of "
            f"{pluralize(stage['rows'], 'sequence')}, "
            f"{pluralize(stage['microbatches'], 'microbatch')}: {stage['tokens']:,} tokens"
            for stage in values["ramp"]
        ),
        "",
        f"memory of one device: {gib(values['total_bytes'])} of {gib(values['memory_bytes'])} "
        f"({share:.0%}): {fits}",
    ]
    lines += [f"  {gib(size):>10}  {TERMS[name].about}" for name, size in values["terms"].items()]
    if values["host_bytes"]:
        lines.append(f"  host memory {gib(values['host_bytes'])}")
    lines += [f"  fits with {change}" for change in nearest]
    stages = values["stages"]
    layers = ", ".join(str(stage["layers"]) for stage in stages[:16])
    depth = ", ".join(str(stage["chunks_in_flight"]) for stage in stages[:16])
    more = ", ..." if len(stages) > 16 else ""
    lines += [
        "",
        f"stages: layers {layers}{more}; chunks in flight {depth}{more}",
        *_prologue_line(values),
        f"ticks: {values['ticks']}, stages idle for {values['bubble']:.1%} of them",
        "",
        f"step: {format_duration(values['seconds'])} predicted, "
        f"{values['tokens_per_second']:,.0f} tokens/s, MFU {values['mfu']:.1%}",
        "  "
        + ", ".join(
            f"{name} {seconds / values['seconds']:.1%}"
            for name, seconds in sorted(values["parts"].items(), key=lambda item: -item[1])
        ),
        "sent per device and step: "
        + (
            ", ".join(
                f"{each['axis']} ({each['link']}) {gib(each['bytes'])}"
                for each in values["traffic"]
            )
            or "nothing"
        ),
    ]
    return "\n".join(lines)


def _prologue_line(values: dict[str, Any]) -> list[str]:
    """Return a line that describes the prologue layers, if any."""
    outside = values["outside"]
    if not outside["layers"]:
        return []
    return [
        f"prologue on every stage: the first {pluralize(outside['layers'], 'layer')}, "
        f"{gib(outside['bytes'])} ({outside['bytes'] / values['total_bytes']:.1%}) of the memory "
        f"and {outside['seconds'] / values['seconds']:.1%} of the step"
    ]


def search_values(
    found: SearchResult,
    hardware: Hardware,
    compiled: Sequence[RankedCandidate] = (),
    measured: Sequence[RankedCandidate] = (),
) -> dict[str, Any]:
    """Return a search result as JSON-compatible data, including the rankings based on
    compilation and on measurement.
    """
    by_compiler = [
        plan_values(ranked.candidate, hardware)
        | {
            "compiled_fits": ranked.fits,
            "compiled_seconds": ranked.compiled_seconds,
            "compiled_mfu": None if ranked.compiled_seconds is None else ranked.mfu,
            "report": ranked.report and ranked.report.to_json(),
        }
        for ranked in compiled
    ]
    by_devices = [
        plan_values(ranked.candidate, hardware)
        | {"measured_seconds": ranked.measured, "measured_mfu": ranked.mfu}
        for ranked in measured
    ]
    return {
        "considered": found.considered,
        "computed": found.computed,
        "too_large": found.too_large,
        "best": [plan_values(candidate, hardware) for candidate in found.best[:NUM_RESULTS]],
        "compiled": by_compiler,
        "measured": by_devices,
    }


def format_ranking(found: Sequence[RankedCandidate], *, ran: bool = False) -> str:
    """Format the best layouts, ranked by compiler estimate or, if `ran` is set, by measured
    time.
    """
    lines = ["", "measured:" if ran else "compiler estimates:"]
    if not ran and all(each.compiled_seconds is None for each in found):
        lines[-1] = (
            "compiled (the compiler has no time estimates for these devices, so layouts that fit "
            "keep their predicted order):"
        )
    for rank, each in enumerate(found, 1):
        cost = each.candidate.cost
        forecast = f"{format_duration(cost.seconds)}, MFU {cost.mfu:.1%} predicted"
        lines += [
            f"{rank:>2}. {_verdict(each)}",
            f"    {forecast}, {gib(each.candidate.memory.total)} predicted",
            f"    {each.candidate.overrides}",
        ]
    return "\n".join(lines)


def _verdict(ranked: RankedCandidate) -> str:
    """Format the measured time of a layout, or its compile report."""
    if ranked.measured is not None:
        return f"{format_duration(ranked.measured)}, MFU {ranked.mfu:.1%}"
    if (report := ranked.report) is None:
        return "does not fit"
    fits = f"{gib(report.total_bytes)}: {'fits' if ranked.fits else 'does not fit'}"
    sent = sum(traffic.total_bytes for traffic in report.collectives)
    exposed = sent * (1 - report.asynchronous_share)
    if (seconds := ranked.compiled_seconds) is not None:
        shares = f"{report.exposed_seconds / seconds:.1%} exposed communication"
        return f"{format_duration(seconds)}, MFU {ranked.mfu:.1%}, {shares}, {fits}"
    operations = f"{report.flops / report.model_flops:.2f} x the model FLOPs"
    return f"{fits}, {operations}, {gib(exposed)} of {gib(sent)} sent synchronously"


def format_calibration(found: Measurements, before: Hardware, after: Hardware) -> str:
    """Format the measured times, and the hardware parameters before and after calibration."""
    times = {
        "layer forward": found.forward,
        "layer input gradient": found.input_grad,
        "layer weight gradients": found.weight_grad,
        "overhead of deferring weight gradients": found.deferred,
        "recomputation with remat=names": found.names_recomputed,
        "saved activations with remat=none": found.none_recomputed,
        "layer forward, other devices idle": found.forward_alone,
        "message to the next device": found.hop,
        "all-gather of layer weights": found.gather,
        "gather or reduce-scatter of sharded tokens": found.tokens,
        "reduction of layer gradients": found.scatter,
        "expert all-to-all of a layer": found.exchange,
        "collective latency": found.latency,
        "tick overhead": after.tick_us * 1e-6,
    }
    lines = [f"{after.name}, measured {after.measured}", ""]
    lines += [f"{name:<43} {1e6 * taken:12,.1f} us" for name, taken in times.items() if taken]
    lines += ["", f"{'figure':<34} {'published':>12} {'measured':>12}"]
    for name in FIGURES:
        old, new = getattr(before, name), getattr(after, name)
        lines.append(f"{name:<34} {old:12.4g} {new:12.4g}")
    return "\n".join(lines)


FIGURES = (
    "matmul_efficiency",
    "memory_gb_per_second",
    "input_grad_cost",
    "weight_grad_cost",
    "deferred_cost",
    "names_recomputed",
    "none_recomputed",
    "fastest_mib",
    "growth_above",
    "growth_below",
    "split_cost",
    "ring_cost",
    "link_gb_per_second",
    "exchange_rate",
    "tokens_rate",
    "latency_us",
    "tick_us",
    "shared_by",
    "fresh_gb_per_second",
)
"""Hardware parameters that a calibration replaces."""


def format_search(found: SearchResult, hardware: Hardware) -> str:
    """Format each of the best layouts on two lines, including the largest components of its step
    time.
    """
    some = found.computed < found.considered
    computed = f"{found.computed:,} evaluated, " if some else ""
    lines = [
        f"{found.considered:,} layouts, {computed}{found.too_large:,} do not fit in "
        f"{hardware.memory_gib:g} GiB",
        "",
    ]
    for rank, candidate in enumerate(found.best[:NUM_RESULTS], 1):
        parts = sorted(candidate.cost.parts.items(), key=lambda item: -item[1])
        spent = ", ".join(f"{name} {s / candidate.cost.seconds:.0%}" for name, s in parts[:4])
        lines += [
            f"{rank:>2}. {format_duration(candidate.cost.seconds)}, MFU {candidate.cost.mfu:.1%}, "
            f"{gib(candidate.memory.total)}: {spent}",
            f"    {candidate.overrides}",
        ]
    return "\n".join(lines)
