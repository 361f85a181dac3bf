"""`dpl pretrain`: weights for a private run from images that a random process makes, so from no data at all.

It makes images (dead leaves, noise with the spectrum of photographs, untrained generators), and trains the network of a
configuration on them without labels: two views of an image lie together, and images spread. The configuration's data
set is not read; only its image size, channels and normalisation are used.
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import save

from dp_lightning.atomic_files import replacing, require_writable
from dp_lightning.commands.configs import with_paths
from dp_lightning.commands.fit_settings import SettingsReader, prepare
from dp_lightning.errors import ConfigurationError
from dp_lightning.lightning_modules.classifiers import OWN_NETWORKS
from dp_lightning.models.pretraining import Pretraining, Recipe, random_images
from dp_lightning.privacy.exported import RANDOM_IMAGES, RECIPE, SOURCE, TENSORS, recipe_of
from dp_lightning.privacy.weights import digest_of


def main(arguments: list[str]) -> None:
    """Train, or resume a training of the same recipe that was stopped; a finished one is left as it is.

    Raises:
        ConfigurationError: for settings that cannot be used, or a file of another recipe.
    """
    options, of_fit = _parser().parse_known_args(with_paths(arguments)[1:])
    if options.out.suffix != ".safetensors":
        raise ConfigurationError(f"--out is {options.out}; weights are written as .safetensors.")
    require_writable(options.out.parent, "--out")
    settings = SettingsReader()(of_fit)
    if settings["model"].get("init_args", {}).get("weights") is not None:
        raise ConfigurationError("model.init_args.weights is set, but pretraining starts from nothing. Remove it.")
    torch.manual_seed(options.seed)
    cli = prepare({**settings, "seed_everything": options.seed})
    data = cli.datamodule
    # A module of the user's own may load weights, of which nobody knows where they come from.
    if type(cli.model) not in OWN_NETWORKS or not hasattr(data, "image_size"):
        raise ConfigurationError(
            f"dpl pretrain trains {', '.join(kind.__name__ for kind in OWN_NETWORKS)} on images; "
            f"{type(cli.model).__name__} with {type(data).__name__} is something else."
        )
    recipe = Recipe(
        network={**settings["model"], "num_classes": data.num_classes},  # decides the first weights
        channels=data.in_channels,
        size=data.image_size,
        mean=tuple(data.mean),
        std=tuple(data.std),
        images=options.images,
        steps=options.steps,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        view_size=options.view_size,
        precision=options.precision,
        seed=options.seed,
    )
    if options.out.exists():
        if recipe_of(options.out) != recipe.digest:
            raise ConfigurationError(f"{options.out} is of another recipe. Give another --out.")
        print(f"{options.out} is finished.")
        return
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    unfinished = options.out.with_name(f"{options.out.name}.unfinished")
    state = torch.load(unfinished, weights_only=True, map_location="cpu") if unfinished.exists() else None
    if state is not None and state["recipe"] != recipe.to_json():
        raise ConfigurationError(f"{unfinished} is of another recipe. Remove it, or give another --out.")
    images = random_images(recipe, lambda made: None if made % 10_000 else print(f"{made:,} random images", flush=True))
    training = Pretraining(cli.model.model.train(), recipe, images, device)
    if state is not None:
        training.load_state_dict(state)
        print(f"Resuming after step {training.steps:,}.", flush=True)
    while training.steps < recipe.steps:
        loss = training.step()
        if training.steps % max(1, recipe.steps // 100) and training.steps < recipe.steps:
            continue
        # After each hundredth of all steps they are kept in a file, to resume from.
        if not loss.isfinite():
            raise ConfigurationError(
                f"The loss is {loss.item()} at step {training.steps:,}: --learning-rate {recipe.learning_rate:g} is "
                "too high. Lower it."
            )
        print(f"step {training.steps:,} of {recipe.steps:,}, loss {loss.item():.3f}", flush=True)
        with replacing(unfinished, private=True) as file:
            torch.save(training.state_dict(), file)
    weights = training.weights()
    with replacing(options.out) as file:
        said = {RECIPE: recipe.to_json(), SOURCE: RANDOM_IMAGES, TENSORS: digest_of(weights)}
        file.write(save(weights, said))
    unfinished.unlink(missing_ok=True)
    print(f"{options.out}: {RANDOM_IMAGES} (recipe {recipe.digest[:16]}).")
    print(f"A private run starts from it with --model.init_args.weights {options.out}.")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dpl pretrain",
        description=__doc__,
        epilog="Every other option is one of dpl fit, such as --config and --model.init_args.width. A training that is "
        "stopped resumes from its last hundredth when the same command is given again.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("random.safetensors"), help="file of the weights; default: random.safetensors")
    add("--images", type=int, default=50_000, help="how many images; default: 50,000")
    add("--steps", type=int, default=10_000, help="steps of the optimizer; default: 10,000")
    add("--batch-size", "--batch_size", type=int, default=256, help="images of a step, each in two views; default: 256")
    add("--learning-rate", "--learning_rate", type=float, default=0.002, help="of AdamW; default: 0.002")
    side = "pixels of a view's side, fewer than the image's to save time; default: all"
    add("--view-size", "--view_size", type=int, help=side)
    precision = "32, or bf16 where the hardware computes it faster; default: 32"
    add("--precision", choices=["32", "bf16"], default="32", help=precision)
    add("--seed", type=int, default=0, help="of everything random; the weights are public, and so is it; default: 0")
    add("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    return parser
