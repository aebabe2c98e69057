"""What a release says of itself holds: the index page, the stability page, the workflow."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pagedserve.scheduler import CacheConfig, Scheduler, SchedulerConfig

ROOT = Path(__file__).resolve().parents[2]
INDEX_PAGE = ROOT / "python" / "README.md"


@pytest.mark.parametrize("page", [INDEX_PAGE, ROOT / "rust" / "core" / "README.md"])
def test_pages_of_registries_have_no_relative_link(page: Path) -> None:
    targets = re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not target.startswith("https://")] == []


def test_scheduler_example_of_the_index_page_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", INDEX_PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (example,) = (block for block in blocks if "Scheduler(" in block)
    done = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, check=True
    )
    (expected,) = re.findall(r"print\(.*\)  # (.*)", example)
    assert done.stdout.strip() == expected


def test_stability_page_names_the_format_of_the_log(tmp_path: Path) -> None:
    limits = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=8, max_model_len=8)
    path = tmp_path / "decisions.jsonl"
    scheduler = Scheduler(limits, CacheConfig(block_size=4, num_gpu_blocks=4), log=path)
    scheduler.flush_log()
    header = json.loads(path.read_text().splitlines()[0])
    page = (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")
    assert f'`"log": {header["log"]}`' in page


def test_workflow_runs_what_a_clone_runs() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    commands = re.findall(r"- run: (.+)", workflow)
    assert ".ci/run" in commands
    made = [command.split()[1:] for command in commands if command.startswith("make ")]
    assert made == [["wheels", "check-wheels"]]
    assert set(*made) <= targets
