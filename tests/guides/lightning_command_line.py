"""In the style of Lightning's example of an image classifier with LightningCLI, fitted and tested by hand."""

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split


class Backbone(torch.nn.Module):
    def __init__(self, hidden_dim=32):
        super().__init__()
        self.l1 = torch.nn.Linear(64, hidden_dim)
        self.l2 = torch.nn.Linear(hidden_dim, 10)

    def forward(self, x):
        return self.l2(torch.relu(self.l1(x)))


class LitClassifier(LightningModule):
    def __init__(self, hidden_dim: int = 32, learning_rate: float = 0.001):
        super().__init__()
        self.save_hyperparameters()
        self.backbone = Backbone(hidden_dim)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.backbone(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("valid_loss", F.cross_entropy(self.backbone(x), y), on_step=True)

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_loss", F.cross_entropy(self.backbone(x), y))

    def predict_step(self, batch, batch_idx, dataloader_idx=None):
        x, _ = batch
        return self.backbone(x)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)


class MyDataModule(LightningDataModule):
    def __init__(self, batch_size: int = 32):
        super().__init__()
        images, labels = load_digits(return_X_y=True)
        full = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
        splits = random_split(full, [1400, 200, 197], torch.Generator().manual_seed(42))
        self.train_set, self.val_set, self.test_set = splits
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.batch_size)

    def test_dataloader(self):
        return DataLoader(self.test_set, batch_size=self.batch_size)


def cli_main():
    cli = LightningCLI(
        LitClassifier,
        MyDataModule,
        seed_everything_default=1234,
        save_config_kwargs={"overwrite": True},
        trainer_defaults={
            "max_epochs": 2,
        },
        run=False,
    )
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    cli.trainer.test(ckpt_path="best", datamodule=cli.datamodule)
    print(len(cli.trainer.predict(ckpt_path="best", dataloaders=cli.datamodule.test_dataloader())))


if __name__ == "__main__":
    cli_main()
