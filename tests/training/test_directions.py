"""Direction of metrics by name, compared with published lists."""

from __future__ import annotations

import importlib
import re

import pytest

from zeus_plugins.protocol import certain_direction, is_higher_better

FALLING = """
    nll val_nll ppl eval_ppl perplexity fid val_fid kid err val_err error error_rate top1_error test/top5_err logloss
    log_loss bce val_bce ce cross_entropy xent mape smape wape mase eer lpips wer eval_wer cer mer mae val_mae rmse RMSE
    mse val_MSE msle rmsle kl kl_div kl_divergence loss val_loss valLoss eval_loss val/loss val_loss_epoch
    loss/dataloader_idx_0 dice_loss iou_loss focal_loss reconstruction_error mean_absolute_percentage_error max_error
    brier_score ece hamming_loss edit_distance levenshtein_distance hd95 chamfer_distance fpr false_positive_rate crps
    neg_log_likelihood negative_log_likelihood neg_elbo bpc bits_per_byte total_variation davies_bouldin_score regret
"""
RISING = """
    acc val_acc accuracy eval_accuracy acc@1 top5_accuracy f1 F1Score macro_f1 roc_auc auroc pr_auc ap AP50
    mAP mAP50 map50_95 mean_iou mIoU dice dice_coef jaccard precision recall recall@10 balanced_accuracy mcc
    matthews_correlation cohen_kappa ndcg@10 mrr hit_rate bleu sacrebleu rouge1 rougeL rougeLsum meteor chrf bertscore
    exact_match r2 r2_score explained_variance pearsonr spearmanr kendall_tau psnr ssim ms_ssim MS-SSIM snr si_sdr pesq
    stoi reward episode_return success_rate win_rate log_likelihood elbo neg_mean_squared_error neg_log_loss score
    cosine_similarity clip_score silhouette_score adjusted_rand_score nmi v_measure pass@1 eval/test_accuracy
"""
UNKNOWN = "drift metric lossless glossary terror closs answer loss_accuracy samples_per_second entropy"
# Classes of torchmetrics in which `higher_is_better` contradicts the documentation.
MISTAKEN = {"DaviesBouldinScore", "SpectralDistortionIndex", "WordInfoPreserved"}


@pytest.mark.parametrize(("names", "expected"), [(FALLING, False), (RISING, True), (UNKNOWN, None)])
def test_name_of_a_common_metric_gives_the_direction(names: str, *, expected: bool | None) -> None:
    assert [name for name in names.split() if is_higher_better(name) is not expected] == []
    assert is_higher_better("") is None


def test_only_well_known_names_are_certain() -> None:
    certain = (
        "val_loss eval/cosine_accuracy MulticlassF1Score neg_mean_squared_error val_acc_epoch rougeL mAP50 eval_wer"
    )
    assert [name for name in certain.split() if certain_direction(name) is not is_higher_better(name)] == []
    for name in ("val_score", "distance", "episode_return", "drift", "loss_accuracy", "quality"):
        assert certain_direction(name) is None


def test_direction_agrees_with_the_classes_of_torchmetrics() -> None:
    torchmetrics = pytest.importorskip("torchmetrics", reason="no torchmetrics")
    parts = "audio classification clustering detection image multimodal nominal regression retrieval segmentation text"
    modules = [torchmetrics, *(importlib.import_module(f"torchmetrics.{part}") for part in parts.split())]
    classes = {name: getattr(module, name) for module in modules for name in module.__all__}
    said = {
        name: direction
        for name, each in classes.items()
        if isinstance(direction := getattr(each, "higher_is_better", None), bool) and name not in MISTAKEN
    }
    assert len(said) > 100
    for written in (str, lambda name: re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()):
        found = {name: is_higher_better(written(name)) for name in said}
        assert {name: found[name] for name in said if found[name] not in (said[name], None)} == {}
        assert [*found.values()].count(None) < 0.05 * len(said)
