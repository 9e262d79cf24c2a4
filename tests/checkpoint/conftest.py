from pathlib import Path

import pytest

from segue.checkpoint.bundled import ensure_bundled_model
from segue.config import default_cache_dir


@pytest.fixture(scope="session")
def bundled_path() -> Path:
    """The bundled model's GGUF file; `make` has fetched it."""
    return ensure_bundled_model(Path(default_cache_dir()))
