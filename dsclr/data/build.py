"""From the ``dsclr.data`` section to loaders."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from dsclr.config import ConfigError, DataConfig
from dsclr.data.cache import ShardCache, default_cache_dir
from dsclr.data.dataset import CaptionPolicy, ShardDataset
from dsclr.data.decode import Tokenizer
from dsclr.data.images import ImageReader
from dsclr.data.loader import TrainLoader
from dsclr.data.order import MixedOrder, Order, ResampledOrder, SampleOrder, Slots
from dsclr.data.reader import ShardReader
from dsclr.data.shards import expand_shards
from dsclr.data.tasks import collate
from dsclr.data.views import SIMCLR_CROP_SCALE, Augmentation, build_transform
from dsclr.models import ImageSettings

# A JPEG file is decoded at a reduced scale only where its shorter side stays so many times what a crop needs.
DRAFT_MARGIN = 2


def build_train_dataset(
    cfg: DataConfig,
    objective: str,
    settings: ImageSettings,
    tokenizer: Tokenizer | None,
    seed: int,
    order: Order | None = None,
) -> ShardDataset:
    """The training rows in the run's order.

    Args:
        objective: "clip" reads images and captions, "simclr" two views of every image.
        settings: of the model's preprocessing.
        tokenizer: of the model; ignored for simclr.
        seed: of order and augmentation.
        order: None: as the section says, for which all samples are counted.

    Raises:
        ConfigError: missing, unreadable or empty shards.
    """
    augment: Augmentation = cfg.augment or ("simclr" if objective == "simclr" else "light")
    transform = build_transform(settings, augment, crop_scale=cfg.crop_scale, flip=cfg.flip)
    smallest_crop = {"none": 1.0, "light": cfg.crop_scale[0], "simclr": SIMCLR_CROP_SCALE[0]}[augment]
    shortest = math.ceil(DRAFT_MARGIN * max(settings.image_size) / math.sqrt(smallest_crop))
    return _dataset(cfg, "dsclr.data.train", objective, transform, tokenizer, seed, True, shortest, order)


def build_train_loader(
    cfg: DataConfig,
    dataset: ShardDataset,
    rows: int,
    *,
    rank: int = 0,
    world_size: int = 1,
    local_ranks: int = 1,
    slots: Slots | None = None,
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
        slots=slots,
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
    held_out = cfg.model_copy(update={"train": shards, "shuffle": False, "resampled": False})
    objective = "simclr" if tokenizer is None else "clip"
    dataset = _dataset(held_out, where, objective, build_transform(settings, "none"), tokenizer, 0, False, 0)
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
    shortest: int,
    order: Order | None = None,
) -> ShardDataset:
    cache = ShardCache(Path(cfg.cache_dir) if cfg.cache_dir else default_cache_dir(), cfg.cache_size)
    sources = cfg.sources
    patterns = [cfg.train] if sources is None else [source.shards for source in sources]
    parts = [expand_shards(one, where, cfg.allow_pipe) for one in patterns]  # type: ignore[arg-type]
    windows = cfg.shuffle_shards * len(parts)
    reader = ShardReader([shard for part in parts for shard in part], cache, open_files=2 * windows)
    counts: list[int] = []
    if order is None:
        counts = reader.counts()
        order = _order(cfg, where, counts, [len(part) for part in parts], seed)
    id_source = cfg.id
    if id_source == "auto":
        id_source = "key" if objective == "simclr" else "caption"
    return ShardDataset(
        reader,
        order,
        images=ImageReader(
            tuple(cfg.image.lower().split(";")), cfg.background, cfg.truncated_image, cfg.max_pixels, shortest
        ),
        caption=cfg.caption,
        captions=CaptionPolicy(cfg.empty_caption, cfg.long_caption),
        id_source=id_source,
        transform=transform,
        tokenizer=tokenizer if objective == "clip" else None,
        seed=seed,
        sources=dict(zip(cfg.source_names, map(len, parts), strict=False)),
        counts=counts,
        choose_caption=choose_caption,
    )


def _order(cfg: DataConfig, where: str, counts: list[int], shards: list[int], seed: int) -> Order:
    """
    Args:
        counts: samples of each shard.
        shards: of each source, how many.
    """

    def of_source(own: list[int], seed: int) -> Order:
        if cfg.resampled:
            return ResampledOrder(own, seed, cfg.shuffle_shards)
        return SampleOrder(own, seed, cfg.shuffle, cfg.shuffle_shards)

    if cfg.sources is None:
        return of_source(counts, seed)
    orders = []
    for number, (name, source) in enumerate(zip(cfg.source_names, cfg.sources, strict=True)):
        own, counts = counts[: shards[number]], counts[shards[number] :]
        if not sum(own):
            raise ConfigError(f"{where}: source {name} ({source.shards}) has no samples")
        orders.append(of_source(own, seed + number))
    try:
        return MixedOrder(orders, shards, [source.weight for source in cfg.sources], seed)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
