"""A Trainer of Lightning, saved and resumed by this library.

    python examples/train_lightning.py runs/lightning 20

A second call, with more steps, continues at the newest checkpoint as if the first one had not ended.
"""

import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader

import bytecheckpoint as bcp
from bytecheckpoint.integrations.lightning import BcpSingleDeviceStrategy


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 8))

    def training_step(self, batch, index):
        return (self.net(batch) - batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    folder, steps = sys.argv[1:]
    data = StatefulDataLoader(torch.randn(64, 8, generator=torch.Generator().manual_seed(0)), 4, shuffle=True)
    newest = bcp.latest(folder)
    saves = ModelCheckpoint(folder, every_n_train_steps=5, save_top_k=-1)
    strategy = BcpSingleDeviceStrategy(device="cpu")
    options = {"accelerator": "cpu", "devices": 1, "logger": False}
    trainer = Trainer(strategy=strategy, max_steps=int(steps), callbacks=[saves], **options)
    trainer.fit(Model(), data, ckpt_path=newest and newest.url)
