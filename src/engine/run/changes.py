"""Compare a start of a run with the one before, and refuse what would make it another experiment."""

from pathlib import Path
from typing import Any

import yaml

from src.engine.errors import UserError
from src.engine.files import read_json, write_text

# What a run is made of, as its manifest keeps it. Another value needs `--allow_changed`.
ESSENTIAL = ("task", "model", "seed_everything", "global_batch_size", "world_size")


def refuse_changed(folder: Path, essentials: dict[str, Any], allowed: str | None) -> None:
    """Refuse another task, model class, seed, global batch or world size for a run that has begun."""
    names = {name for name in (allowed or "").replace(",", " ").split() if name}
    if unknown := sorted(names - set(ESSENTIAL)):
        raise UserError(f"--allow_changed {unknown[0]}: only {', '.join(ESSENTIAL)} need it")
    before = read_json(folder / "manifest.json")
    if not before and (folder / "manifest.json").exists():
        print(f"warning: {folder / 'manifest.json'} is damaged: nothing says what this run has been trained with")
    if "planned_batch_size" in before:  # the data gives another batch than was worked out, now as then
        before["global_batch_size"] = before["planned_batch_size"]
    changed = [name for name in ESSENTIAL if name in before and name in essentials and before[name] != essentials[name]]
    if refused := [name for name in changed if name not in names]:
        was = ", ".join(f"{name} {before[name]} (now {essentials[name]})" for name in refused)
        raise UserError(
            f"run {folder.name} has been trained with {was}: give it these values again, or continue it as another "
            f"experiment with --allow_changed {','.join(changed)}, or start another run with --fresh"
        )


def keep_config(folder: Path, config: str) -> list[str]:
    """Write config.yaml; where it changed since the last start, say what and keep the old one as config.<n>.yaml."""
    path = folder / "config.yaml"
    if not path.exists():
        write_text(path, config)
        return []
    changed = changes(folder, config)
    if changed:
        number = sum(1 for _ in folder.glob("config.*.yaml")) + 1
        path.rename(folder / f"config.{number}.yaml")
        write_text(path, config)
    return changed


def changes(folder: Path, config: str) -> list[str]:
    """Return what differs from the configuration that the run was last started with, as a note."""
    path = folder / "config.yaml"
    old = path.read_text(errors="replace") if path.exists() else config
    if old == config:
        return []
    try:
        before = flat(yaml.safe_load(old))
    except yaml.YAMLError:
        return [f"{path} is no YAML: nothing says what has changed since the last start"]
    after = flat(yaml.safe_load(config))
    changed = [key for key in before | after if before.get(key) != after.get(key)]
    if not changed:
        return []
    shown = ", ".join(f"{key} {before.get(key)} -> {after.get(key)}" for key in changed[:8])
    return [f"changed since the last start: {shown}{' …' if len(changed) > 8 else ''}"]


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one dictionary with dotted names."""
    if not isinstance(config, dict):
        return {prefix: config}
    return {
        key: value
        for name, child in config.items()
        for key, value in flat(child, f"{prefix}.{name}"[not prefix :]).items()
    }
