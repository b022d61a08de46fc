"""Networks from images to embeddings: a small one of our own, and any timm model with the heads that recipes use."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pydml import checks
from pydml.train.config import Config
from pydml.train.packages import optional

#: Mean and standard deviation of ImageNet's channels, which timm's weights were trained with.
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class SmallCNN(nn.Module):
    """Four strided convolutions, for images of about 32×32: 389 000 parameters.

    GroupNorm knows one image at a time, so that gradient caching gives exactly the gradient of the whole batch.
    """

    features = 256

    def __init__(self, channels: int = 1) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for out in (32, 64, 128, 256):
            conv = nn.Conv2d(channels, out, 3, stride=2, padding=1, bias=False)
            layers += [conv, nn.GroupNorm(8, out), nn.ReLU(inplace=True)]
            channels = out
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


class TimmFeatures(nn.Module):
    """A timm model without its classifier: a feature map [B, C, H, W], or vectors [B, C] where it works on tokens."""

    def __init__(self, name: str, pretrained: bool, channels: int) -> None:
        super().__init__()
        timm = optional("timm", f"backbone: got {name!r}, which", instead="take --backbone small, which needs nothing")
        if not timm.is_model(name):
            close = timm.list_models(f"{name}*") + difflib.get_close_matches(name, timm.list_models())
            near = ", ".join(map(repr, close[:5])) or "none; see timm.list_models()"
            raise ValueError(f"backbone: got {name!r}, wanted 'small' or a timm model; near matches: {near}")
        try:
            net: Any = timm.create_model(name, pretrained=pretrained, num_classes=0, in_chans=channels)
        except Exception as error:
            if not pretrained:
                raise
            raise ValueError(
                f"pretrained: timm has no weights of {name!r} at hand ({str(error).splitlines()[0][:120]}); "
                "give a file with --weights, or start from nothing with --no-pretrained"
            ) from error
        self.net, self.features = net, int(net.num_features)

    def forward(self, x: Tensor) -> Tensor:
        net: Any = self.net
        y: Tensor = net.forward_features(x)
        if y.ndim == 4:
            return y if y.shape[1] == self.features else y.permute(0, 3, 1, 2)
        y = net.forward_head(y, pre_logits=True)
        return y


class Embedder(nn.Module):
    """Images, uint8 or in [0, 1], to raw embeddings [B, dim]; the losses normalise.

    Parameters
    ----------
    backbone
        Gives a feature map [B, features, H, W], which is pooled here, or vectors [B, features].
    features, dim
        Width of the backbone's output and of the embeddings.
    pool
        "avg", "max", or "avg+max", the sum of both (GAP+GMP, as in Proxy-Anchor's code).
    freeze_bn
        BatchNorm layers keep their running statistics, as in Multi-Similarity's code; their weights learn.
    normalize
        Mean and standard deviation of each channel.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        backbone: nn.Module,
        features: int,
        dim: int,
        *,
        pool: str = "avg",
        dropout: float = 0.0,
        freeze_bn: bool = False,
        normalize: tuple[Iterable[float], Iterable[float]] = ((0.5,), (0.5,)),
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.pool = checks.choice("pool", pool, ("avg", "max", "avg+max"))
        self.dropout = nn.Dropout(dropout)
        self.embedding = nn.Linear(features, dim)
        self.freeze_bn = freeze_bn
        for name, values in zip(("mean", "std"), normalize, strict=True):
            self.register_buffer(name, torch.tensor(tuple(values)).view(1, -1, 1, 1), persistent=False)

    def train(self, mode: bool = True) -> Embedder:
        super().train(mode)
        if self.freeze_bn:
            for module in self.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        dtype = self.embedding.weight.dtype
        x = images.to(dtype) / 255 if images.dtype == torch.uint8 else images.to(dtype)
        y: Tensor = self.backbone((x - self.mean.to(dtype)) / self.std.to(dtype))
        if y.ndim == 4:
            average, largest = y.mean((2, 3)), y.amax((2, 3)) if "max" in self.pool else None
            y = average if largest is None else largest if self.pool == "max" else average + largest
        z: Tensor = self.embedding(self.dropout(y))
        return z


def build(config: Config, channels: int) -> Embedder:
    """The network of a run."""
    backbone: Any
    if config.backbone == "small":
        backbone, normalize = SmallCNN(channels), ((0.5,) * channels, (0.5,) * channels)
    else:
        pretrained = config.pretrained and config.weights is None
        backbone = TimmFeatures(config.backbone, pretrained, channels)
        normalize = IMAGENET if channels == 3 else ((0.5,) * channels, (0.5,) * channels)
    if config.weights is not None:
        _load_weights(backbone, Path(config.weights))
    return Embedder(
        backbone, backbone.features, config.dim,
        pool=config.pool, dropout=config.dropout, freeze_bn=config.freeze_bn, normalize=normalize,
    )  # fmt: skip


def synchronised(model: nn.Module, device: torch.device) -> nn.Module:
    """BatchNorm over the images of all ranks; torch has it on GPUs only, elsewhere each rank normalises its own."""
    if device.type != "cuda":
        return model
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return converted


def has_batchnorm(model: nn.Module) -> bool:
    """Does what the network makes of an image hang on the others of its batch?"""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def _load_weights(backbone: nn.Module, path: Path) -> None:
    """A state_dict into the backbone: every parameter of it must be there; a classifier beside them is left out."""
    if not path.is_file():
        raise ValueError(f"weights: got {str(path)!r}, which is not a file")
    if path.suffix == ".safetensors":
        what = f"weights: got {str(path)!r}, which"
        state = optional("safetensors.torch", what, instead="save it with torch.save").load_file(path)
    else:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:160]
            raise ValueError(f"weights: got {str(path)!r}, which is no state_dict of tensors ({reason})") from None
    target = getattr(backbone, "net", backbone)
    missing, _ = target.load_state_dict(state, strict=False)
    if missing:
        raise ValueError(f"weights: {path} lacks {len(missing)} parameters of the backbone, such as {missing[0]}")
