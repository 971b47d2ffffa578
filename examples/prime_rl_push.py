"""prime-rl whose trainer pushes weights into the inference servers, instead of files on a shared file system.

    VLLM_SERVER_DEV_MODE=1 python examples/prime_rl_push.py inference @ inference.toml
    export PUSH_TO=http://127.0.0.1:8000                                             # or several, with commas
    torchrun --nproc-per-node 8 examples/prime_rl_push.py trainer @ trainer.toml

Start the orchestrator as usual, and leave ``weight_broadcast.type`` at "filesystem" everywhere. Each rank sends its own
shards, and each worker receives only its part. The engines serve the new version when the trainer has pushed it; the
orchestrator still learns of it from the file STABLE, and its request to load weights then only clears the prefix cache.
For models in the layout of transformers, without LoRA.
"""

from __future__ import annotations

import os
import sys

from bytecheckpoint.inference.push import HttpEngine, Pusher
from bytecheckpoint.inference.vllm.worker import WorkerExtension


class Worker(WorkerExtension):
    """Extends vLLM's workers by what a push needs, and answers the requests of prime-rl's servers."""

    def init_broadcaster(self, *args):
        """Does nothing: a push needs no process group."""

    def update_weights_from_path(self, weight_path):
        """Does nothing: the weights are there already."""


def trainer(urls):
    """Run prime-rl's trainer."""
    from prime_rl.trainer.rl import train
    from prime_rl.trainer.rl.broadcast.filesystem import FileSystemWeightBroadcast
    from prime_rl.utils.utils import get_broadcast_dir, get_step_path

    pusher = Pusher([HttpEngine(url, pause="keep") for url in urls])

    class PushBroadcast(FileSystemWeightBroadcast):
        def broadcast_weights(self, model, step):
            runs = self.multi_run_manager
            pusher.push(model, version=step)
            for run in list(runs.ready_to_update_idxs):
                if self.world.is_master:
                    folder = get_step_path(get_broadcast_dir(runs.get_run_dir(run)), runs.progress[run].step)
                    folder.mkdir(parents=True, exist_ok=True)
                    self._notify_orchestrator(folder)
                runs.ready_to_update[run] = False

    train.setup_weight_broadcast = PushBroadcast
    with pusher:
        train.main()


def inference():
    """Run prime-rl's inference server."""
    from prime_rl.entrypoints import inference as entrypoint
    from prime_rl.inference import server

    prepare = server.setup_vllm_env

    def setup_vllm_env(config):
        prepare(config)  # before anything imports vLLM
        from prime_rl.inference.vllm.server import WORKER_EXTENSION_CLS

        WORKER_EXTENSION_CLS["filesystem"] = "prime_rl_push.Worker"

    server.setup_vllm_env = setup_vllm_env
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (sys.path[0], os.environ.get("PYTHONPATH"))))
    entrypoint.main()


if __name__ == "__main__":
    what = sys.argv.pop(1)
    if what == "trainer":
        trainer(os.environ["PUSH_TO"].split(","))
    else:
        inference()
