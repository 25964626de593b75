"""DeepSpeed engine, GradCache step, loop and checkpoints."""

from dsclr.data import BadDataError
from dsclr.train.loop import Plan, TrainingError, make_plan, train

__all__ = ["BadDataError", "Plan", "TrainingError", "make_plan", "train"]
