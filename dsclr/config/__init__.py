"""The run's configuration: one DeepSpeed JSON whose ``"dsclr"`` section is ours.

DeepSpeed's own keys (batch size, precision, ZeRO, optimizer, scheduler, clipping, activation
checkpointing, TensorBoard) keep their names and their place; everything else lives under ``"dsclr"``.
"""

from dsclr.config.explain import ConfigError
from dsclr.config.run import Config, load_config
from dsclr.config.sections import (
    BankConfig,
    DataConfig,
    DsclrConfig,
    EvalConfig,
    LogitScaleConfig,
    LoraConfig,
    LossConfig,
    ModelConfig,
    NegativesConfig,
    ProjectionConfig,
    RunConfig,
    SourceConfig,
    StepConfig,
)

__all__ = [
    "BankConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "DsclrConfig",
    "EvalConfig",
    "LogitScaleConfig",
    "LoraConfig",
    "LossConfig",
    "ModelConfig",
    "NegativesConfig",
    "ProjectionConfig",
    "RunConfig",
    "SourceConfig",
    "StepConfig",
    "load_config",
]
