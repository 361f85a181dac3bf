"""Which public modules, losses, augmentations and detectors train privately as they are, compared with a loop.

Each row is an expression, or a function below, and makes something tiny. It takes one private step without noise on
four examples in float32, ``together`` and, where that refuses it, ``one_by_one``; the clipped sum is compared with a
loop over single examples in float64. Install the packages whose rows shall run in an environment of their own::

    python benchmarks/public_modules.py                     # prints a line of JSON for each row
    python benchmarks/public_modules.py --only kornia monai

A row works if the sum differs by at most 1e-3 of its norm. What draws random numbers is run, and not compared.
BatchNorm is replaced by GroupNorm.
"""

import copy
import importlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from measuring import arguments
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import TensorDataset

Loss = Callable[[nn.Module, Any], Tensor]

EXAMPLES, CLASSES, SIDE, TOLERANCE = 4, 3, 32, 1e-3

# By kind: expressions with the path of a class, one a line. What a kind makes of its object is in `case_of`.
ROWS = {
    "network": """
        torchgeo.models.FCN(3, 3, 8)
        torchgeo.models.FarSeg('resnet18', classes=3, backbone_pretrained=False)
        segmentation_models_pytorch.Unet('resnet18', encoder_weights=None, classes=3)
        segmentation_models_pytorch.UnetPlusPlus('resnet18', encoder_weights=None, classes=3)
        segmentation_models_pytorch.FPN('resnet18', encoder_weights=None, classes=3)
        segmentation_models_pytorch.DeepLabV3Plus('resnet18', encoder_weights=None, classes=3)
        segmentation_models_pytorch.PSPNet('resnet18', encoder_weights=None, classes=3)
        segmentation_models_pytorch.Segformer('mit_b0', encoder_weights=None, classes=3)
        monai.networks.nets.UNet(2, 3, 2, (4, 8, 16), (2, 2))
        monai.networks.nets.BasicUNet(2, 3, 2, (4, 4, 8, 8, 8, 4))
        monai.networks.nets.SegResNet(2, 8, 3, 2)
        monai.networks.nets.AttentionUnet(2, 3, 2, (4, 8), (2,))
        monai.networks.nets.ViT(3, 32, 8, 16, 16, 1, 2, spatial_dims=2)
        monai.networks.nets.UNETR(3, 2, 32, 8, 24, 32, 4, spatial_dims=2)
        monai.networks.nets.DenseNet(2, 3, 3, 8, 4, (1, 1))
        torch_uncertainty.layers.PackedConv2d(3, 8, 3, alpha=2, num_estimators=2, first=True)
        torch_uncertainty.layers.bayesian.BayesConv2d(3, 4, 3)
        torch_uncertainty.layers.BatchConv2d(3, 8, 3, num_estimators=1)
        anomalib.models.image.draem.torch_model.DiscriminativeSubNetwork(3, 2, base_width=4)
        timm.create_model('resnet10t', num_classes=3)
        timm.create_model('vit_tiny_patch16_224', img_size=32, embed_dim=24, depth=1, num_heads=2, num_classes=3)
        timm.create_model('convnext_atto', num_classes=3)
        timm.create_model('mobilenetv3_small_050', num_classes=3)
    """,
    "augmentation": """
        kornia.augmentation.Normalize(torch.zeros(3), torch.ones(3))
        kornia.augmentation.RandomHorizontalFlip()
        kornia.augmentation.RandomHorizontalFlip(p=1.0)
        kornia.augmentation.RandomAffine(10.0)
        kornia.augmentation.RandomCrop((24, 24))
        kornia.augmentation.RandomResizedCrop((24, 24))
        kornia.augmentation.ColorJitter(0.1, 0.1, 0.1, 0.1)
        kornia.augmentation.RandomErasing()
        kornia.augmentation.RandomGaussianBlur((3, 3), (0.1, 2.0))
        kornia.augmentation.RandomPerspective()
        kornia.augmentation.RandomElasticTransform()
        kornia.augmentation.RandomGrayscale(p=0.5)
        kornia.augmentation.auto.RandAugment(2, 5)
        torchgeo.transforms.AppendNDVI(0, 1)
        torchvision.transforms.v2.RandomHorizontalFlip(0.5)
        torchvision.transforms.v2.GaussianBlur(3)
        torchvision.transforms.v2.TrivialAugmentWide()
    """,
    "loss of classes": """
        kornia.losses.FocalLoss(0.5, reduction='mean')
        timm.loss.LabelSmoothingCrossEntropy()
        timm.loss.BinaryCrossEntropy()
        torch_uncertainty.losses.FocalLoss(2.0)
        torch_uncertainty.losses.ConfidencePenaltyLoss()
        torch.nn.MultiMarginLoss()
    """,
    "loss of labels": """
        monai.losses.FocalLoss()
        timm.loss.AsymmetricLossMultiLabel()
        timm.loss.SoftTargetCrossEntropy()
        torch.nn.BCEWithLogitsLoss()
    """,
    "loss of masks": """
        kornia.losses.DiceLoss()
        kornia.losses.TverskyLoss(0.5, 0.5)
        kornia.losses.LovaszSoftmaxLoss()
        segmentation_models_pytorch.losses.DiceLoss('multiclass')
        segmentation_models_pytorch.losses.JaccardLoss('multiclass')
        segmentation_models_pytorch.losses.FocalLoss('multiclass')
        segmentation_models_pytorch.losses.LovaszLoss('multiclass')
        segmentation_models_pytorch.losses.TverskyLoss('multiclass')
    """,
    "loss of channels": """
        monai.losses.DiceLoss(to_onehot_y=True, softmax=True)
        monai.losses.DiceCELoss(to_onehot_y=True, softmax=True)
        monai.losses.GeneralizedDiceLoss(to_onehot_y=True, softmax=True)
        monai.losses.TverskyLoss(to_onehot_y=True, softmax=True)
        monai.losses.HausdorffDTLoss(to_onehot_y=True, softmax=True)
    """,
    "loss of images": """
        kornia.losses.SSIMLoss(5)
        kornia.losses.PSNRLoss(1.0)
        kornia.losses.CharbonnierLoss(reduction='mean')
        monai.losses.SSIMLoss(2)
        monai.losses.LocalNormalizedCrossCorrelationLoss(2)
        monai.losses.GlobalMutualInformationLoss()
        torch.nn.SmoothL1Loss()
    """,
    "loss of embeddings": """
        pytorch_metric_learning.losses.ArcFaceLoss(3, 8)
        pytorch_metric_learning.losses.CosFaceLoss(3, 8)
        pytorch_metric_learning.losses.SubCenterArcFaceLoss(num_classes=3, embedding_size=8)
        pytorch_metric_learning.losses.NormalizedSoftmaxLoss(3, 8)
        pytorch_metric_learning.losses.ProxyNCALoss(3, 8)
        pytorch_metric_learning.losses.ProxyAnchorLoss(3, 8)
        pytorch_metric_learning.losses.SoftTripleLoss(3, 8)
        pytorch_metric_learning.losses.TripletMarginLoss()
        pytorch_metric_learning.losses.NTXentLoss()
        pytorch_metric_learning.losses.MultiSimilarityLoss()
    """,
    "loss of two views": """
        lightly.loss.NegativeCosineSimilarity()
        lightly.loss.NTXentLoss()
        lightly.loss.BarlowTwinsLoss()
        lightly.loss.VICRegLoss()
        lightly.loss.TiCoLoss()
    """,
    "detector": """
        torchvision.models.detection.ssdlite320_mobilenet_v3_large(weights_backbone=None, num_classes=3)
    """,
    "transformer": """
        ViTForImageClassification(image_size=32, patch_size=8)
        Dinov2ForImageClassification(image_size=32, patch_size=8)
        BeitForImageClassification(image_size=32, patch_size=8)
        ResNetForImageClassification(embedding_size=8, depths=[1, 1], hidden_sizes=[8, 16], layer_type='basic')
    """,
    "adapter": """
        peft.LoraConfig(r=2, target_modules=['q_proj', 'v_proj'])
        peft.LoraConfig(r=2, target_modules=['q_proj'], use_dora=True)
        peft.LoraConfig(r=2, target_modules=['q_proj'], use_rslora=True, modules_to_save=['classifier'])
        peft.AdaLoraConfig(init_r=3, target_r=2, total_step=10, target_modules=['q_proj'])
        peft.IA3Config(target_modules=['q_proj', 'fc1'], feedforward_modules=['fc1'])
        peft.LoHaConfig(r=2, target_modules=['q_proj'])
        peft.LoKrConfig(r=2, target_modules=['q_proj'])
        peft.VeraConfig(r=2, target_modules=['q_proj'])
        peft.OFTConfig(r=2, oft_block_size=0, target_modules=['q_proj'])
        peft.BOFTConfig(boft_block_size=4, target_modules=['q_proj'])
    """,
}
_TRANSFORMER = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}


def rows() -> Iterator[tuple[str, str]]:
    """Kind and expression of each row."""
    for kind, lines in ROWS.items():
        yield from ((kind, line.strip()) for line in lines.strip().splitlines())


def package_of(kind: str, expression: str) -> str:
    return "transformers" if kind == "transformer" else expression.partition(".")[0]


def made(expression: str) -> Any:
    """The object of an expression, which begins with the path of a class or function."""
    path, _, given = expression.partition("(")
    module, _, name = path.rpartition(".")
    return eval(f"make({given}", {"make": getattr(importlib.import_module(module), name), "torch": torch})


def tiny_transformer(expression: str) -> nn.Module:
    """A model of transformers, by its class and what differs from a small configuration."""
    import transformers

    name, _, given = expression.partition("(")
    kind = getattr(transformers, name)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    return kind(kind.config_class(**{**sizes, "num_labels": CLASSES, **eval(f"dict({given}")}))


def output_loss(output: Any) -> Tensor:
    """A number that depends on every entry of the output, a tree of tensors (1, ...)."""
    found = [x for x in tree_leaves(dict(output) if isinstance(output, dict) else output) if x.is_floating_point()]
    return sum((x.tanh() * torch.arange(x.numel()).sin().view(x.shape).to(x)).mean() for x in found)


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    return model(pixel_values=batch[0], labels=batch[1]).loss


def detection_loss(model: nn.Module, batch: Any) -> Tensor:
    box = torch.tensor([[4.0, 6.0, 20.0, 24.0]]).to(batch[0])
    return sum(model[0](list(batch[0]), [{"boxes": box, "labels": batch[1]}]).values())


# How a kind of loss is called, by the loss, the outputs of a small network, and a batch of one example. The network
# has one output for each class, or as many as OUTPUTS says.
LOSSES: dict[str, Callable[[Any, Callable[[Tensor], Tensor], Any], Tensor]] = {
    "augmentation": lambda part, net, batch: F.cross_entropy(net(part(batch[0])[:, :3]).mean((2, 3)), batch[1]),
    "loss of classes": lambda part, net, batch: part(net(batch[0]).mean((2, 3)), batch[1]),
    "loss of labels": lambda part, net, batch: part(
        net(batch[0]).mean((2, 3)), F.one_hot(batch[1], CLASSES).to(batch[0])
    ),
    "loss of masks": lambda part, net, batch: part(net(batch[0]), batch[2]),
    "loss of channels": lambda part, net, batch: part(net(batch[0]), batch[2].unsqueeze(1)),
    "loss of images": lambda part, net, batch: part(net(batch[0]), batch[0]),
    "loss of embeddings": lambda part, net, batch: part(net(batch[0]).mean((2, 3)), batch[1]),
    "loss of two views": lambda part, net, batch: part(net(batch[0]).mean((2, 3)), net(batch[0].square()).mean((2, 3))),
}
OUTPUTS = {"loss of embeddings": 8, "loss of two views": 8}


def case_of(kind: str, expression: str) -> tuple[nn.Module, Loss]:
    """A module, and the loss of a batch ``(images, labels, masks)`` of one example."""
    if kind == "transformer":
        return tiny_transformer(expression), own_loss
    part = made(expression)
    if kind == "adapter":
        import peft

        return peft.get_peft_model(
            tiny_transformer("ViTForImageClassification(image_size=32, patch_size=8)"), part
        ), own_loss
    if kind == "network":
        return nn.ModuleList([part]), lambda model, batch: output_loss(model[0](batch[0]))
    if kind == "detector":
        return nn.ModuleList([part]), detection_loss
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, OUTPUTS.get(kind, CLASSES), 1))
    owner = nn.ModuleList([net, part] if isinstance(part, nn.Module) else [net])
    return owner, lambda model, batch: LOSSES[kind](model[1] if len(model) == 2 else part, model[0], batch)


def clipped_by_loop(model: nn.Module, loss: Loss, batch: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """The clipped sum by ordinary autograd, with C = 1."""
    model = copy.deepcopy(model).to(dtype)
    trained = [p for p in model.parameters() if p.requires_grad]
    batch = tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, batch)
    total = torch.zeros(sum(p.numel() for p in trained), dtype=torch.float64)
    for i in range(EXAMPLES):
        value = loss(model, [x[i : i + 1] for x in batch])
        found = torch.autograd.grad(value, trained, allow_unused=True)
        flat = torch.cat(
            [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(trained, found, strict=True)]
        )
        total += flat / max(1.0, float(flat.norm()))
    return total


def clipped_by_step(model: nn.Module, loss: Loss, batch: tuple[Tensor, ...], examples: str) -> Tensor:
    """The same sum by a private step without noise, which draws every example."""
    from dp_lightning.privacy import ClipPlan, PrivateStep
    from dp_lightning.privacy.plan import PrivacyPlan

    sizes = {"num_train": EXAMPLES, "expected_batch_size": EXAMPLES, "num_steps": 1, "delta": 0.1}
    plan = PrivacyPlan(**sizes, noise_multiplier=0.0, accountant="rdp")
    settings = {"plan": plan, "clip_plan": ClipPlan.flat(max_grad_norm=1.0), "examples": examples, "seed": 0}
    step = PrivateStep(model, lambda example: loss(model, example), TensorDataset(*batch), **settings)
    for each in step.batches():
        step.accumulate(each)
    step.release()
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.requires_grad]) * EXAMPLES


def short(error: BaseException) -> str:
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:300]}".replace("|", "/")


def judged(kind: str, expression: str) -> tuple[str, str]:
    """What happens under ``together`` and, where that refuses it, ``one_by_one``; then the difference from the loop."""
    from dp_lightning.models.batch_norm import batch_norm_to_group_norm

    torch.manual_seed(0)
    model, loss = case_of(kind, expression)
    batch_norm_to_group_norm(model.train())
    for module in model.modules():
        for option, value in vars(module).items():
            if isinstance(value, float) and (option == "p" or "drop" in option) and kind != "augmentation":
                setattr(module, option, 0.0)
    labels = torch.arange(EXAMPLES) % CLASSES
    batch = torch.rand(EXAMPLES, 3, SIDE, SIDE), labels, torch.randint(CLASSES, (EXAMPLES, SIDE, SIDE))
    expected, told = reference(model, loss, batch), []
    for examples in ("together", "one_by_one"):
        try:
            found = clipped_by_step(copy.deepcopy(model), loss, batch, examples)
        except Exception as error:
            told.append(f"refused: {short(error)}")
            continue
        if isinstance(expected, str):
            told.append(f"works; {expected}")
        elif not expected.any():
            told.append("works; nothing to learn, as in the loop" if not found.any() else "WRONG")
        else:
            error = float((found - expected).norm() / expected.norm())
            told.append(f"{'works' if error <= TOLERANCE else 'WRONG'}, {error:.0e}")
        break
    return told[0], told[-1] if told[1:] else ""


def reference(model: nn.Module, loss: Loss, batch: tuple[Tensor, ...]) -> Tensor | str:
    """The sum by a loop, in float32 where the code takes nothing else; or why there is none to compare with."""
    for dtype in (torch.float64, torch.float32):
        try:
            first, second = (clipped_by_loop(model, loss, batch, dtype) for _ in range(2))
        except Exception as error:
            why = short(error)
            continue
        return first if torch.equal(first, second) else "random"
    return f"the loop fails: {why}"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="packages, kinds, or parts of an expression")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for kind, expression in rows():
        name = f"{kind}: {expression}"
        if options.only and not any(each in name for each in options.only):
            continue
        try:
            print(json.dumps([kind, expression, *judged(kind, expression)]), flush=True)
        except Exception as error:
            print(json.dumps([kind, expression, "not built", short(error)]), flush=True)


if __name__ == "__main__":
    main()
