"""Trainers built on the Hugging Face one (TRL, PEFT, sentence-transformers, SetFit), with models made on the spot.

Each way makes a trainer with a callback, and returns the sizes that its model will have seen, and what trains it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

from tests.support.hf_models import QUIET, Tokens, quiet_arguments

ROWS = 168
WORDS = [f"w{number}" for number in range(40)]

Way = Callable[[Path, Any], tuple[list[int], Callable[[], Any]]]
WAYS: dict[str, tuple[Way, str]] = {}


def way(name: str, monitor: str = "eval_loss") -> Callable[[Way], Way]:
    def register(make: Way) -> Way:
        WAYS[name] = make, monitor
        return make

    return register


def tokenizer() -> PreTrainedTokenizerFast:
    specials = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unk>", "bos_token": "<begin>"}
    words = {word: number for number, word in enumerate([*specials.values(), *WORDS])}
    word_level = Tokenizer(WordLevel(words, unk_token="<unk>"))  # noqa: S106 - a word, no password
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
    """Another one for each of some hundred numbers."""
    words = [number, number // len(WORDS), *(number * 7 + place for place in range(length - 2))]
    return " ".join(WORDS[word % len(WORDS)] for word in words)


def table(make_row: Callable[[int], dict[str, Any]], rows: int = ROWS) -> Dataset:
    return Dataset.from_list([make_row(number) for number in range(rows)])


def counted(trainer: Any) -> list[int]:
    """The samples of each batch of the training, counted where its loss is computed."""
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


@way("TRL's SFTTrainer", monitor="mean_token_accuracy")
def sft(folder: Path, callback: Any) -> tuple[list[int], Callable[[], Any]]:
    import trl

    data = table(lambda number: {"text": text(number)})
    trainer = trl.SFTTrainer(
        model=gpt2(),
        args=trl.SFTConfig(output_dir=str(folder), max_length=16, **OPTIONS),
        train_dataset=data,
        eval_dataset=data.select(range(40)),
        processing_class=tokenizer(),
        callbacks=[callback],
    )
    return counted(trainer), trainer.train


@way("TRL's SFTTrainer with a PEFT model")
def sft_peft(folder: Path, callback: Any) -> tuple[list[int], Callable[[], Any]]:
    import peft
    import trl

    data = table(lambda number: {"text": text(number)})
    trainer = trl.SFTTrainer(
        model=gpt2(),
        args=trl.SFTConfig(output_dir=str(folder), max_length=16, **OPTIONS),
        train_dataset=data,
        eval_dataset=data.select(range(40)),
        processing_class=tokenizer(),
        peft_config=peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True),
        callbacks=[callback],
    )
    return counted(trainer), trainer.train


@way("PEFT")
def lora(folder: Path, callback: Any) -> tuple[list[int], Callable[[], Any]]:
    import peft

    model = peft.get_peft_model(
        gpt2(GPT2ForSequenceClassification, num_labels=10),
        peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="SEQ_CLS", fan_in_fan_out=True),
    )
    trainer = Trainer(
        model=model,
        args=quiet_arguments(folder),
        train_dataset=Tokens(),
        eval_dataset=Tokens(),
        callbacks=[callback],
    )
    return counted(trainer), trainer.train


@way("TRL's DPOTrainer")
def dpo(folder: Path, callback: Any) -> tuple[list[int], Callable[[], Any]]:
    import trl

    data = table(lambda n: {"prompt": text(n), "chosen": " " + text(n + 1), "rejected": " " + text(n + 2)})
    trainer = trl.DPOTrainer(
        model=gpt2(),
        ref_model=gpt2(),
        args=trl.DPOConfig(output_dir=str(folder), max_length=16, **OPTIONS),
        train_dataset=data,
        eval_dataset=data.select(range(40)),
        processing_class=tokenizer(),
        callbacks=[callback],
    )
    sizes = counted(trainer)
    return sizes, trainer.train


@way("TRL's RewardTrainer")
def reward(folder: Path, callback: Any) -> tuple[list[int], Callable[[], Any]]:
    import trl

    data = table(lambda n: {"chosen": text(n), "rejected": text(n + 3)})
    trainer = trl.RewardTrainer(
        model=gpt2(GPT2ForSequenceClassification, num_labels=1),
        args=trl.RewardConfig(output_dir=str(folder), max_length=16, **OPTIONS),
        train_dataset=data,
        eval_dataset=data.select(range(40)),
        processing_class=tokenizer(),
        callbacks=[callback],
    )
    return counted(trainer), trainer.train


def grpo_trainer(folder: Path, callback: Any, **options: Any) -> Any:
    import trl

    data = table(lambda number: {"prompt": text(number, 3)}, 24)
    given = {**OPTIONS, "per_device_eval_batch_size": 8, "num_generations": 4, "max_completion_length": 4, **options}
    return trl.GRPOTrainer(
        model=gpt2(),
        reward_funcs=lambda completions, **_: [float(len(completion)) for completion in completions],
        args=trl.GRPOConfig(output_dir=str(folder), **given),
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        processing_class=tokenizer(),
        callbacks=[callback],
    )


@way("TRL's GRPOTrainer", monitor="eval_reward")
def grpo(folder: Path, callback: Any) -> tuple[list[int], Callable[[], Any]]:
    trainer = grpo_trainer(folder, callback)
    return counted(trainer), trainer.train


@way("TRL's GRPOTrainer, accumulating", monitor="eval_reward")
def grpo_accumulating(folder: Path, callback: Any) -> tuple[list[int], Callable[[], Any]]:
    trainer = grpo_trainer(folder, callback, gradient_accumulation_steps=2)
    return counted(trainer), trainer.train


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


def sentence_trainer(folder: Path, callback: Any, data: Any, **options: Any) -> Any:
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    model = sentence_model()
    return SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(output_dir=str(folder), **OPTIONS, **options),
        train_dataset=data,
        eval_dataset=pairs(40),
        loss=MultipleNegativesRankingLoss(model),
        callbacks=[callback],
    )


@way("sentence-transformers")
def sentences(folder: Path, callback: Any) -> tuple[list[int], Callable[[], Any]]:
    trainer = sentence_trainer(folder, callback, pairs())
    return counted(trainer), trainer.train


@way("sentence-transformers, no duplicates")
def sentences_without_duplicates(folder: Path, callback: Any) -> tuple[list[int], Callable[[], Any]]:
    trainer = sentence_trainer(folder, callback, pairs(), batch_sampler="no_duplicates")
    return counted(trainer), trainer.train


@way("sentence-transformers, several data sets")
def sentences_of_several_data_sets(folder: Path, callback: Any) -> tuple[list[int], Callable[[], Any]]:
    trainer = sentence_trainer(folder, callback, {"left": pairs(), "right": pairs()})
    return counted(trainer), trainer.train


def setfit_trainer(folder: Path, *callbacks: Any) -> tuple[Any, tuple[list[str], list[int]]]:
    """SetFit's trainer, and its texts with their labels."""
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


@way("SetFit", monitor="eval_embedding_loss")
def setfit_training(folder: Path, callback: Any) -> tuple[list[int], Callable[[], Any]]:
    trainer, data = setfit_trainer(folder, callback)
    return counted(trainer.st_trainer), lambda: trainer.train_embeddings(*data, *data)
