"""The training loop. Everything that it does twice, or that can be tested alone, is in the modules beside it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pydml.miners
from pydml import metrics
from pydml.backends import largest_class
from pydml.data import base as data_base
from pydml.data.files import read_json
from pydml.distributed import ShardedLoss, ShardedMiner
from pydml.memory import CrossBatchMemory
from pydml.samplers import CategorySampler, MPerClassSampler
from pydml.train import checkpoint, lock, models, optim, snapshot, transforms
from pydml.train.batches import Images, seed_all, stream
from pydml.train.checkpoint import CheckpointError
from pydml.train.config import Config
from pydml.train.evaluate import autocast, embed
from pydml.train.gradcache import cached_backward
from pydml.train.logs import Log, Progress, memory, shown
from pydml.train.setup import open_data, place

#: Settings that a resumed run may change: they do not change its numbers.
MOVABLE = ("data", "device", "workers", "eval_batch")


class TrainingError(RuntimeError):
    """What stopped a training; the message says what and where."""


class Interrupted(Exception):
    """Ctrl-C or SIGTERM: the run was saved."""


class Trainer:
    """One run: data, network, loss, optimizer, and where it is.

    Parameters
    ----------
    config
        The settings. A run's directory, ``config.out``, must not hold another run; see :meth:`resume`.
    splits
        Training and test images; None: opened from ``config.data``.
    model, loss
        Your own instead of those that the settings name. The model maps images [n, C, H, W] to embeddings.
    quiet
        Print nothing.

    Examples
    --------
    >>> config = pydml.train.Config(data="products", preset="ms/paper", batch_size=4096, micro_batch=64)
    >>> results = pydml.train.Trainer(config).fit()  # doctest: +SKIP
    """

    def __init__(
        self,
        config: Config,
        splits: data_base.Splits | None = None,
        *,
        model: nn.Module | None = None,
        loss: nn.Module | None = None,
        quiet: bool = False,
        _resumed: bool = False,
    ) -> None:
        self.config, self.out = config, Path(config.out)
        if not _resumed and (self.out / "last.pt").exists():
            raise ValueError(
                f"out: got {config.out!r}, which holds a run; resume it (--resume {config.out}) or name another"
            )
        self.rank, self.world_size, self.device = place(config.device)
        self.quiet = quiet or self.rank > 0
        if config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        seed_all(config.seed)

        self.splits = splits if splits is not None else open_data(config)
        self.train_set, self.val_set = self.splits.train, None
        if config.val_fraction:
            self.train_set, self.val_set = data_base.split_classes(self.train_set, config.val_fraction, config.val_seed)
        augment, self.transform = transforms.build(config.transform, self.train_set, config.image_size)
        self.images = Images(self.train_set, augment, config.seed)
        self.sampler = self._build_sampler()

        self.channels = transforms.to_tensor(self.train_set.load(0)).shape[0]
        self.model = (models.build(config, self.channels) if model is None else model).to(self.device)
        self.notes: list[str] = []  # said when the training begins
        if self.world_size > 1 and not config.freeze_bn and models.has_batchnorm(self.model):
            self.model = models.synchronised(self.model, self.device)
            if self.device.type != "cuda":
                self.notes.append("BatchNorm: each rank normalises its own images, so losses differ from one rank's")
        self.miner = None if config.miner is None else getattr(pydml.miners, config.miner)(**config.miner_args)
        self.loss = (self._build_loss() if loss is None else loss).to(self.device)
        self.optimizer = optim.build(config, self.model, self.loss)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.amp == "fp16")
        self.ema = None
        if config.ema is not None:
            average = torch.optim.swa_utils.get_ema_multi_avg_fn(config.ema)
            self.ema = torch.optim.swa_utils.AveragedModel(self.model, multi_avg_fn=average)

        self.called: nn.Module = self.model  # what a step calls: the same, wrapped where there are several ranks
        self.criterion: nn.Module = self.loss
        if self.world_size > 1:
            self.called = nn.parallel.DistributedDataParallel(
                self.model, device_ids=[self.device] if self.device.type == "cuda" else None
            )
            sharded: Any = self.loss
            self.criterion = ShardedLoss(sharded, mode="gather", ddp=True)
            self.miner = None if self.miner is None else ShardedMiner(self.miner)
        seed_all(config.seed, 1 + self.rank)  # dropout differs between ranks
        self.epoch = self.batch = self.steps = self.images_seen = self.logged = 0
        self.epoch_loss = 0.0
        self.best = -math.inf
        self.stopping = ""
        self.loss_seconds = 0.0
        self.found = lock.identity(self.out / "last.pt")

    # Making and remaking a run

    @classmethod
    def resume(
        cls,
        run: str | Path,
        splits: data_base.Splits | None = None,
        *,
        model: nn.Module | None = None,
        loss: nn.Module | None = None,
        quiet: bool = False,
        **moved: Any,
    ) -> Trainer:
        """The run of a directory as its last checkpoint left it.

        Parameters
        ----------
        run
            The directory, ``out`` of its settings.
        splits, model, loss, quiet
            As for the new run that it was.
        **moved
            ``data``, ``device``, ``workers`` or ``eval_batch``, where they are not what they were.
        """
        run = Path(run)
        wrong = [name for name in moved if name not in MOVABLE]
        if wrong:
            raise ValueError(f"{wrong[0]}: a resumed run keeps its settings; only {', '.join(MOVABLE)} may change")
        source = run / "last.pt"
        found = lock.identity(source)
        if source.exists():
            state = checkpoint.load(source)
            settings = state["config"]
        elif (run / "config.json").exists():  # killed before its first checkpoint
            state, source = None, run / "config.json"
            settings = read_json(source)
        else:
            raise ValueError(f"resume: got {str(run)!r}, which holds no run (neither last.pt nor config.json)")
        config = Config.from_dict({**settings, **moved, "out": str(run)}, str(source))
        trainer = cls(config, splits, model=model, loss=loss, quiet=quiet, _resumed=True)
        trainer.found = found
        if state is not None:
            try:
                trainer.load_state_dict(state)
            except KeyError as error:
                raise CheckpointError(f"{source}: lacks {error}, without which a run cannot go on") from None
            except RuntimeError as error:
                reason = str(error).splitlines()[-1].strip()
                raise CheckpointError(f"{source}: does not fit this run's network, loss or memory ({reason})") from None
        return trainer

    def _build_sampler(self) -> MPerClassSampler | CategorySampler:
        """Ranks share each batch: the sampler draws whole ones, and checks that they can be shared."""
        config, data = self.config, self.train_set
        if config.batch_size % self.world_size:
            raise ValueError(f"batch_size: got {config.batch_size}, wanted a multiple of the {self.world_size} ranks")
        if config.sampler == "category":
            if data.super_labels is None:
                raise ValueError(f"sampler: 'category' needs super categories, which {data.name} has not")
            return CategorySampler(data.labels, data.super_labels, config.batch_size, seed=config.seed)
        images = config.images_per_epoch or max(len(data), config.batch_size)
        return MPerClassSampler(data.labels, config.m_per_class, config.batch_size, images, seed=config.seed)

    def _build_loss(self) -> nn.Module:
        loss = self.config.build_loss(len(self.train_set.classes))
        if not self.config.memory:
            return loss
        if self.config.memory % self.world_size:
            raise ValueError(f"memory: got {self.config.memory}, wanted a multiple of the {self.world_size} ranks")
        miner, self.miner = self.miner, None  # it mines the memory then
        return CrossBatchMemory(loss, self.config.dim, self.config.memory // self.world_size, miner)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the run hangs on, as tensors and plain values."""
        own = {"random": checkpoint.random_state(), "loss": self.loss.state_dict() if self.config.memory else None}
        everyone: list[Any] = [own]
        if self.world_size > 1:
            everyone = [None] * self.world_size
            dist.all_gather_object(everyone, own)
        return {
            "config": self.config.as_dict(),
            "channels": self.channels,
            "classes": len(self.train_set.classes),
            "model": self.model.state_dict(),
            "ema": None if self.ema is None else self.ema.state_dict(),
            "loss": self.loss.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "sampler": {"seed": self.config.seed, "epoch": self.epoch, "batch": self.batch},
            "steps": self.steps,
            "images_seen": self.images_seen,
            "logged": self.logged,
            "epoch_loss": self.epoch_loss,
            "best": self.best,
            "random": [rank["random"] for rank in everyone],
            "memories": [rank["loss"] for rank in everyone] if self.config.memory else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go where :meth:`state_dict` was taken."""
        if state["classes"] != len(self.train_set.classes):
            raise ValueError(f"data: got {len(self.train_set.classes)} training classes, wanted {state['classes']}")
        self.model.load_state_dict(state["model"])
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])
        memories, before = state.get("memories"), len(state["random"])
        kept = before == self.world_size
        if not memories:
            self.loss.load_state_dict(state["loss"])
        elif kept:
            self.loss.load_state_dict(memories[self.rank])
        else:
            inner = {k.removeprefix("loss."): v for k, v in state["loss"].items() if k.startswith("loss.")}
            self.loss.loss.load_state_dict(inner)  # type: ignore[union-attr]
            self.notes.append(f"memory: it was kept by {before} ranks, and begins empty on {self.world_size}")
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.sampler.load_state_dict(state["sampler"])
        self.epoch, self.batch = state["sampler"]["epoch"], state["sampler"]["batch"]
        self.steps, self.images_seen, self.logged = state["steps"], state["images_seen"], state["logged"]
        self.epoch_loss, self.best = state["epoch_loss"], state["best"]
        if kept:
            checkpoint.set_random_state(state["random"][self.rank])
        else:  # batches are those of all ranks together, whatever their number; only this is a rank's own
            seed_all(self.config.seed, 1 + self.rank, self.steps)
            self.notes.append(
                f"resumed on {self.world_size} ranks, was on {before}: the same batches; dropout draws other numbers, "
                "sums are rounded in another order"
            )

    # Training

    def fit(self) -> dict[str, Any]:
        """Train to the end; returns what results.json holds: the metrics of validation and test.

        Raises
        ------
        Interrupted
            After Ctrl-C or SIGTERM, when the run has been saved.
        TrainingError
            If an image cannot be loaded, a worker dies, or the loss is not finite.
        """
        config = self.config
        with lock.alone(self.out, self.found, self.rank, self.world_size):
            log = None
            if self.rank == 0:
                checkpoint.write_atomically(self.out / "config.json", json.dumps(config.as_dict(), indent=1).encode())
                log = Log(self.out, self.logged)
            progress = Progress(config.epochs, self.sampler.batches, self.quiet)
            try:
                for note in self.notes:
                    progress.say(note)
                with self._signals():
                    if self.logged == 0:
                        self._evaluate(log, progress, None)
                        self._save()
                    self._epochs(log, progress)
                    return self._finish(progress)
            finally:
                progress.close()
                if log is not None:
                    log.close()

    def _epochs(self, log: Log | None, progress: Progress) -> None:
        config = self.config
        batches = stream(
            self.images, self.train_set.labels, self.sampler, (self.epoch, self.batch), config.epochs,
            micro_batch=config.micro_batch, workers=config.workers, rank=self.rank, world_size=self.world_size,
        )  # fmt: skip
        while self.epoch < config.epochs:
            progress.epoch(self.epoch, self.batch)
            began = time.perf_counter()
            while self.batch < self.sampler.batches:
                try:
                    parts, labels = next(batches)
                except RuntimeError as error:
                    raise TrainingError(f"epoch {self.epoch + 1}, batch {self.batch + 1}: {error}") from error
                record = self.step(parts, labels)
                now = time.perf_counter()
                record |= self._speed(now - began)
                began = now
                self._log(log, "step", record)
                progress.step(record)
                if self._stop():
                    self._save()
                    progress.say(f"{self.stopping}: saved after step {self.steps}; go on with --resume {config.out}")
                    raise Interrupted(self.stopping)
                if config.checkpoint_every and self.steps % config.checkpoint_every == 0:
                    self._save()
            self._evaluate(log, progress, self.epoch_loss / self.sampler.batches)
            self._save()

    def _classes(self, labels: Tensor) -> contextlib.AbstractContextManager[None]:
        """What the host knows of the classes while labels are still there: the loss need not ask the device."""
        if self.world_size > 1 or self.config.memory:  # there are other columns than these
            return contextlib.nullcontext()
        return largest_class(int(labels.unique(return_counts=True)[1].max()))

    def step(self, parts: list[Tensor], labels: Tensor) -> dict[str, Any]:
        """One optimizer step on a batch in micro-batches; returns its record."""
        config = self.config
        at = self.epoch + self.batch / self.sampler.batches
        rate = optim.set_rates(self.optimizer, config, at)
        classes = self._classes(labels)
        labels = labels.to(self.device)
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)

        def forward(model: nn.Module, part: Tensor) -> Tensor:
            with autocast(self.device, config.amp):
                z: Tensor = model(part.to(self.device, non_blocking=True))
                return z

        def loss(z: Tensor) -> Tensor:
            tuples = () if self.miner is None else (self.miner(z.detach(), labels),)
            value: Tensor = self.criterion(z, labels, *tuples)
            return value

        with classes:
            value, _ = cached_backward(
                self.called, parts, loss, forward=forward, scale=self.scaler.scale, on_loss=self._clock()
            )
        number = value.item()
        if not math.isfinite(number):
            raise TrainingError(
                f"step {self.steps + 1}: the loss is {number}; the last checkpoint is from before. Try a lower lr, "
                "clip, or warmup"
            )
        self.scaler.unscale_(self.optimizer)
        everything = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = nn.utils.clip_grad_norm_(everything, config.clip if config.clip else math.inf)
        if not self.scaler.is_enabled() and not math.isfinite(norm):  # a scaler leaves such a step out, and goes on
            raise TrainingError(
                f"step {self.steps + 1}: the loss is {number:g}, the norm of its gradient {float(norm)}; the last "
                "checkpoint is from before. Try a lower lr, or warmup"
            )
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.ema is not None:
            self.ema.update_parameters(self.model)
        self.steps, self.batch = self.steps + 1, self.batch + 1
        self.images_seen += config.batch_size
        self.epoch_loss += number
        return {
            "step": self.steps, "epoch": self.epoch + self.batch / self.sampler.batches, "images": self.images_seen,
            "loss": number, "lr": config.lr * rate, "grad_norm": float(norm),
        }  # fmt: skip

    @contextlib.contextmanager
    def _clock(self) -> Iterator[None]:
        """Time the loss; on a GPU only every tenth step, because it has to wait for the device."""
        cuda = self.device.type == "cuda"
        if cuda and self.steps % 10:
            yield
            return
        if cuda:
            torch.cuda.synchronize(self.device)
        began = time.perf_counter()
        yield
        if cuda:
            torch.cuda.synchronize(self.device)
        self.loss_seconds = time.perf_counter() - began

    def _speed(self, seconds: float) -> dict[str, float]:
        return {
            "seconds": seconds,
            "loss_seconds": self.loss_seconds,
            "loss_share": self.loss_seconds / seconds,
            "images_per_second": self.config.batch_size / seconds,
            "memory": memory(self.device),
        }

    # After an epoch

    @property
    def evaluated(self) -> nn.Module:
        """The network that counts: the average of the weights if there is one."""
        return self.model if self.ema is None else self.ema.module

    def embed(self, data: Any) -> Tensor:
        """Embeddings of a set, each rank its share, all of them on every rank."""
        mine = range(self.rank, len(data), self.world_size)
        options: dict[str, Any] = {
            "batch": self.config.eval_batch,
            "workers": self.config.workers,
            "amp": self.config.amp,
        }
        try:
            z = embed(self.evaluated, data, self.transform, indices=mine, **options)
        except RuntimeError as error:
            raise TrainingError(f"evaluation of epoch {self.epoch}: {error}") from error
        if self.world_size == 1:
            return z
        share = -(-len(data) // self.world_size)
        padded = torch.zeros(share, self.config.dim)
        padded[: len(z)] = z
        shares = [torch.zeros_like(padded, device=self.device) for _ in range(self.world_size)]
        dist.all_gather(shares, padded.to(self.device))
        return torch.stack(shares, 1).flatten(0, 1)[: len(data)].cpu()

    def evaluate(self, data: Any, gallery: Any = None) -> dict[str, float]:
        """Metrics of a set; see :func:`pydml.train.evaluate`."""
        query = self.embed(data)
        if gallery is None:
            return metrics.retrieval_metrics(query, data.labels, self.config.ks)
        return metrics.retrieval_metrics(query, data.labels, self.config.ks, self.embed(gallery), gallery.labels)

    def _evaluate(self, log: Log | None, progress: Progress, loss: float | None) -> None:
        """Close an epoch: validation metrics, snapshot, best weights. Epoch 0 is the untrained network."""
        config = self.config
        self._check_weights()
        if loss is not None:
            self.epoch, self.batch, self.epoch_loss = self.epoch + 1, 0, 0.0
        due = self.epoch % config.eval_every == 0 or self.epoch == config.epochs
        found: dict[str, float] = {}
        if self.val_set is not None and due:
            z = self.embed(self.val_set)
            found = metrics.retrieval_metrics(z, self.val_set.labels, config.ks)
            if self.rank == 0 and self.epoch in (config.snapshots or (0, (config.epochs + 1) // 2, config.epochs)):
                self.out.joinpath("snapshots").mkdir(exist_ok=True)
                snapshot.take(self.out, self.epoch, z, self.val_set)
        text = f"epoch {self.epoch:>{len(str(config.epochs))}}/{config.epochs}"
        text += "  untrained    " if loss is None else f"  loss {loss:.5f}"
        progress.say(f"{text}  {shown(found, config.ks, len(self.val_set or ()))}")
        record = {"step": self.steps, "epoch": self.epoch, "images": self.images_seen, "loss": loss, **found}
        self._log(log, "epoch", record)
        score = found.get(f"recall@{config.ks[0]}", float(self.epoch))
        if (found or self.val_set is None) and score > self.best:
            self.best = score
            if self.rank == 0:
                checkpoint.save(self.out / "best.pt", self._weights(found))

    def _log(self, log: Log | None, kind: str, record: dict[str, Any]) -> None:
        self.logged += 1
        if log is not None:
            log.write(kind, **record)

    def _weights(self, found: dict[str, float]) -> dict[str, Any]:
        """What `pydml eval` and `pydml embed` need."""
        return {
            "config": self.config.as_dict(), "channels": self.channels, "model": self.evaluated.state_dict(),
            "epoch": self.epoch, "metrics": found,
        }  # fmt: skip

    def _finish(self, progress: Progress) -> dict[str, Any]:
        """Metrics of the test split, by the weights that were best in validation."""
        config = self.config
        if self.world_size > 1:
            dist.barrier()  # the first rank has written it
        best = checkpoint.load(self.out / "best.pt")
        self.evaluated.load_state_dict(best["model"])
        results = {"best_epoch": best["epoch"], "validation": best["metrics"], "test": {}}
        if config.test and len(self.splits.test):
            test, gallery = self.splits.test, self.splits.gallery
            results["test"] = self.evaluate(test, gallery)
            line = shown(results["test"], config.ks, len(test if gallery is None else gallery))
            progress.say(f"test (weights of epoch {best['epoch']})  {line}")
        if self.rank == 0:
            checkpoint.write_atomically(self.out / "results.json", json.dumps(results, indent=1).encode())
        return results

    # Saving and stopping

    def _save(self) -> None:
        self._check_weights()
        state = self.state_dict()
        if self.rank == 0:
            checkpoint.save(self.out / "last.pt", state)
            self.found = lock.identity(self.out / "last.pt")

    def _check_weights(self) -> None:
        """Before a good checkpoint is replaced: weights are finite, and nothing beside them is NaN."""
        wrong = checkpoint.not_finite(self.model, self.loss, self.evaluated)
        if wrong:
            raise TrainingError(
                f"step {self.steps}: {wrong[0]} is not finite, nor are {len(wrong) - 1} others; the last checkpoint is "
                "from before. Try a lower lr, clip, or warmup"
            )

    def _stop(self) -> bool:
        """Was any rank asked to stop?"""
        if self.world_size == 1:
            return bool(self.stopping)
        asked = torch.tensor([bool(self.stopping)], dtype=torch.int32, device=self.device)
        dist.all_reduce(asked, dist.ReduceOp.MAX)
        self.stopping = self.stopping or ("another rank was interrupted" if asked.item() else "")
        return bool(self.stopping)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """The first Ctrl-C (or SIGTERM, which batch systems send) ends the run after its step, a second one at once."""

        def ask(number: int, frame: Any) -> None:
            if self.stopping:
                raise KeyboardInterrupt
            self.stopping = signal.Signals(number).name

        before = {}
        with contextlib.suppress(ValueError):  # not the main thread: leave signals to whoever has it
            before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
