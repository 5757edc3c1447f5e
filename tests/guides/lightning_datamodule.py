"""In the style of Lightning's documentation of LightningDataModule: module and data with saved hyperparameters."""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.functional.classification import multiclass_accuracy


class DigitsDataModule(L.LightningDataModule):
    def __init__(self, batch_size: int = 64, num_workers: int = 0):
        super().__init__()
        self.save_hyperparameters()

    def prepare_data(self):
        load_digits()

    def setup(self, stage: str):
        images, labels = load_digits(return_X_y=True)
        full = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
        lengths = [1400, 200, 197]
        self.train_set, self.val_set, self.test_set = random_split(full, lengths, torch.Generator().manual_seed(42))

    def train_dataloader(self):
        return DataLoader(self.train_set, shuffle=True, drop_last=True, **self.hparams)

    def val_dataloader(self):
        return DataLoader(self.val_set, **self.hparams)

    def test_dataloader(self):
        return DataLoader(self.test_set, **self.hparams)


class LitClassifier(L.LightningModule):
    def __init__(self, hidden_dim: int = 32, learning_rate: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.l1 = nn.Linear(64, self.hparams.hidden_dim)
        self.l2 = nn.Linear(self.hparams.hidden_dim, 10)

    def forward(self, x):
        return self.l2(torch.relu(self.l1(x)))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self._shared_eval(batch, "val")

    def test_step(self, batch, batch_idx):
        self._shared_eval(batch, "test")

    def _shared_eval(self, batch, prefix):
        x, y = batch
        y_hat = self(x)
        self.log(f"{prefix}_loss", F.cross_entropy(y_hat, y), prog_bar=True)
        self.log(f"{prefix}_acc", multiclass_accuracy(y_hat, y, num_classes=10, average="micro"), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


L.seed_everything(7)
dm = DigitsDataModule(batch_size=32)
model = LitClassifier()
trainer = L.Trainer(
    accelerator="auto",
    max_epochs=2,
    callbacks=[
        EarlyStopping(monitor="val_loss", patience=3),
        LearningRateMonitor(logging_interval="epoch"),
    ],
)
trainer.fit(model, datamodule=dm)
trainer.test(model, datamodule=dm)
