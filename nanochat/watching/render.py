"""Status and lists as text: aligned and plain, or with colours and rules for a terminal."""

from __future__ import annotations

import io
import shutil
import textwrap
from collections.abc import Sequence

from nanochat.watching.status import Status

#: Widest a value is written, so that eyes find the next line.
WIDTH = 120
_STATE_COLOURS: dict[str, str] = {
    "running": "green",
    "finished": "bright_blue",
    "stopped": "yellow",
    "died": "bold red",
    "imported": "default",
    "unknown": "yellow",
}


def render_status(status: Status, *, colours: bool) -> str:
    """The status as lines of label and value, by section."""
    return _coloured_status(status) if colours else _plain_status(status)


def _plain_status(status: Status) -> str:
    labels = [line.label for lines in status.sections.values() for line in lines]
    indent = max(map(len, labels)) + 2
    blocks = [status.title]
    for lines in status.sections.values():
        rows = []
        for line in lines:
            value = [part for row in line.value.split("\n") for part in _wrapped(row, WIDTH - indent)]
            rows.append(f"{line.label:<{indent}}{value[0]}")
            rows += [" " * indent + part for part in value[1:]]
        blocks.append("\n".join(rows))
    return "\n\n".join(blocks)


def _wrapped(row: str, width: int) -> list[str]:
    hang = "  " if row.startswith("- ") else ""
    return textwrap.wrap(row, width, subsequent_indent=hang, break_on_hyphens=False, break_long_words=False) or [""]


def _coloured_status(status: Status) -> str:
    from rich.table import Table
    from rich.text import Text

    colour = _STATE_COLOURS[status.state.name]
    pieces: list[object] = [Text.assemble((status.title, "bold"), "  ", (status.state.name, colour))]
    labels = max(len(line.label) for lines in status.sections.values() for line in lines)
    for lines in status.sections.values():
        table = Table.grid(padding=(0, 2))
        table.add_column(style="cyan", width=labels, no_wrap=True)
        table.add_column()
        for line in lines:
            table.add_row(line.label, Text(line.value, style=_style(line.label, line.value, colour)))
        pieces += [Text(), table]
    return _printed(pieces)


def _style(label: str, value: str, state_colour: str) -> str:
    if label == "state":
        return state_colour
    if (label == "looks wrong" and value != "nothing") or (label == "not finite" and value != "no step"):
        return "yellow"
    if value.startswith("n/a"):
        return "dim"
    return "bold" if label in ("step", "left", "validation", "speed") else ""


def render_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, colours: bool, right: frozenset[str]) -> str:
    """A table; ``right`` names the columns of numbers. Nothing is cut off, however narrow the terminal is."""
    widths = [max(len(cell) for cell in cells) for cells in zip(columns, *rows, strict=True)]
    lines = []
    for cells in (columns, *rows):
        padded = [
            f"{cell:>{width}}" if name in right else f"{cell:<{width}}"
            for cell, width, name in zip(cells, widths, columns, strict=True)
        ]
        lines.append(padded)
    if not colours:
        return "\n".join("  ".join(line).rstrip() for line in lines)
    from rich.text import Text

    header, *body = lines
    pieces: list[object] = [Text("  ".join(header), style="cyan")]
    for line in body:
        styled = [(cell, _STATE_COLOURS.get(cell.strip(), "")) for cell in line]
        pieces.append(Text("  ").join(Text(*each) for each in styled))
    return _printed(pieces)


def _printed(pieces: Sequence[object]) -> str:
    from rich.console import Console
    from rich.text import Text

    console = Console(
        file=io.StringIO(),
        force_terminal=True,
        highlight=False,
        width=min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns),
    )
    for piece in pieces:
        console.print(piece, soft_wrap=isinstance(piece, Text))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().rstrip("\n").split("\n"))
