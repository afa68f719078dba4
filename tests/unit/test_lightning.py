"""Lightning's Trainer trains, saves and loads a model with a collection."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
from own_loop import assert_same_state
from scenario import Net, global_batch

from colonnade import RowOptimizer


@pytest.fixture
def lightning():
    """Import Lightning here, not at the top: it takes seconds, also of who only collects tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = pytest.importorskip(
            "lightning", reason="Lightning is not installed (pip install colonnade[test])"
        )
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return package


class Steps:
    """Methods of a `LightningModule` of ours. It has two optimizers, so steps are called by hand."""

    def __init__(self, seed=3):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.net = Net(stays="counted and frequent", seed=seed)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01), RowOptimizer(self.net.embeddings)

    def training_step(self, batch, number):
        dense, rows = self.optimizers()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            self.net(batch), batch.label.double()
        )
        dense.zero_grad()
        self.manual_backward(loss)
        rows.step()
        dense.step()

    # For `assert_same_state`.
    def state(self):
        return [self.net.state_dict(), self.trainer.optimizers[1].state_dict()]


def train(lightning, module, first, end, folder, checkpoint=None):
    trainer = lightning.Trainer(
        max_epochs=1 if checkpoint is None else 2, accelerator="cpu", logger=False, default_root_dir=folder,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the data has no length, nor workers
        stream = module.net.embeddings.lookahead(
            global_batch(step, 24) for step in range(first, end)
        )
        trainer.fit(module, stream, ckpt_path=checkpoint, weights_only=True)
    return trainer


def test_save_checkpoint_and_load_from_checkpoint(tmp_path, lightning):
    class Module(Steps, lightning.LightningModule):
        pass

    whole = Module()
    trainer = train(lightning, whole, 0, 4, tmp_path)
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    again = Module.load_from_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    fresh = Module()
    train(lightning, whole, 4, 7, tmp_path, checkpoint=tmp_path / "model.ckpt")
    train(lightning, fresh, 4, 7, tmp_path, checkpoint=tmp_path / "model.ckpt")
    assert_same_state(whole, fresh)
    assert int(fresh.net.embeddings.step) == 7
