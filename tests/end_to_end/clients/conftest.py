"""What the clients that run as programs of their own need."""

from pathlib import Path

import pytest

from tests.end_to_end.clients.tokenizer_folder import write_tokenizer_folder
from tests.fakes.demo_model import demo_model_path


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2-tokenizer")
    write_tokenizer_folder(demo_model_path(), folder)
    return folder
