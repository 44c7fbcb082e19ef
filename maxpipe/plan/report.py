"""Reports as text: what a compiler said, and what a plan foretells."""

from __future__ import annotations

from collections.abc import Sequence

from maxpipe.plan.advice import gib
from maxpipe.plan.compile import Report, Traffic


def compiled(report: Report) -> str:
    """A page for a terminal."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in report.mesh.items()) or "one device"
    slices = f"{report.num_slices} slices of " if report.num_slices > 1 else ""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    verdict = "fits" if report.fits else "does not fit"
    share = report.total_bytes / report.memory_bytes
    lines = [
        f"compiled for {slices}{report.topology}: {report.num_devices} devices, {mesh}",
        f"  with {versions}; traced in {report.lower_seconds:.1f} s, compiled in "
        f"{report.compile_seconds:.1f} s",
        "",
        f"memory of one device: {gib(report.total_bytes)} of {gib(report.memory_bytes)} "
        f"({share:.0%}): {verdict}",
        f"  arguments {gib(report.argument_bytes)}, temporary {gib(report.temp_bytes)}, "
        f"outputs besides {gib(report.output_bytes - report.alias_bytes)}, program "
        f"{gib(report.program_bytes)}",
    ]
    if report.host_bytes:
        lines.append(f"  in host memory {gib(report.host_bytes)}")
    held = {name: size for name, size in report.buffers.items() if size > 2**10}
    ordered = sorted(held.items(), key=lambda item: -item[1])
    lines.append("  of the temporary: " + ", ".join(f"{name} {gib(s)}" for name, s in ordered))
    lines += ["", f"operations: {report.flops / 1e12:.4g} TFLOP in a step, the model needs "]
    lines[-1] += f"{report.model_flops / 1e12:.4g} ({report.flops / report.model_flops:.2f} x)"
    if report.cycles:
        busy = f"{report.cycles / 1e9:.3g} Gcycles"
        lines.append(f"compute: {busy} by the compiler's estimate, {report.seconds:.3g} s")
    lines += ["", *_table(report.collectives)]
    if report.copies:
        lines.append(f"copies of whole buffers inside loops: {report.copies}")
    if report.unknown_loops:
        lines.append(f"loops counted once: {', '.join(report.unknown_loops)}")
    return "\n".join(lines)


def _table(found: Sequence[Traffic]) -> list[str]:
    if not found:
        return ["no collectives"]
    head = ("collective", "axes", "link", "times", "sent", "asynchronous", "behind")
    rows = [
        (
            each.kind,
            each.axes,
            each.link,
            f"{each.count:.0f}",
            gib(each.total_bytes),
            "yes" if each.asynchronous else "no",
            f"{each.cycles_behind / 1e6:.0f} Mcycles" if each.cycles_behind else "-",
        )
        for each in found
    ]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]
