"""What clients may have the server read."""

from pathlib import Path

import pytest

from segue.config import EngineConfig
from segue.errors import InvalidRequestError
from segue.messages.weight_operations import BeginUpdate, UpdateFromDisk
from segue.server.control_routes import limits
from tests.server.live import LiveServer

REQUEST = UpdateFromDisk(model_path="/models/a")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "localhost", "::1", "[::1]"])
def test_any_directory_may_be_read_on_a_loopback_address(host: str) -> None:
    assert limits(EngineConfig(host=host), REQUEST) == {"roots": None, "from_hub": False}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com"])
def test_elsewhere_an_admin_key_or_directories_are_needed(host: str) -> None:
    with pytest.raises(InvalidRequestError, match="--weights-root") as error:
        limits(EngineConfig(host=host, api_key="k"), REQUEST)
    assert error.value.param == "model_path"
    assert limits(EngineConfig(host=host, admin_api_key="k"), REQUEST)["roots"] is None
    with_roots = limits(EngineConfig(host=host, weights_root="/models:/more"), REQUEST)
    assert with_roots["roots"] == ["/models", "/more"]


def test_the_hub_and_other_calls() -> None:
    assert limits(EngineConfig(weights_from_hub=True), REQUEST)["from_hub"] is True
    assert limits(EngineConfig(host="0.0.0.0"), BeginUpdate()) == {}


def test_the_route_refuses(tiny_model: Path) -> None:
    with LiveServer(tiny_model, host="0.0.0.0") as server:
        for path, body in (
            ("/update_weights_from_disk", {"model_path": "/etc/passwd"}),
            ("/update_weights", {"weight_dir": "/etc"}),
        ):
            response = server.client.post(path, json=body)
            assert response.status_code == 400
            assert "--weights-root" in response.json()["message"]
