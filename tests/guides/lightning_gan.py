"""In the style of Lightning's GAN tutorial: manual optimization, two optimizers, each with a scheduler."""

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class DigitsDataModule(L.LightningDataModule):
    def __init__(self, batch_size: int = 64):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage=None):
        full = TensorDataset(torch.Tensor(load_digits().data / 8 - 1))
        self.train_set, self.val_set = random_split(full, [1500, 297])

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.batch_size)


class GAN(L.LightningModule):
    def __init__(self, latent_dim: int = 16, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(latent_dim, 32), nn.ReLU(), nn.Linear(32, 64), nn.Tanh())
        self.discriminator = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, noise):
        return self.generator(noise)

    def loss(self, images, *, real):
        scores = self.discriminator(images)
        target = torch.ones_like(scores) if real else torch.zeros_like(scores)
        return nn.functional.binary_cross_entropy_with_logits(scores, target)

    def training_step(self, batch):
        (images,) = batch
        noise = torch.randn(len(images), self.hparams.latent_dim).type_as(images)
        generator_optimizer, discriminator_optimizer = self.optimizers()

        self.toggle_optimizer(generator_optimizer)
        g_loss = self.loss(self(noise), real=True)
        generator_optimizer.zero_grad()
        self.manual_backward(g_loss)
        generator_optimizer.step()
        self.untoggle_optimizer(generator_optimizer)

        self.toggle_optimizer(discriminator_optimizer)
        d_loss = (self.loss(images, real=True) + self.loss(self(noise).detach(), real=False)) / 2
        discriminator_optimizer.zero_grad()
        self.manual_backward(d_loss)
        discriminator_optimizer.step()
        self.untoggle_optimizer(discriminator_optimizer)

        self.log_dict({"g_loss": g_loss, "d_loss": d_loss}, prog_bar=True)

    def on_train_epoch_end(self):
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def validation_step(self, batch):
        (images,) = batch
        self.log("val_real_score", self.discriminator(images).mean())

    def configure_optimizers(self):
        networks = [self.generator, self.discriminator]
        optimizers = [torch.optim.Adam(network.parameters(), lr=self.hparams.lr) for network in networks]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(each, gamma=0.9) for each in optimizers]


dm = DigitsDataModule()
model = GAN()
trainer = L.Trainer(
    accelerator="auto",
    devices=1,
    max_epochs=2,
)
trainer.fit(model, dm)
