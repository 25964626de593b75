"""DeepSpeed engine, GradCache step, loop and checkpoints."""

from dsclr.data import BadDataError
from dsclr.train.agreement import check_agreement
from dsclr.train.checkpoint import TrainingError
from dsclr.train.lifeline import Lifeline
from dsclr.train.loop import train
from dsclr.train.run_plan import Plan, make_plan
from dsclr.train.step import OutOfMemory
from dsclr.train.verify import verify

__all__ = [
    "BadDataError",
    "Lifeline",
    "OutOfMemory",
    "Plan",
    "TrainingError",
    "check_agreement",
    "make_plan",
    "train",
    "verify",
]
