"""In the style of transformers' causal language modelling from a stream: IterableDataset, max_steps, dictionaries."""

import math

import torch
from sklearn.datasets import load_digits
from torch.utils.data import IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, default_data_collator


class DigitsStream(IterableDataset):
    def __init__(self, first, last):
        self.first, self.last = first, last

    def __iter__(self):
        images = load_digits().data.astype(int)
        for image in images[self.first : self.last]:
            tokens = torch.tensor(image[:32])
            yield {"input_ids": tokens, "labels": tokens.clone()}


model = GPT2LMHeadModel(
    GPT2Config(vocab_size=17, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
)
training_args = TrainingArguments(
    "gpt-digits",
    per_device_train_batch_size=8,
    per_device_eval_batch_size=32,
    max_steps=30,
    eval_strategy="steps",
    eval_steps=10,
    logging_steps=10,
    save_steps=10,
    save_total_limit=1,
    learning_rate=5e-3,
    lr_scheduler_type="linear",
    seed=1,
)
trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=DigitsStream(0, 1500),
    eval_dataset=DigitsStream(1500, 1600),
    data_collator=default_data_collator,
)
trainer.train()
print("perplexity", math.exp(trainer.evaluate()["eval_loss"]))
