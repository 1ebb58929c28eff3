"""Writes into pages what other files know: tables of flags, files of the root."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
_INCLUDE = re.compile(r"<!-- include: (\w+\.md) -->")
_FLAGS = re.compile(r"<!-- flags: ([\w.]+) -->")
_REPLACED = "<!-- replaced -->"
_FLAG = re.compile(r"^  --(\w+): (.*?)\n      default: (.*?)$", re.MULTILINE | re.DOTALL)
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+((?!docs/)[\w./-]+)\)")
# Files of the root that have a page of their own.
_PAGES = {
    "BENCHMARKS.md": "reference/benchmarks.md",
    "CHANGELOG.md": "reference/changelog.md",
    "CONFORMANCE.md": "reference/conformance.md",
    "CONTRIBUTING.md": "reference/contributing.md",
}


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Fills in the tables of flags, and turns links out of `docs/` into what a site can have."""
    up = "../" * page.file.src_uri.count("/")
    markdown = _INCLUDE.sub(lambda found: (ROOT / found[1]).read_text(), markdown)
    markdown = _FLAGS.sub(lambda found: table_of_flags(found[1]), markdown)
    if _REPLACED in markdown:
        markdown = markdown.replace(_REPLACED, table_of_replacements())
    markdown = re.sub(r"\]\(docs/", f"]({up}", markdown)
    for name, target in _PAGES.items():
        markdown = re.sub(rf"\]\((?:\.\./)*{re.escape(name)}\)", f"]({up}{target})", markdown)
    # Files of the repository are no pages of the site: their paths are told.
    return _OUTSIDE.sub(_path_instead, markdown)


def on_page_content(html: str, page, config, files) -> str:
    """Keeps short code on one line: a flag is not broken after its dashes."""
    return re.sub(r"<code>([^<]{1,44})</code>", r'<code class="short">\1</code>', html)


def _path_instead(found):
    if (ROOT / "docs" / found[2]).exists():
        return found[0]
    label = found[1].strip("`")
    return f"`{found[2]}`" if label in found[2] else f"{found[1]} (`{found[2]}`)"


def table_of_replacements() -> str:
    """Returns a table of all that is replaced in Keras and TensorFlow, as the package has it."""
    from tfmulti.keras_compat import TABLE
    from tfmulti.keras_compat.table import TRIED

    tried = ", ".join(f"{name} {low} to {high}" for name, (low, high) in TRIED.items())
    rows = [
        f"| tried with {tried} | what it repairs | where it acts | test |",
        "|---|---|---|---|",
    ]
    for entry in TABLE:
        where = entry.applies_to.__doc__ if entry.applies_to else f"within `{entry.within}`"
        cells = [f"`{entry.target}`", entry.repairs, where.rstrip("."), f"`{entry.test}`"]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def table_of_flags(module: str) -> str:
    """Returns a table of all flags of an entry point, as its `--help` tells them."""
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    rows = ["| flag | default | what |", "|---|---|---|"]
    for name, text, default in _FLAG.findall(done.stdout):
        text = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
        rows.append(f"| `--{name}` | `{default}` | {text} |")
    return "\n".join(rows)
