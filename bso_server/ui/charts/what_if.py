"""The charts of a job under other knobs: the best size by η, and the cost of each size's runs as η goes from 0 to 1."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup, escape

from bso_server.service.page_views import EtaSpan, WhatIfPage
from bso_server.ui import units
from bso_server.ui.charts.job import ticks_of_energy
from bso_server.ui.charts.scales import Scale
from bso_server.ui.charts.svg import Plot, colours, mark, share, text
from zeus_plugins.protocol import JobRegistration

# A span of less than this share of the width has no room for its name.
_APART = 0.08


def spans_of_eta(job: JobRegistration, spans: Sequence[EtaSpan], eta: float | None = None) -> Markup:
    """The best size under each η, as a bar from 0 to 1, with the job's own η, and the one that is asked about."""
    colour, parts = colours(job.batch_sizes), []
    for span in spans:
        width = span.high - span.low
        place = f'x="{share(span.low)}" width="{share(width)}" y="14" height="16"'
        parts.append(f'<rect class="span {colour[span.batch_size]}" {place}/>')
        if width > _APART:
            parts.append(text(share(span.low + width / 2), 10, str(span.batch_size), "size-name mid"))
        if span.high < 1:
            parts.append(text(share(span.high), 46, units.number(span.high, 2), "tick mid"))
    ends = text("0", 46, "time", "tick") + text("100%", 46, "energy", "tick end")
    own = share(job.eta_knob)
    parts.append(f'{ends}<line class="own" x1="{own}" x2="{own}" y1="14" y2="34"/>')
    if eta is not None and eta != job.eta_knob:
        parts.append(f'<line class="asked" x1="{share(eta)}" x2="{share(eta)}" y1="14" y2="34"/>')
    told = "; ".join(
        f"{span.batch_size} from {units.number(span.low, 2)} to {units.number(span.high, 2)}" for span in spans
    )
    label = escape(f"Best batch size by eta: {told}")
    return Markup(f'<svg class="row" height="50" role="img" aria-label="{label}">{"".join(parts)}</svg>')  # noqa: S704 - numbers and escaped text


def costs_by_eta(page: WhatIfPage) -> Markup | None:
    """The mean cost of a run of each size, a line over η, and what it is under the η that is asked about."""
    if not page.means:
        return None
    job, colour = page.job, colours(page.job.batch_sizes)
    ends = {each.batch_size: (job.max_power * each.time_s, each.energy_j) for each in page.means}
    y = Scale.over([cost for both in ends.values() for cost in both], log=False)
    best = "" if page.batch_size is None else f"; {page.batch_size} is the lowest at {units.exact(page.eta)}"
    plot = Plot("by-eta", "Cost of a run by η", f"A line for each batch size{best}.", Scale(0.0, 1.0), y, height=260)
    plot.y_axis(ticks_of_energy(y))
    plot.x_axis([(tick, units.exact(round(tick, 9))) for tick in plot.x.ticks(5)], "η: from time alone to energy alone")
    for kind, eta in (("own", job.eta_knob), ("asked", page.eta)):
        x = plot.left(eta)
        plot.parts.append(f'<line class="{kind}" x1="{x}" x2="{x}" y1="0" y2="{plot.height}"/>')
    for size, (at_time, at_energy) in ends.items():
        plot.path(
            [(0.0, at_time), (1.0, at_energy)], f"line {colour[size]}{' best' if size == page.batch_size else ''}"
        )
    for each in page.means:
        told = f"{each.batch_size}: {units.energy(each.cost_j)} at η = {units.exact(page.eta)}"
        classes = colour[each.batch_size]
        plot.parts.append(mark(plot.left(page.eta), plot.top(each.cost_j), "completed", classes, told))
    return plot.drawn()
