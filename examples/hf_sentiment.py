"""A Hugging Face training that learns the cheapest batch size while its data change from recurrence to recurrence.

Each recurrence trains a small BERT from scratch on the next slice of a sentiment data set: ``N_train.json`` and
``N_val.json`` in the folder ``--data``, as in Capriccio (38 slices of tweets). Each file holds objects with a ``text``
and a ``label``, one per line or as a JSON list. Without ``--data``, the script generates a small data set.

Usage: ``python examples/hf_sentiment.py [--recurrences N] [--data DIR] [--slice N] [--target ACCURACY]
[--server-url URL] [--job-id ID]``
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

from zeus_plugins import JobSpec
from zeus_plugins.huggingface import ZeusBSOTrainerCallback

MAX_EPOCHS = 15
MAX_TOKENS = 64
VOCABULARY = 8000


@dataclass(frozen=True)
class Examples:
    """Texts and their labels."""

    texts: list[str]
    labels: list[Any]


@dataclass(frozen=True)
class Slice:
    """The data of one recurrence."""

    train: Examples
    validation: Examples


# Slices in files


def slice_numbers(folder: Path) -> list[int]:
    """Return the numbers of the slices in a folder, in ascending order."""
    found = [re.fullmatch(r"(\d+)_train\.json", path.name) for path in folder.glob("*_train.json")]
    numbers = sorted(int(match[1]) for match in found if match)
    if not numbers:
        raise SystemExit(f"{folder} holds no slice: name its files 1_train.json, 1_val.json, 2_train.json, …")
    return numbers


def read_slice(folder: Path, number: int) -> Slice:
    """Read slice `number` from a folder."""
    return Slice(read_examples(folder / f"{number}_train.json"), read_examples(folder / f"{number}_val.json"))


def read_examples(path: Path) -> Examples:
    """Read texts and labels from a file of JSON Lines, or of one JSON list."""
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SystemExit(f"{path} is missing: a slice is a file N_train.json and a file N_val.json") from None
    is_list = content.lstrip().startswith("[")
    try:
        rows = json.loads(content) if is_list else [json.loads(line) for line in content.splitlines() if line.strip()]
        return Examples([str(row["text"]) for row in rows], [row["label"] for row in rows])
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(
            f"{path} is not as expected ({error!r}): give one JSON object with a 'text' and a 'label' per line, or a "
            "JSON list of such objects"
        ) from None


# Generated slices

GOOD = """great lovely superb brilliant charming splendid delightful gorgeous smooth tasty friendly clever solid elegant
cheerful reliable fresh stunning witty cosy generous handy crisp warm lush vivid neat divine ace stellar"""
BAD = """awful dreadful lousy broken dull nasty rude bland soggy clumsy shabby dirty noisy stale ugly slow greasy faulty
dim sour cheap grim boring sloppy flimsy murky harsh vile weak rotten"""
THINGS = """phone hotel film soup driver battery song concert flight screen coffee waiter novel jacket garden game
lecture train camera pizza"""
WORDS_IN_USE = 20
SAID_WRONGLY = 0.03


def made_up_slice(number: int) -> Slice:
    """Generate short reviews; from each slice to the next, one praise word and one blame word are replaced."""
    return Slice(made_up_examples(number, 1500, seed=2 * number), made_up_examples(number, 500, seed=2 * number + 1))


def words_in_use(words: list[str], number: int) -> list[str]:
    """Return the words of slice `number`: a window on `words` that moves by one word per slice."""
    return [words[(number + offset) % len(words)] for offset in range(WORDS_IN_USE)]


def made_up_examples(number: int, count: int, seed: int) -> Examples:
    """Generate `count` reviews of a slice; about 3 % have the wrong label."""
    dice = random.Random(seed)  # noqa: S311 - the texts are no secret
    good, bad = words_in_use(GOOD.split(), number), words_in_use(BAD.split(), number)
    things = THINGS.split()
    texts, labels = [], []
    for _ in range(count):
        is_good = dice.random() < 0.5
        clauses = []
        for _ in range(dice.randint(1, 3)):
            is_negated = dice.random() < 0.2
            word = dice.choice(good if is_good != is_negated else bad)
            clauses.append(f"the {dice.choice(things)} was {'not ' if is_negated else ''}{word}")
        texts.append(" and ".join(clauses))
        labels.append(int(is_good != (dice.random() < SAID_WRONGLY)))
    return Examples(texts, labels)


# The training


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a BERT tokenizer on `texts`; its vocabulary has words and parts of words."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # noqa: S106 - a token of text, no password
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    wordpieces = trainers.WordPieceTrainer(vocab_size=VOCABULARY, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts, wordpieces)
    tokenizer.post_processor = processors.BertProcessing(
        ("[SEP]", tokenizer.token_to_id("[SEP]")), ("[CLS]", tokenizer.token_to_id("[CLS]"))
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",  # noqa: S106 - a token of text, no password
        unk_token="[UNK]",  # noqa: S106 - a token of text, no password
        cls_token="[CLS]",  # noqa: S106 - a token of text, no password
        sep_token="[SEP]",  # noqa: S106 - a token of text, no password
    )


def encoded(examples: Examples, tokenizer: PreTrainedTokenizerFast, classes: list[Any]) -> list[dict[str, Any]]:
    """Return the examples as token and class numbers, the form of data set that a Trainer reads."""
    unknown = sorted({str(label) for label in examples.labels if label not in classes})
    if unknown:
        raise SystemExit(f"the validation data has labels that the training data lacks: {', '.join(unknown)}")
    tokens = tokenizer(examples.texts, truncation=True, max_length=MAX_TOKENS)["input_ids"]
    return [
        {"input_ids": ids, "labels": classes.index(label)} for ids, label in zip(tokens, examples.labels, strict=True)
    ]


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Return the share of texts that are classified correctly."""
    return {"accuracy": float((prediction.predictions.argmax(axis=-1) == prediction.label_ids).mean())}


def train(options: argparse.Namespace) -> None:
    """Train once, as one recurrence of the job."""
    torch.set_num_threads(1)  # more would not speed up so small a model, and on a busy machine would slow it
    if options.data is None:
        number = options.slice or 0
        print(f"no --data given: training on slice {number} of a small made-up data set", flush=True)
        data = made_up_slice(number)
    else:
        number = first_slice(options, slice_numbers(options.data))
        print(f"training on slice {number} of {options.data}", flush=True)
        data = read_slice(options.data, number)
    tokenizer = make_tokenizer(data.train.texts)
    classes = sorted(set(data.train.labels))
    job = JobSpec(
        job_id=options.job_id,
        job_id_prefix="sentiment",
        batch_sizes=(16, 32, 64, 128),
        default_batch_size=64,
        target_metric=options.target,
        max_epochs=MAX_EPOCHS,
    )
    callback = ZeusBSOTrainerCallback(job, monitor="accuracy", server_url=options.server_url, on_failure="finish")
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,  # equal for all slices, so that all runs train the same model
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=MAX_TOKENS,
            num_labels=len(classes),
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                num_train_epochs=MAX_EPOCHS,
                learning_rate=0.0005,  # at the default batch size; the callback scales it
                lr_scheduler_type="constant",
                per_device_eval_batch_size=256,
                eval_strategy="epoch",
                save_strategy="no",
                logging_strategy="no",
                report_to=[],
                disable_tqdm=True,
                dataloader_pin_memory=torch.cuda.is_available(),
            ),
            train_dataset=encoded(data.train, tokenizer, classes),
            eval_dataset=encoded(data.validation, tokenizer, classes),
            data_collator=DataCollatorWithPadding(tokenizer),
            compute_metrics=accuracy,
            callbacks=[callback],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    trial = callback.summary
    print(f"trial {trial.trial_number}: batch size {trial.batch_size}, {trial.outcome}", flush=True)


def main() -> None:
    """Train once, or launch this script ``--recurrences`` times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--recurrences", type=int, default=0, metavar="N", help="launch this script N times, each on the next slice"
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder of the slices")
    parser.add_argument("--slice", type=int, metavar="N", help="slice of the training, or of the first recurrence")
    parser.add_argument("--target", type=float, default=0.94, help="target accuracy on the validation data")
    parser.add_argument("--server-url", help="default: ZEUS_SERVER_URL, or if unset, a server in this process")
    parser.add_argument("--job-id", default="sentiment-hf")
    options = parser.parse_args()
    if not options.recurrences:
        train(options)
    once = ["--target", str(options.target), "--job-id", options.job_id]
    once += [] if options.server_url is None else ["--server-url", options.server_url]
    once += [] if options.data is None else ["--data", str(options.data)]
    for number in slices_to_train_on(options):
        subprocess.run([sys.executable, __file__, *once, "--slice", str(number)], check=True)  # noqa: S603 - this very script


def slices_to_train_on(options: argparse.Namespace) -> list[int]:
    """Return one slice number per recurrence; after a folder's last slice, start again at its first."""
    if options.data is None:
        first = options.slice or 0
        return list(range(first, first + options.recurrences))
    numbers = slice_numbers(options.data)
    start = numbers.index(first_slice(options, numbers))
    return [numbers[(start + recurrence) % len(numbers)] for recurrence in range(options.recurrences)]


def first_slice(options: argparse.Namespace, numbers: list[int]) -> int:
    """Return the slice of ``--slice``, or the first slice of the folder if ``--slice`` is absent."""
    if options.slice is None:
        return numbers[0]
    if options.slice not in numbers:
        raise SystemExit(f"{options.data} holds no slice {options.slice}, but {', '.join(map(str, numbers))}")
    number: int = options.slice
    return number


if __name__ == "__main__":
    main()
