"""The parts of the dashboard's charts and figures: axes, units."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bso_server.ui import units
from bso_server.ui.charts import COLOURS, colours
from bso_server.ui.html import templates
from bso_server.ui.plot import Label, Mark, Picture, Scale, apart
from bso_server.ui.words import sentence
from tests.support.jobs import job
from zeus_plugins.protocol import CreatedJob

VALUES = st.lists(st.floats(-1e12, 1e12).filter(lambda value: value == 0 or abs(value) > 1e-9), max_size=20)


class TestScale:
    @given(VALUES, st.booleans())
    def test_scale_has_room_for_all_values_and_round_ticks(self, values: list[float], zero: bool) -> None:
        scale = Scale.over(values, zero=zero)
        assert scale.low < scale.high
        for value in values:
            assert -1e-9 <= scale.at(value) <= 1 + 1e-9
        ticks = scale.ticks(6)
        assert ticks == sorted(set(ticks))
        assert len(ticks) <= 8
        for tick in ticks:
            assert -1e-6 <= scale.at(tick) <= 1 + 1e-6
        steps = {round(after - before, 9 - math.floor(math.log10(after - before))) for before, after in pairwise(ticks)}
        assert {f"{step:e}"[0] for step in steps} <= set("125")
        assert len(ticks) >= 2

    def test_labels_keep_minimum_distance(self) -> None:
        assert apart([0.0, 0.05, 0.1, 0.11, 0.3], 0.1) == [True, False, True, False, True]


class TestUnits:
    @pytest.mark.parametrize(
        ("joules", "told"),
        [
            (0, "0 J"),
            (0.25, "250 mJ"),
            (999.4, "999 J"),
            (1000, "1 kJ"),
            (212_345, "212 kJ"),
            (3.5e6, "3500 kJ"),
            (3.6e6, "1 kWh"),
            (-8.1e7, "−22.5 kWh"),
            (3.6e9, "1 MWh"),
        ],
    )
    def test_energy_is_shown_in_fitting_unit(self, joules: float, told: str) -> None:
        assert units.energy(joules).replace(units.SPACE, " ") == told

    @pytest.mark.parametrize(
        ("seconds", "told"),
        [
            (0, "0 s"),
            (0.034, "0.034 s"),
            (59.6, "1 min"),
            (90, "1 min 30 s"),
            (8040, "2 h 14 min"),
            (-3600, "−1 h"),
            (90_000, "1 d 1 h"),
        ],
    )
    def test_duration_is_shown_in_fitting_unit(self, seconds: float, told: str) -> None:
        assert units.duration(seconds).replace(units.SPACE, " ") == told

    @pytest.mark.parametrize(
        ("seconds", "told"), [(2, "just now"), (200, "3 min ago"), (-200, "in 3 min"), (90_000, "1 d ago")]
    )
    def test_age_is_shown_in_fitting_unit(self, seconds: float, told: str) -> None:
        now = datetime(2026, 1, 1, tzinfo=UTC)
        assert units.ago(now - timedelta(seconds=seconds), now).replace(units.SPACE, " ") == told

    @pytest.mark.parametrize(
        ("share", "told"),
        [(-0.0004, "0.0 %"), (-0.001, "−0.1 %"), (-0.999 / 100, "−1.0 %"), (-0.31, "−31 %"), (0.0, "0 %")],
    )
    def test_percentages_are_rounded(self, share: float, told: str) -> None:
        assert units.percent(share).replace(units.SPACE, " ") == told

    @given(st.floats(-1e11, 1e11))
    def test_shown_number_has_first_digits_of_value(self, value: float) -> None:
        told = units.number(value, 4).replace(units.SPACE, "").replace(units.MINUS, "-")
        assert float(told) == pytest.approx(value, rel=5.1e-4)


def test_energies_in_reason_get_fitting_units() -> None:
    reason = "the cheapest so far, 7.194e+05 J at 512 and 48 J at 256"
    assert sentence(reason).replace(units.SPACE, " ") == "The cheapest so far, 719 kJ at 512 and 48 J at 256."


@given(st.lists(st.integers(1, 2**20), min_size=1, max_size=40, unique=True).map(sorted))
def test_each_size_has_own_colour_while_colours_suffice(sizes: list[int]) -> None:
    found = colours(CreatedJob.model_validate(job(batch_sizes=sizes, default_batch_size=sizes[0])))
    assert found[sizes[0]] == "s0 default"
    shown = {name.removesuffix(" default") for name in found.values()}
    assert len(shown) == min(len(sizes), COLOURS)
    assert shown <= {f"s{index}" for index in range(COLOURS)}


def test_text_in_chart_is_escaped() -> None:
    told = 'a"><script>'
    parts = [Mark("1%", 2.0, "completed", "s0", told, "jobs/<b>"), Mark("1%", 2.0, "end", "s0", told)]
    picture = Picture(20, [*parts, Label("1%", 2.0, told, "tick")], told)
    drawn = str(templates().get_template("charts.html").module.picture(picture))  # type: ignore[attr-defined]  # a macro
    assert drawn.count("a&#34;&gt;&lt;script&gt;") == 4
    assert "<script>" not in drawn
    assert "<b>" not in drawn
