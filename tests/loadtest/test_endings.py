"""How a server ends, with a tiny one."""

from pathlib import Path

import pytest

from loadtest.endings import killed, main, terminated, to_markdown
from tests.fakes.tiny_model import tiny_llama_folder
from tests.fakes.tiny_tokenizer import write_tiny_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tiny_llama_folder(tmp_path_factory.mktemp("tiny"), max_position_embeddings=1024)
    write_tiny_tokenizer(folder, vocab_size=320)
    return str(folder)


def test_no_request_under_way_is_cut_by_sigterm_and_later_ones_are_refused(
    model: str, tmp_path: Path
) -> None:
    found = terminated(model, num_clients=16, after_s=0.5, output_len=64, log=tmp_path / "log")
    assert found["why"] == []
    assert found["in flight at SIGTERM"] == found["of these whole"] == 16
    assert found["sent later and refused"] == 16
    assert found["exit status"] == 0


def test_a_killed_server_is_ready_again_on_its_port(model: str, tmp_path: Path) -> None:
    found = killed(model, times=1, num_clients=4, after_s=0.2, log=tmp_path / "log")
    live, ready, token = (found[f"seconds to {what}"]["median"] for what in ("live", "ready", "a token"))
    assert 0 < live <= ready <= token
    text = to_markdown(
        {
            "date": "2026-01-01T00:00:00",
            "command": "c",
            "version": "1",
            "model": "tiny",
            "term": {"cut": 1, "why": ["gone"]},
            "kill": found,
        }
    )
    assert "| cut | 1 |\n| cut since | gone |" in text
    assert "| seconds to ready |" in text


def test_a_server_that_does_not_start_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(tmp_path / "none")]) == 2
    assert "the server ended with status 1" in capsys.readouterr().err
