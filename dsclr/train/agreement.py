"""All ranks were told the same, before the first of them waits for what never comes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from dsclr.report.run_folder import differences
from dsclr.train.checkpoint import TrainingError
from dsclr.train.run_plan import Plan
from dsclr.train.runtime import Runtime

# Of one machine.
_OWN = ("dsclr.data.cache_dir", "dsclr.step.spill_dir", "dsclr.data.workers")


def check_agreement(plan: Plan, runtime: Runtime, options: Mapping[str, Any]) -> None:
    """
    Args:
        options: of the command line.

    Raises:
        TrainingError: on all ranks, if one has another configuration, other options or other shards than rank 0.
    """
    own = {**plan.config.resolved(), **options, "the training shards": plan.dataset.contents()}
    # As JSON, which has no tuples: to be compared, and read by any version.
    ranks: list[Any] = [None] * runtime.world_size
    dist.all_gather_object(ranks, json.dumps(own))
    first, *others = (json.loads(rank) for rank in ranks)
    for rank, other in enumerate(others, start=1):
        for key, (expected, found) in differences(first, other):
            if key.startswith(_OWN):
                continue
            raise TrainingError(
                f"rank {rank} was started with {key} = {json.dumps(found)}, rank 0 with {json.dumps(expected)}: give "
                "all ranks the same configuration, options and shards (is a file on one machine an older one?)"
            )
