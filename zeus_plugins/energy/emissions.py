"""Emissions of a training in known formats: a row of CodeCarbon's ``emissions.csv``, or a block of a model card."""

from __future__ import annotations

import csv
import json
import platform
import uuid
from datetime import UTC, datetime
from pathlib import Path

from zeus_plugins.energy.rates import JOULES_PER_KWH, Rates
from zeus_plugins.environment import CO2_G_PER_KWH
from zeus_plugins.errors import ZeusBSOConfigError

# The columns of CodeCarbon 3.3, in its order.
COLUMNS = (
    *("timestamp", "project_name", "run_id", "experiment_id", "duration", "emissions", "emissions_rate"),
    *("cpu_power", "gpu_power", "ram_power", "cpu_energy", "gpu_energy", "ram_energy", "energy_consumed"),
    *("water_consumed", "country_name", "country_iso_code", "region", "cloud_provider", "cloud_region", "os"),
    *("python_version", "codecarbon_version", "cpu_count", "cpu_model", "gpu_count", "gpu_model", "longitude"),
    *("latitude", "ram_total_size", "tracking_mode", "cpu_utilization_percent", "gpu_utilization_percent"),
    *("ram_utilization_percent", "ram_used_gb", "on_cloud", "pue", "wue"),
)


def append_emissions(path: Path, time_s: float, energy_j: float, co2_g: float | None) -> None:
    """Append a row to a file with CodeCarbon's columns, in seconds, kWh and kg of CO2; leave unknown cells empty.

    Raises:
        OSError: The file cannot be written.
    """
    row: dict[str, object] = {
        "timestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S"),
        "project_name": "zeus-plugins",
        "run_id": str(uuid.uuid4()),
        "duration": time_s,
        "energy_consumed": energy_j / JOULES_PER_KWH,
        "os": platform.platform(),
        "python_version": platform.python_version(),
    }
    if co2_g is not None:
        row |= {"emissions": co2_g / 1000, "emissions_rate": co2_g / 1000 / time_s if time_s else 0.0}
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        if not file.tell():
            writer.writeheader()
        writer.writerow(row)


def model_card_block(time_s: float, energy_j: float, source: str) -> str:
    """Return the block ``co2_eq_emissions`` of a Hugging Face model card as YAML, in grams of CO2.

    The rate of `ZEUS_CO2_G_PER_KWH` applies to the `time_s` seconds until now.

    Raises:
        ZeusBSOConfigError: No rate is stated, or it is invalid.
    """
    co2_g = Rates().of(energy_j, time_s).get("co2_g")
    if co2_g is None:
        raise ZeusBSOConfigError(f"the CO2 of a kilowatt-hour is unknown: set {CO2_G_PER_KWH} to its grams")
    text = f"zeus-plugins: {energy_j / JOULES_PER_KWH:.4g} kWh ({source}) at a stated rate ({CO2_G_PER_KWH})"
    return f"co2_eq_emissions:\n  emissions: {co2_g:.6g}\n  source: {json.dumps(text)}\n"
