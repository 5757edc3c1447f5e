"""The callback in trainers built on the Hugging Face one: TRL, PEFT, sentence-transformers, SetFit."""

from __future__ import annotations

import functools
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

if not os.environ.get("CI"):
    pytest.importorskip("transformers", reason="the Trainer's callback needs zeus-plugins[transformers]")
    for package in ("trl", "peft", "sentence_transformers", "setfit"):
        pytest.importorskip(package, reason=f"{package} is in the extra integrations")

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
)

from tests.support.hf_bench import QUIET, Bench, Tokens, quiet_arguments
from tests.support.job_bench import SERVERS_SIZE
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.protocol import TrialState

ROWS = 168
WORDS = [f"w{number}" for number in range(40)]


def tokenizer() -> PreTrainedTokenizerFast:
    specials = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unk>", "bos_token": "<begin>"}
    words = {word: number for number, word in enumerate([*specials.values(), *WORDS])}
    word_level = Tokenizer(WordLevel(words, unk_token="<unk>"))  # noqa: S106 - not a password
    word_level.pre_tokenizer = Whitespace()
    made = PreTrainedTokenizerFast(
        tokenizer_object=word_level, model_max_length=16, model_input_names=["input_ids", "attention_mask"], **specials
    )
    made.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return made


def gpt2(kind: Any = GPT2LMHeadModel, **options: Any) -> Any:
    config = GPT2Config(
        vocab_size=4 + len(WORDS),
        n_positions=32,
        n_embd=8,
        n_layer=1,
        n_head=2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=3,
        **options,
    )
    return kind(config)


def text(number: int, length: int = 6) -> str:
    """Return a distinct text for each of a few hundred numbers."""
    words = [number, number // len(WORDS), *(number * 7 + place for place in range(length - 2))]
    return " ".join(WORDS[word % len(WORDS)] for word in words)


def table(make_row: Callable[[int], dict[str, Any]], rows: int = ROWS) -> Dataset:
    return Dataset.from_list([make_row(number) for number in range(rows)])


def counted(trainer: Any) -> list[int]:
    """Record the number of samples of each training batch, where its loss is computed."""
    sizes: list[int] = []
    compute = trainer.compute_loss

    def counting(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if model.training:
            sizes.append(_length(inputs))
        return compute(model, inputs, *args, **kwargs)

    trainer.compute_loss = counting
    return sizes


def _length(inputs: Any) -> int:
    names = ("completion_ids", "input_ids", "sentence_0_input_ids", "anchor_input_ids", "sentence1_input_ids")
    found = next((inputs[name] for name in names if name in inputs), None)
    if found is None:
        found = next(value for value in inputs.values() if hasattr(value, "shape"))
    return len(found)


OPTIONS = {name: value for name, value in QUIET.items() if name != "learning_rate"} | {"learning_rate": 1e-3}


def trl_trainer(kind: str, folder: Path, callback: Any, row: Callable[[int], dict[str, Any]], **options: Any) -> Any:
    import trl

    data = table(row)
    given = {
        "model": gpt2(),
        "args": getattr(trl, f"{kind}Config")(output_dir=str(folder), max_length=16, **OPTIONS),
        "train_dataset": data,
        "eval_dataset": data.select(range(40)),
        "processing_class": tokenizer(),
        "callbacks": [callback],
    }
    return getattr(trl, f"{kind}Trainer")(**given | options)


def lora(task: str) -> Any:
    import peft

    return peft.LoraConfig(r=2, target_modules=["c_attn"], task_type=task, fan_in_fan_out=True)


def sft(folder: Path, callback: Any) -> Any:
    return trl_trainer("SFT", folder, callback, lambda number: {"text": text(number)})


def sft_peft(folder: Path, callback: Any) -> Any:
    return trl_trainer("SFT", folder, callback, lambda number: {"text": text(number)}, peft_config=lora("CAUSAL_LM"))


def dpo(folder: Path, callback: Any) -> Any:
    def row(n: int) -> dict[str, Any]:
        return {"prompt": text(n), "chosen": " " + text(n + 1), "rejected": " " + text(n + 2)}

    return trl_trainer("DPO", folder, callback, row, ref_model=gpt2())


def reward(folder: Path, callback: Any) -> Any:
    model = gpt2(GPT2ForSequenceClassification, num_labels=1)
    return trl_trainer("Reward", folder, callback, lambda n: {"chosen": text(n), "rejected": text(n + 3)}, model=model)


def peft_model(folder: Path, callback: Any) -> Any:
    import peft

    model = peft.get_peft_model(gpt2(GPT2ForSequenceClassification, num_labels=10), lora("SEQ_CLS"))
    data = {"train_dataset": Tokens(), "eval_dataset": Tokens()}
    return Trainer(model=model, args=quiet_arguments(folder), callbacks=[callback], **data)


def grpo(folder: Path, callback: Any) -> Any:
    import trl

    data = table(lambda number: {"prompt": text(number, 3)}, 24)
    given = {**OPTIONS, "per_device_eval_batch_size": 8, "num_generations": 4, "max_completion_length": 4}
    return trl.GRPOTrainer(
        model=gpt2(),
        reward_funcs=lambda completions, **_: [float(len(completion)) for completion in completions],
        args=trl.GRPOConfig(output_dir=str(folder), **given),
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        processing_class=tokenizer(),
        callbacks=[callback],
    )


def sentence_model() -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    folder = tempfile.mkdtemp()
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    BertModel(BertConfig(vocab_size=4 + len(WORDS), max_position_embeddings=16, **size)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return SentenceTransformer(modules=[Transformer(folder), Pooling(8)], device="cpu")


def pairs(rows: int = ROWS) -> Dataset:
    return table(lambda number: {"anchor": text(number), "positive": text(number, 5)}, rows)


def sentences(folder: Path, callback: Any, data: Any = None, **options: Any) -> Any:
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    model = sentence_model()
    return SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(output_dir=str(folder), **OPTIONS, **options),
        train_dataset=data or pairs(),
        eval_dataset=pairs(40),
        loss=MultipleNegativesRankingLoss(model),
        callbacks=[callback],
    )


def setfit_trainer(folder: Path, *callbacks: Any) -> tuple[Any, tuple[list[str], list[int]]]:
    """Return SetFit's trainer, and its texts with labels."""
    import setfit

    model = setfit.SetFitModel(model_body=sentence_model(), model_head=torch.nn.Identity(), labels=None)
    data = table(lambda number: {"text": text(number), "label": number % 2}, 24)
    arguments = setfit.TrainingArguments(
        output_dir=str(folder),
        batch_size=16,
        num_epochs=1,
        num_iterations=5,
        eval_strategy="epoch",
        save_strategy="no",
        report_to=[],
    )
    trainer = setfit.Trainer(
        model=model, args=arguments, train_dataset=data, eval_dataset=data, callbacks=list(callbacks)
    )
    return trainer, (list(data["text"]), list(data["label"]))


def setfit_training(folder: Path, callback: Any) -> tuple[Any, Callable[[], Any]]:
    trainer, data = setfit_trainer(folder, callback)
    return trainer.st_trainer, lambda: trainer.train_embeddings(*data, *data)


# Functions that create a trainer, or a trainer and its training function.
WAYS: dict[str, tuple[Callable[[Path, Any], Any], str]] = {
    "TRL's SFTTrainer": (sft, "mean_token_accuracy"),
    "TRL's SFTTrainer with a PEFT model": (sft_peft, "eval_loss"),
    "PEFT": (peft_model, "eval_loss"),
    "TRL's DPOTrainer": (dpo, "eval_loss"),
    "TRL's RewardTrainer": (reward, "eval_loss"),
    "sentence-transformers": (sentences, "eval_loss"),
    "sentence-transformers, no duplicates": (functools.partial(sentences, batch_sampler="no_duplicates"), "eval_loss"),
    "sentence-transformers, several data sets": (
        lambda folder, callback: sentences(folder, callback, {"left": pairs(), "right": pairs()}),
        "eval_loss",
    ),
    "SetFit": (setfit_training, "eval_embedding_loss"),
}


pytestmark = [
    pytest.mark.slow,
    # These packages warn about their own code or about each other.
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

EASY = {"target": 1e9, "higher_is_better_metric": False}
# The model sees this number of samples for each sample of a batch: both texts of a pair.
PAIRED = {"TRL's DPOTrainer", "TRL's RewardTrainer"}


@pytest.mark.parametrize("name", WAYS)
def test_kindred_trainer_trains_at_size_of_server(bench: Bench, name: str) -> None:
    make, monitor = WAYS[name]
    callback = bench.callback(bench.job(**EASY), monitor)
    trainer, train = made if isinstance(made := make(bench.folder, callback), tuple) else (made, made.train)
    sizes = counted(trainer)
    train()
    expected = SERVERS_SIZE * (2 if name in PAIRED else 1)
    full = [size for size in sizes if size == expected]
    assert len(full) >= max(2, len(sizes) - 2), sizes
    assert max(sizes) == expected
    assert bench.only_trial().state is TrialState.COMPLETED


def test_grpo_is_refused_before_trial(bench: Bench) -> None:
    trainer = grpo(bench.folder, bench.callback(bench.job(**EASY), "eval_reward"))
    with pytest.raises(ZeusBSOConfigError, match="batch size of a GRPOTrainer, which generates its own training data"):
        trainer.train()
    assert not bench.is_registered()


def test_negatives_within_batch_are_warned_about(
    bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "zeus_plugins"):
        sentences(tmp_path, bench.callback(bench.job(**EASY), "eval_loss")).train()
    (warning,) = [record.getMessage() for record in caplog.records if "negative" in record.getMessage()]
    assert warning.startswith("MultipleNegativesRankingLoss takes the other samples of a batch as negative examples")


def test_callback_attaches_to_own_trainer_of_setfit(bench: Bench) -> None:
    callback = bench.callback(bench.job(**EASY), "eval_embedding_loss")
    trainer, data = setfit_trainer(bench.folder)
    callback.attach(trainer.st_trainer)
    sizes = counted(trainer.st_trainer)
    trainer.train_embeddings(*data, *data)
    assert set(sizes[:-1]) == {SERVERS_SIZE}
