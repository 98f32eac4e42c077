"""A small model under DeepSpeed's ZeRO, on whatever the nodes have: GPUs, or CPUs with gloo.

    safelaunch train.py --hostfile hosts --deepspeed_config ds.json

Takes a few seconds. `--fail-rank R` makes rank R raise an error, `--stall-rank R` stalls its data loader.
"""

import argparse
import time
from collections.abc import Iterator
from itertools import islice

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FEATURES = 16
SAMPLES = 256


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser.add_argument("--steps", type=int, default=5, help="how many to train (%(default)s)")
    parser.add_argument("--fail-rank", type=int, default=-1, help="the rank that raises an error")
    parser.add_argument("--fail-step", type=int, default=2, help="the step at which it does (%(default)s)")
    parser.add_argument("--stall-rank", type=int, default=-1, help="the rank whose data do not come")
    return deepspeed.add_config_arguments(parser).parse_args()


def no_compiling_for_gloo() -> None:
    """On CPUs, spare the first run the half minute in which DeepSpeed compiles its shared-memory transport.

    It only speeds up all-reduce between ranks of one machine; without it, gloo does that too.
    """
    if get_accelerator().device_name() == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class Sums(Dataset[tuple[Tensor, Tensor]]):
    """x and y = sum(x), the same on every rank."""

    def __init__(self, stalls: bool) -> None:
        self.x = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(0))
        self.reads_left = 10 if stalls else SAMPLES**2

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.reads_left -= 1
        if self.reads_left < 0:
            time.sleep(3600)  # a disk that does not answer
        return self.x[index], self.x[index].sum(dim=0, keepdim=True)


def batches(engine: deepspeed.DeepSpeedEngine, stalls: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches without end, another share of the data on each rank."""
    data = Sums(stalls)
    sampler = DistributedSampler(data, num_replicas=engine.dp_world_size, rank=engine.global_rank)
    size = engine.train_micro_batch_size_per_gpu()
    loader = DataLoader(data, batch_size=size, sampler=sampler, num_workers=1, persistent_workers=True)
    while True:
        yield from loader


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    no_compiling_for_gloo()
    deepspeed.init_distributed()
    model = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, 1))
    engine, *_ = deepspeed.initialize(args=arguments, model=model, model_parameters=model.parameters())
    rank = engine.global_rank
    for step, (x, y) in enumerate(islice(batches(engine, rank == arguments.stall_rank), arguments.steps)):
        if rank == arguments.fail_rank and step == arguments.fail_step:
            raise RuntimeError(f"rank {rank} was told to fail at step {step}")
        loss = nn.functional.mse_loss(engine(x.to(engine.device)), y.to(engine.device))
        engine.backward(loss)
        engine.step()
        print(f"rank {rank} of {engine.world_size} step {step} loss {loss.item():.4f}", flush=True)
    # Without it, a thread of torch's gloo may still hold a tensor, and abort when Python is gone.
    deepspeed.comm.barrier()
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
