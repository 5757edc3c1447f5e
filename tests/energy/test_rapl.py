"""CPU packages and their memory."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.energy_bench import spent_j, window
from tests.support.fake_nvml import Clock
from tests.support.fake_powercap import add_zone, make_powercap, spend_uj
from zeus_plugins.energy import EnergyUnavailableError, Measurement, RaplMonitor
from zeus_plugins.energy.estimate import cpu_model_name
from zeus_plugins.energy.rapl import Zone
from zeus_plugins.errors import ZeusBSOOperationOrderError
from zeus_plugins.protocol import GpuConfig

# Powers of ten, so that the sum identifies the zones in it.
SPENT_UJ = {
    "intel-rapl:0": 1_000_000,
    "intel-rapl:1": 10_000_000,
    "intel-rapl:0:2": 100_000_000,
    "intel-rapl:1:2": 1_000_000_000,
    "intel-rapl:0:0": 10**10,
    "intel-rapl:0:1": 10**10,
    "intel-rapl:2": 10**10,
    "intel-rapl-mmio:0": 10**10,
}


def test_packages_and_memory_are_summed_without_double_counting(tmp_path: Path) -> None:
    root, clock = make_powercap(tmp_path), Clock()

    def spend() -> None:
        for folder, energy_uj in SPENT_UJ.items():
            spend_uj(root, folder, energy_uj)

    monitor = RaplMonitor(root=root, clock=clock)
    assert window(monitor, clock, 12.5, spend) == Measurement(12.5, 1111.0, "rapl")
    assert monitor.gpus() == GpuConfig(max_power=250.0, number_of_gpus=2, gpu_model=cpu_model_name())


def test_stated_limit_of_memory_counts(tmp_path: Path) -> None:
    add_zone(tmp_path, "intel-rapl:0", "package-0-die-0")
    add_zone(tmp_path, "intel-rapl:0:0", "dram", max_power_uw=30_000_000)
    assert RaplMonitor(root=tmp_path).gpus().max_power == 155.0


def test_limit_in_force_replaces_the_missing_highest_limit(tmp_path: Path) -> None:
    zone = add_zone(tmp_path, "intel-rapl:0", "package-0", max_power_uw=0)
    (zone / "constraint_0_power_limit_uw").write_text("95000000\n")
    assert RaplMonitor(root=tmp_path).gpus().max_power == 95.0


def test_without_limits_the_power_is_stated_or_missing(tmp_path: Path) -> None:
    add_zone(tmp_path, "intel-rapl:0", "package-0", max_power_uw=None)

    with pytest.raises(EnergyUnavailableError, match=r"package-0 \(intel-rapl:0\) states no power limit.*max_power_w="):
        RaplMonitor(root=tmp_path).gpus()
    assert RaplMonitor(root=tmp_path, max_power_w=170.0).gpus().max_power == 170.0


@settings(deadline=None)
@given(
    range_uj=st.integers(min_value=1_000_000, max_value=10**12),
    first=st.floats(min_value=0.0, max_value=1.0, exclude_max=True),
    parts=st.lists(st.floats(min_value=0.0, max_value=1.0, exclude_max=True), min_size=1, max_size=30),
)
def test_wraps_are_followed_if_none_is_missed(
    tmp_path_factory: pytest.TempPathFactory, range_uj: int, first: float, parts: list[float]
) -> None:
    true_uj = int(first * range_uj)
    folder = tmp_path_factory.getbasetemp()
    (folder / "energy_uj").write_text(f"{true_uj}\n")
    zone = Zone(folder, "package-0", range_uj, 100.0)
    assert zone.energy_uj() == 0
    for part in parts:
        true_uj += int(part * range_uj)  # less than a full range between two readings
        (folder / "energy_uj").write_text(f"{true_uj % range_uj}\n")
        counted_uj = zone.energy_uj()
    assert counted_uj == true_uj - int(first * range_uj)


def test_thread_follows_wraps_in_a_long_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeus_plugins.energy.rapl.RAPL_INTERVAL_S", 0.01)
    read = threading.Event()
    reading = Zone.energy_uj

    def noted(zone: Zone) -> int:
        energy_uj = reading(zone)
        if threading.current_thread() is not threading.main_thread():
            read.set()
        return energy_uj

    monkeypatch.setattr(Zone, "energy_uj", noted)
    add_zone(tmp_path, "intel-rapl:0", "package-0", range_uj=10_000_000)
    monitor = RaplMonitor(root=tmp_path)
    monitor.begin_window("training")
    for _ in range(3):  # 2.5 ranges in total, of which a single reading at the end would see half a range
        # Replaced atomically: otherwise the thread would sometimes find an empty file, which a kernel never shows.
        counter = tmp_path / "intel-rapl:0" / "energy_uj"
        following = tmp_path / "following"
        following.write_text(str((int(counter.read_text()) + 8_333_334) % 10_000_000))
        following.replace(counter)
        read.clear()
        assert read.wait(60.0)
    assert monitor.end_window("training").energy_j == pytest.approx(25.000002)


def test_machine_without_rapl_counters_is_unavailable(tmp_path: Path) -> None:
    add_zone(tmp_path, "intel-rapl-mmio:0", "package-0")
    add_zone(tmp_path, "intel-rapl:0", "psys")

    for root in (tmp_path, tmp_path / "absent"):
        with pytest.raises(EnergyUnavailableError, match=rf"no CPU package counts its energy in {root} \(RAPL\)"):
            RaplMonitor(root=root).gpus()


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("energy_uj", "0\n", r"intel-rapl:0/energy_uj stands at 0"),
        ("max_energy_range_uj", "many\n", r"intel-rapl:0 \(RAPL\) cannot be read: .*many"),
    ],
)
def test_unreadable_or_zero_counter_is_named(tmp_path: Path, file: str, content: str, problem: str) -> None:
    (add_zone(tmp_path, "intel-rapl:0", "package-0") / file).write_text(content)
    with pytest.raises(EnergyUnavailableError, match=problem):
        RaplMonitor(root=tmp_path).gpus()


@pytest.mark.parametrize("content", ["0\n", "", None], ids=["stands at 0", "is empty", "is absent"])
def test_unreadable_memory_is_left_out_with_a_single_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str | None
) -> None:
    root, clock = make_powercap(tmp_path), Clock()
    counter = root / "intel-rapl:0:2" / "energy_uj"
    counter.unlink() if content is None else counter.write_text(content)

    def spend() -> None:
        spend_uj(root, "intel-rapl:0", 10**6)
        spend_uj(root, "intel-rapl:1:2", 10**7)  # the other memory, which counts

    for _ in range(2):
        measured = window(RaplMonitor(root=root, clock=clock), clock, 0.5, spend)
    assert measured.energy_j == 11.0
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("the energy of memory is left out: ")
    assert "intel-rapl:0:2" in warning


def test_counter_lost_during_a_window_is_a_package_error(tmp_path: Path) -> None:
    zone = add_zone(tmp_path, "intel-rapl:0", "package-0")
    monitor = RaplMonitor(root=tmp_path)
    with pytest.raises(EnergyUnavailableError, match=r"intel-rapl:0 \(RAPL\) cannot be read"):
        spent_j(monitor, lambda: (zone / "energy_uj").unlink())
    with pytest.raises(ZeusBSOOperationOrderError, match="open windows: none"):
        monitor.end_window("window")


def test_counters_readable_only_by_root_are_skipped_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_powercap(tmp_path)
    read = Path.read_text

    def read_unless_forbidden(path: Path, encoding: str | None = None) -> str:
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, encoding)

    monkeypatch.setattr(Path, "read_text", read_unless_forbidden)
    with pytest.raises(EnergyUnavailableError) as unavailable:
        RaplMonitor(root=root).gpus()
    assert unavailable.value.cause == (
        f"only root may read {root}/intel-rapl:0/energy_uj (RAPL); `sudo chmod a+r {root}/intel-rapl:*/energy_uj` lets"
        " everybody, until the next start of the machine"
    )
