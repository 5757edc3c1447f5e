"""The wire contract, over real HTTP against a real server on each kind of database."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx
import pytest

from tests.support.exports import export_over
from tests.support.jobs import job
from tests.support.wire import assert_refused, begin, reached, report
from tests.support.zeus_jobs import ZEUS_JOB
from zeus_plugins import JobSpec
from zeus_plugins.protocol import CreatedJob


@pytest.fixture
def spec() -> dict[str, Any]:
    """Return exactly the fields that a Zeus client sends, for a separate job."""
    sizes = {"batch_sizes": [32, 8, 16], "default_batch_size": 16, "max_epochs": 10, "num_pruning_rounds": 1}
    return {**ZEUS_JOB, **job(**sizes, mab_seed=1)}


@pytest.fixture
def job_id(http: httpx.Client, spec: dict[str, Any]) -> str:
    assert http.post("/jobs", json=spec).status_code == 201
    return str(spec["job_id"])


def trials_of(http: httpx.Client, job_id: str) -> list[dict[str, Any]]:
    trials: list[dict[str, Any]] = http.get(f"/api/jobs/{job_id}").json()["trials"]
    return trials


class TestRegistering:
    def test_new_job_is_created_and_found_again(self, http: httpx.Client, spec: dict[str, Any]) -> None:
        created = http.post("/jobs", json=spec)
        again = http.post("/jobs", json=spec)

        assert (created.status_code, again.status_code) == (201, 200)
        assert created.json() == again.json()
        made = {"registration_id": created.json()["registration_id"], "fingerprint": None, "target_runs": None}
        assert created.json() == {
            **spec,
            "batch_sizes": [8, 16, 32],
            "policy": "zeus",
            "controls": 0.08,
            "warm_start": "auto",
            "warm": None,
            "confirm": 1,
            "no_worse_than_default": None,
            "tags": None,
            "scaling": None,
            **made,
        }
        assert http.post("/jobs", json={**spec, "batch_sizes": [16, 8, 32]}).status_code == 200
        # Clients of earlier versions state "auto" for the default budget.
        assert http.post("/jobs", json={**spec, "controls": "auto"}).status_code == 200

    @pytest.mark.parametrize("absent", [{}, {"job_id": None}], ids=["absent", "null"])
    def test_server_generates_an_id(self, http: httpx.Client, spec: dict[str, Any], absent: dict[str, Any]) -> None:
        del spec["job_id"]
        answer = http.post("/jobs", json={**spec, **absent})

        assert answer.status_code == 201
        prefix, _, digits = answer.json()["job_id"].rpartition("-")
        assert prefix == "job"
        assert len(digits) == 8
        assert int(digits, 16) >= 0

    @pytest.mark.parametrize("name", [".", ".."])
    def test_id_of_a_job_cannot_be_a_path(self, http: httpx.Client, spec: dict[str, Any], name: str) -> None:
        assert_refused(http.post("/jobs", json={**spec, "job_id_prefix": ".", "job_id": name}), 422, "job_id_prefix")
        longer = {**spec, "job_id_prefix": "..", "job_id": "..."}
        assert_refused(http.post("/jobs", json=longer), 422, "job_id_prefix", "names a folder")

    def test_window_has_a_maximum_length(self, http: httpx.Client, spec: dict[str, Any]) -> None:
        assert_refused(http.post("/jobs", json={**spec, "window_size": 1001}), 422, "window_size", "1000", "0")
        assert http.post("/jobs", json={**spec, "window_size": 1000}).status_code == 201
        unstated = {name: value for name, value in spec.items() if name not in ("policy", "job_id")}
        many = http.post("/jobs", json={**unstated, "window_size": 10, "mab_num_explorations": 10**6})
        assert_refused(
            many, 422, "mab_num_explorations", "set mab_num_explorations to 1000 or less, or window_size to 0"
        )

    def test_window_must_hold_the_explorations(self, http: httpx.Client, spec: dict[str, Any]) -> None:
        """Enlarge the window of a Zeus client, which sends no policy and cannot act on an error."""
        short = {**spec, "window_size": 3, "mab_num_explorations": 5}
        refused = http.post("/jobs", json={**short, "policy": "zeus"})
        assert_refused(refused, 422, "window_size", "mab_num_explorations to 3 or less", "window_size to 0")
        created, again = (http.post("/jobs", json=short) for _ in range(2))
        assert (created.status_code, again.status_code) == (201, 200)
        assert created.json()["window_size"] == again.json()["window_size"] == 5
        gp_voi = {**short, "policy": "gp_voi", "job_id": spec["job_id"] + "-other"}
        assert http.post("/jobs", json=gp_voi).json()["window_size"] == 3

    def test_controls_are_a_share_of_the_cost(self) -> None:
        fields = {"job_id_prefix": "job", "batch_sizes": (8,), "default_batch_size": 8}
        assert [JobSpec(**fields, controls=each).controls for each in (0.05, "off")] == [0.05, 0.0]
        with pytest.raises(ValueError, match=r'state the share of the cost .*, such as 0\.08, or "off"'):
            JobSpec(**fields, controls="auto")
        # Jobs that earlier versions stored have the default budget.
        stored = CreatedJob(**fields, job_id="job-1", max_power=1, number_of_gpus=1, gpu_model="A").model_dump()
        assert CreatedJob.model_validate_json(json.dumps({**stored, "controls": "auto"})).controls == 0.08

    def test_misspelt_field_of_a_jobspec_is_refused(self) -> None:
        required = {"job_id_prefix": "job", "batch_sizes": (8,), "default_batch_size": 8}
        with pytest.raises(ValueError, match="no 'max_epoch': did you mean 'max_epochs'"):
            JobSpec(**required, max_epoch=3)
        with pytest.raises(ValueError, match=r"no 'eta': did you mean 'eta_knob'\?; JobSpec has no 'colour' "):
            JobSpec(**required, eta=1, colour="blue")

    def test_defaults_of_a_job_are_literal(self, http: httpx.Client, spec: dict[str, Any]) -> None:
        required = {"job_id", "job_id_prefix", "batch_sizes", "default_batch_size", "max_power", "number_of_gpus"}
        answer = http.post("/jobs", json={name: spec[name] for name in [*required, "gpu_model"]})

        assert answer.status_code == 201
        defaults = {"target_metric": 0.5, "max_epochs": 100, "num_pruning_rounds": 2, "mab_seed": None}
        of_zeus = {name: ZEUS_JOB[name] for name in ZEUS_JOB.keys() - required - {"gpu_model"}}
        assert answer.json().items() >= (of_zeus | defaults).items()

    def test_ids_are_case_sensitive(self, http: httpx.Client, spec: dict[str, Any]) -> None:
        assert http.post("/jobs", json={**spec, "job_id": spec["job_id"] + "a"}).status_code == 201
        assert http.post("/jobs", json={**spec, "job_id": spec["job_id"] + "A"}).status_code == 201


class TestTrials:
    def test_trials_are_numbered_from_1_and_start_at_the_default(self, http: httpx.Client, job_id: str) -> None:
        body = http.get("/jobs/batch_size", params={"job_id": job_id}).json()
        assert (body["job_id"], body["batch_size"], body["trial_number"]) == (job_id, 16, 1)
        assert (body["origin"], body["reason"]) == ("exploration", "exploring: your default size (round 1 of 1)")
        assert begin(http, job_id)["trial_number"] == 2

    @pytest.mark.parametrize(
        ("energy", "metric", "epoch", "verdict", "state"),
        [
            (1000, 0.5, 1, (False, False, "keep_training"), "running"),
            (900, 0.95, 2, (True, True, "target_reached"), "completed"),
            (1001, 0.95, 2, (True, False, "cost_bound_crossed"), "early_stopped"),
            (1, 0.5, 10, (True, False, "max_epochs_reached"), "exhausted"),
        ],
    )
    def test_verdict_follows_from_target_bound_and_last_epoch(
        self,
        http: httpx.Client,
        job_id: str,
        energy: float,
        metric: float,
        epoch: int,
        verdict: tuple[bool, bool, str],
        state: str,
    ) -> None:
        reached(http, begin(http, job_id), cost_j=500)  # a trial may cost twice as much
        body = report(http, begin(http, job_id), time=10, energy=energy, metric=metric, current_epoch=epoch).json()
        (_, trial) = trials_of(http, job_id)
        assert (body["stop_train"], body["converged"], body["reason"]) == verdict
        assert f"metric {metric}, target 0.9" in body["message"]
        assert (trial["state"], trial["message"]) == (state, body["message"])
        assert (trial["time_s"], trial["energy_j"], trial["cost_j"]) == (10, energy, 0.5 * energy + 0.5 * 100 * 10)
        assert (trial["epochs"], trial["metric"]) == (epoch, metric)

    def test_reports_of_all_ranks_of_an_epoch_are_a_single_evaluation(self, http: httpx.Client, job_id: str) -> None:
        """Zeus's distributed example lets every rank report; windows and metrics of ranks differ slightly."""
        reached(http, begin(http, job_id), cost_j=500)
        trial = begin(http, job_id)
        ranks = [(5, 500, 0.5), (4.9, 510, 0.95), (20, 490, 0.5), (4.8, 480, 0.5)]
        firsts = [
            report(http, trial, time=time, energy=energy, metric=metric, current_epoch=1)
            for time, energy, metric in ranks
        ]
        # Neither another metric nor a crossed bound gives a later rank another verdict than the first rank.
        assert [(each.status_code, each.json()["stop_train"]) for each in firsts] == [(200, False)] * 4
        (_, shown) = trials_of(http, job_id)
        assert (shown["time_s"], shown["energy_j"], shown["metric"]) == (20, 510, 0.5)
        kept = export_over(http, job_id)[2]
        assert (kept["report_count"], kept["epoch"], kept["first_time_s"], kept["first_energy_j"]) == (1, 1, 20, 510)

        # The first rank of the next epoch has used less than another rank before; the bound is crossed by the maximum.
        lasts = [
            report(http, trial, time=10 + rank / 10, energy=600, metric=0.95, current_epoch=2) for rank in range(4)
        ]
        late = report(http, trial, time=4.8, energy=480, metric=0.5, current_epoch=1)
        assert {(each.status_code, each.json()["stop_train"], each.json()["reason"]) for each in [*lasts, late]} == {
            (200, True, "cost_bound_crossed")
        }
        message = lasts[0].json()["message"]
        assert [each.json()["message"] for each in lasts[1:]] == [
            f"the end of trial 2 is already reported. It was: {message}"
        ] * 3
        (_, shown) = trials_of(http, job_id)
        assert (shown["state"], shown["time_s"], shown["cost_j"]) == ("early_stopped", 20, 0.5 * 600 + 50 * 20)

    @pytest.mark.parametrize(
        "later", [{}, {"time": 5.2}, {"time": 7, "energy": 505}], ids=["equal totals", "soon after", "after a while"]
    )
    def test_second_evaluation_of_an_epoch_at_the_target_counts(
        self, http: httpx.Client, job_id: str, later: dict[str, float]
    ) -> None:
        trial = begin(http, job_id)
        first = {"time": 5, "energy": 500, "metric": 0.5, "current_epoch": 1}
        report(http, trial, **first)
        other_rank = report(http, trial, **first | {"time": 5.05, "energy": 510, "metric": 0.95})
        assert not other_rank.json()["stop_train"]  # another evaluation is impossible within a hundredth of the epoch
        answers = [report(http, trial, **first | {"time": 5.05, "energy": 510} | later | {"metric": 0.95})] * 2

        assert [(each.status_code, each.json()["converged"]) for each in answers] == [(200, True)] * 2
        assert answers[0].json() == answers[1].json()
        assert trials_of(http, job_id)[0]["state"] == "completed"

    def test_repeated_report_of_a_rank_gets_the_same_answer(self, http: httpx.Client, job_id: str) -> None:
        trial = begin(http, job_id)
        for body in (
            {"time": 5, "energy": 500, "metric": 0.5, "current_epoch": 1},
            {"time": 7, "energy": 700, "metric": 0.6, "current_epoch": 1},
            {"time": 9, "energy": 900, "metric": 0.95, "current_epoch": 2},
        ):
            answers = [report(http, trial, **body, rank=0) for _ in range(2)]
            assert answers[0].status_code == 200
            assert answers[0].json() == answers[1].json()
        kept = export_over(http, job_id)[1]
        assert (kept["report_count"], kept["state"]) == (3, "completed")

    def test_rank_reporting_after_the_end_is_informed(self, http: httpx.Client, job_id: str) -> None:
        ended, failed = begin(http, job_id), begin(http, job_id)
        reached(http, ended, cost_j=500)
        http.patch("/trials", json=failed)
        late = {"time": 1, "energy": 1, "metric": 0.5, "current_epoch": 1}
        for trial, status in ((ended, 200), (failed, 409)):
            for rank in ({}, {"rank": 1, "energy_source": "nvml"}):
                answer = report(http, trial, **late, **rank)
                assert answer.status_code == status
                assert "is already reported." in answer.json()["message"]

    def test_rank_0_of_our_client_may_report_second(self, http: httpx.Client, job_id: str) -> None:
        trial = begin(http, job_id)
        of = {"metric": 0.5, "current_epoch": 1, "energy_source": "nvml"}
        report(http, trial, time=5.01, energy=500, rank=1, **of)
        answer = report(http, trial, time=5, energy=510, rank=0, **of)
        assert (answer.status_code, answer.json()["stop_train"]) == (200, False)
        alone = report(http, trial, time=5, energy=500, **of)  # from a client that reports for all ranks
        assert_refused(alone, 422, "time")


class TestEnding:
    def test_running_trial_ended_by_a_client_has_failed_and_is_explored_again(
        self, http: httpx.Client, job_id: str
    ) -> None:
        trial = begin(http, job_id)
        assert http.patch("/trials", json=trial).status_code == 200
        assert trials_of(http, job_id)[0]["state"] == "failed"
        # The trial does not count as the exploration of 16, which is therefore next again.
        again = http.get("/jobs/batch_size", params={"job_id": job_id}).json()
        assert (again["batch_size"], again["origin"]) == (16, "exploration")


def test_unknown_routes_and_methods_are_refused(http: httpx.Client) -> None:
    assert_refused(http.get("/nothing"), 404, None)
    # A client of an earlier version continues without its probe or its measurements.
    for message in ("probe", "power_profile"):
        words = "update zeus-plugins where the training runs"
        assert_refused(http.put(f"/trials/{message}", json={"job_id": "none"}), 404, None, words)
    assert_refused(http.post("/api/import", content=b"{}"), 410, None, "bso-server jobs import FILE")
    assert_refused(http.put("/jobs"), 405, None)
    response = http.put("/report")
    assert_refused(response, 405, None)
    assert response.headers["Allow"] == "POST, OPTIONS"


@pytest.mark.parametrize("path", ["/jobs", "/report"])
def test_encoded_body_is_refused(http_on_sqlite: httpx.Client, path: str) -> None:
    answer = http_on_sqlite.post(path, content=gzip.compress(b"{}"), headers={"Content-Encoding": "gzip"})
    assert_refused(answer, 415, None, "Content-Encoding: gzip")


@pytest.mark.parametrize("path", ["/", "/ui", "/ui/", "/ui/static/style.css", "/health/live", "/health/ready"])
def test_head_answers_like_get_without_a_body(http_on_sqlite: httpx.Client, path: str) -> None:
    head, get = http_on_sqlite.head(path), http_on_sqlite.get(path)
    assert (head.status_code, head.content) == (get.status_code, b"")
    assert head.headers.get("Content-Type") == get.headers.get("Content-Type")
