"""What `load_state_dict` says of weights that are not those of a network, in one line."""

import re

# Tensors that are named.
_NAMED = 3
_SIZES = re.compile(
    r"size mismatch for ([\w.]+): copying a param with shape torch\.Size\(\[([\d, ]*)\]\) from checkpoint, the shape "
    r"in current model is torch\.Size\(\[([\d, ]*)\]\)"
)


def weights_that_do_not_fit(message: str, *, known_classes: int | None = None) -> str | None:
    """The tensors that differ and their shapes; None for a message of another kind.

    Args:
        message: of torch.
        known_classes: of the data, by which the last layer is known.
    """
    sizes = _SIZES.findall(message)
    told = [f"{name} has shape ({saved}) in the checkpoint and ({now}) here" for name, saved, now in sizes]
    for which, where in (("Missing", "missing from the checkpoint"), ("Unexpected", "only in the checkpoint")):
        if found := re.search(rf"{which} key\(s\) in state_dict: (.+?)\.\s*(?:\n|$)", message):
            told += [f"{name} is {where}" for name in re.findall(r'"([^"]+)"', found[1])]
    if not told:
        return None
    more = f", and {len(told) - _NAMED} more" if len(told) > _NAMED else ""
    classes = _classes(sizes, known_classes)
    return f"{'; '.join(told[:_NAMED])}{more}.{classes} Take the configuration that the checkpoint's run saved."


def _classes(sizes: list[tuple[str, str, str]], known: int | None) -> str:
    """If the last tensor differs only in its rows, and has as many here as the data has classes."""
    if not sizes:
        return ""
    (saved, *rest), (now, *same) = (shape.split(", ") for shape in sizes[-1][1:])
    if saved == now or rest != same or now != str(known):
        return ""
    return f" The checkpoint has {saved} classes, and the data has {now}."
