"""DeepSpeed's own keys, which it does not check itself."""

from __future__ import annotations

from typing import Any

from dsclr.config.explain import ConfigError, did_you_mean
from dsclr.config.sections import DsclrConfig

# DeepSpeed ignores a top-level key it does not know, so that a typo would silently change the run.
DEEPSPEED_KEYS = frozenset(
    [
        "activation_checkpointing",
        "aio",
        "amp",
        "autotuning",
        "bf16",
        "bfloat16",
        "checkpoint",
        "comms_logger",
        "communication_data_type",
        "compile",
        "compression_training",
        "csv_monitor",
        "curriculum_learning",
        "data_efficiency",
        "data_types",
        "disable_allgather",
        "dump_state",
        "elasticity",
        "flops_profiler",
        "fp16",
        "fp32_allreduce",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "gradient_predivide_factor",
        "load_universal_checkpoint",
        "memory_breakdown",
        "optimizer",
        "prescale_gradients",
        "progressive_layer_drop",
        "scheduler",
        "seq_parallel_communication_data_type",
        "sparse_gradients",
        "steps_per_print",
        "tensorboard",
        "torch_autocast",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "wall_clock_breakdown",
        "wandb",
        "comet",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "zero_optimization",
    ]
)


def check_deepspeed_keys(raw: dict[str, Any], source: str) -> None:
    for key in raw:
        if key != "dsclr" and key not in DEEPSPEED_KEYS:
            ours = f"; {key} belongs under dsclr: dsclr.{key}" if key in DsclrConfig.model_fields else ""
            raise ConfigError(
                f"{source}: unknown key {key!r}{ours or did_you_mean(key, [*DEEPSPEED_KEYS, 'dsclr'])}. "
                "Top-level keys are DeepSpeed's, everything of dsclr's own stands under \"dsclr\""
            )
    if raw.get("zero_optimization") is not None and not isinstance(raw["zero_optimization"], dict):
        raise ConfigError(f"{source}: zero_optimization = {raw['zero_optimization']!r}, an object is expected")
