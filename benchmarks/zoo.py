"""Which models have right per-example gradients, compared with a loop over single examples and with Opacus' hooks.

The smallest model of every family of timm and torchvision, and small configurations of transformers. Each runs in a
process of its own, in float64, on three examples; dropout is off, so that the loop sees the same function::

    python benchmarks/zoo.py --results zoo.json             # runs what the file does not hold yet
    python benchmarks/zoo.py --results zoo.json --table     # prints the results as markdown
    python benchmarks/zoo.py --only timm/vit                # runs one and prints what goes wrong

A model is right if all examples' gradients differ from the loop's by at most 1e-5 of their norm.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

Case = tuple[nn.Module, Any, Callable[[nn.Module, Any], Tensor]]  # model, examples (b, ...), loss of a batch

EXAMPLES, CLASSES, TOLERANCE = 3, 10, 1e-5
SIDES = (64, 96, 112, 128, 160, 224, 299)
MOST_PARAMETERS = 130_000_000  # four float64 gradients of three examples fit into 13 GiB; larger ones get two blocks


# Families of timm and torchvision


def timm_families() -> dict[str, list[str]]:
    import timm

    return {f"timm/{module}": timm.list_models(module=module) for module in timm.list_modules()}


def torchvision_families() -> dict[str, list[str]]:
    from torchvision import models

    families: dict[str, list[str]] = {}
    for package, kind in ((models, "torchvision"), (models.segmentation, "torchvision/segmentation")):
        for name in models.list_models(package):
            family = models.get_model_builder(name).__module__.rpartition(".")[2]
            families.setdefault(f"{kind}/{family}", []).append(name)
    return families


def build_timm(name: str, **options: Any) -> nn.Module:
    import timm

    return timm.create_model(name, num_classes=CLASSES, **options)


def build_torchvision(name: str) -> nn.Module:
    from torchvision import models

    options = {"weights_backbone": None} if "segmentation" in models.get_model_builder(name).__module__ else {}
    return models.get_model(name, weights=None, num_classes=CLASSES, **options)


def smallest(names: list[str], build: Callable[[str], nn.Module]) -> tuple[str, int] | None:
    """Name and number of parameters."""
    sizes = []
    for name, device in product(names, ("meta", "cpu")):
        if device == "cpu" and any(name == known for _, known in sizes):
            continue
        try:
            with torch.device(device):
                sizes.append((sum(p.numel() for p in build(name).parameters()), name))
        except Exception:
            continue  # a model that cannot be built is not a candidate; some cannot be built on meta
    return min(sizes)[::-1] if sizes else None


def image_case(name: str, build: Callable[..., nn.Module]) -> Case:
    """The model, with examples of the smallest size at which it runs."""
    default = getattr(build(name), "pretrained_cfg", {}).get("input_size", (3, 224, 224))
    for side in (*SIDES, default[-1]):
        for options, frozen in product(({"img_size": side}, {}), (False, True)):
            try:
                model = prepared(build(name, **options), frozen=frozen)
                x = torch.randn(EXAMPLES, default[0], side, side)
                with torch.no_grad():
                    model(x[:1])
            except Exception:
                continue  # the next size, or the next way to set it
            return model, (x, torch.arange(EXAMPLES)), image_loss
    raise RuntimeError("runs at no size")


def image_loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    output = model(x)
    return F.cross_entropy(output, y) if isinstance(output, Tensor) and output.dim() == 2 else output_loss(output)


def output_loss(output: Any) -> Tensor:
    """A number that depends on every entry of the output, a tree of tensors (b, ...)."""
    total = 0.0
    tensors = [x for x in tree_leaves(dict(output) if isinstance(output, dict) else output) if x.is_floating_point()]
    for x in tensors:
        total = total + (x.tanh() * torch.arange(x[0].numel()).sin().view(x.shape[1:])).mean()
    return total


def prepared(model: nn.Module, *, frozen: bool = False) -> nn.Module:
    """In training mode, without BatchNorm (or with a frozen one) and without randomness; no float64 weight is zero."""
    from dp_lightning.errors import ModelError
    from dp_lightning.models.batch_norm import batch_norm_to_group_norm, freeze_batch_norm

    model.train()
    try:
        if not frozen:
            batch_norm_to_group_norm(model)
    except ModelError:
        frozen = True
    if frozen:
        freeze_batch_norm(model)
    for module in model.modules():
        for option, value in vars(module).items():
            if isinstance(value, float) and (option == "p" or "drop" in option):
                setattr(module, option, 0.0)
    model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(0.02 * torch.randn_like(parameter))
    return model


# Configurations of transformers


def transformers_cases() -> dict[str, Callable[[], Case]]:
    import transformers as hf

    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    text = {**size, "vocab_size": 50, "max_position_embeddings": 32}
    image = {**size, **quiet, "image_size": 32, "patch_size": 8, "num_labels": CLASSES}
    grouped = {**text, "num_key_value_heads": 2}

    def words(length: int = 8) -> dict[str, Tensor]:
        mask = torch.ones(EXAMPLES, length, dtype=torch.long)
        mask[1, 6:] = 0
        return {"input_ids": torch.randint(2, 50, (EXAMPLES, length)), "attention_mask": mask}

    def classify(model: str, config: Any) -> Case:
        config.num_labels = CLASSES
        return own_loss(getattr(hf, model)(config), {**words(), "labels": torch.arange(EXAMPLES)})

    def language(model: str, config: Any) -> Case:
        return own_loss(getattr(hf, model)(config), {**words(), "labels": torch.randint(2, 50, (EXAMPLES, 8))})

    def images(model: str, config: Any, side: int = 32) -> Case:
        config.num_labels = CLASSES
        batch = {"pixel_values": torch.randn(EXAMPLES, 3, side, side), "labels": torch.arange(EXAMPLES)}
        return own_loss(getattr(hf, model)(config), batch)

    def segformer() -> Case:
        config = hf.SegformerConfig(
            depths=[1, 1, 1, 1], hidden_sizes=[16, 16, 32, 32], num_attention_heads=[1, 1, 2, 2],
            decoder_hidden_size=32, drop_path_rate=0.0, classifier_dropout_prob=0.0, num_labels=CLASSES, **quiet,
        )  # fmt: skip
        batch = {
            "pixel_values": torch.randn(EXAMPLES, 3, 64, 64),
            "labels": torch.randint(CLASSES, (EXAMPLES, 64, 64)),
        }
        return own_loss(hf.SegformerForSemanticSegmentation(config), batch)

    def masked_autoencoder() -> Case:
        config = hf.ViTMAEConfig(
            decoder_hidden_size=32, decoder_num_hidden_layers=1, decoder_num_attention_heads=4,
            decoder_intermediate_size=48, **image,
        )  # fmt: skip
        batch = {"pixel_values": torch.randn(EXAMPLES, 3, 32, 32), "noise": torch.rand(EXAMPLES, 16)}
        return own_loss(hf.ViTMAEForPreTraining(config), batch)

    def clip() -> Case:
        config = hf.CLIPConfig(
            text_config={**text, "projection_dim": 16, "eos_token_id": 1},
            vision_config={**image, "projection_dim": 16},
            projection_dim=16,
        )
        batch = {**words(), "pixel_values": torch.randn(EXAMPLES, 3, 32, 32)}
        batch["input_ids"][:, -1] = 1

        def loss(model: nn.Module, batch: Any) -> Tensor:
            output = model(**masked(model, batch))
            return output_loss([output.text_embeds, output.image_embeds])

        return prepared(hf.CLIPModel(config)), batch, loss

    def siglip() -> Case:
        config = hf.SiglipVisionConfig(**{**size, "image_size": 32, "patch_size": 8})

        def loss(model: nn.Module, batch: Any) -> Tensor:
            return output_loss(model(**batch).pooler_output)

        return prepared(hf.SiglipVisionModel(config)), {"pixel_values": torch.randn(EXAMPLES, 3, 32, 32)}, loss

    def speech() -> Case:
        config = hf.Wav2Vec2Config(
            conv_dim=(16, 16), conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2,
            num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, apply_spec_augment=False, layerdrop=0.0,
            hidden_dropout=0.0, attention_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0,
            activation_dropout=0.0, num_labels=CLASSES, classifier_proj_size=16, **size,
        )  # fmt: skip
        batch = {"input_values": torch.randn(EXAMPLES, 400), "labels": torch.arange(EXAMPLES)}
        return own_loss(hf.Wav2Vec2ForSequenceClassification(config), batch)

    def whisper() -> Case:
        config = hf.WhisperConfig(
            vocab_size=50, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8,
            max_source_positions=20, max_target_positions=20, dropout=0.0, pad_token_id=0, bos_token_id=1,
            eos_token_id=2, decoder_start_token_id=3,
        )  # fmt: skip
        batch = {"input_features": torch.randn(EXAMPLES, 8, 40), "labels": torch.randint(4, 50, (EXAMPLES, 6))}
        return own_loss(hf.WhisperForConditionalGeneration(config), batch)

    def t5() -> Case:
        config = hf.T5Config(
            vocab_size=50, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
            decoder_start_token_id=0,
        )  # fmt: skip
        return language("T5ForConditionalGeneration", config)

    def bart() -> Case:
        config = hf.BartConfig(
            vocab_size=50, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, dropout=0.0, max_position_embeddings=32,
        )  # fmt: skip
        return language("BartForConditionalGeneration", config)

    swin = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "drop_path_rate": 0.0}
    return {
        "transformers/BERT": lambda: classify(
            "BertForSequenceClassification", hf.BertConfig(**text, **quiet)
        ),
        "transformers/GPT-2": lambda: language(
            "GPT2LMHeadModel",
            hf.GPT2Config(vocab_size=50, n_positions=32, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0,
                          embd_pdrop=0.0, attn_pdrop=0.0),
        ),
        "transformers/T5": t5,
        "transformers/Swin": lambda: images(
            "SwinForImageClassification", hf.SwinConfig(image_size=32, patch_size=4, **swin, **quiet)
        ),
        "transformers/SegFormer": segformer,
        "transformers/Siglip": siglip,
        "transformers/Mixtral": lambda: language(
            "MixtralForCausalLM",  # the default product of experts does not support float64
            hf.MixtralConfig(**grouped, num_local_experts=4, num_experts_per_tok=2,
                             experts_implementation="batched_mm"),
        ),
        "transformers/Wav2Vec2": speech,
        "transformers/ViT": lambda: images("ViTForImageClassification", hf.ViTConfig(**image)),
        "transformers/DistilBERT": lambda: classify(
            "DistilBertForSequenceClassification",
            hf.DistilBertConfig(vocab_size=50, dim=32, n_layers=2, n_heads=4, hidden_dim=48, dropout=0.0,
                                attention_dropout=0.0, seq_classif_dropout=0.0, max_position_embeddings=32),
        ),
        "transformers/RoBERTa": lambda: classify(
            "RobertaForSequenceClassification", hf.RobertaConfig(**text, **quiet)
        ),
        "transformers/ALBERT": lambda: classify(
            "AlbertForSequenceClassification",
            hf.AlbertConfig(**text, embedding_size=16, classifier_dropout_prob=0.0, **quiet),
        ),
        "transformers/ELECTRA": lambda: classify(
            "ElectraForSequenceClassification", hf.ElectraConfig(**text, embedding_size=16, **quiet)
        ),
        "transformers/BART": bart,
        "transformers/Llama": lambda: language("LlamaForCausalLM", hf.LlamaConfig(**grouped)),
        "transformers/DeiT": lambda: images("DeiTForImageClassification", hf.DeiTConfig(**image)),
        "transformers/ConvNeXt": lambda: images(
            "ConvNextForImageClassification",
            hf.ConvNextConfig(depths=[1, 1, 1, 1], hidden_sizes=[8, 16, 24, 32], drop_path_rate=0.0), 64,
        ),
        "transformers/ViTMAE": masked_autoencoder,
        "transformers/CLIP": clip,
        "transformers/Whisper": whisper,
        "transformers/Mistral": lambda: language("MistralForCausalLM", hf.MistralConfig(**grouped)),
        "transformers/GPT-NeoX": lambda: language(
            "GPTNeoXForCausalLM", hf.GPTNeoXConfig(**text, hidden_dropout=0.0, attention_dropout=0.0)
        ),
    }  # fmt: skip


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Case:
    """The case of a model of transformers, which computes its loss itself."""
    return prepared(model), batch, lambda model, batch: model(**masked(model, batch)).loss


def masked(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch with its mask in four dimensions, (b, 1, 1 or L, L), which transformers applies without reading it."""
    if (given := batch.get("attention_mask")) is None:
        return batch
    mask = given[:, None, None, :].bool()
    if type(model).__name__.startswith(("CLIP", "GPT", "Llama", "Mistral", "Mixtral")):
        mask = mask & mask.new_ones(mask.shape[-1], mask.shape[-1]).tril()
    return {**batch, "attention_mask": mask}


# One model


def measure(case: Case) -> dict[str, Any]:
    model, batch, loss = case
    batch = tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, batch)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    result: dict[str, Any] = {"parameters": sum(p.numel() for p in trained.values())}
    with torch.no_grad():
        if not torch.equal(loss(model, batch), loss(model, batch)):
            raise RuntimeError("two runs of the model differ")
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    expected = by_loop(model, batch, loss, trained)
    changed = [name for name, buffer in model.named_buffers() if not torch.equal(before[name], buffer)]
    result["changed"] = changed
    for way, gradients in (("together", by_recording), ("opacus", by_opacus)):
        start = time.perf_counter()
        try:
            result[way] = compared(gradients(model, batch, loss, trained), expected)
        except Exception as error:
            result[way] = {"refused": f"{type(error).__name__}: {' '.join(str(error).split())}"[:1500]}
        result[way]["seconds"] = time.perf_counter() - start
    return result


def compared(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, Any]:
    """Errors relative to the whole gradient, and to that of each parameter if that is more than rounding."""
    norm = sum(g.square().sum() for g in expected.values()).sqrt()
    differences = {name: (found[name] - g).norm() if name in found else g.norm() for name, g in expected.items()}
    error = float(torch.stack(list(differences.values())).norm() / norm)
    each = {name: float(d / expected[name].norm().clamp_min(1e-8 * norm)) for name, d in differences.items()}
    worst = max(each, key=lambda name: each[name])
    return {"error": error, "worst": each[worst], "worst_parameter": worst}


def by_loop(model: nn.Module, batch: Any, loss: Any, trained: dict[str, Tensor]) -> dict[str, Tensor]:
    total: dict[str, list[Tensor]] = {name: [] for name in trained}
    for i in range(EXAMPLES):
        value = loss(model, tree_map_only(Tensor, lambda x: x[i : i + 1], batch))  # noqa: B023
        gradients = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
        for (name, parameter), gradient in zip(trained.items(), gradients, strict=True):
            total[name].append(torch.zeros_like(parameter) if gradient is None else gradient)
    return {name: torch.stack(rows) for name, rows in total.items()}


def by_recording(model: nn.Module, batch: Any, loss: Any, trained: dict[str, Tensor]) -> dict[str, Tensor]:
    from dp_lightning.privacy.gradients.recording import Recording

    found: dict[str, Tensor] = {}
    recording = Recording(trained, EXAMPLES, lambda contribution: found.update(contribution.formed().gradients))
    examples = tree_map_only(Tensor, lambda x: x.unsqueeze(1), batch)
    recording.backward(recording.run(lambda example: loss(model, example), examples))
    return found


def by_opacus(model: nn.Module, batch: Any, loss: Any, trained: dict[str, Tensor]) -> dict[str, Tensor]:
    from opacus.grad_sample import GradSampleModule

    wrapped = GradSampleModule(model)
    loss(wrapped, batch).backward()
    samples = {name: parameter.grad_sample for name, parameter in trained.items()}
    return {name: sample for name, sample in samples.items() if sample is not None}


def run_one(name: str, model: str, *, shallow: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    if name.startswith("transformers/"):
        case = transformers_cases()[name]()
    else:
        build = build_timm if name.startswith("timm/") else build_torchvision
        case = image_case(model, partial(build, depth=2) if shallow else build)
    return measure(case)


# All of them


def chosen(results: dict[str, Any]) -> Iterator[tuple[str, str, int]]:
    """Name, model and number of parameters of each case; the choice is kept in the results."""
    for families, build in ((timm_families(), build_timm), (torchvision_families(), build_torchvision)):
        for family, names in families.items():
            if family not in results:
                found = smallest(names, build)
                results[family] = {"model": found[0], "parameters": found[1]} if found else {"model": None}
            if results[family]["model"] is not None:
                yield family, results[family]["model"], results[family]["parameters"]
    for name in transformers_cases():
        results.setdefault(name, {"model": name.partition("/")[2]})
        yield name, results[name]["model"], 0


def run_all(path: Path, jobs: int, seconds: float) -> None:
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def run(case: tuple[str, str, int]) -> None:
        name, model, parameters = case
        if "together" in results[name] or "failed" in results[name]:
            return
        command = [sys.executable, __file__, "--only", name, "--model", model]
        if parameters > MOST_PARAMETERS:
            command.append("--shallow")
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
            results[name].update(json.loads(done.stdout.splitlines()[-1]))
        except subprocess.TimeoutExpired:
            results[name]["failed"] = f"takes more than {seconds:.0f} s"
        except (IndexError, json.JSONDecodeError):
            results[name]["failed"] = " ".join(done.stderr[-500:].split())
        path.write_text(json.dumps(results, indent=1))

    cases = list(chosen(results))
    path.write_text(json.dumps(results, indent=1))
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, sorted(cases, key=lambda case: case[2])))


def verdict(result: dict[str, Any]) -> str:
    if "refused" in result:
        return "refuses"
    return "right" if result["error"] <= TOLERANCE else f"wrong ({result['error']:.0e})"


def table(results: dict[str, Any]) -> str:
    lines, counts = [], Counter[str]()
    for name, result in sorted(results.items()):
        if "together" not in result:
            lines.append(f"| {name} | {result['model']} | | not run: {result.get('failed', 'does not build')} | |")
            continue
        ours, theirs = verdict(result["together"]), verdict(result["opacus"])
        counts.update([f"together {ours.split()[0]}", f"Opacus {theirs.split()[0]}"])
        if ours == "refuses":
            ours = f"one_by_one: {result['together']['refused']}"
        lines.append(f"| {name} | {result['model']} | {result['parameters'] / 1e6:.1f} | {ours} | {theirs} |")
    summary = ", ".join(f"{what} {count}" for what, count in sorted(counts.items()))
    head = ["| family | model | million parameters | together | Opacus' hooks |", "| --- | --- | ---: | --- | --- |"]
    return "\n".join([f"{counts.total() // 2} models: {summary}", "", *head, *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("zoo.json"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=300, help="for one model")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--only")
    parser.add_argument("--model")
    parser.add_argument("--shallow", action="store_true", help="two blocks of it")
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(run_one(arguments.only, arguments.model, shallow=arguments.shallow)))
    elif arguments.table:
        print(table(json.loads(arguments.results.read_text())))
    else:
        run_all(arguments.results, arguments.jobs, arguments.seconds)


if __name__ == "__main__":
    main()
