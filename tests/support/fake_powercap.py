"""A folder like Linux's /sys/class/powercap."""

from __future__ import annotations

from pathlib import Path

RANGE_UJ = 262_143_328_850


def add_zone(
    root: Path,
    folder: str,
    name: str,
    *,
    energy_uj: int = 1_000_000,
    range_uj: int = RANGE_UJ,
    max_power_uw: int | None = 125_000_000,
) -> Path:
    """Add one power zone, as the kernel lays it out."""
    zone = root / folder
    zone.mkdir(parents=True)
    (zone / "name").write_text(f"{name}\n")
    (zone / "energy_uj").write_text(f"{energy_uj}\n")
    (zone / "max_energy_range_uj").write_text(f"{range_uj}\n")
    if max_power_uw is not None:
        (zone / "constraint_0_max_power_uw").write_text(f"{max_power_uw}\n")
    return zone


def make_powercap(root: Path) -> Path:
    """Create a machine with two packages, their memory, and other zones that must not count."""
    for package in (0, 1):
        add_zone(root, f"intel-rapl:{package}", f"package-{package}")
        add_zone(root, f"intel-rapl:{package}:0", "core")
        add_zone(root, f"intel-rapl:{package}:1", "uncore")
        add_zone(root, f"intel-rapl:{package}:2", "dram", max_power_uw=None)
    add_zone(root, "intel-rapl:2", "psys")
    add_zone(root, "intel-rapl-mmio:0", "package-0")
    (root / "intel-rapl").mkdir()
    return root


def spend_uj(root: Path, folder: str, energy_uj: int) -> None:
    """Let a zone's counter rise, and wrap where its range ends."""
    counter = root / folder / "energy_uj"
    range_uj = int((root / folder / "max_energy_range_uj").read_text())
    counter.write_text(f"{(int(counter.read_text()) + energy_uj) % range_uj}\n")
