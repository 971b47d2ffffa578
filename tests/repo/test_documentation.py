"""Run every block of Python in the README and the documentation.

The blocks of a page run one after the other, as one program, in their own folder. ``s3://`` and ``/local`` are
folders, too. A block that cannot run here has a comment before it with the reason: ``<!-- not run: needs ... -->``.
"""

from __future__ import annotations

import re
import signal
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import bytecheckpoint as bcp

REPOSITORY = Path(__file__).parents[2]
PAGES = sorted(
    page
    for page in (REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md"))
    # rules/test_rules_page.py and examples/test_start_pages.py run the others.
    if "```python" in page.read_text() and page.name != "rules.md" and page.parent.name != "start"
)
BLOCK = re.compile(r"(?:^ *<!-- not run: (?P<reason>.+?) -->\n)?^ *```python\n(?P<code>.*?)^ *```", re.M | re.S)


def prelude() -> dict[str, Any]:
    """What the pages take for granted: a model that is trained, and checkpoints of it."""
    model = nn.ModuleDict({"wte": nn.Embedding(256, 4), "blocks": nn.ModuleList([nn.Linear(4, 4)])})
    optimizer = torch.optim.AdamW(model.parameters())

    def train_step() -> None:
        optimizer.zero_grad()
        model["blocks"][0](model["wte"](torch.arange(8))).sum().backward()
        optimizer.step()

    train_step()
    return {
        "bcp": bcp,
        "torch": torch,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        "train_step": train_step,
        "steps": 3,
        "extra": {"step": 3},
        "state": {"model": model, "optimizer": optimizer, "extra_state": {"step": 0}},
    }


def prepare(page: Path, root: Path, names: dict[str, Any]) -> None:
    """Save what a page loads without having saved it."""
    model, optimizer, state = names["model"], names["optimizer"], names["state"]
    if page.name in ("README.md", "features.md"):
        state = {**state, "lr_scheduler": names["scheduler"], "rng": bcp.RNGState()}
        bcp.save(root / "s3" / "runs" / "7b" / "step-1000", state, step=1)
    if page.name == "dcp.md":
        names["state"] = {
            "model": model.state_dict(),
            "optimizer": get_optimizer_state_dict(model, optimizer),
            "extra": {"step": 5},
        }
    if page.stem == "ranks":  # the job before
        run_blocks(page, root, prelude())
    if page.name == "other-formats.md":
        (root / "run").mkdir()
        sections = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "extra_state": {"step": 3}}
        torch.save(sections, root / "run" / "last.pt")
        bcp.save(root / "run" / "step-100", state)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = prelude()
    prepare(page, tmp_path, names)
    run_blocks(page, tmp_path, names)


@pytest.mark.parametrize("name", ["state", "preemption"])
def test_the_loop_of_a_page_resumes_after_a_signal(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = REPOSITORY / "docs" / "how-to" / f"{name}.md"
    first, second = prelude(), prelude()
    train_step = first["train_step"]

    def interrupted_step() -> None:
        train_step()
        if first["step"] == 2:
            signal.raise_signal(signal.SIGTERM)

    first["train_step"] = interrupted_step
    with pytest.raises(SystemExit) as exit:
        run_blocks(page, tmp_path, first)
    assert exit.value.code == 128 + signal.SIGTERM
    run_blocks(page, tmp_path, second | {"steps": 2})
    for left, resumed in zip(first["model"].parameters(), second["model"].parameters(), strict=True):
        torch.testing.assert_close(resumed, left, rtol=0, atol=0)


def run_blocks(page: Path, root: Path, names: dict[str, Any]) -> None:
    text = page.read_text()
    for found in BLOCK.finditer(text):
        if found["reason"] is None:
            code = textwrap.dedent(found["code"])
            code = code.replace("s3://", f"{root}/s3/").replace('"/local', f'"{root}/local')
            line = text.count("\n", 0, found.start("code"))
            exec(compile("\n" * line + code, str(page), "exec"), names)


def test_all_python_is_in_blocks_that_are_found() -> None:
    """Python in an indented block is not run, so there is none."""
    for page in (REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")):
        outside = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.M | re.S)
        lines = re.findall(r"^ {4,}.*\bbcp\.\w+\(.*$", outside, re.M)
        assert not lines, f"{page.name}: {lines}"


def test_the_reference_contains_every_public_name() -> None:
    text = (REPOSITORY / "docs" / "reference" / "python.md").read_text()
    found = re.findall(r"^\.\. auto\w+:: bytecheckpoint\.(\w+)$", text, re.M)
    # `errors` has its own page, and of `dcp` the page contains the classes.
    assert sorted(found) == sorted({*dir(bcp)} - {"__version__", "dcp", "errors"})


def test_the_pod_of_the_kubernetes_page_ends_after_its_processes() -> None:
    text = (REPOSITORY / "docs" / "how-to" / "kubernetes.md").read_text()
    job, service = yaml.safe_load_all(re.findall(r"^```yaml\n(.*?)^```", text, re.M | re.S)[0])
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (command,) = container["args"]
    (shutdown_s,) = map(int, re.findall(r"--shutdown-timeout (\d+)", command))
    (grace_s,) = map(int, re.findall(r"CheckpointManager\(.*grace_s=(\d+)", text))
    assert command.startswith("exec ")
    assert grace_s < shutdown_s < pod["terminationGracePeriodSeconds"]
    assert service["metadata"]["name"] == pod["subdomain"]


def test_the_first_page_leads_to_every_how_to_page_and_concept() -> None:
    docs = REPOSITORY / "docs"
    text = (docs / "index.md").read_text()
    pages = [*docs.glob("how-to/*.md"), *docs.glob("concepts/*.md")]
    assert [page.name for page in pages if f"]({page.relative_to(docs)})" not in text] == []


def test_the_page_of_the_environment_has_every_variable() -> None:
    code = [
        path
        for name in ("bytecheckpoint", "planners", "storage_backends")
        for path in REPOSITORY.glob(f"{name}/**/*.py")
    ]
    found = {name for path in code for name in re.findall(r"\bBYTECHECKPOINT_[A-Z_]+", path.read_text())}
    text = (REPOSITORY / "docs" / "reference" / "environment.md").read_text()
    assert {*re.findall(r"^\| `(BYTECHECKPOINT_[A-Z_]+)`", text, re.M)} == found


def test_the_page_of_errors_has_what_to_do_for_every_error() -> None:
    text = (REPOSITORY / "docs" / "errors.md").read_text()
    found = {name: getattr(bcp.errors, name) for name in bcp.errors.__all__}
    raised = [name for name, error in found.items() if not error.__subclasses__()]
    assert [name for name in raised if f"`{name}`" not in text] == []


def test_some_blocks_run() -> None:
    ran = [page.name for page in PAGES for found in BLOCK.finditer(page.read_text()) if found["reason"] is None]
    assert len(ran) >= 8, ran
