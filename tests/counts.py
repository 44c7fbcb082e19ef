"""Print the size of the package, its layers, and the files of three journeys through it.

python tests/counts.py
"""

from __future__ import annotations

import ast

from test_architecture import LAYERS, MODULES, PACKAGE, ROOT, sources, upward_imports

JOURNEYS = {
    "main loop": ["cli", "train.loop", "train.session", "train.set_up", "train.run"],
    "train step": [
        "step.build",
        "step.step",
        "step.state",
        "pipeline.program",
        "pipeline.engine",
    ],
    "Llama, from config to logits": [
        "models.llama",
        "models.family",
        "nn.decoder",
        "nn.module",
        "nn.attention_layer",
        "nn.mlp",
    ],
}
"""Modules to read in order to understand a subject."""


def lines(module: str) -> int:
    """Return the number of lines of a module."""
    return len(sources()[module].read_text(encoding="utf-8").splitlines())


def functions() -> list[int]:
    """Return the number of lines of each function of the package."""
    nodes = (node for path in sources().values() for node in ast.walk(ast.parse(path.read_text())))
    return [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def main() -> None:
    """Print the counts as a Markdown table."""
    sizes = sorted(functions())
    print(f"{len(sources())} modules, {len(sources()) - len(MODULES)} of them empty `__init__.py`")
    print(f"{sum(map(lines, sources()))} lines, {len(sizes)} functions, ", end="")
    print(f"median {sizes[len(sizes) // 2]} lines, 90% at most {sizes[len(sizes) * 9 // 10]}")
    print(f"{len(upward_imports())} imports of a higher folder, in {len(LAYERS)} layers\n")
    print("| folder | modules | lines |\n|---|---|---|")
    for folder in sorted(path for path in PACKAGE.iterdir() if (path / "__init__.py").exists()):
        inside = [name for name, path in sources().items() if folder in path.parents]
        print(f"| {folder.relative_to(ROOT)} | {len(inside)} | {sum(map(lines, inside))} |")
    print("\n| to understand | modules | lines |\n|---|---|---|")
    for name, modules in JOURNEYS.items():
        total = sum(lines(f"maxpipe.{module}") for module in modules)
        print(f"| {name} | {len(modules)} | {total} |")


if __name__ == "__main__":
    main()
