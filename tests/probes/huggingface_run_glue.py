"""In the style of transformers' example for GLUE: local JSON lines, dynamic padding, prediction after training."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from datasets import load_dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)


@dataclass
class DataTrainingArguments:
    train_file: str = field(default="train.json")
    validation_file: str = field(default="validation.json")
    max_seq_length: int = field(default=32)


def write_rows():
    for name, rows in {"train.json": 600, "validation.json": 100}.items():
        lines = [
            {"sentence1": f"w{n % 23} w{n % 7}", "sentence2": f"w{(n * 3) % 23}", "label": int(n % 7 > 3)}
            for n in range(rows)
        ]
        Path(name).write_text("\n".join(map(json.dumps, lines)))


def main():
    parser = HfArgumentParser((DataTrainingArguments, TrainingArguments))
    data_args, training_args = parser.parse_dict(
        {
            "output_dir": "glue",
            "do_train": True,
            "do_eval": True,
            "eval_strategy": "epoch",
            "per_device_train_batch_size": 32,
            "gradient_accumulation_steps": 2,
            "num_train_epochs": 2,
            "report_to": "none",
        }
    )
    write_rows()
    raw_datasets = load_dataset(
        "json", data_files={"train": data_args.train_file, "validation": data_args.validation_file}, cache_dir="cache"
    )
    words = {"[PAD]": 0, "[UNK]": 1, "[SEP]": 2} | {f"w{number}": number + 3 for number in range(23)}
    word_level = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    word_level.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=word_level, pad_token="[PAD]", unk_token="[UNK]", sep_token="[SEP]"
    )
    config = BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    model = BertForSequenceClassification(config)

    def preprocess_function(examples):
        result = tokenizer(
            examples["sentence1"], examples["sentence2"], max_length=data_args.max_seq_length, truncation=True
        )
        result["label"] = examples["label"]
        return result

    raw_datasets = raw_datasets.map(preprocess_function, batched=True)

    def compute_metrics(p: EvalPrediction):
        return {"accuracy": float((np.argmax(p.predictions, axis=1) == p.label_ids).mean())}

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=raw_datasets["train"],
        eval_dataset=raw_datasets["validation"],
        compute_metrics=compute_metrics,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8),
    )
    if training_args.do_train:
        result = trainer.train()
        trainer.save_model()
        trainer.log_metrics("train", result.metrics)
    if training_args.do_eval:
        trainer.log_metrics("eval", trainer.evaluate(eval_dataset=raw_datasets["validation"]))
    predictions = trainer.predict(raw_datasets["validation"].remove_columns("label"), metric_key_prefix="predict")
    print(np.bincount(np.argmax(predictions.predictions, axis=1)))


if __name__ == "__main__":
    main()
