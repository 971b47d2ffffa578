"""torchtitan's debug model, saved and resumed by this library.

    torchrun --nproc-per-node 2 examples/train_torchtitan.py --folder runs/titan --steps 20

A second call continues at the newest checkpoint, also on another number of GPUs.
"""

from __future__ import annotations

import argparse

from torchtitan.models.llama3.config_registry import llama3_debugmodel

from bytecheckpoint.integrations.torchtitan import BcpCheckpointManager


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="runs/titan", help="where the job writes")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    config = llama3_debugmodel()
    config.dump_folder, config.training.steps = arguments.folder, arguments.steps
    options = {"interval": 5, "last_save_model_only": False, "dataloader_on_resize": "skip"}
    config.checkpoint = BcpCheckpointManager.Config(enable=True, **options)
    trainer = config.build()
    try:
        trainer.train()
    finally:
        trainer.close()


if __name__ == "__main__":
    main()
