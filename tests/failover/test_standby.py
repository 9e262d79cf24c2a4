from __future__ import annotations

from pathlib import Path

from segue.failover.standby import count_standbys, has_standby, sign_of


def test_an_engine_that_waits_is_seen_until_it_ends(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    assert not has_standby(tmp_path, "default")
    sign = sign_of(tmp_path, "default", "engine-b")
    sign.acquire()
    assert has_standby(tmp_path, "default")
    assert not has_standby(tmp_path, "other")
    sign.release()
    assert not has_standby(tmp_path, "default"), "its file may stay, its lock does not"


def test_several_may_wait(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    signs = [sign_of(tmp_path, "default", name) for name in ("b", "c")]
    for sign in signs:
        sign.acquire()
    assert count_standbys(tmp_path, "default") == 2
    signs[0].release()
    assert count_standbys(tmp_path, "default") == 1
    assert has_standby(tmp_path, "default")
    signs[1].release()
    assert not has_standby(tmp_path, "default")
