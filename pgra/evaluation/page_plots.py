"""Plots as inline SVG: drawn by the page's own style sheet, so that they follow light and dark.

The figures for papers are matplotlib's (`pgra.evaluation.figures`). These need no package, and keep
their letters readable on a phone: names stand above their line, not beside it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _SIDE = 400, 12  # of the drawing's own units; the page scales it
_ROW, _FOOT = 44, 26
_TICKS = 4
_NAME_LENGTH = 30
_EXACT = 1e-9  # what rounding may do to a value on a tick
_SWEEP = 240  # height of a sweep's field


@dataclass(frozen=True)
class PlotRow:
    """One line of a plot.

    Attributes:
        name: What is measured.
        values: One a seed, fractions; empty if it is missing.
        interval: Both ends of the 95 % interval; None where it is unknown.
        paper: What the paper prints; None where it prints nothing.
    """

    name: str
    values: Sequence[float]
    interval: tuple[float, float] | None = None
    paper: float | None = None

    @property
    def mean(self) -> float:
        """Give the mean over the seeds."""
        return sum(self.values) / len(self.values)


def interval_plot(title: str, rows: Sequence[PlotRow]) -> str:
    """Draw each row's mean (a disc), seeds (rings), 95 % interval (a bar) and the paper's value.

    Args:
        title: What the values are; escaped here, as all names are.
        rows: From above; one without values is said to be missing.
    """
    axis = _Axis.over([value for row in rows for value in _all_values(row)])
    height = _ROW * len(rows) + _FOOT
    parts = [axis.draw(height)]
    parts += [_draw_row(row, axis, place * _ROW) for place, row in enumerate(rows)]
    return _figure(title, rows, height, parts)


def sweep_plot(title: str, axis_name: str, rows: Sequence[PlotRow]) -> str:
    """Draw the mean along the values of one argument, with each point's 95 % interval.

    Values stand at equal steps, for the paper's are powers of two and the like.

    Args:
        title: What the values are.
        axis_name: The argument's.
        rows: From left to right, each named by the argument's value; one without values is said
            to be missing, and the line has a gap there.
    """
    axis = _Axis.over([value for row in rows for value in _all_values(row)])
    left, right = 5 * _SIDE, _WIDTH - 3 * _SIDE
    step = (right - left) / max(len(rows) - 1, 1)
    parts = [
        f'<line class="grid" x1="{left}" x2="{right}" y1="{axis.y(t / 100)}" y2="{axis.y(t / 100)}"'
        f'/><text class="tick" x="{left - 16}" y="{axis.y(t / 100) + 4}" text-anchor="end">'
        f"{t:.{axis.digits}f}</text>"
        for t in axis.ticks
    ]
    last = None
    for place, row in enumerate(rows):
        x = round(left + place * step, 1)
        here = (x, axis.y(row.mean)) if row.values else None
        if last and here:
            parts.append(
                f'<line class="trend" x1="{last[0]}" y1="{last[1]}" x2="{here[0]}" y2="{here[1]}"/>'
            )
        parts.append(_draw_point(row, axis, x))
        last = here
    height = _SWEEP + 2 * _FOOT
    parts.append(
        f'<text class="tick" x="{(left + right) / 2}" y="{height - 8}" text-anchor="middle">'
        f"{escape(axis_name)}</text>"
    )
    return _figure(title, rows, height, parts)


@dataclass(frozen=True)
class _Axis:
    """Where values lie from left to right.

    Attributes:
        ticks: Round values, at least two, that enclose all others.
        digits: Decimals that tell the ticks apart.
    """

    ticks: Sequence[float]
    digits: int

    @classmethod
    def over(cls, values: Sequence[float]) -> "_Axis":
        """Choose round ticks around some values."""
        known = [100 * value for value in values] or [0.0, 100.0]
        span = max(max(known) - min(known), 0.1)
        power = 10.0 ** math.floor(math.log10(span / _TICKS))
        step = next(power * m for m in (1, 2, 5, 10) if power * m >= span / _TICKS)
        first = math.floor(min(known) / step + _EXACT)
        last = math.ceil(max(known) / step - _EXACT)
        last = max(last, first + 1)
        digits = max(0, -math.floor(math.log10(step) + _EXACT))
        return cls([place * step for place in range(first, last + 1)], digits)

    def share(self, value: float) -> float:
        """Give how far along the axis a fraction lies, from 0 to 1."""
        return (100 * value - self.ticks[0]) / (self.ticks[-1] - self.ticks[0])

    def x(self, value: float) -> float:
        """Give a fraction's place from left to right."""
        return round(2 * _SIDE + self.share(value) * (_WIDTH - 4 * _SIDE), 1)

    def y(self, value: float) -> float:
        """Give a fraction's place in a sweep, from the top."""
        return round(_SIDE + (1 - self.share(value)) * (_SWEEP - 2 * _SIDE), 1)

    def draw(self, height: int) -> str:
        """Draw lines and numbers."""
        foot = height - _FOOT
        return "".join(
            f'<line class="grid" x1="{self.x(t / 100)}" x2="{self.x(t / 100)}" y1="0" y2="{foot}"/>'
            f'<text class="tick" x="{self.x(t / 100)}" y="{foot + 16}" text-anchor="middle">'
            f"{t:.{self.digits}f}</text>"
            for t in self.ticks
        )


def _worded(row: PlotRow) -> str:
    if not row.values:
        return "missing"
    told = f"{100 * row.mean:.1f}"
    if row.interval is not None:
        told += f" ({100 * row.interval[0]:.1f} to {100 * row.interval[1]:.1f})"
    return told


def _all_values(row: PlotRow) -> list[float]:
    return [*row.values, *_drawn(row), *([] if row.paper is None else [row.paper])]


def _drawn(row: PlotRow) -> list[float]:
    """Give the interval within 0 to 1: by Student's t over two seeds it can be wider than all."""
    if row.interval is None or not row.values:
        return []
    return [min(max(end, min(0.0, *row.values)), 1.0) for end in row.interval]


def _draw_row(row: PlotRow, axis: _Axis, top: int) -> str:
    name = row.name if len(row.name) <= _NAME_LENGTH else f"{row.name[: _NAME_LENGTH - 1]}…"
    parts = [
        f'<text x="{_SIDE}" y="{top + 16}">{escape(name)}<title>{escape(row.name)}</title></text>',
        f'<text x="{_WIDTH - _SIDE}" y="{top + 16}" text-anchor="end">{_worded(row)}</text>',
    ]
    y = top + 30
    if ends := _drawn(row):
        places = f'x1="{axis.x(ends[0])}" x2="{axis.x(ends[1])}"'
        parts.append(f'<line class="range" {places} y1="{y}" y2="{y}"/>')
    if len(row.values) > 1:
        parts += [f'<circle class="seed" cx="{axis.x(v)}" cy="{y}" r="5"/>' for v in row.values]
    if row.values:
        parts.append(f'<circle class="mean" cx="{axis.x(row.mean)}" cy="{y}" r="5"/>')
    if row.paper is not None:
        parts.append(_diamond(axis.x(row.paper), y))
    return "".join(parts)


def _draw_point(row: PlotRow, axis: _Axis, x: float) -> str:
    parts = [
        f'<text class="tick" x="{x}" y="{_SWEEP + 16}" text-anchor="middle">'
        f"{escape(row.name)}</text>"
    ]
    if ends := _drawn(row):
        places = f'y1="{axis.y(ends[0])}" y2="{axis.y(ends[1])}"'
        parts.append(f'<line class="range" x1="{x}" x2="{x}" {places}/>')
    if row.values:
        parts.append(f'<circle class="mean" cx="{x}" cy="{axis.y(row.mean)}" r="5"/>')
    else:
        parts.append(
            f'<text class="tick" x="{x}" y="{_SWEEP // 2}" text-anchor="middle">missing</text>'
        )
    if row.paper is not None:
        parts.append(_diamond(x, axis.y(row.paper)))
    return "".join(parts)


def _diamond(x: float, y: float) -> str:
    return f'<path class="paper" d="M{x} {y - 6}l6 6l-6 6l-6-6z"/>'


def _figure(title: str, rows: Sequence[PlotRow], height: int, parts: Sequence[str]) -> str:
    told = "; ".join(f"{row.name}: {_worded(row)}" for row in rows)
    papers = [f"{row.name}: {100 * row.paper:.1f}" for row in rows if row.paper is not None]
    told += f". The paper (diamonds): {'; '.join(papers)}" if papers else ""
    more = " \N{WHITE DIAMOND} the paper" if papers else ""
    return (
        f"<figure><figcaption>{escape(title)}{more}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(told)}">'
        f"{''.join(parts)}</svg></figure>"
    )
