"""What a training run is: one flat dataclass, filled from Python, a TOML or YAML file, or the command line.

The command line's options, their help and the checks come from the fields below: each setting is written once.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pydml.miners
from pydml import checks
from pydml.losses import LOSSES, MetricLoss
from pydml.presets import preset, presets
from pydml.train.packages import optional


def _option(default: Any, text: str, *, least: float | None = None, options: Sequence[str] = ()) -> Any:
    """A field with its help, lower bound and allowed values."""
    return field(default=default, metadata=_about(text, least, options))


def _about(text: str, least: float | None = None, options: Sequence[str] = ()) -> dict[str, Any]:
    return {"help": text, "least": least, "options": tuple(options)}


MINERS = tuple(name for name in pydml.miners.__all__ if name not in ("BaseMiner", "Miner"))


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of a run. Each is an option of ``pydml train``: ``batch_size`` is ``--batch-size``."""

    # what is learned from
    data: str = _option("", "directory of the data set; see docs/data.md")
    data_format: str | None = _option(None, "format of the data set; default: found out from its files")
    out: str = _option("run", "directory of the run: logs, checkpoints, what the report needs")
    val_fraction: float = _option(0.1, "share of the training classes kept for validation; 0: none", least=0)
    val_seed: int = _option(0, "which classes those are", least=0)
    transform: str = _option(
        "auto",
        "auto: papers for files, jitter for packed images; none; jitter: small random affine maps in plain torch; "
        "papers: random resized crop and flip",
        options=("auto", "none", "jitter", "papers"),
    )
    image_size: int = _option(224, "size of the papers' crops", least=1)
    workers: int = _option(0, "processes that load images", least=0)

    # what is minimised
    loss: str = _option("", "loss by its short name: " + ", ".join(LOSSES) + "; default: the preset's, else ms")
    preset: str | None = _option(None, "settings of the loss by name, such as ms/paper; see docs/presets.md")
    loss_args: dict[str, Any] = field(
        default_factory=dict, metadata=_about("arguments of the loss, as name=value; they override the preset's")
    )
    miner: str | None = _option(None, "miner before the loss: " + ", ".join(MINERS))
    miner_args: dict[str, Any] = field(default_factory=dict, metadata=_about("arguments of the miner, as name=value"))

    memory: int = _option(0, "compare batches with so many earlier embeddings, too (cross-batch memory)", least=0)

    # the network
    backbone: str = _option("small", "small: four convolutions for 32x32 images; else the name of a timm model")
    pretrained: bool = _option(True, "start a timm model from its published weights")
    weights: str | None = _option(None, "start the backbone from this state_dict (.pt, .safetensors) instead")
    dim: int = _option(128, "numbers in an embedding", least=1)
    pool: str = _option("avg", "pooling over the last feature map", options=("avg", "max", "avg+max"))
    freeze_bn: bool = _option(False, "keep the running statistics of BatchNorm layers as they are")
    dropout: float = _option(0.0, "dropout before the embedding layer", least=0)

    # batches
    batch_size: int = _option(512, "images in a batch, all ranks together", least=2)
    m_per_class: int = _option(4, "images of a class in a batch", least=1)
    sampler: str = _option(
        "m_per_class", "category: FastAP's batches from two super-categories", options=("m_per_class", "category")
    )
    micro_batch: int | None = _option(
        None,
        "images that the network sees at once (gradient caching); the gradient is the whole batch's",
        least=1,
    )
    epochs: int = _option(10, "epochs", least=0)
    images_per_epoch: int | None = _option(None, "default: as many as there are training images", least=1)

    # optimisation
    optimizer: str = _option("adamw", "optimizer", options=("adamw", "adam", "sgd"))
    lr: float = _option(1e-3, "learning rate", least=0)
    embedding_lr: float | None = _option(None, "learning rate of the embedding layer; default: lr", least=0)
    proxy_lr: float | None = _option(None, "learning rate of the loss' own parameters; default: lr", least=0)
    weight_decay: float = _option(1e-4, "weight decay of the network's matrices", least=0)
    momentum: float = _option(0.9, "of sgd", least=0)
    schedule: str = _option("cosine", "course of the learning rates", options=("cosine", "step", "constant"))
    warmup: float = _option(0.0, "epochs in which the learning rates rise from 0", least=0)
    step_epochs: float = _option(10.0, "schedule step: epochs between two steps", least=0)
    milestones: tuple[int, ...] = _option((), "schedule step: epochs of the steps, instead of equal distances")
    step_gamma: float = _option(0.5, "schedule step: factor of a step", least=0)
    freeze_backbone: int = _option(0, "first epochs in which only the embedding layer and the loss learn", least=0)
    clip: float | None = _option(None, "largest norm of the gradient", least=0)
    ema: float | None = _option(None, "decay of an average of the weights, which is then what is evaluated", least=0)
    amp: str = _option("none", "mixed precision", options=("none", "bf16", "fp16"))

    # running
    seed: int = _option(0, "of everything random", least=0)
    deterministic: bool = _option(False, "refuse operations whose result may differ between two runs")
    device: str = _option("auto", "auto, cpu, cuda, cuda:1, …")
    eval_batch: int = _option(256, "images at once in evaluation", least=1)
    eval_every: int = _option(1, "epochs between two evaluations", least=1)
    ks: tuple[int, ...] = _option((1, 10, 100, 1000), "the K of Recall@K")
    checkpoint_every: int | None = _option(None, "also save after so many steps; default: every epoch", least=1)
    snapshots: tuple[int, ...] = _option((), "epochs of the report's triplet diagrams; default: first, middle, last")
    test: bool = _option(True, "evaluate the test split once, after the last epoch")

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value, hint = getattr(self, f.name), _HINTS()[f.name]
            if value is None and type(None) in typing.get_args(hint):
                continue
            _check(f.name, value, _bare(hint), f.metadata)
        if self.preset is not None:
            if self.preset not in presets():
                preset(self.preset)  # raises with the near matches
            short = next(name for name, cls in LOSSES.items() if cls is presets()[self.preset].loss)
            if self.loss and self.loss != short:
                raise ValueError(f"preset: got {self.preset!r} beside loss={self.loss!r}, wanted one of that loss")
            object.__setattr__(self, "loss", short)
        object.__setattr__(self, "loss", self.loss or "ms")
        checks.choice("loss", self.loss, tuple(LOSSES))
        if self.miner is not None:
            checks.choice("miner", self.miner, MINERS)
        if not self.val_fraction < 1:
            raise ValueError(f"val_fraction: got {self.val_fraction!r}, wanted a number < 1")
        if self.ema is not None and not self.ema < 1:
            raise ValueError(f"ema: got {self.ema!r}, wanted a number < 1")
        if not self.dropout < 1:
            raise ValueError(f"dropout: got {self.dropout!r}, wanted a number < 1")
        if self.schedule == "step" and self.step_epochs == 0:
            raise ValueError("step_epochs: got 0, wanted a number > 0")
        if self.sampler == "m_per_class" and self.batch_size % self.m_per_class:
            raise ValueError(f"batch_size: got {self.batch_size}, wanted a multiple of m_per_class={self.m_per_class}")

    def build_loss(self, num_classes: int) -> MetricLoss:
        """The loss; what it needs to know of data and network is filled in."""
        cls = LOSSES[self.loss]
        known = {"num_classes": num_classes, "embedding_size": self.dim}
        if self.preset is not None:
            required = presets()[self.preset].required
        else:
            parameters = inspect.signature(cls).parameters.values()
            required = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
        arguments = {name: known[name] for name in required if name in known} | self.loss_args
        missing = [name for name in required if name not in arguments]
        if missing and self.preset is None:
            raise ValueError(f"loss_args: {self.loss} needs {' and '.join(missing)}: --loss-args {missing[0]}=…")
        return preset(self.preset, **arguments) if self.preset is not None else cls(**arguments)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and checkpoints."""
        plain = dataclasses.asdict(self)
        return plain | {name: list(value) for name, value in plain.items() if isinstance(value, tuple)}

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str = "config") -> Config:
        """From plain values; keys may be written with - or _."""
        known = {f.name for f in dataclasses.fields(cls)}
        values = {key.replace("-", "_"): value for key, value in values.items()}
        for key in values:
            checks.choice(f"{where}: setting", key, sorted(known))
        for key, hint in _HINTS().items():
            if _bare(hint) is tuple and isinstance(values.get(key), list):
                values[key] = tuple(values[key])
            # 1 is a fine way to write a learning rate of 1.0; YAML reads 1e-3 as text
            if _bare(hint) is float and isinstance(values.get(key), (int, str)):
                values[key] = _number(f"{where}: {key}", values[key])
        return cls(**values)

    @classmethod
    def from_file(cls, path: str | Path, **overrides: Any) -> Config:
        """From a TOML or YAML file; ``overrides`` win."""
        return cls.from_dict({**read_settings(path), **overrides}, str(path))


def _HINTS() -> dict[str, Any]:
    return typing.get_type_hints(Config)


def _bare(hint: Any) -> Any:
    """``int | None`` -> int, ``tuple[int, ...]`` -> tuple."""
    if isinstance(hint, types.UnionType):
        hint = next(h for h in typing.get_args(hint) if h is not type(None))
    return typing.get_origin(hint) or hint


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except ValueError:
        raise TypeError(f"{name}: got {value!r}, wanted a number") from None


def _check(name: str, value: Any, kind: Any, metadata: Any) -> None:
    if kind is bool:
        checks.flag(name, value)
    elif kind is int:
        checks.integer(name, value, least=metadata["least"] if metadata["least"] is not None else 0)
    elif kind is float:
        checks.number(name, value, least=metadata["least"])
    elif kind is tuple:
        if not isinstance(value, tuple):
            raise TypeError(f"{name}: got {value!r} of type {type(value).__name__}, wanted a tuple of ints")
        for i, k in enumerate(value):
            checks.integer(f"{name}[{i}]", k, least=0 if name == "snapshots" else 1)
    elif not isinstance(value, kind):
        raise TypeError(f"{name}: got {value!r} of type {type(value).__name__}, wanted {kind.__name__}")
    if metadata["options"]:
        checks.choice(name, value, metadata["options"])


def read_settings(path: str | Path) -> dict[str, Any]:
    """The table of a .toml, .yaml or .yml file."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"config: got {str(path)!r}, which cannot be read: {error.strerror}") from None
    if path.suffix == ".toml":
        try:
            import tomllib
        except ImportError:  # Python 3.10
            raise ValueError(f"config: got {str(path)!r}; TOML needs Python 3.11, write it as YAML") from None
        try:
            return tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise ValueError(f"{path}: not valid TOML: {error}") from None
    if path.suffix in (".yaml", ".yml"):
        yaml = optional("yaml", f"config: got {str(path)!r}, which", package="pyyaml", instead="write it as TOML")
        try:
            settings = yaml.safe_load(text)
        except (yaml.YAMLError, RecursionError) as error:
            raise ValueError(f"{path}: not valid YAML: {error}") from None
        if settings is None:
            return {}
        if not isinstance(settings, dict):
            raise ValueError(f"{path}: got a {type(settings).__name__}, wanted a table of settings")
        return settings
    raise ValueError(f"config: got {str(path)!r}, wanted a file that ends in .toml, .yaml or .yml")


class _Pair(argparse.Action):
    """``--loss-args alpha=2 base=0.5`` as a dict; values are read as Python literals where they are."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        import ast

        pairs = dict(getattr(namespace, self.dest, None) or {})
        for text in values:
            name, equals, value = text.partition("=")
            if not equals:
                parser.error(f"argument {option_string}: got {text!r}, wanted name=value")
            try:
                pairs[name] = ast.literal_eval(value)
            except (ValueError, SyntaxError):
                pairs[name] = value
        setattr(namespace, self.dest, pairs)


def add_options(parser: argparse.ArgumentParser) -> None:
    """One option for each setting; those not given are absent from the namespace."""
    for f in dataclasses.fields(Config):
        hint = _bare(_HINTS()[f.name])
        keywords: dict[str, Any] = {"dest": f.name, "default": argparse.SUPPRESS, "help": f.metadata["help"]}
        default = () if f.default is dataclasses.MISSING else f.default
        if default not in (None, "", ()) and "default:" not in keywords["help"]:
            shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
            keywords["help"] += f"; default {shown}"
        keywords["help"] = keywords["help"].replace("%", "%%")
        if hint is bool:
            keywords["action"] = argparse.BooleanOptionalAction
        elif hint is dict:
            keywords |= {"action": _Pair, "nargs": "+", "metavar": "NAME=VALUE"}
        elif hint is tuple:
            keywords |= {"type": int, "nargs": "*", "metavar": "N"}
        elif f.metadata["options"]:
            keywords["choices"] = f.metadata["options"]
        else:
            keywords |= {"type": hint, "metavar": {int: "N", float: "X"}.get(hint, "TEXT")}
        parser.add_argument("--" + f.name.replace("_", "-"), **keywords)
