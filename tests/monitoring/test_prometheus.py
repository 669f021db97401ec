"""Finding, fetching and configuring Prometheus."""

import subprocess
from pathlib import Path

import pytest
import yaml

from monitoring.prometheus import CONFIG, FOLDER, NotThere, config_for, fetch


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "https://llm.example.org/prefix/"])
def test_a_configuration_is_one_that_prometheus_takes(url: str, promtool: Path, tmp_path: Path) -> None:
    path = tmp_path / "prometheus.yml"
    path.write_text(config_for(url, api_key="secret", interval_s=0.25), encoding="utf-8")
    subprocess.run([promtool, "check", "config", path], check=True, capture_output=True)


def test_the_committed_configuration_is_one_too(promtool: Path) -> None:
    subprocess.run([promtool, "check", "config", CONFIG], check=True, capture_output=True)


def test_a_url_tells_scheme_address_and_path() -> None:
    config = yaml.safe_load(config_for("https://llm.example.org/prefix/", api_key="secret"))
    (job,) = config["scrape_configs"]
    assert job["scheme"] == "https"
    assert job["static_configs"] == [{"targets": ["llm.example.org"]}]
    assert job["metrics_path"] == "/prefix/metrics"
    assert job["authorization"] == {"credentials": "secret"}
    assert "authorization" not in config_for("http://127.0.0.1:8000")


def test_provisioned_files_name_what_is_there() -> None:
    compose = yaml.safe_load((FOLDER / "compose.yml").read_bytes())
    mounted = [
        volume.split(":")[0]
        for service in compose["services"].values()
        for volume in service["volumes"]
        if volume.startswith("./")
    ]
    assert mounted
    assert all((FOLDER / path).exists() for path in mounted)
    provider = yaml.safe_load((FOLDER / "grafana/provisioning/dashboards/asyncserve.yml").read_bytes())
    targets = [volume.split(":")[1] for volume in compose["services"]["grafana"]["volumes"]]
    assert provider["providers"][0]["options"]["path"] in targets


def test_a_system_without_apt_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotThere, match="apt-get"):
        fetch(tmp_path / "unpacked")


def test_a_package_that_cannot_be_had_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("apt-get", "dpkg-deb"):
        program = tmp_path / name
        program.write_text("#!/bin/sh\necho no route >&2\nexit 100\n", encoding="utf-8")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotThere, match="no route"):
        fetch(tmp_path / "unpacked")
    assert not (tmp_path / "unpacked").exists()
