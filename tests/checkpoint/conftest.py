from pathlib import Path

import pytest

from segue.checkpoint.bundled import ensure_bundled_model
from segue.config import default_cache_dir


@pytest.fixture(scope="session")
def bundled_path() -> Path:
    """Returns the path of the bundled model's GGUF file, which `make model` has fetched."""
    return ensure_bundled_model(Path(default_cache_dir()))
