import json
from pathlib import Path

import pytest
import torch

from loadtest import figures


def test_figures_are_written_after_date_label_and_machine(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    figures.write(file, label="here", copy_gbps=1.5, rows=[{"us": 2.0}])
    content = json.loads(file.read_text())
    assert list(content) == ["date", "label", "gpu", "torch", "triton", "copy_gbps", "rows"]
    assert (content["label"], content["torch"], content["rows"]) == ("here", torch.__version__, [{"us": 2.0}])
    assert (content["gpu"] is None) is not torch.cuda.is_available()


def test_what_is_not_there_is_said_to_be_unknown_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert figures.commit() == "unknown"
    assert figures.driver() == ("unknown", "unknown", "unknown")
    assert set(figures.versions()) == {"python", "torch", "triton", "transformers", "tokenizers", "uvloop"}
