"""In the style of "Lightning in 15 minutes": an autoencoder, a loader given to fit, and no validation."""

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn, optim, utils


def mlp(*widths):
    layers = []
    for inputs, outputs in zip(widths, widths[1:]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class LitAutoEncoder(L.LightningModule):
    def __init__(self, encoder, decoder):
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    def training_step(self, batch, batch_idx):
        images = batch[0].flatten(start_dim=1)
        loss = nn.functional.mse_loss(self.decoder(self.encoder(images)), images)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return optim.Adam(self.parameters(), lr=1e-3)


digits = load_digits()
dataset = utils.data.TensorDataset(torch.Tensor(digits.images / 16), torch.tensor(digits.target))
train_loader = utils.data.DataLoader(dataset)

trainer = L.Trainer(
    limit_train_batches=100,
    max_epochs=1,
)
trainer.fit(model=LitAutoEncoder(mlp(64, 32, 3), mlp(3, 32, 64)), train_dataloaders=train_loader)

best = trainer.checkpoint_callback.best_model_path
autoencoder = LitAutoEncoder.load_from_checkpoint(best, encoder=mlp(64, 32, 3), decoder=mlp(3, 32, 64))
autoencoder.eval()
with torch.no_grad():
    print("Four digits, embedded:", autoencoder.encoder(dataset[:4][0].flatten(start_dim=1)))
