"""From the ``dsclr.data`` section to loaders."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from dsclr.config import DataConfig
from dsclr.data.dataset import ShardDataset, ShardReader
from dsclr.data.decode import Tokenizer
from dsclr.data.loader import TrainLoader
from dsclr.data.order import SampleOrder
from dsclr.data.shards import default_cache_dir, expand_shards
from dsclr.data.tasks import collate
from dsclr.data.views import Augmentation, build_transform
from dsclr.models import ImageSettings


def build_train_dataset(
    cfg: DataConfig, objective: str, settings: ImageSettings, tokenizer: Tokenizer | None, seed: int
) -> ShardDataset:
    """The training rows in the run's order.

    Args:
        objective: "clip" reads images and captions, "simclr" two views of every image.
        settings: of the model's preprocessing.
        tokenizer: of the model; ignored for simclr.
        seed: of order and augmentation.

    Raises:
        ConfigError: missing, unreadable or empty shards.
    """
    augment: Augmentation = cfg.augment or ("simclr" if objective == "simclr" else "light")
    transform = build_transform(settings, augment, crop_scale=cfg.crop_scale, flip=cfg.flip)
    return _dataset(cfg, "dsclr.data.train", objective, transform, tokenizer, seed, choose_caption=True)


def build_train_loader(
    cfg: DataConfig,
    dataset: ShardDataset,
    rows: int,
    *,
    rank: int = 0,
    world_size: int = 1,
    local_ranks: int = 1,
    consumed: int = 0,
    host_images: str = "keep",
    spill_dir: Path | None = None,
) -> TrainLoader:
    """Batches of ``rows`` rows for this rank; see :class:`TrainLoader`.

    Args:
        local_ranks: ranks that share this machine's processors.
    """
    workers = cfg.workers
    if workers is None:
        workers = max(1, min(16, len(os.sched_getaffinity(0)) // local_ranks - 1))
    return TrainLoader(
        dataset,
        rows,
        rank=rank,
        world_size=world_size,
        workers=workers,
        prefetch=cfg.prefetch,
        max_bad_fraction=cfg.max_bad_fraction,
        pin_memory=torch.cuda.is_available(),
        consumed=consumed,
        host_images=host_images,
        spill_dir=spill_dir,
    )


def build_eval_loader(
    cfg: DataConfig,
    shards: str | list[str],
    settings: ImageSettings,
    tokenizer: Tokenizer | None,
    batch_size: int,
    where: str = "dsclr.eval.data",
) -> DataLoader:
    """Every sample of ``shards`` once, in order, without augmentation, as :class:`dsclr.data.tasks.Task`.

    Raises:
        ConfigError: missing, unreadable or empty shards.
    """
    held_out = cfg.model_copy(update={"train": shards, "shuffle": False})
    objective = "simclr" if tokenizer is None else "clip"
    dataset = _dataset(held_out, where, objective, build_transform(settings, "none"), tokenizer, 0, False)
    positions = list(range(dataset.order.epoch_samples))
    tasks = [positions[i : i + batch_size] for i in range(0, len(positions), batch_size)]
    return DataLoader(dataset, batch_sampler=tasks, collate_fn=collate, generator=torch.Generator())


def _dataset(
    cfg: DataConfig,
    where: str,
    objective: str,
    transform: v2.Compose,
    tokenizer: Tokenizer | None,
    seed: int,
    choose_caption: bool,
) -> ShardDataset:
    cache_dir = Path(cfg.cache_dir) if cfg.cache_dir else default_cache_dir()
    reader = ShardReader(expand_shards(cfg.train, where), cache_dir, open_files=2 * cfg.shuffle_shards)
    order = SampleOrder(reader.counts(), seed, cfg.shuffle, cfg.shuffle_shards)
    id_source = cfg.id
    if id_source == "auto":
        id_source = "key" if objective == "simclr" else "caption"
    return ShardDataset(
        reader,
        order,
        image=cfg.image,
        caption=cfg.caption,
        id_source=id_source,
        transform=transform,
        tokenizer=tokenizer if objective == "clip" else None,
        seed=seed,
        choose_caption=choose_caption,
    )
