"""`ecospec-train` in processes that tests look into and kill, with Lightning's DeepSpeed strategies on CPUs.

`python -m tests.train_processes predictor …` is `ecospec-train predictor …`; `torchrun` may start several. Environment:
`LOSSES` names a file to append the loss of every step to, `DIE_AT` the step at which the first process kills itself,
`SPOIL_AT` the one in which the last process's loss alone is NaN, `PAIRED` makes one process read its batches in the
order in which two would. Each process adds what it ends with to a file `exits` beside `LOSSES`.

Lightning refuses DeepSpeed on anything but GPUs, though DeepSpeed itself runs over gloo: `CpuDeepSpeed` overrides that.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, StrategyRegistry

from ecospec.data import module as data_module
from ecospec.predictor import cli
from ecospec.predictor.objective.loss import batch_loss
from ecospec.predictor.training import module as lightning_module
from ecospec.predictor.training import trainer
from ecospec.predictor.training.module import PredictorModule

ROOT = Path(__file__).resolve().parent.parent


class CpuDeepSpeed(DeepSpeedStrategy):
    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)


def allow_deepspeed_on_cpus() -> None:
    """Let the product's names of the strategies mean these ones, without the C++ that DeepSpeed would compile."""
    import deepspeed.comm.torch

    deepspeed.comm.torch.build_shm_op = lambda: None
    trainer.require_strategy = lambda config: None
    for stage in (1, 2):
        name = f"deepspeed_stage_{stage}"
        StrategyRegistry.remove(name)
        StrategyRegistry.register(name, CpuDeepSpeed, stage=stage, process_group_backend="gloo")


def watch(losses: Path, die_at: int) -> None:
    """Append [optimizer step, excess loss over all processes] for every step, and die after step `die_at`."""
    end = PredictorModule.on_train_batch_end

    def watched(module: PredictorModule, outputs: object, batch: object, batch_idx: int) -> None:
        if module.step_ended(batch_idx) and module.trainer.is_global_zero:
            with losses.open("a") as file:
                file.write(json.dumps([module.global_step, module.step_loss()]) + "\n")
            if module.global_step == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
        end(module, outputs, batch, batch_idx)

    PredictorModule.on_train_batch_end = watched


def spoil(step: int) -> None:
    """Let the loss of the last process, and of no other, be NaN in this optimizer step.

    All are to end by themselves: what torchrun sends to the others when one has ended is ignored.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    training_step = PredictorModule.training_step

    def spoiled(module: PredictorModule, batch: object, batch_idx: int) -> torch.Tensor:
        last = module.global_rank == module.trainer.world_size - 1
        if last and module.global_step + 1 == step:
            lightning_module.batch_loss = lambda predictor, batch: batch_loss(predictor, batch) * float("nan")
        return training_step(module, batch, batch_idx)

    PredictorModule.training_step = spoiled


def read_in_pairs() -> None:
    group = data_module.group_by_length
    data_module.group_by_length = lambda *args, **more: group(*args[:4], **{"processes": 2} | more)


def run(
    processes: int, losses: Path, *words: str, die_at: int = 0, spoil_at: int = 0, paired: bool = False
) -> subprocess.CompletedProcess:
    """Start this module as so many processes."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    command = [sys.executable, "-m", *(torchrun if processes > 1 else []), "tests.train_processes", *words]
    environment = {"LOSSES": str(losses), "DIE_AT": str(die_at), "SPOIL_AT": str(spoil_at)}
    environment |= {"PAIRED": "1" if paired else "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    options = {"cwd": ROOT, "env": os.environ | environment, "capture_output": True, "text": True, "timeout": 300}
    return subprocess.run(command, check=False, **options)


if __name__ == "__main__":
    if any("deepspeed" in word for word in sys.argv):
        allow_deepspeed_on_cpus()
    watch(Path(os.environ["LOSSES"]), int(os.environ["DIE_AT"]))
    if int(os.environ["SPOIL_AT"]):
        spoil(int(os.environ["SPOIL_AT"]))
    if os.environ["PAIRED"]:
        read_in_pairs()
    code = cli.main()
    with Path(os.environ["LOSSES"]).with_name("exits").open("a") as file:
        file.write(f"{code}\n")
    sys.exit(code)
