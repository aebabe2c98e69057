"""The number of compute threads: CPUs, quotas of control groups, what a user sets."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from pagedserve.host_ops import threads
from pagedserve.host_ops.threads import ThreadWaits, cpu_quota, limit_threads, num_compute_threads


class Groups:
    """Control groups of a process, as files under a folder."""

    def __init__(self, folder: Path) -> None:
        self.root, self.membership = folder / "cgroup", folder / "membership"
        self.membership.write_text("")

    def join(self, line: str) -> None:
        with self.membership.open("a") as file:
            file.write(f"{line}\n")

    def write(self, **files: str) -> None:
        for name, text in files.items():
            path = self.root / name.replace("__", "/").replace("_max", ".max")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")

    def limit(self, folder: str, quota: int, period: int = 100_000) -> None:
        """A quota as version 1 writes it."""
        (self.root / folder).mkdir(parents=True, exist_ok=True)
        (self.root / folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (self.root / folder / "cpu.cfs_period_us").write_text(f"{period}\n")

    @property
    def quota(self) -> float | None:
        return cpu_quota(self.root, self.membership)


@pytest.fixture
def groups(tmp_path: Path) -> Groups:
    return Groups(tmp_path)


def test_no_group_has_no_quota(groups: Groups, tmp_path: Path) -> None:
    assert groups.quota is None
    assert cpu_quota(tmp_path, tmp_path / "absent") is None
    groups.join("0::/some/slice")
    assert groups.quota is None


@pytest.mark.parametrize(
    ("text", "quota"),
    [("max 100000", None), ("150000 100000", 1.5), ("5000 10000", 0.5), ("", None), ("?", None)],
)
def test_version_2(groups: Groups, text: str, quota: float | None) -> None:
    groups.join("0::/a/b")
    groups.write(a__b__cpu_max=text)
    assert groups.quota == quota


def test_smallest_quota_of_all_groups_around(groups: Groups) -> None:
    groups.join("0::/a/b")
    groups.write(a__b__cpu_max="400000 100000", a__cpu_max="250000 100000")
    groups.write(c__cpu_max="100000 100000")  # another process's
    assert groups.quota == 2.5


def test_container_whose_group_is_the_mounted_one(groups: Groups) -> None:
    groups.join("0::/")
    groups.write(cpu_max="200000 100000")
    assert groups.quota == 2.0


@pytest.mark.parametrize("mounted", ["cpu", "cpu,cpuacct"])
def test_version_1(groups: Groups, mounted: str) -> None:
    groups.join("4:memory:/docker/1")
    groups.join("3:cpu,cpuacct:/docker/1")
    groups.limit(mounted, -1)
    groups.limit(f"{mounted}/docker/1", 50_000)
    assert groups.quota == 0.5


def test_version_1_beside_version_2(groups: Groups) -> None:
    groups.join("2:cpu:/")
    groups.join("0::/a")
    groups.limit("cpu", 300_000)
    groups.write(unified__a__cpu_max="max 100000")
    assert groups.quota == 3.0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine of four CPUs without variables, and a process without torch."""
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 5})
    return monkeypatch


@pytest.mark.parametrize(
    ("quota", "number"), [(None, 4), (8.0, 4), (2.0, 2), (1.5, 2), (1.0, 1), (0.2, 1)]
)
def test_threads_follow_affinity_and_quota(
    machine: pytest.MonkeyPatch, quota: float | None, number: int
) -> None:
    machine.setattr(threads, "cpu_quota", lambda: quota)
    assert num_compute_threads() == limit_threads(4) == number


@pytest.mark.parametrize(("text", "number"), [("3", 3), ("6,2", 6), ("0", 1), ("many", 1)])
def test_a_number_that_is_set_is_used(machine: pytest.MonkeyPatch, text: str, number: int) -> None:
    machine.setattr(threads, "cpu_quota", lambda: 1.0)
    machine.setenv("OMP_NUM_THREADS", text)
    assert num_compute_threads() == number


def test_torch_says_how_many_where_it_is_imported(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(threads, "cpu_quota", lambda: None)
    machine.setattr(sys.modules["torch"], "get_num_threads", lambda: 3, raising=False)
    assert num_compute_threads() == 3
    machine.setattr(threads, "cpu_quota", lambda: 1.5)
    assert num_compute_threads() == 2


def test_torch_threads_are_limited_by_the_quota_alone(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(threads, "cpu_quota", lambda: None)
    assert limit_threads(9) == 9
    machine.setattr(threads, "cpu_quota", lambda: 1.5)
    assert [limit_threads(number) for number in (1, 2, 9)] == [1, 2, 2]
    machine.setenv("OMP_NUM_THREADS", "9")
    assert limit_threads(9) == 9


CONTROLLER = Path("/sys/fs/cgroup/cpu")


def can_limit() -> bool:
    """Whether this machine lets the tests make a group of version 1."""
    group = CONTROLLER / "pagedserve-test"
    try:
        group.mkdir()
        group.rmdir()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not can_limit(), reason="no control group can be made here")
def test_quota_of_a_real_group() -> None:
    group = CONTROLLER / f"pagedserve-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpu.cfs_quota_us").write_text("100000")
        (group / "cpu.cfs_period_us").write_text("100000")
        code = (
            "import os, sys\n"
            "open(sys.argv[1], 'w').write(str(os.getpid()))\n"
            "from pagedserve.host_ops.threads import cpu_quota, num_compute_threads\n"
            "print(cpu_quota(), num_compute_threads())"
        )
        environment = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"}
        done = subprocess.run(
            [sys.executable, "-c", code, group / "cgroup.procs"],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split() == ["1.0", "1"]
    finally:
        group.rmdir()


def test_waits_add_up() -> None:
    assert ThreadWaits.total([]) == ThreadWaits()
    both = ThreadWaits.total([ThreadWaits(1, 2, 0.5), ThreadWaits(10, 20, 1.0)])
    assert both == ThreadWaits(11, 22, 1.5)
    first, second = ThreadWaits.now(), ThreadWaits.now()
    assert all(later >= before for before, later in zip(first, second, strict=True))
