"""Jobs derived from a target and the facts of a training: literal values, and general properties."""

from __future__ import annotations

import re
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fake_trainer import failing
from zeus_plugins import JobSpec
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.protocol import MAX_ID_LENGTH, GpuConfig
from zeus_plugins.training.defaults import (
    JobPlan,
    JobWish,
    TrainingFacts,
    check_direction,
    check_epochs,
    first_report_warning,
    hash_of_parameters,
    name_of_data,
    planned,
    script_name,
)

FACTS = TrainingFacts(script="train", model="Net", samples=1437, step_size=64, max_epochs=30)
GPUS = GpuConfig(max_power=800.0, number_of_gpus=2, gpu_model="NVIDIA A100-SXM4-80GB")


def plan(monitor: str = "val_acc", target: float = 0.97, facts: dict[str, Any] | None = None, **said: Any) -> JobPlan:
    told = TrainingFacts(**{**vars(FACTS), **(facts or {})})
    return planned(JobWish(monitor=monitor, target=target, **said), told)


# Guesses


def test_target_and_metric_make_a_job() -> None:
    guessed = plan()
    assert guessed.job == JobSpec(
        job_id_prefix="train-Net-val_acc-0.97",
        batch_sizes=(8, 16, 32, 64, 128, 256, 512),
        default_batch_size=64,
        target_metric=0.97,
        max_epochs=30,
    )
    assert guessed.guesses == [
        "batch sizes 8, 16, 32, 64, 128, 256, 512",
        "at most 30 epochs",
        "higher val_acc is better",
        "the job's id",
    ]
    assert guessed.warning is None
    assert JobSpec.model_fields.keys() - guessed.guessed == {"target_metric"}


@pytest.mark.parametrize(
    ("facts", "sizes"),
    [
        ({"step_size": 100}, (25, 50, 100, 200, 400, 800)),
        ({"step_size": 7}, (7, 14, 28, 56)),
        ({"step_size": 64, "unit": 32}, (32, 64, 128, 256, 512)),
        ({"step_size": 64, "samples": 200}, (8, 16, 32, 64, 128)),
        ({"step_size": 64, "samples": None}, (8, 16, 32, 64, 128, 256, 512)),
        ({"step_size": 64, "samples": 64}, (8, 16, 32, 64)),
        ({"step_size": 2**30, "samples": None}, (2**27, 2**28, 2**29, 2**30)),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_sizes_are_halves_and_doubles_within_the_limits_of_devices_and_data(
    facts: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    assert plan(facts=facts).job.batch_sizes == sizes


def test_untrainable_sizes_are_left_out() -> None:
    def check(size: int) -> None:
        if size in (8, 512):
            raise ZeusBSOConfigError("no")

    assert planned(JobWish(monitor="val_acc"), FACTS, check_size=check).job.batch_sizes == (16, 32, 64, 128, 256)


def test_untrainable_size_of_the_script_is_refused() -> None:
    with pytest.raises(ZeusBSOConfigError, match=r"^ends too soon$"):
        planned(JobWish(monitor="val_acc"), FACTS, check_size=failing(ZeusBSOConfigError("ends too soon")))


@given(
    st.integers(1, 64),
    st.integers(1, 4096),
    st.one_of(st.none(), st.integers(0, 10**6)),
    st.text(max_size=400),
    st.text(max_size=400),
)
def test_every_training_gets_a_trainable_job(unit: int, times: int, more: int | None, script: str, model: str) -> None:
    samples = None if more is None else unit * times + more
    facts = {"unit": unit, "step_size": unit * times, "samples": samples, "script": script, "model": model}
    guessed = plan(facts=facts)
    sizes, own = guessed.job.batch_sizes, unit * times
    assert own in sizes
    assert all(size % unit == 0 and own / 8 <= size <= own * 8 for size in sizes)
    assert samples is None or max(sizes) <= samples
    job_id = guessed.on(GPUS).job_id
    assert job_id is not None
    assert job_id.startswith(guessed.job.job_id_prefix)
    assert len(job_id) <= MAX_ID_LENGTH
    JobSpec(**dict(guessed.on(GPUS)))
    assert plan(facts=facts).on(GPUS) == guessed.on(GPUS)


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({"samples": 63}, r"this training \(64\) is larger than its data \(63 samples\): lower it"),
        ({"step_size": None}, "is unknown before it begins: .*or describe the job by job="),
    ],
)
def test_unknown_or_unusable_size_of_the_script_is_reported(facts: dict[str, Any], problem: str) -> None:
    with pytest.raises(ZeusBSOConfigError, match=problem):
        plan(facts=facts)


def test_id_depends_on_script_model_target_and_hardware() -> None:
    own = "train-Net-val_acc-0.97-2xNVIDIA-A100-SXM4-80GB"
    assert plan(facts={"devices": 2}).on(GPUS).job_id == own
    for facts in ({"script": "tune"}, {"model": "Big"}, {"devices": 4}):
        assert plan(facts={"devices": 2, **facts}).on(GPUS).job_id != own
    # Neither the amount of data nor stated watts lead to another job.
    for samples in (1500, None):
        other = plan(facts={"devices": 2, "samples": samples, "max_epochs": 50})
        assert other.on(GPUS.model_copy(update={"max_power": 600.0})).job_id == own


@pytest.mark.parametrize(
    ("monitor", "said", "prefix"),
    [
        ("eval_accuracy", {"target": 97}, "train-Net-accuracy-97"),
        ("val/loss", {"target": 1e-05}, "train-Net-val-loss-1e-05"),
        ("elbo", {"target": -3.5, "mode": "max"}, "train-Net-elbo-minus3.5"),
        ("val_acc", {"target": None}, "train-Net-val_acc"),
        ("val_acc", {"target": 0.5, "mode": "min"}, "train-Net-val_acc-0.5-min"),
        ("drift", {"target": 0.5, "mode": "max"}, "train-Net-drift-0.5-max"),
    ],
)
def test_id_contains_metric_target_and_an_unexpected_mode(monitor: str, said: dict[str, Any], prefix: str) -> None:
    assert plan(monitor, **said).job.job_id_prefix == prefix


def test_long_id_ends_with_a_digest() -> None:
    ids = {plan(facts={"model": "M" * 300 + end}).on(GPUS).job_id or "" for end in "ab"}
    assert len(ids) == 2
    assert all(len(job_id) <= MAX_ID_LENGTH for job_id in ids)


def test_stated_id_is_used_unchanged() -> None:
    guessed = plan(job_id="digits-nightly")
    assert (guessed.on(GPUS).job_id, guessed.job.job_id_prefix) == ("digits-nightly", "digits-nightly")
    assert "job_id" not in guessed.guessed
    named = plan().named("of-the-environment")
    assert (named.on(GPUS).job_id, "job_id" in named.guessed) == ("of-the-environment", False)


def test_trainer_without_a_limit_gets_the_default_max_epochs() -> None:
    assert plan(facts={"max_epochs": None}).job.max_epochs == 100


@pytest.mark.parametrize(
    ("argument", "name"),
    [
        ("train.py", "train"),
        ("/a/b/run_glue.py", "run_glue"),
        ("-c", "python"),
        ("", "python"),
        ("/site/pkg/__main__.py", "pkg"),
        ("/bin/my-train", "my-train"),
    ],
)
def test_name_of_a_script_is_the_file_or_module(argument: str, name: str) -> None:
    assert script_name(argument) == name


@pytest.mark.parametrize(
    ("code_file", "session", "name"),
    [
        ("/home/me/Train daily.ipynb", "/srv/other.ipynb", "Train daily"),
        (None, "/home/me/retrain.ipynb", "retrain"),
        (None, "/home/me/console-1-5f0c", "notebook"),
        (None, None, "notebook"),
    ],
)
def test_name_of_a_notebook_differs_from_the_kernel(
    monkeypatch: pytest.MonkeyPatch, code_file: str | None, session: str | None, name: str
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__vsc_ipynb_file__", code_file, raising=False)
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    if session is not None:
        monkeypatch.setenv("JPY_SESSION_NAME", session)
    for kernel in ("ipykernel_launcher.py", "colab_kernel_launcher.py"):
        assert script_name(f"/usr/lib/python3/dist-packages/{kernel}") == name


# Stated arguments


def test_stated_sizes_join_the_scripts_size() -> None:
    assert plan(batch_sizes=(32, 128)).job.batch_sizes == (32, 64, 128)
    assert plan(batch_sizes=(32, 64)).job.batch_sizes == (32, 64)


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"job": plan().job, "target": 1.0, "job_id": "a"}, r"say target= as JobSpec\(target_metric=…\), job_id= as"),
        (
            {"job": plan().job, "mode": "max", "max_epochs": 3},
            r"say mode= as JobSpec\(higher_is_better_metric=…\), max_e",
        ),
    ],
)
def test_missing_or_contradictory_arguments_are_refused(said: dict[str, Any], problem: str) -> None:
    with pytest.raises(ZeusBSOConfigError, match=problem):
        JobWish(monitor="val_acc", **said)


def test_complete_job_is_used_unchanged() -> None:
    job = plan().job
    assert planned(JobWish(job=job, monitor="val_acc")) == JobPlan(job=job, monitor="val_acc")


def test_fields_absent_from_a_mapping_are_read_from_the_training() -> None:
    said = {"monitor": "val_acc", "target": 0.9}
    plain = planned(JobWish(monitor="val_acc", target=0.9), FACTS)
    taken = planned(JobWish({"eta_knob": 0, "controls": "off"}, **said), FACTS)
    assert taken.job == plain.job.model_copy(update={"eta_knob": 0.0, "controls": 0.0})
    assert (plain.guessed - taken.guessed, plain.follows - taken.follows) == ({"eta_knob", "controls"},) * 2
    other = JobWish({"max_epochs": 5, "higher_is_better_metric": False, "batch_sizes": [8, 16]}, **said)
    given = {"max_epochs": 5, "higher_is_better_metric": False, "batch_sizes": (8, 16)}
    assert other.fields == {**given, "target_metric": 0.9}
    for fields, problem in (
        ({"eta_knob": 2}, "eta_knob: Input should be less than or equal to 1"),
        ({"eta_nob": 1}, "did you mean 'eta_knob'"),
        ({"target_metric": 0.8}, "job= and target= say the same"),
    ):
        with pytest.raises(ZeusBSOConfigError, match=problem):
            JobWish(fields, **said)


def test_single_size_is_pinned() -> None:
    pinned = plan(batch_sizes=(256,))
    assert (pinned.job.batch_sizes, pinned.job.default_batch_size) == ((256,), 256)
    assert not {"batch_sizes", "default_batch_size"} & pinned.follows


# Direction


@pytest.mark.parametrize(
    ("monitor", "higher"),
    [
        *[(name, False) for name in ("val_loss", "eval_loss", "loss", "valLoss", "val/perplexity", "wer", "test_CER")],
        *[(name, False) for name in ("mean_squared_error", "mae", "val_rmse", "loss/dataloader_idx_0")],
        *[(name, True) for name in ("val_acc", "f1", "cosine_accuracy")],
    ],
)
def test_direction_follows_from_words_of_the_name(monitor: str, *, higher: bool) -> None:
    assert plan(monitor).job.higher_is_better_metric is higher
    job = JobSpec(job_id_prefix="job", batch_sizes=(8,), default_batch_size=8)
    taken = planned(JobWish(job=job, monitor=monitor))
    assert taken.job.higher_is_better_metric is higher
    assert taken.guesses == ([] if higher else [f"lower {monitor} is better"])
    assert taken.guessed == (set() if higher else {"higher_is_better_metric"})


@pytest.mark.parametrize(
    ("monitor", "said", "warning"),
    [
        ("val_loss", True, "of a metric called 'val_loss' lower values are usually better"),
        ("val_loss", False, None),
        ("val_acc", False, "of a metric called 'val_acc' higher values are usually better"),
        ("val_acc", True, None),
        ("drift", False, None),
        ("loss_accuracy", False, None),
    ],
)
def test_direction_contradicting_the_name_is_used_with_a_warning(
    monitor: str, warning: str | None, *, said: bool
) -> None:
    job = JobSpec(job_id_prefix="j", batch_sizes=(8,), default_batch_size=8, higher_is_better_metric=said)
    for taken in (plan(monitor, mode="max" if said else "min"), planned(JobWish(job=job, monitor=monitor))):
        assert taken.job.higher_is_better_metric is said
        assert (taken.warning is None) == (warning is None)
        assert (warning or "") in (taken.warning or "")


@pytest.mark.parametrize(
    ("monitor", "modes", "higher"),
    [
        ("drift", {"ModelCheckpoint(mode='max')": "max"}, True),
        ("drift", {"ModelCheckpoint(mode='min')": "min", "EarlyStopping(mode='min')": "min"}, False),
        ("val_acc", {"ModelCheckpoint(mode='max')": "max"}, True),
    ],
)
def test_settings_of_the_script_give_the_direction(monitor: str, modes: Any, *, higher: bool) -> None:
    wish = JobWish(monitor=monitor, target=0.5)
    assert planned(wish, FACTS, modes).job.higher_is_better_metric is higher
    job = JobSpec(job_id_prefix="job", batch_sizes=(8,), default_batch_size=8)
    assert planned(JobWish(job=job, monitor=monitor), modes=modes).job.higher_is_better_metric is higher


@pytest.mark.parametrize(
    ("monitor", "modes", "problem"),
    [
        ("drift", {}, "the name 'drift' does not say for certain whether the metric rises or falls"),
        ("val_score", {}, "the name 'val_score' does not say"),
        ("loss_accuracy", {}, "the name 'loss_accuracy' does not say"),
        (
            "val_acc",
            {"ModelCheckpoint(mode='min')": "min"},
            r"\(ModelCheckpoint\(mode='min'\) says lower and the name 'val_acc' says higher\)",
        ),
        ("drift", {"ModelCheckpoint(mode='min')": "min", "EarlyStopping(mode='max')": "max"}, "says lower and Early"),
    ],
)
def test_unclear_direction_is_requested(monitor: str, modes: Any, problem: str) -> None:
    with pytest.raises(ZeusBSOConfigError, match=f"{problem}.*: say mode='max' or mode='min'$"):
        planned(JobWish(monitor=monitor, target=0.5), FACTS, modes)
    assert planned(JobWish(monitor=monitor, target=0.5, mode="min"), FACTS, modes).job.higher_is_better_metric is False
    job = JobSpec(job_id_prefix="job", batch_sizes=(8,), default_batch_size=8)
    with pytest.raises(ZeusBSOConfigError, match=f"{problem}.*: say JobSpec"):
        planned(JobWish(job=job, monitor=monitor), modes=modes)


@pytest.mark.parametrize(
    ("monitor", "higher", "metrics", "is_refused"),
    [
        ("val_score", True, (0.5, 0.4), True),
        ("val_score", True, (0.5, 0.5), False),
        ("val_score", True, (0.5, 0.499), False),  # perhaps by chance
        ("val_score", False, (0.4, 0.5), True),
        ("val_acc", True, (0.5, 0.4), False),
        ("val_acc", False, (0.4, 0.5), True),
    ],
)
def test_move_away_from_the_target_is_refused_unless_the_name_is_certain(
    monitor: str, metrics: tuple[float, float], *, higher: bool, is_refused: bool
) -> None:
    job = plan(monitor, mode="max" if higher else "min").job
    with (
        pytest.raises(ZeusBSOConfigError, match="mode='min'" if higher else "mode='max'")
        if is_refused
        else nullcontext()
    ):
        check_direction(job, monitor, *metrics)


@pytest.mark.parametrize(
    ("target", "metric", "reached", "warning"),
    [
        (0.9, 0.95, True, "val_acc was 0.95 at the first report, at or above the target 0.9, so that the training"),
        (97.0, 0.8, False, "the target is 97, and val_acc was 0.8 at the first report: .* 0.97 may be meant"),
        (0.9, 0.8, False, None),
        (97.0, 1.5, False, None),
        (1000.0, 0.5, False, None),
    ],
)
def test_first_report_reveals_an_implausible_target(
    target: float, metric: float, warning: str | None, *, reached: bool
) -> None:
    said = first_report_warning(plan(target=target).job, "val_acc", metric, is_reached=reached)
    assert (said is None) == (warning is None)
    assert re.search(warning or "", said or "")


# Trainer that ends before the job


@pytest.mark.parametrize(
    ("limit", "trained", "problem"),
    [
        (3, 0, None),
        (5, 2, None),
        (2, 0, "Trainer(n=2) ends before the job's max_epochs (3), so the server would never learn that a batch size "
         "cannot reach the target: set the job's max_epochs=2 or Trainer(n=3)"),
        (4, 2, "Trainer(n=4) ends before the job's max_epochs (3) after the 2 epochs that this trainer has trained "
         "already, so the server would never learn that a batch size cannot reach the target: make a new Trainer for "
         "each training"),
    ],
)  # fmt: skip
def test_trainer_ending_before_the_job_is_refused(limit: int, trained: int, problem: str | None) -> None:
    check_epochs(0, limit, "Trainer(n={})", trained=trained)
    with nullcontext() if problem is None else pytest.raises(ZeusBSOConfigError, match=f"^{re.escape(problem)}$"):
        check_epochs(3, limit, "Trainer(n={})", trained=trained)


# --- Fingerprints -----------------------------------------------------------------------------------------------------


def test_hash_of_parameters_follows_their_number_and_shapes_only() -> None:
    def net(width: int, layers: int = 2) -> torch.nn.Module:
        return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))

    known = hash_of_parameters(net(3))
    assert known is not None
    assert known == hash_of_parameters(net(3)) == hash_of_parameters(torch.nn.DataParallel(net(3)))
    assert known == hash_of_parameters(torch.nn.ModuleDict({"_orig_mod": net(3)}))
    assert len({known, hash_of_parameters(net(4)), hash_of_parameters(net(3, layers=3))}) == 3
    for unknown in (torch.nn.Sequential(torch.nn.LazyLinear(3)), torch.nn.ReLU(), None):
        assert hash_of_parameters(unknown) is None


def test_data_are_named_by_themselves_or_by_their_class() -> None:
    data = torch.utils.data.TensorDataset(torch.zeros(3))
    info = SimpleNamespace(dataset_name="mnist")
    assert name_of_data(data) == "TensorDataset"
    assert name_of_data(torch.utils.data.Subset(torch.utils.data.Subset(data, [0, 1]), [0])) == "TensorDataset"
    assert name_of_data(SimpleNamespace(info=info)) == "mnist"
    assert name_of_data(None) is None
