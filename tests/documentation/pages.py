"""The pages, their fenced blocks, and the hidden words that say how a block is tried.

A block's words stand in an HTML comment on the line before it:

    <!-- test: alone -->            a Python block runs in a process of its own
    <!-- test: workers 2 -->        ... on so many workers, started by the launcher
    <!-- test: checked only: why --> it is read and checked, not run
    <!-- test: together -->         the commands of a shell block run at the same time
    <!-- test: file NAME -->        the block is written to a file for those after it
    <!-- test: program NAME -->     ... and a Python block is run by their commands alone

    <!-- test: hidden file NAME     ... and one that readers do not see
    code
    -->
    <!-- test: setup                hidden Python, run where it stands
    code
    -->

Python blocks of a page run in one process, in their order.
"""

import dataclasses
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHECKED_ONLY = "checked only: "
_WORDS = re.compile(r"<!-- test: (.*?) *-->", re.DOTALL)
# Commands that are indented, as the READMEs of experiments have them.
_PROGRAM = r"(?:[A-Z_]+=\S+ )?(?:python|make|mpiexec|srun|sbatch|pip|torchrun|kubectl) "
_INDENTED = re.compile(rf"(?<=\n\n)((?:    {_PROGRAM}.*\n(?:     .*\n)*)+)(?=\n|\Z)")
_FENCE = re.compile(r"^( *)```([a-z]*)[^\n]*\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block, or a hidden one.

    Attributes:
        page: The page's path from the root.
        line: The number of its first line, from 1.
        language: `python`, `sh` and so on.
        text: What it holds.
        words: How it is tried, or "".
    """

    page: str
    line: int
    language: str
    text: str
    words: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_checked_only(self) -> bool:
        return self.words.startswith(CHECKED_ONLY)

    @property
    def file(self) -> str | None:
        found = re.fullmatch(r"(?:hidden file|file|program) (\S+)", self.words)
        return found[1] if found else None


def page_names() -> list[str]:
    """The README, what stands beside it, and every page of `docs/`."""
    beside = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "tf_config/README.md"]
    beside += ["benchmarks/README.md"]
    beside += [str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("experiments/*/README.md"))]
    return beside + [str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("docs/**/*.md"))]


@functools.cache
def read(page: str) -> str:
    return (ROOT / page).read_text()


@functools.cache
def blocks_of(page: str) -> tuple[Block, ...]:
    """All blocks of a page in their order, hidden ones too."""
    text = read(page)
    found = [(m.start(), m.end(), m[2], _outdent(m[3], m[1]), "") for m in _FENCE.finditer(text)]
    inside = [(start, end) for start, end, *_ in found]
    for lines in _INDENTED.finditer(text):
        if not any(start < lines.start() < end for start, end in inside):
            commands = _outdent(lines[1], "    ")
            found.append((lines.start(), lines.end(), "sh", commands, f"{CHECKED_ONLY}indented"))
    blocks = []
    for comment in _WORDS.finditer(text):
        if any(start < comment.start() < end for start, end in inside):
            continue
        words, _, code = comment[1].partition("\n")
        if code:
            language = "python" if words == "setup" or words.endswith(".py") else "text"
            found.append((comment.start(), comment.end(), language, code + "\n", words))
            continue
        at = [i for i, (start, *_) in enumerate(found) if text[comment.end() : start].isspace()]
        assert len(at) == 1, f"{page}: `{comment[0]}` must stand right before a block"
        found[at[0]] = (*found[at[0]][:4], words)
    for start, _, language, content, words in sorted(found):
        line = text.count("\n", 0, start) + 1
        blocks.append(Block(page, line, language, content, words))
    return tuple(blocks)


def _outdent(text, indent):
    return "".join(line.removeprefix(indent) for line in text.splitlines(keepends=True))


def all_blocks(*languages: str) -> list[Block]:
    return [b for page in page_names() for b in blocks_of(page) if b.language in languages]


def prose_of(page: str) -> str:
    """A page without its blocks and comments."""
    text = _FENCE.sub("", read(page))
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


def spans_of(page: str) -> list[str]:
    """What stands in `backticks`."""
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose_of(page))


def links_of(page: str) -> list[str]:
    """The targets of all links and pictures."""
    prose = re.sub(r"(?<!`)`[^`\n]+`(?!`)", "", prose_of(page))
    return re.findall(r"\]\(([^()\s]+)\)", prose) + re.findall(r'<img [^>]*src="([^"]+)"', prose)


def anchors_of(page: str) -> set[str]:
    """The headings of a page as links name them."""
    headings = re.findall(r"^#+ +(.+?)(?: *\{#([\w-]+)\})?$", prose_of(page), re.MULTILINE)
    return {own or _slug(title) for title, own in headings}


def _slug(title):
    title = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", title)
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title.strip().lower()))
