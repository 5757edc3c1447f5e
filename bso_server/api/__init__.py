"""Litestar handlers: decode, call the service, encode. No SQL and no error handling here."""

from __future__ import annotations

from bso_server.api import admin, jobs, training

HANDLERS = [
    training.register_job,
    training.suggest,
    training.record_offline,
    training.end_trial,
    training.heartbeat,
    training.store_power_profile,
    training.delete_job,
    jobs.list_jobs,
    jobs.show_job,
    jobs.list_trials,
    jobs.list_arms,
    jobs.list_epochs,
    jobs.list_power_profiles,
    jobs.list_events,
    jobs.export_job,
    jobs.trials_csv,
    admin.import_job,
    admin.live,
    admin.ready,
    admin.show_version,
]
