"""Makes `docs/images/train.png`: what a terminal shows of a real run of `make train`'s command.

    python docs/make_picture.py [FILE [COMMAND ...]]

Runs the command in a terminal of its own (pty), follows what it writes as a terminal does (pyte),
and has headless Chromium draw the last screen. Needs the extra `docs`, and Chromium.
"""

from __future__ import annotations

import os
import pty
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pyte
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).parent.parent
_PICTURE = ROOT / "docs" / "images" / "train.png"
_COLUMNS, _LINES = 88, 400
_SHOWN = 34
_COMMAND = ("python", "-m", "tfmulti.train", "--strategy", "mirrored", "--workdir", "runs/default")
# As rich's own, without its fonts, which come from the network.
_SVG = """<svg viewBox="0 0 {terminal_width} {terminal_height}" width="{terminal_width}"
 height="{terminal_height}" xmlns="http://www.w3.org/2000/svg">
<style>.{unique_id}-matrix {{ font-family: 'DejaVu Sans Mono', monospace;
 font-size: {char_height}px;
 line-height: {line_height}px; font-variant-east-asian: full-width; }}
{styles}</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>
{lines}</defs>
<g clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g></svg>"""
_MARGIN = 16
_PAGE = """<body style="margin:0;background:transparent"><div style="background:#1f2430;
border-radius:10px;padding:{margin}px;width:{width}px;height:{height}px">{svg}</div></body>"""


def run_in_terminal(command, folder) -> pyte.Screen:
    """Runs a command in a terminal; returns its last screen. Its own exit code must be 0."""
    screen = pyte.Screen(_COLUMNS, _LINES)
    stream = pyte.ByteStream(screen)
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.environ.update(TERM="xterm-256color", PYTHONPATH=str(ROOT), COLORTERM="truecolor")
        os.environ.update(COLUMNS=str(_COLUMNS), LINES="50")
        os.execv(command[0], command)
    _set_size(terminal)
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:
            break
        if not data:
            break
        stream.feed(data)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        raise RuntimeError(f"The command must end well. Received: exit code {code}.")
    return screen


def _set_size(terminal):
    import fcntl
    import termios

    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, _COLUMNS, 0, 0))


def texts_of(screen: pyte.Screen) -> list[Text]:
    """Returns the lines of a screen as rich's texts, with their colours."""
    lines = []
    for y in range(screen.cursor.y + 1):
        line = Text()
        for x in range(_COLUMNS):
            cell = screen.buffer[y][x]
            line.append(cell.data, Style(color=_color(cell.fg), bold=cell.bold))
        line.rstrip()
        lines.append(line)
    while lines and not lines[-1].plain:
        lines.pop()
    return lines


def _color(name):
    if name == "default":
        return None
    if len(name) == 6 and all(c in "0123456789abcdef" for c in name):
        return f"#{name}"
    return name.replace("brown", "yellow").replace("bright", "bright_")


def draw(lines: list[Text], picture: Path) -> None:
    """Draws lines into a PNG, twice as fine as a screen."""
    with open(os.devnull, "w") as nowhere:
        console = Console(width=_COLUMNS, record=True, file=nowhere)
    with tempfile.TemporaryDirectory() as folder:
        console.file = open(os.devnull, "w")  # noqa: SIM115
        for line in lines:
            console.print(line, no_wrap=True, crop=True)
        svg = console.export_svg(title="", theme=MONOKAI, code_format=_SVG)
        width, height = (
            round(float(part)) for part in svg.split('viewBox="0 0 ')[1].split('"')[0].split()
        )
        page = Path(folder) / "screen.html"
        page.write_text(_PAGE.format(svg=svg, margin=_MARGIN, width=width, height=height))
        chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))))
        subprocess.run(
            [
                *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
                *("--default-background-color=00000000", "--force-device-scale-factor=1.25"),
                f"--window-size={width + 2 * _MARGIN},{height + 2 * _MARGIN}",
                f"--screenshot={picture}",
                page.as_uri(),
            ],
            check=True,
            capture_output=True,
        )


def shorten(lines: list[Text]) -> list[Text]:
    """Keeps the beginning and the end of a long screen, and says what was left out."""
    if len(lines) <= _SHOWN:
        return lines
    begin = _SHOWN // 3
    end = _SHOWN - begin - 1
    left_out = Text(f"... {len(lines) - begin - end} lines ...", Style(dim=True))
    return [*lines[:begin], left_out, *lines[-end:]]


def main() -> int:
    """Runs, draws; returns the exit code."""
    picture = Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else _PICTURE
    command = tuple(sys.argv[2:]) or _COMMAND
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable if word == "python" else word for word in command]
        screen = run_in_terminal(words, folder)
    lines = [Text(f"$ {' '.join(command)}", Style(bold=True)), *shorten(texts_of(screen))]
    picture.parent.mkdir(parents=True, exist_ok=True)
    draw(lines, picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
