"""Write the long description of the package: README.md with links that work on a package index.

A package index does not resolve relative links. If `[project.urls]` of pyproject.toml has `Source`,
relative links and pictures become links into that repository. Without `Source`, the text of a link
is kept without its target, and pictures are left out.
"""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?!https?:|#)(?P<target>[^)\s]+)\)")


def description(readme: str, source: str) -> str:
    """Return a README for a package index, given the URL of the repository or an empty string."""

    def absolute(link: re.Match[str]) -> str:
        if not source:
            return "" if link["picture"] else link["text"]
        kind = "raw" if link["picture"] else "blob"
        return f"{link['picture']}[{link['text']}]({source}/{kind}/main/{link['target']})"

    return LINK.sub(absolute, readme)


class CustomMetadataHook(MetadataHookInterface):
    """Set the field `readme` while the package is built."""

    def update(self, metadata: dict) -> None:
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        source = metadata.get("urls", {}).get("Source", "").rstrip("/")
        text = description(readme, source)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
