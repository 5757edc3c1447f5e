"""In the style of transformers' guide to subclassing Trainer: a custom loss, accumulation, warm-up, steps."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.modeling_outputs import SequenceClassifierOutput


class DigitsConfig(PretrainedConfig):
    model_type = "digits"

    def __init__(self, hidden_size=32, **kwargs):
        self.hidden_size = hidden_size
        super().__init__(**kwargs)


class DigitsModel(PreTrainedModel):
    config_class = DigitsConfig

    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.Sequential(nn.Linear(64, config.hidden_size), nn.ReLU(), nn.Linear(config.hidden_size, 10))
        self.post_init()

    def forward(self, pixel_values, labels=None):
        return SequenceClassifierOutput(logits=self.layers(pixel_values))


class WeightedTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs.logits, labels, weight=torch.linspace(0.5, 1.5, 10))
        return (loss, outputs) if return_outputs else loss

    def get_train_dataloader(self):
        sampler = WeightedRandomSampler(torch.ones(len(self.train_dataset)), len(self.train_dataset))
        loader = DataLoader(
            self.train_dataset,
            batch_size=self.args.per_device_train_batch_size,
            sampler=sampler,
            collate_fn=self.data_collator,
        )
        return self.accelerator.prepare(loader)


class PrintLoss(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        print(state.global_step, logs)


def collate(samples):
    pixels, labels = zip(*samples)
    return {"pixel_values": torch.stack(pixels), "labels": torch.stack(labels)}


images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)

args = TrainingArguments(
    output_dir="weighted",
    per_device_train_batch_size=8,
    gradient_accumulation_steps=4,
    num_train_epochs=2,
    learning_rate=1e-2,
    lr_scheduler_type="cosine",
    warmup_steps=10,
    logging_steps=5,
    eval_strategy="steps",
    eval_steps=20,
    save_strategy="no",
    remove_unused_columns=False,
    label_names=["labels"],
)
trainer = WeightedTrainer(
    model=DigitsModel(DigitsConfig()),
    args=args,
    data_collator=collate,
    train_dataset=TensorDataset(images[:1440], labels[:1440]),
    eval_dataset=TensorDataset(images[1440:], labels[1440:]),
    callbacks=[PrintLoss()],
)
trainer.train()
