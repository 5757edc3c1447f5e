"""A data loader that measures the training it feeds, for scripts that a master launches."""

from zeus_plugins.dataloader.loader import ZeusDataLoader

__all__ = ["ZeusDataLoader"]
