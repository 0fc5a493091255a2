"""What FSDP says about the units that it found in a model."""

from torch import nn

SMALL = 100_000  # parameters; a unit of fewer is gathered in less time than it takes to ask for it


def unit_notes(module: nn.Module, units: list[tuple[str, nn.Module]]) -> list[str]:
    """The units, what is left to the root, and a warning where this division will not help."""
    within = {id(parameter) for _, unit in units for parameter in unit.parameters()}
    root = sum(parameter.numel() for parameter in module.parameters() if id(parameter) not in within)
    if not units:
        return [
            f"warning: fsdp found no blocks, so all {_count(root)} parameters are gathered at once: memory is saved "
            "for gradients and optimizer state only, and nothing overlaps; give the network `BLOCKS = (YourBlock,)`"
        ]
    sizes = [sum(parameter.numel() for parameter in unit.parameters()) for _, unit in units]
    kinds = " and ".join(dict.fromkeys(_name(unit) for _, unit in units))
    each = f"{_count(max(sizes))} parameters each"
    if min(sizes) != max(sizes):
        each = f"{_count(min(sizes))} to {_count(max(sizes))} parameters each"
    many = f"{len(units)} unit{'s' if len(units) > 1 else ''} of {kinds} ({each})"
    notes = [f"note: fsdp gathers {many} and {_count(root)} parameters of the root"]
    if len(units) > 1 and max(sizes) < SMALL:
        notes.append(
            "warning: fsdp's units are so small that starting a transfer takes longer than the transfer: name larger "
            "blocks in BLOCKS, or use --trainer.strategy ddp, if memory allows"
        )
    return notes


def _name(unit: nn.Module) -> str:
    return type(unit).__name__


def _count(number: int) -> str:
    return f"{number / 1e6:.1f} M" if number >= 1e5 else f"{number:,}".replace(",", " ")
