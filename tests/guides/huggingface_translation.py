"""In the style of transformers' translation guide: Seq2SeqTrainer, padded labels, metrics of generated texts."""

import numpy as np
from sklearn.datasets import load_digits
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]

words = ["<pad>", "</s>", "<unk>", *NAMES, *(f"p{position}" for position in range(64))]
word_level = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
word_level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=word_level, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=64
)


def preprocess(image, label):
    ink = " ".join(f"p{position}" for position in np.flatnonzero(image > 8))
    return {**tokenizer(ink + " </s>"), "labels": tokenizer(NAMES[label] + " </s>")["input_ids"]}


def compute_metrics(eval_preds):
    predictions, labels = eval_preds
    predictions = np.where(predictions != -100, predictions, tokenizer.pad_token_id)
    labels = np.where(labels != -100, labels, tokenizer.pad_token_id)
    predicted = tokenizer.batch_decode(predictions, skip_special_tokens=True)
    wanted = tokenizer.batch_decode(labels, skip_special_tokens=True)
    return {"exact_match": float(np.mean([a.strip() == b.strip() for a, b in zip(predicted, wanted)]))}


rows = [preprocess(image, label) for image, label in zip(*load_digits(return_X_y=True))]

model = T5ForConditionalGeneration(
    T5Config(
        vocab_size=len(words),
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
)
trainer = Seq2SeqTrainer(
    model=model,
    args=Seq2SeqTrainingArguments(
        output_dir="digits_to_words",
        eval_strategy="epoch",
        learning_rate=1e-2,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=64,
        weight_decay=0.01,
        save_total_limit=3,
        num_train_epochs=2,
        predict_with_generate=True,
        generation_max_length=4,
        train_sampling_strategy="group_by_length",
    ),
    train_dataset=rows[:800],
    eval_dataset=rows[800:900],
    processing_class=tokenizer,
    data_collator=DataCollatorForSeq2Seq(tokenizer=tokenizer, model=model),
    compute_metrics=compute_metrics,
)
trainer.train()
