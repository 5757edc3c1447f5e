"""A Lightning training by a new user, without any logging configuration."""

from __future__ import annotations

from lightning.pytorch import Trainer

from tests.support.lightning_bench import Classifier, train_loader, val_loader
from zeus_plugins.lightning import ZeusBSOCallback

if __name__ == "__main__":
    zeus = ZeusBSOCallback(monitor="val_acc", target=0.0)
    trainer = Trainer(max_epochs=2, callbacks=[zeus], accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(Classifier(), train_loader(), val_loader())
