"""In the style of transformers' text classification guide: tokenizer, padding collator, compute_metrics, best model."""

import numpy as np
from sklearn.datasets import load_digits
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)


def as_text(image):
    """Return the positions with ink, line by line: texts of different lengths."""
    return " ".join(f"p{position}" for position in np.flatnonzero(image > 8))


class TextDataset(Dataset):
    def __init__(self, texts, labels):
        self.encodings = [tokenizer(text, truncation=True) for text in texts]
        self.labels = labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, idx):
        return {**self.encodings[idx], "labels": int(self.labels[idx])}


def compute_metrics(eval_pred):
    logits, labels = eval_pred
    predictions = np.argmax(logits, axis=1)
    return {"accuracy": float((predictions == labels).mean())}


words = {"[PAD]": 0, "[UNK]": 1} | {f"p{position}": position + 2 for position in range(64)}
word_level = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
word_level.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=word_level, pad_token="[PAD]", unk_token="[UNK]", model_max_length=64
)

images, labels = load_digits(return_X_y=True)
texts = [as_text(image) for image in images]
train_dataset = TextDataset(texts[:1000], labels[:1000])
eval_dataset = TextDataset(texts[1000:1200], labels[1000:1200])

model = BertForSequenceClassification(
    BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        num_labels=10,
    )
)

training_args = TrainingArguments(
    output_dir="my_awesome_model",
    learning_rate=2e-3,
    per_device_train_batch_size=16,
    per_device_eval_batch_size=16,
    num_train_epochs=2,
    weight_decay=0.01,
    eval_strategy="epoch",
    save_strategy="epoch",
    load_best_model_at_end=True,
    metric_for_best_model="accuracy",
)

trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=train_dataset,
    eval_dataset=eval_dataset,
    processing_class=tokenizer,
    data_collator=DataCollatorWithPadding(tokenizer=tokenizer),
    compute_metrics=compute_metrics,
)

trainer.train()
trainer.save_model("final")
print(trainer.evaluate(eval_dataset=eval_dataset))
print(trainer.predict(eval_dataset, metric_key_prefix="predict").metrics)
