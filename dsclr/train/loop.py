"""A run from its configuration to its last file."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.torch_autocast import autocast_if_enabled

from dsclr.config import ConfigError
from dsclr.data import build_eval_loader, build_train_loader
from dsclr.data.order import Slots
from dsclr.data.tasks import Task
from dsclr.eval import extract_features, retrieval_recall
from dsclr.interruption import Interrupted, Interruption
from dsclr.memory import capacity_bytes, peak_bytes
from dsclr.models import (
    ContrastiveModel,
    build_model,
    enable_activation_checkpointing,
    save_trained,
)
from dsclr.negatives import build_bank
from dsclr.ops.native import choose_backend
from dsclr.plan import make_planner, summary
from dsclr.report.metrics import append_line, step_of_last_line, tensorboard_events, write_atomically
from dsclr.report.progress import ProgressDisplay
from dsclr.report.run_folder import RunFolder
from dsclr.report.run_lock import only_job
from dsclr.retention import Retention
from dsclr.train.bad_steps import BadSteps
from dsclr.train.checkpoint import Checkpoints, Progress, TrainingError, has_frozen_random_weights, step_of
from dsclr.train.data_report import DataReport
from dsclr.train.determinism import explained, make_deterministic
from dsclr.train.engine import build_engine, engine_config
from dsclr.train.finite import NotFinite, first_not_finite, training_state
from dsclr.train.masters import master_value
from dsclr.train.run_plan import Plan
from dsclr.train.runtime import Runtime
from dsclr.train.step import StepResult, build_step
from dsclr.train.timing import rank_metrics

logger = logging.getLogger(__name__)


def train(
    plan: Plan,
    runtime: Runtime,
    *,
    resume: str | None = None,
    stop_after: int | None = None,
    interruption: Interruption | None = None,
) -> RunFolder:
    """Run (or continue) the training of a plan; all ranks call this together.

    Args:
        plan: of :func:`make_plan`.
        runtime: of :func:`dsclr.train.runtime.start`.
        resume: "newest": continue from the newest complete checkpoint of the run folder; "auto": from the newest that
            is not damaged, or start anew if there is none.
        stop_after: end after this step of the run, with a checkpoint; the schedule is still that of the
            whole run.
        interruption: asks for an end at the next step boundary, with a checkpoint.

    Raises:
        Interrupted: on all ranks, when asked to end; the checkpoint is written.
        ConfigError, TrainingError, dsclr.data.BadDataError.
    """
    with _only_job(plan, runtime, resume):
        run = _Run(plan, runtime, resume, interruption or Interruption())
        try:
            run.train(plan.total_steps if stop_after is None else min(stop_after, plan.total_steps))
        except Exception as error:
            # Whatever keeps these from being written must not hide what happened.
            with suppress(OSError):
                # Those that ended the run.
                run.data_report.write_skipped(run.progress.step + 1)
            with suppress(OSError):
                if not isinstance(error, Interrupted):
                    run.say("failed")
            raise
        finally:
            run.display.close()
            run.loader.close()
    return plan.folder


@contextmanager
def _only_job(plan: Plan, runtime: Runtime, resume: str | None) -> Iterator[None]:
    """Hold the run folder, on rank 0 for all.

    Raises:
        TrainingError: on all ranks, if another job holds it, or it cannot be made.
    """
    with ExitStack() as held:
        error: list[str | None] = [None]
        if runtime.is_main:
            # A job that was told to end, or lost a rank, is gone in less than this.
            patience = min(60.0, plan.config.dsclr.run.timeout_seconds / 2) if resume == "auto" else 0.0
            try:
                held.enter_context(only_job(plan.folder.path, patience))
                if resume is None:
                    # Another one may have come and gone since the plan was made.
                    plan.folder.check(plan.config, plan.dataset.contents(), resume)
            except ConfigError as refused:
                error = [str(refused)]
            except OSError as refused:
                error = [
                    f"nothing can be written to {plan.folder.path} ({refused.strerror}): choose another "
                    "--set dsclr.run.dir=FOLDER"
                ]
        dist.broadcast_object_list(error)
        if error[0] is not None:
            raise TrainingError(error[0])
        yield


class _Run:
    def __init__(self, plan: Plan, runtime: Runtime, resume: str | None, interruption: Interruption) -> None:
        self.plan, self.runtime, self.interruption = plan, runtime, interruption
        ours = plan.config.dsclr
        if ours.run.deterministic:
            make_deterministic()
        # Every rank makes the same weights, then draws its own dropout.
        torch.manual_seed(ours.run.seed)
        self.model: ContrastiveModel = build_model(ours.model, ours.objective)
        self.model.to(runtime.device)
        enable_activation_checkpointing(self.model, plan.config.raw)
        ds_config = engine_config(plan.config, plan.total_steps, str(plan.folder.path), runtime.device)
        self.engine = build_engine(self.model, ds_config)
        self.model.train()
        torch.manual_seed(ours.run.seed + 1 + runtime.rank)
        self.checkpoints = Checkpoints(
            plan.folder.checkpoints,
            runtime,
            ours.run.keep_last,
            save_frozen=has_frozen_random_weights(self.model, ours.model.pretrained, ours.model.name),
        )
        self.bank = build_bank(ours.negatives.bank, runtime.world_size, ours.negatives.across_ranks)
        self.rows = plan.config.train_batch_size // runtime.world_size
        self.progress = self._resume(resume) if resume else self._start()
        # The steps of the newest checkpoint, and of the newest one that a finite step came after (0: none).
        self.saved_at = self.progress.step
        self.good_at = self._newest_good() if resume else 0
        if runtime.is_main:
            # Only now: a run that could not start leaves no folder behind.
            plan.folder.write_config(plan.config, plan.dataset.contents())
        self.loader = build_train_loader(
            ours.data,
            plan.dataset,
            self.rows,
            rank=runtime.rank,
            world_size=runtime.world_size,
            local_ranks=runtime.local_world_size,
            slots=self.progress.slots,
            consumed=self.progress.consumed,
            host_images=ours.step.host_images,
            spill_dir=None if ours.step.spill_dir is None else Path(ours.step.spill_dir),
        )
        self.loader.skipped.update(self.progress.skipped_samples)
        self.loader.notes.update(self.progress.noted_samples)
        self.data_report = DataReport(self.loader, plan.folder.skipped, runtime)
        # Now: a build of the C++ scan would otherwise count as the first step's time.
        if ours.loss.name == "topk":
            choose_backend(ours.loss.backend, runtime.device, torch.float32)
        retention = Retention(ours.step.retain, runtime.device, runtime.local_world_size)
        self.step = build_step(plan.config, self.engine, runtime.device, self.bank, retention)
        self._forecast()
        trainable = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        logger.info(
            "%s, %s of %s parameters train, %d ranks on %s, batch %d in micro-batches of %d, %d steps over %d samples",
            ours.model.name,
            f"{trainable:,}",
            f"{sum(p.numel() for p in self.model.parameters()):,}",
            runtime.world_size,
            runtime.device.type,
            plan.config.train_batch_size,
            plan.config.micro_batch_size,
            plan.total_steps,
            plan.dataset.order.epoch_samples,
        )
        self.display = ProgressDisplay(plan.total_steps, self.progress.step, runtime.is_main)

    def _forecast(self) -> None:
        """What the run will need of memory: a line in the log, and plan.json."""
        runtime, folder = self.runtime, self.plan.folder
        if runtime.device.type == "cpu" and self.plan.config.precision != "fp32":
            logger.info("memory: no forecast on a CPU in %s, which may take minutes", self.plan.config.precision)
            return
        planner = make_planner(
            self.plan.config,
            runtime.world_size,
            self.model,
            self.plan.tokenizer,
            both=False,
            autocast=partial(autocast_if_enabled, self.engine),
        )
        device_bytes = capacity_bytes(runtime.device, runtime.local_world_size)
        forecast = planner.forecast(planner.configured(device_bytes, on_host=runtime.device.type == "cpu"))
        if runtime.is_main:
            write_atomically(folder.path / "plan.json", json.dumps(forecast.as_dict(), indent=2) + "\n")
        logger.info("memory: %s", summary(forecast, device_bytes))
        if forecast.peak_bytes > device_bytes:
            logger.warning(
                "that is more than there is: tools/plan.py finds settings that fit. The run goes on, with smaller "
                "micro-batches when memory runs out"
            )

    def _start(self) -> Progress:
        return Progress(slots=Slots(self.rows, self.runtime.world_size))

    def _resume(self, mode: str) -> Progress:
        checkpoint, seed = self.checkpoints.choose(mode), self.plan.config.dsclr.run.seed
        if checkpoint is None:
            progress = self._start()
        else:
            progress = self.checkpoints.load(self.engine, checkpoint, self.bank, seed)
        if self.runtime.is_main:
            # Of a run that is started anew not even the evaluation before its first step.
            self.plan.folder.forget_after(-1 if checkpoint is None else progress.step)
        if checkpoint is None:
            logger.info("--resume auto: no checkpoint in %s, a new run begins", self.plan.folder.path)
        else:
            logger.info("resumed from %s, step %d", checkpoint, progress.step)
        return progress

    def _newest_good(self) -> int:
        step = [0]
        if self.runtime.is_main:
            good = self.checkpoints.newest_good()
            step = [0 if good is None else step_of(good)]
        dist.broadcast_object_list(step)
        return step[0]

    def train(self, last_step: int) -> None:
        cfg = self.plan.config.dsclr.run
        first_step = self.progress.step
        self.say("running")
        # Of a run that was interrupted while it evaluated, or before it.
        self._evaluate(due=self._evaluation_is_due(first_step))
        batches = iter(self.loader)
        streak = BadSteps(cfg.max_bad_steps)
        while self.progress.step < last_step:
            self._stop_if_asked()
            started = time.perf_counter()
            with self.step.clock.waiting_for_data():
                batch = next(batches)
            # Before this there is nothing to save, and a signal ends the process at once.
            self.interruption.defer()
            learning_rate = float(self.engine.optimizer.param_groups[0]["lr"])
            streak.before_step(self.progress, self.runtime.device)
            with explained():
                result = self.step(batch, self.progress.step)
            # Before the next one is made: two would take twice the memory, or the disk.
            del batch
            seconds = time.perf_counter() - started
            self._advance()
            if not result.applied:
                self.progress.skipped_steps += 1
                self._report_skipped(result.not_finite)
            if self.progress.step % cfg.log_every == 0 or self.progress.step == last_step:
                self._log(result, learning_rate, seconds)
            streak.after_step(result)
            if streak.is_over:
                self._give_up(streak)
            if not streak.count:
                self._prove()
            if self.progress.step < last_step:
                self._evaluate(due=self._evaluation_is_due(self.progress.step))
            # Not amid bad steps: what the last step made of the weights may be their cause.
            if self._checkpoint_is_due() and not streak.count:
                self._save()
                self.say("running")
        self._save()
        if self.progress.step == self.plan.total_steps:
            self._evaluate(due=True)
            self._stop_if_asked()
            self._save_model()
            self.say("done")
            logger.info("done: %s", self.plan.folder.path)
        else:
            self.say("stopped")
            logger.info(
                "stopped after step %d of %d, the same command with --resume and without --max-steps goes on: %s",
                self.progress.step,
                self.plan.total_steps,
                self.plan.folder.path,
            )

    def _checkpoint_is_due(self) -> bool:
        every = self.plan.config.dsclr.run.checkpoint_every
        return every is not None and self.progress.step // every > self.saved_at // every

    def _stop_if_asked(self) -> None:
        """All ranks come here at the same step, and one request is enough for all.

        Raises:
            Interrupted: with everything saved.
        """
        asked = torch.tensor(float(self.interruption.requested), device=self.runtime.device)
        if self.runtime.world_size > 1:
            dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        if not bool(asked):
            return
        self._save()
        self.say("interrupted")
        raise Interrupted(
            f"{self.interruption.reason or 'another rank was asked to end'}: ended after step {self.progress.step} of "
            f"{self.plan.total_steps}, the same command with --resume auto goes on: {self.plan.folder.path}"
        )

    def say(self, state: str) -> None:
        """See :meth:`RunFolder.write_state`."""
        if self.runtime.is_main:
            self.plan.folder.write_state(state, self.progress.step)

    def _save(self) -> None:
        """A checkpoint, unless there is one of this step.

        Raises:
            TrainingError: training has damaged what it would hold.
        """
        if self.saved_at == self.progress.step:
            return
        bad = self._damage()
        if bad is not None:
            raise TrainingError(
                f"step {self.progress.step}: {bad.tensor} of rank {bad.rank} not finite. {self._advice()}"
            )
        if self.runtime.is_main:
            self.plan.folder.sync()
        self.checkpoints.save(self.engine, self.progress, self.bank)
        self.saved_at = self.progress.step

    def _damage(self) -> NotFinite | None:
        return first_not_finite(training_state(self.engine), self.runtime.device)

    def _prove(self) -> None:
        """A finite step came after the newest checkpoint."""
        if self.saved_at == self.good_at:
            return
        self.good_at = self.saved_at
        if self.runtime.is_main:
            # On a full disk the next save says so.
            with suppress(OSError):
                self.checkpoints.prove(self.good_at)

    def _advice(self) -> str:
        start = "Lower"
        if self.good_at:
            start = f"The checkpoint of step {self.good_at} is the last good one: lower"
        elif self.saved_at:
            start = f"The only checkpoint, of step {self.saved_at}, may hold the cause (then start anew): lower"
        return (
            f"{start} the learning rate, lengthen the warm-up or look at the data of the bad steps "
            f"({self.plan.folder.bad_steps}), then go on with --resume auto"
        )

    def _report_skipped(self, bad: NotFinite | None) -> None:
        """One line of the rank that met it."""
        step = self.progress.step
        if bad is None:
            logger.warning("step %d skipped: the fp16 gradients overflowed, the loss scale is lowered", step)
        elif bad.rank == self.runtime.rank:
            logger.warning("step %d skipped on all ranks: %s (rank %d)", step, bad, bad.rank)
            record = {"step": step, "rank": bad.rank, "tensor": bad.tensor, "values": bad.values, "size": bad.size}
            append_line(self.plan.folder.bad_steps, record)

    def _give_up(self, streak: BadSteps) -> None:
        """End the run on the last good state.

        That is the newest checkpoint which a finite step came after. The weights from just before the bad steps are
        finite, but may have become such that nothing else is: they are what --resume takes only if there is no other.
        """
        last = self.progress.step
        self.progress = streak.go_back(self.runtime.device)
        damaged, before = self._damage(), self.progress.step
        kept = ""
        if damaged is not None:
            kept = f"; {damaged.tensor} of rank {damaged.rank} has become not finite itself"
        elif before > self.good_at:
            self._save()
            if self.good_at and self.runtime.is_main:
                aside = self.checkpoints.set_aside(before)
                kept = f"; what they began with is in {aside.name}, which --resume does not take"
        raise TrainingError(
            f"{streak.count} steps in a row were not finite, up to step {last} ({streak.last}{kept}). {self._advice()}"
        )

    def _evaluation_is_due(self, step: int) -> bool:
        every = self.plan.config.dsclr.eval.every
        return step == 0 or bool(every and step % every == 0)

    def _advance(self) -> None:
        self.progress.step += 1
        self.progress.samples_seen += self.plan.config.train_batch_size
        self.progress.consumed = self.loader.consumed
        self.progress.skipped_samples = dict(self.loader.skipped)
        self.progress.noted_samples = dict(self.loader.notes)
        self.data_report.write_skipped(self.progress.step)

    def _log(self, result: StepResult, learning_rate: float, seconds: float) -> None:
        # A collective, so all ranks come here.
        scale = float(master_value(self.model.logit_scale).exp())
        metrics = self.runtime.mean(result.metrics)
        of_data = self.data_report.counts()
        of_ranks = self.step.clock.counts(self.runtime.rank, self.runtime.world_size)
        counts = self.runtime.added([*of_data, *of_ranks])
        if not self.runtime.is_main:
            return
        record: dict[str, Any] = {
            "step": self.progress.step,
            "samples_seen": self.progress.samples_seen,
            "loss": result.loss,
            "learning_rate": learning_rate,
            "logit_scale": scale,
            "grad_norm": result.grad_norm,
            "skip_rate": math.nan,
            **metrics,
            "samples_per_second": self.plan.config.train_batch_size / seconds,
            "step_seconds": seconds,
            "peak_bytes": peak_bytes(self.runtime.device),
            "recoveries": self.step.recoveries,
            "skipped_steps": self.progress.skipped_steps,
            **rank_metrics(counts[len(of_data) :], self.rows, seconds),
            **self.data_report.metrics(counts[: len(of_data)]),
        }
        append_line(self.plan.folder.metrics, record)
        self.engine.monitor.write_events(tensorboard_events(record, "train"))
        self.display.update(record)

    def _evaluate(self, due: bool) -> None:
        """Held-out retrieval, on the first rank; the others wait. Not twice for a step."""
        cfg = self.plan.config.dsclr
        if cfg.eval.data is None or not due:
            return
        if self.runtime.is_main and step_of_last_line(self.plan.folder.evaluations) != self.progress.step:
            loader = build_eval_loader(
                cfg.data, cfg.eval.data, self.plan.settings, self.plan.tokenizer, cfg.eval.batch_size
            )
            with suppress(Interrupted):
                recall = retrieval_recall(
                    extract_features(self.model, self._unless_interrupted(loader), self.runtime.device)
                )
                record = {"step": self.progress.step, **recall}
                append_line(self.plan.folder.evaluations, record)
                self.engine.monitor.write_events(tensorboard_events(record, "eval"))
                logger.info("step %d, held out: %s", self.progress.step, format_recall(recall))
        dist.barrier()

    def _unless_interrupted(self, tasks: Iterable[Task]) -> Iterator[Task]:
        """An evaluation is given up for a request to end, and made up for by the resumed run."""
        for task in tasks:
            if self.interruption.requested:
                raise Interrupted
            yield task

    def _save_model(self) -> None:
        """The trained tensors, as the optimizer's fp32 values: adapter/ under LoRA, model/ otherwise."""
        masters = {
            name: master_value(parameter).cpu()
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }
        if self.runtime.is_main:
            lora = self.plan.config.dsclr.model.lora is not None
            target = self.plan.folder.adapter if lora else self.plan.folder.model
            save_trained(self.model, target, masters)
            logger.info("trained weights: %s", target)
        dist.barrier()


def format_recall(recall: dict[str, float]) -> str:
    """ "image to text R@1 0.20 ...; text to image R@1 ..." on one line."""
    parts = []
    for direction in ("image_to_text", "text_to_image"):
        values = " ".join(
            f"{name.rsplit('_', 1)[1]} {value:.3f}" for name, value in recall.items() if name.startswith(direction)
        )
        parts.append(f"{direction.replace('_', ' ')} {values}")
    return "; ".join(parts)
