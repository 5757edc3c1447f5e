"""In the style of Lightning's CIFAR tutorial: OneCycleLR stepped at every step, over the trainer's estimate."""

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Accuracy

L.seed_everything(7)


class LitConvNet(L.LightningModule):
    def __init__(self, lr=0.05, batch_size=32):
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(36, 10)
        )
        self.val_accuracy = Accuracy(task="multiclass", num_classes=10)

    def setup(self, stage=None):
        digits = load_digits()
        images = torch.Tensor(digits.images / 16).unsqueeze(1)
        labels = torch.tensor(digits.target)
        train, val = train_test_split(torch.arange(len(labels)), test_size=0.2, random_state=7)
        self.train_set = TensorDataset(images[train], labels[train])
        self.val_set = TensorDataset(images[val], labels[val])

    def train_dataloader(self):
        return DataLoader(self.train_set, self.hparams.batch_size, True)

    def val_dataloader(self):
        return DataLoader(self.val_set, 256)

    def forward(self, x):
        return F.log_softmax(self.model(x), dim=1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.nll_loss(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.val_accuracy(self(x).argmax(dim=1), y)
        self.log("val_acc", self.val_accuracy, prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9, weight_decay=5e-4)
        scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


model = LitConvNet()
trainer = L.Trainer(
    max_epochs=2,
    accelerator="auto",
    devices=1,
    logger=CSVLogger(save_dir="logs/"),
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    val_check_interval=0.5,
    callbacks=[
        LearningRateMonitor(logging_interval="step"),
    ],
)
trainer.fit(model)
