"""Several workers: Horovod and torch.distributed behind pfl's DistributedContext."""
