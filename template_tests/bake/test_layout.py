"""What of the repository belongs to a generated project, and that the template says it in one place only."""

import ast
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from template_tests.bake.baking import ROOT

TEMPLATE = "{{cookiecutter.project_slug}}"
DOT = "{{cookiecutter.__dot}}"
# At the root, tracked, and on purpose in no generated project.
TEMPLATE_ONLY = {
    *(TEMPLATE, "cookiecutter.json", "hooks", "template_tests", "GNUmakefile"),
    *(".ci", ".github/workflows/template.yaml"),
    "benchmarks",  # how fast this code was measured to be
}
# Written anew for each project.
RENDERED = {"README.md", "LICENSE", "project.yaml"}
QUESTIONS = json.loads((ROOT / "cookiecutter.json").read_text())


def links(root: Path) -> dict[str, Path]:
    """The template's symbolic links by the name that they have in a project."""
    template = root / TEMPLATE
    found = [path for path in sorted(template.rglob("*")) if path.is_symlink()]
    return {str(path.relative_to(template)).replace(DOT, "."): path for path in found}


def faults(root: Path, tracked: list[str], copied: list[str]) -> list[str]:
    """What would break a generated project or be forgotten in it; each with what to do."""
    bad = []
    here = links(root)
    for name, link in here.items():
        target = Path(os.readlink(link))
        wanted = "../" * (name.count("/") + 1) + name
        try:
            (link.parent / target).resolve(strict=True)
        except (OSError, RuntimeError):
            bad.append(f"{name}: the link in {TEMPLATE}/ leads nowhere ({target}): make the file, or git rm the link")
        if str(target) != wanted:
            bad.append(f"{name}: the link in {TEMPLATE}/ must be {wanted}, for the hook to restore it; it is {target}")
        if name not in copied:
            bad.append(f"{name}: name it in _copy_without_render of cookiecutter.json, or it comes out empty")
    bad += [
        f"{name}: cookiecutter.json copies it, but {TEMPLATE}/{name} is no link"
        for name in copied
        if name not in here and not name.endswith("_cache")  # may lie there, and must not be rendered
    ]
    known = here.keys() | TEMPLATE_ONLY | RENDERED
    for name in tracked:
        parts = Path(name).parts
        if not any("/".join(parts[: n + 1]) in known for n in range(len(parts))):
            bad.append(
                f"{name}: new at the root. For generated projects: ln -s ../{name} '{TEMPLATE}/{name}' and name it in "
                f"_copy_without_render of cookiecutter.json; for the template alone: TEMPLATE_ONLY here"
            )
    return bad


def listed() -> list[str]:
    files = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    return [name for name in files.stdout.decode().split("\0") if name and os.path.lexists(ROOT / name)]


def test_every_link_leads_to_its_file_and_everything_is_linked_or_left_out_on_purpose() -> None:
    """A link without a target, a link to elsewhere, and a root item that nobody decided about are named."""
    copied = [name.replace(DOT, ".") for name in QUESTIONS["_copy_without_render"]]
    assert faults(ROOT, listed(), copied) == []


@pytest.mark.parametrize(
    ("target", "tracked", "copied", "message"),
    [
        ("../src", [], ["src"], "leads nowhere"),
        ("src", [], ["src"], "leads nowhere"),  # itself: a cycle
        ("../../src", [], ["src"], "must be ../src"),
        ("../src", [], [], "name it in _copy_without_render"),
        ("../src", ["notes/a.txt"], ["src"], "notes/a.txt: new at the root"),
        ("../src", [], ["src", "slurm"], "slurm: cookiecutter.json copies it"),
    ],
)
def test_a_broken_layout_is_found(
    target: str, tracked: list[str], copied: list[str], message: str, tmp_path: Path
) -> None:
    """The rule above does find each kind of fault."""
    (tmp_path / TEMPLATE).mkdir()
    (tmp_path / TEMPLATE / "src").symlink_to(target)
    if message != "leads nowhere":
        (tmp_path / "src").mkdir()
    assert any(message in fault for fault in faults(tmp_path, tracked, copied))


def test_no_copied_folder_holds_links_or_programs() -> None:
    """A copy follows links, and a zip forgets the executable bit: what is copied is started by python, bash or make."""
    for name in listed():
        if name.split("/")[0] in {copied.split("/")[0] for copied in QUESTIONS["_copy_without_render"]}:
            assert not (ROOT / name).is_symlink(), name
            assert not os.access(ROOT / name, os.X_OK), name


def test_a_project_is_small_enough_to_look_through() -> None:
    """Two hundred files at most arrive with a new project."""
    copied = {name.replace(DOT, ".") for name in QUESTIONS["_copy_without_render"]} | RENDERED
    arriving = [name for name in listed() if any(name == item or name.startswith(f"{item}/") for item in copied)]
    assert 100 < len(arriving) <= 200


def test_there_are_eight_questions_with_readable_texts() -> None:
    """Nobody answers nine; every choice is explained where its value does not explain itself."""
    asked = [key for key in QUESTIONS if not key.startswith("_")]
    assert len(asked) <= 8
    texts = QUESTIONS["__prompts__"]
    assert texts.keys() == set(asked)
    for key, text in texts.items():
        if isinstance(text, dict):
            assert text.keys() == {"__prompt__", *QUESTIONS[key]}, key


def test_the_choices_are_what_is_there() -> None:
    """Tasks and clusters can be chosen as soon as their files exist, and only then."""
    tasks = [path.stem for path in (ROOT / "configs/tasks").glob("*.yaml")]
    clusters = [path.stem for path in (ROOT / "configs/clusters").glob("*.yaml") if path.stem != "mine"]
    assert sorted(QUESTIONS["task"]) == sorted(tasks)
    assert sorted(QUESTIONS["cluster"]) == sorted(clusters)


SHARED = {"From a laptop to a cluster", "Where things are", "Where does my new … go?"}


def test_both_readmes_say_the_same_about_the_same() -> None:
    """Sections of one title have one text, and both say what `make train` leaves and what --run does."""

    def sections(text: str) -> dict[str, str]:
        return {part.split("\n", 1)[0]: part.strip() for part in text.split("\n## ")[1:]}

    texts = [(ROOT / "README.md").read_text(), (ROOT / TEMPLATE / "README.md").read_text()]
    ours, theirs = map(sections, texts)
    assert ours.keys() & theirs.keys() == SHARED
    for title in SHARED:
        assert ours[title] == theirs[title], title
    promise = "With `--run NAME` the same command resumes a run that was killed; the result is bit-identical"
    for text in texts:
        assert promise in " ".join(text.split())
        assert {"train", "test", "lint"} <= set(re.findall(r"make (\w+)", text))
        assert len(text.splitlines()) <= 80, "readers stop at the second screen"


def test_the_promised_shapes_are_there() -> None:
    """One, two, four GPUs on one node and one or two on several: n1g1, n1g2, n1g4, n2g1, n2g2, n4g1."""
    names = {path.stem for path in (ROOT / "configs").glob("*.yaml")}
    wanted = {f"a100_n{n}_gpu{g}" for n, g in ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1))}
    assert wanted | {"cpu", "cpu_n1_proc2", "v100_n1_gpu2", "h100_n1_gpu8", "h100_n4_gpu8"} <= names


def test_the_hooks_run_on_an_old_python() -> None:
    """cookiecutter may run on Python 3.8 of a login node: no newer syntax, annotations are not evaluated."""
    for path in (ROOT / "hooks").glob("*.py"):
        tree = ast.parse(path.read_text(), feature_version=(3, 8))
        assert any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body), path
        assert "is_relative_to" not in path.read_text()  # Python 3.9


def test_the_repository_itself_has_the_first_choices() -> None:
    """What --no-input chooses is what this project does."""
    project = yaml.safe_load((ROOT / "project.yaml").read_text())
    assert project == {"task": QUESTIONS["task"][0], "cluster": QUESTIONS["cluster"][0], "account": "", "partition": ""}
