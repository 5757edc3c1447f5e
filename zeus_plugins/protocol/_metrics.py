"""The direction of a metric by its name."""

from __future__ import annotations

import re
from itertools import pairwise

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
# If the last known word is one of these, the metric is a loss: ``dice_loss`` falls although Dice rises.
_LOSSES = frozenset({"loss", "losses", "logloss", "error", "errors", "err"})


def is_higher_better(metric: str) -> bool | None:
    """Return whether a metric rises as the model improves, by the words of its name; None if they do not say."""
    words = _words_in(metric)
    # As in ``neg_mean_squared_error`` and ``negative_log_likelihood``.
    is_negated = "neg" in words or ("negative", "log") in pairwise(words)
    known: list[str] = []
    first = 0
    while first < len(words):
        pair = "".join(words[first : first + 2])
        word = pair if pair in _FALLING | _RISING else words[first]
        first += 2 if word == pair else 1
        known += [name for name in (word, re.sub(r"(?<=..)\d+$", "", word)) if name in _FALLING | _RISING][:1]
    rising = {word in _RISING for word in known}
    if len(rising) > 1 and known[-1] in _LOSSES:
        rising = {False}
    if not known and "score" in words:  # otherwise it is a score of something, such as ``brier_score``
        rising = {True}
    return None if len(rising) != 1 else rising.pop() is not is_negated


def is_lower_better(metric: str, margin: float | None = None) -> bool:
    """Return whether a watched metric falls as the model improves: by its name, or if its `margin` is negative."""
    return is_higher_better(metric) is False or (margin is not None and margin < 0)


def _words_in(metric: str) -> list[str]:
    """Return the words in a name, in lower case: ``eval_valLoss`` has ``eval``, ``val`` and ``loss``."""
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", metric)
    return re.findall(r"[a-z]+[0-9]*", parted.lower())
