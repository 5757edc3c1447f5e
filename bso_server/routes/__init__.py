"""Litestar handlers: decode, call the service, encode. No SQL and no error handling here."""

from __future__ import annotations

from bso_server.routes.read import health, list_jobs, show_job
from bso_server.routes.wire import delete_job, end_trial, heartbeat, register_job, report, suggest

HANDLERS = [register_job, suggest, report, end_trial, heartbeat, delete_job, list_jobs, show_job, health]
