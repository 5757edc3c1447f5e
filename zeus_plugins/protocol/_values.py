"""Bounds, enumerations and field types of the messages, and the direction of a metric by its name."""

from __future__ import annotations

import re
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError

MAX_BATCH_SIZE = 2**31 - 1
MAX_BATCH_SIZES = 1000
MAX_ID_LENGTH = 255
MAX_DETAIL_LENGTH = 1000
MAX_WATCHED = 32
MAX_MARGINS = 16
MAX_TAGS = 16
ID_PATTERN = "^[A-Za-z0-9._:@-]+$"  # Safe in URLs, shells, logs and file names without escapes.

GP_VOI = "gp_voi"
"""The default policy."""

ZEUS = "zeus"
"""The policy of the Zeus paper, and of jobs that a Zeus client registers."""

OWN_POLICIES = (ZEUS, GP_VOI)
"""The policies of every server; packages may add others."""


# The source of an energy that consists of a single estimate.
_TIME_ALONE = re.compile(r"(\d+ nodes: )?estimate: [^+,]+")

# Control characters, separators of lines, and marks that turn the direction of text.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


class Paths:
    """URL paths, relative to the server's URL."""

    # Wire contract
    JOBS = "/jobs"
    BATCH_SIZE = "/jobs/batch_size"
    REPORT = "/report"
    TRIALS = "/trials"
    HEARTBEAT = "/trials/heartbeat"
    # Read API
    API_JOBS = "/api/jobs"
    FLEET_REPORT = "/api/report"
    HEALTH = "/health/live"
    READY = "/health/ready"
    VERSION = "/version"
    METRICS = "/metrics"


class Stage(StrEnum):
    """The stage of a job: eliminating arms, or drawing among the survivors."""

    PRUNING = "pruning"
    BANDIT = "bandit"


class Origin(StrEnum):
    """The reason for a dispatch."""

    EXPLORATION = "exploration"
    INCUMBENT = "incumbent"
    CONTROL = "control"
    CONCURRENT = "concurrent"
    BANDIT = "bandit"
    OFFLINE = "offline"
    FINISH = "finish"


class TrialState(StrEnum):
    """The state of a trial; `bso_server.core.job` lists the legal transitions."""

    RUNNING = "running"
    COMPLETED = "completed"
    EARLY_STOPPED = "early_stopped"
    EXHAUSTED = "exhausted"
    FAILED = "failed"
    INFEASIBLE = "infeasible"
    SUSPENDED = "suspended"
    ABANDONED = "abandoned"
    WITHDRAWN = "withdrawn"


ALIVE = frozenset({TrialState.RUNNING, TrialState.SUSPENDED})
"""States of trials that run or may resume. Such trials have leases."""

FINAL = frozenset(TrialState) - ALIVE - {TrialState.ABANDONED}
"""States of trials that have ended for good. An abandoned trial may still continue."""


class EndReason(StrEnum):
    """Why a trial has ended or continues."""

    KEEP_TRAINING = "keep_training"
    TARGET_REACHED = "target_reached"
    NO_TARGET = "no_target"
    COST_BOUND_CROSSED = "cost_bound_crossed"
    EPOCH_BOUND_REACHED = "epoch_bound_reached"
    MAX_EPOCHS_REACHED = "max_epochs_reached"
    CRASHED = "crashed"
    CRASHED_ALIKE = "crashed_alike"
    OUT_OF_MEMORY = "out_of_memory"
    PREEMPTED = "preempted"
    LEASE_EXPIRED = "lease_expired"
    ENDED_EARLY = "ended_early"
    REFUSED = "refused"
    DISCARDED = "discarded"


class Quality(StrEnum):
    """The verdict on a metric of a batch size against the default's."""

    NO_WORSE = "no_worse"
    WORSE = "worse"
    NOT_SHOWN = "not_shown"


class RefusalReason(StrEnum):
    """Why the server refuses a message, if a program acts on the reason.

    OTHER_REGISTRATION: the job was deleted and registered again under its id since the trial began.
    STALE_LEASE: a later run of the training has taken the trial over.
    """

    OTHER_REGISTRATION = "other_registration"
    STALE_LEASE = "stale_lease"


def cost(*, energy_j: float, time_s: float, max_power_w: float, eta: float) -> float:
    """Return the cost in joules: ``η · energy + (1 − η) · max_power · time``.

    η in [0, 1] weighs energy against time; time is priced at the maximum power, so that both terms are joules (You,
    Chung, Chowdhury: Zeus, NSDI '23, equation 2). Energy and maximum power are sums over all GPUs.
    """
    return eta * energy_j + (1 - eta) * max_power_w * time_s


def epochs_in_words(epochs: float) -> str:
    """Return a number of epochs with its noun, such as ``1 epoch`` or ``2.5 epochs``."""
    number = f"{epochs:.3g}" if epochs < 1000 else f"{epochs:.0f}"
    return "1 epoch" if number == "1" else f"{number} epochs"


BUSY_SHARE = 0.2
"""A training that waited for a core for at least this share of its time ran on a busy machine."""


def is_busy(waited_share: float | None) -> bool:
    """Return whether a training that waited for a core for this share of its time ran on a busy machine."""
    return waited_share is not None and waited_share >= BUSY_SHARE


def busy_remark(waited_share: float | None) -> str | None:
    """Return a remark on a training that a busy machine has slowed; None for other trainings."""
    return f"on a busy machine: it waited {waited_share:.0%} of its time for a core" if is_busy(waited_share) else None


def faults_in_words(error: ValidationError, *, most: int | None = None) -> str:
    """Return the faults of a message, or the first `most`, such as ``max_epochs: Input should be greater than 0``."""
    faults = error.errors(include_url=False, include_context=False)[:most]
    words = ((".".join(map(str, each["loc"])), each["msg"].removeprefix("Value error, ")) for each in faults)
    return "; ".join(f"{field}: {problem}" if field else problem for field, problem in words)


def finishing_reason(missed_trial: str, missed_size: int) -> str:
    """Return the reason for the batch size of a trial that finishes the run of a trial without the target."""
    return f"finishes the run of {missed_trial}, which ended at {missed_size} without the target"


def is_estimated(energy_source: str | None) -> bool:
    """Return whether an energy of this source is estimated, at least in part."""
    return "estimate" in (energy_source or "")


def is_time_alone(energy_source: str | None) -> bool:
    """Return whether an energy of this source is watts × time, so that energy and time are one figure."""
    return _TIME_ALONE.fullmatch(energy_source or "") is not None and "CPU time" not in (energy_source or "")


def package_version() -> str:
    """Return the version of the installed distribution, or ``0+unknown`` if the packages are only on the path."""
    try:
        return version("zeus-plugins")
    except PackageNotFoundError:
        return "0+unknown"


def printable(text: str) -> str:
    """Escape control characters such as line feeds, with which a text could forge lines or command a terminal."""
    return _CONTROL.sub(lambda control: control[0].encode("unicode_escape").decode(), text)


# Words in the names of metrics, also made of two words in a row: `totalvariation` for ``total_variation``. They cover
# the metrics of torchmetrics and evaluate (tests/training/test_directions.py).
_FALLING_WORDS = """
    loss losses logloss error errors err risk cost regret penalty deviance divergence distance distortion dissimilarity
    mae mape mase mdape mdae mspe rmspe smape wape wmape nmae mse msle nmse rmse rmsle nrmse rmsse rse epe mpjpe
    nll bce ce xent crossentropy kl kld jsd brier crps probabilityscore huber hinge pinball ece mce disparity
    ppl perplexity bpb bpc bpd bits wer cer mer ter der jer eer wil eed infolost editrate
    fallout fpr fnr fdr falsepositive falsenegative falsediscovery falsealarm
    fid kid fvd fad mifid lpips ergas rase dists texturesimilarity totalvariation spectralangle pathlength
    daviesbouldin hd hausdorff chamfer emd wasserstein levenshtein hamming toxicity latency
"""
_RISING_WORDS = """
    acc accuracy accuracies correct hit hits success reward rewards return likelihood elbo exact em match pass
    f1 f2 fbeta fscore fmeasure precision recall sensitivity specificity tpr tnr ppv npv predictivevalue
    auc auroc auprc aupr rocauc prauc ap map mar mrr ndcg dcg iou miou giou diou ciou jaccard dice panoptic
    kappa qwk winrate mcc matthews corr correlation contingency pearson pearsonr spearman spearmanr kendall ccc
    plcc srcc r2 explained ssim msssim psnr snr sdr sisdr sisnr noiseratio distortionratio similarity pesq stoi estoi
    mos dnsmos nisqa srmr vif fidelity clip quality bleu sacrebleu gleu rouge rougel rougelsum meteor chrf
    bertscore bleurt comet sari mauve cider squad preserved rand ari nmi ami
    mutual mutualinfo homogeneity completeness vmeasure silhouette dunn calinski fowlkes
"""
_FALLING, _RISING = frozenset(_FALLING_WORDS.split()), frozenset(_RISING_WORDS.split())
# Words that have one direction in every training. Others, such as ``score`` and ``distance``, only suggest one.
_WELL_KNOWN_WORDS = """
    loss losses logloss error errors err mae mape mse rmse nll bce ce crossentropy ppl perplexity wer cer fid
    acc accuracy accuracies f1 f2 fbeta fscore precision recall auc auroc auprc rocauc prauc ap map iou miou jaccard
    dice ndcg mrr mcc r2 exact bleu sacrebleu rouge rougel rougelsum meteor chrf psnr ssim
"""
_WELL_KNOWN = frozenset(_WELL_KNOWN_WORDS.split())
# If the last known word is one of these, the metric is a loss: ``dice_loss`` falls although Dice rises.
_LOSSES = frozenset({"loss", "losses", "logloss", "error", "errors", "err"})


def certain_direction(metric: str) -> bool | None:
    """Return `is_higher_better` for a name that contains a well-known one, such as ``val_acc``; None for others."""
    return None if _WELL_KNOWN.isdisjoint(_known_words(_words_in(metric))) else is_higher_better(metric)


def is_higher_better(metric: str) -> bool | None:
    """Return whether a metric rises as the model improves, by the words of its name; None if they do not say."""
    words = _words_in(metric)
    # As in ``neg_mean_squared_error`` and ``negative_log_likelihood``.
    is_negated = "neg" in words or ("negative", "log") in pairwise(words)
    known = _known_words(words)
    rising = {word in _RISING for word in known}
    if len(rising) > 1 and known[-1] in _LOSSES:
        rising = {False}
    if not known and "score" in words:  # otherwise it is a score of something, such as ``brier_score``
        rising = {True}
    return None if len(rising) != 1 else rising.pop() is not is_negated


def _known_words(words: list[str]) -> list[str]:
    """Return the words, and pairs of words, that have a direction."""
    known: list[str] = []
    first = 0
    while first < len(words):
        pair = "".join(words[first : first + 2])
        word = pair if pair in _FALLING | _RISING else words[first]
        first += 2 if word == pair else 1
        known += [name for name in (word, re.sub(r"(?<=..)\d+$", "", word)) if name in _FALLING | _RISING][:1]
    return known


def is_lower_better(metric: str, margin: float | None = None) -> bool:
    """Return whether a watched metric falls as the model improves: by its name, or if its `margin` is negative."""
    return is_higher_better(metric) is False or (margin is not None and margin < 0)


def _words_in(metric: str) -> list[str]:
    """Return the words in a name, in lower case: ``eval_valLoss`` has ``eval``, ``val`` and ``loss``."""
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", metric)
    return re.findall(r"[a-z]+[0-9]*", parted.lower())


# String constraints must be inside `Annotated`: Litestar's OpenAPI schema ignores those of `Field` on a plain str.
BatchSize = Annotated[int, Field(gt=0, le=MAX_BATCH_SIZE)]
Identifier = Annotated[str, StringConstraints(min_length=1, max_length=MAX_ID_LENGTH, pattern=ID_PATTERN)]
PolicyName = Annotated[str, StringConstraints(min_length=1, max_length=32, pattern=ID_PATTERN)]
RegistrationId = Annotated[str, StringConstraints(min_length=1, max_length=32, pattern=ID_PATTERN)]
# PostgreSQL stores every character except NUL.
Text = Annotated[str, StringConstraints(max_length=255, pattern=r"^[^\x00]*$")]
Finite = Annotated[float, Field(allow_inf_nan=False)]
# No control characters, because tables on terminals show names.
MetricName = Annotated[str, StringConstraints(min_length=1, max_length=255, pattern=r"^[^\x00-\x1f\x7f]*$")]
Tags = Annotated[
    dict[
        Annotated[str, StringConstraints(min_length=1, max_length=64, pattern="^[A-Za-z0-9._-]+$")],
        Annotated[str, StringConstraints(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f]*$")],
    ],
    Field(max_length=MAX_TAGS),
]
"""Values of a job's tags by their names."""
Watched = Annotated[dict[MetricName, Finite], Field(max_length=MAX_WATCHED)]
"""The last values of watched metrics by name."""
PositiveFinite = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFinite = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveInt = Annotated[int, Field(gt=0, le=2**31 - 1)]
NonNegativeInt = Annotated[int, Field(ge=0, le=2**31 - 1)]
CONTROLS = 0.08
"""Share of a job's cost that control runs may forgo, unless the job states another."""


def _share_of_cost(controls: object) -> object:
    if controls == "auto":
        raise ValueError(f'state the share of the cost that control runs may forgo, such as {CONTROLS}, or "off"')
    return 0.0 if controls == "off" else controls


Controls = Annotated[float, Field(ge=0, le=0.5, allow_inf_nan=False), BeforeValidator(_share_of_cost)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
LEAST_TIME_S = 1e-6  # Stands for a duration of 0, which `Seconds` does not allow.
# The bounds are far beyond real values, and keep costs, their sums and their squares finite.
Seconds = Annotated[float, Field(gt=0, le=1e10, allow_inf_nan=False)]
Joules = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Watts = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Epochs = Annotated[float, Field(gt=0, le=2**31 - 1, allow_inf_nan=False)]


class WireMessage(BaseModel):
    """Base of all messages: immutable, ignores unknown fields."""

    model_config = ConfigDict(frozen=True, extra="ignore")
