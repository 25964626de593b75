"""DeepSpeed engine, GradCache step, loop and checkpoints."""

from dsclr.data import BadDataError
from dsclr.train.loop import Plan, TrainingError, make_plan, train
from dsclr.train.step import OutOfMemory

__all__ = ["BadDataError", "OutOfMemory", "Plan", "TrainingError", "make_plan", "train"]
