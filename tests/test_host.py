"""Free memory and cores are what the machine and the control groups leave."""

from pathlib import Path

import pytest

from segue.errors import OutOfMemoryError
from segue.host import free_cpu_memory, keep_freed_memory, usable_cores


def _fake_root(root: Path, cgroup: str, files: dict[str, str], available_kib: int = 8_000_000) -> Path:
    files = {
        "proc/meminfo": f"MemTotal: 9000000 kB\nMemFree: 5 kB\nMemAvailable:  {available_kib} kB\n",
        "proc/self/cgroup": cgroup,
        **files,
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_without_control_groups_the_machine_decides(tmp_path):
    assert free_cpu_memory(_fake_root(tmp_path, "", {})) == 8_000_000 * 1024


def test_cgroup_v2_limit_minus_usage(tmp_path):
    files = {"sys/fs/cgroup/app/memory.max": "3000000\n", "sys/fs/cgroup/app/memory.current": "1000000\n"}
    assert free_cpu_memory(_fake_root(tmp_path, "0::/app\n", files)) == 2_000_000


def test_cgroup_v2_counts_clean_file_cache_as_free(tmp_path):
    files = {
        "sys/fs/cgroup/app/memory.max": "3000000\n",
        "sys/fs/cgroup/app/memory.current": "2900000\n",
        "sys/fs/cgroup/app/memory.stat": "anon 1000000\ninactive_file 1900000\nactive_file 5\n",
    }
    assert free_cpu_memory(_fake_root(tmp_path, "0::/app\n", files)) == 2_000_000


def test_cgroup_v2_tightest_ancestor_decides(tmp_path):
    files = {
        "sys/fs/cgroup/a/memory.max": "5000000\n",
        "sys/fs/cgroup/a/memory.current": "4000000\n",
        "sys/fs/cgroup/a/b/memory.max": "3000000\n",
        "sys/fs/cgroup/a/b/memory.current": "1000000\n",
    }
    assert free_cpu_memory(_fake_root(tmp_path, "0::/a/b\n", files)) == 1_000_000


def test_cgroup_v2_without_limit_leaves_the_machine(tmp_path):
    files = {"sys/fs/cgroup/app/memory.max": "max\n", "sys/fs/cgroup/app/memory.current": "1000000\n"}
    assert free_cpu_memory(_fake_root(tmp_path, "0::/app\n", files)) == 8_000_000 * 1024


def test_cgroup_v1_limit_minus_usage(tmp_path):
    files = {
        "sys/fs/cgroup/memory/app/memory.limit_in_bytes": "3000000\n",
        "sys/fs/cgroup/memory/app/memory.usage_in_bytes": "1500000\n",
        "sys/fs/cgroup/memory/app/memory.stat": "inactive_file 7\ntotal_inactive_file 500000\n",
    }
    assert free_cpu_memory(_fake_root(tmp_path, "3:cpu,cpuacct:/x\n9:memory:/app\n", files)) == 2_000_000


def test_cgroup_v1_path_of_the_host_falls_back_to_the_mount(tmp_path):
    files = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "3000000\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000000\n",
    }
    assert free_cpu_memory(_fake_root(tmp_path, "9:memory:/docker/0123abcd\n", files)) == 2_000_000


def test_cgroup_above_its_limit_leaves_nothing(tmp_path):
    files = {"sys/fs/cgroup/app/memory.max": "1000000\n", "sys/fs/cgroup/app/memory.current": "1000001\n"}
    assert free_cpu_memory(_fake_root(tmp_path, "0::/app\n", files)) == 0


def test_this_machine_has_free_memory():
    assert free_cpu_memory() > 0


def test_a_machine_that_does_not_say_what_is_free_is_an_error(tmp_path):
    with pytest.raises(OutOfMemoryError, match="set --num-kv-tokens"):
        free_cpu_memory(tmp_path)


def test_keep_freed_memory_can_be_called_twice():
    keep_freed_memory()
    keep_freed_memory()


def test_cores_are_those_of_the_tightest_quota(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(12))
    files = {"sys/fs/cgroup/cpu.max": "max 100000\n"}
    assert usable_cores(_fake_root(tmp_path, "0::/a/b\n", files)) == 12
    files = {"sys/fs/cgroup/a/cpu.max": "350000 100000\n", "sys/fs/cgroup/a/b/cpu.max": "900000 100000\n"}
    assert usable_cores(_fake_root(tmp_path, "0::/a/b\n", files)) == 3
    assert usable_cores(_fake_root(tmp_path, "0::/a\n", {"sys/fs/cgroup/a/cpu.max": "50000 100000\n"})) == 1
    v1 = "4:cpu,cpuacct:/x\n9:memory:/y\n"
    files = {
        "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "200000\n",
        "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
    }
    assert usable_cores(_fake_root(tmp_path / "v1", v1, files)) == 2
    files["sys/fs/cgroup/cpu/x/cpu.cfs_quota_us"] = "-1\n"
    assert usable_cores(_fake_root(tmp_path / "unlimited", v1, files)) == 12
