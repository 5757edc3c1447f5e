"""Litestar handlers: decode, call the service, encode. No SQL and no error handling here."""

from __future__ import annotations

from bso_server.routes import read, upkeep, wire

HANDLERS = [
    wire.register_job,
    wire.suggest,
    wire.record_offline,
    wire.end_trial,
    wire.heartbeat,
    wire.store_power_profile,
    wire.delete_job,
    read.list_jobs,
    read.show_job,
    read.show_job_named_import,
    read.list_trials,
    read.list_arms,
    read.list_epochs,
    read.list_power_profiles,
    read.list_events,
    read.export_job,
    read.trials_csv,
    upkeep.import_job,
    upkeep.live,
    upkeep.ready,
    upkeep.show_version,
]
