"""A small model under DeepSpeed's ZeRO, on whatever the nodes have: GPUs, or CPUs with gloo.

    safelaunch train.py --hostfile hosts --deepspeed_config ds.json

Takes a few seconds. `--fail-rank R --fail-step S` makes rank R raise an error at step S.
"""

import argparse
from collections.abc import Iterator
from itertools import islice

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

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
    return deepspeed.add_config_arguments(parser).parse_args()


def no_compiling_for_gloo() -> None:
    """On CPUs, spare the first run the half minute in which DeepSpeed compiles its shared-memory transport.

    It only speeds up all-reduce between ranks of one machine; without it, gloo does that too.
    """
    if get_accelerator().device_name() == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def batches(engine: deepspeed.DeepSpeedEngine) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches without end: y = sum(x), the same data everywhere, another share of it on each rank."""
    x = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(dim=1, keepdim=True))
    sampler = DistributedSampler(data, num_replicas=engine.dp_world_size, rank=engine.global_rank)
    loader = DataLoader(data, batch_size=engine.train_micro_batch_size_per_gpu(), sampler=sampler)
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
    for step, (x, y) in enumerate(islice(batches(engine), arguments.steps)):
        if rank == arguments.fail_rank and step == arguments.fail_step:
            raise RuntimeError(f"rank {rank} was told to fail at step {step}")
        loss = nn.functional.mse_loss(engine(x.to(engine.device)), y.to(engine.device))
        engine.backward(loss)
        engine.step()
        print(f"rank {rank} of {engine.world_size} step {step} loss {loss.item():.4f}", flush=True)
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
