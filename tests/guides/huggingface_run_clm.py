"""In the style of transformers' example that trains causal language models: dataclasses of arguments, grouped texts."""

import logging
import math
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import torch
from datasets import load_dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    hidden_size: int = field(default=16, metadata={"help": "Width of the model."})


@dataclass
class DataTrainingArguments:
    train_file: str = field(metadata={"help": "The text to train on."})
    validation_file: str = field(metadata={"help": "The text to validate on."})
    block_size: int = field(default=16, metadata={"help": "Tokens in a row."})


def write_texts():
    for name, lines in {"train.txt": 400, "valid.txt": 60}.items():
        Path(name).write_text("\n".join(" ".join(f"w{(n * k) % 29}" for k in range(1, 9)) for n in range(lines)))


def preprocess_logits_for_metrics(logits, labels):
    return logits.argmax(dim=-1)


def compute_metrics(eval_preds):
    preds, labels = eval_preds
    return {"accuracy": float((preds[:, :-1] == labels[:, 1:]).mean())}


def main():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_dict(
        {
            "train_file": "train.txt",
            "validation_file": "valid.txt",
            "output_dir": "clm",
            "do_train": True,
            "do_eval": True,
            "eval_strategy": "epoch",
            "num_train_epochs": 2,
            "learning_rate": 0.01,
            "warmup_steps": 4,
            "lr_scheduler_type": "cosine",
            "report_to": "none",
            "save_strategy": "epoch",
        }
    )
    set_seed(training_args.seed)
    write_texts()
    data_files = {"train": data_args.train_file, "validation": data_args.validation_file}
    raw_datasets = load_dataset("text", data_files=data_files, cache_dir="cache")

    words = {"<unk>": 0, "<end>": 1} | {f"w{number}": number + 2 for number in range(29)}
    word_level = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    word_level.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=word_level, unk_token="<unk>", eos_token="<end>")

    tokenized_datasets = raw_datasets.map(
        lambda examples: tokenizer(examples["text"]), batched=True, remove_columns=["text"]
    )

    def group_texts(examples):
        concatenated = {name: list(chain(*examples[name])) for name in examples}
        total = len(concatenated["input_ids"]) // data_args.block_size * data_args.block_size
        result = {
            name: [tokens[at : at + data_args.block_size] for at in range(0, total, data_args.block_size)]
            for name, tokens in concatenated.items()
        }
        result["labels"] = [list(row) for row in result["input_ids"]]
        return result

    lm_datasets = tokenized_datasets.map(group_texts, batched=True)
    config = GPT2Config(vocab_size=len(words), n_embd=model_args.hidden_size, n_layer=1, n_head=2, n_positions=32)
    model = GPT2LMHeadModel(config)
    logger.info("parameters: %d", sum(torch.numel(weight) for weight in model.parameters()))

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=lm_datasets["train"],
        eval_dataset=lm_datasets["validation"],
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
    )
    if training_args.do_train:
        train_result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        trainer.log_metrics("train", train_result.metrics)
        trainer.save_metrics("train", train_result.metrics)
        trainer.save_state()
    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        trainer.log_metrics("eval", metrics)


if __name__ == "__main__":
    main()
