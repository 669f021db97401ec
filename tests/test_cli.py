import dataclasses
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from asyncserve.cli import option_help, read_config, to_yaml
from asyncserve.config import GROUPS, BatchConfig, ServerConfig
from asyncserve.errors import ConfigError


def read(*argv: str, environ: Mapping[str, str] | None = None) -> ServerConfig:
    return read_config(argv, environ or {}, ServerConfig)


def read_batch(*argv: str, environ: Mapping[str, str] | None = None) -> BatchConfig:
    return read_config(argv, environ or {}, BatchConfig)


def refusal(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        read_config(argv, environ or {}, ServerConfig)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "server.yaml"
    path.write_text(
        "model: from-file\nport: 9000\nmax_num_seqs: 3\nserved-model-name: [a, b]\n"
        "enable_prefix_caching: false\nmax_model_len: 32k\nrevision: null\n"
    )
    return path


def test_the_model_may_stand_first_or_behind_serve_or_be_a_flag() -> None:
    for argv in (["m"], ["serve", "m"], ["--model", "m"], ["serve", "--model=m"], ["--port", "1", "m"]):
        assert read(*argv).model == "m"


def test_defaults_are_those_of_the_dataclass() -> None:
    assert read("m") == ServerConfig(model="m")


NOT_ALONE = {
    "root_path",
    "ssl_keyfile",
    "ssl_ca_certs",
    "ssl_cert_reqs",
    "ssl_ciphers",
    "kv_cache_memory_bytes",
    "otlp_traces_endpoint",
}
"""Options that a plain 7 does not do for."""


def test_every_option_is_a_flag_with_dashes_or_underscores() -> None:
    for option in dataclasses.fields(ServerConfig):
        kept = getattr(ServerConfig(model="m"), option.name)
        if kept is True or kept is False:
            negated = read("m", f"--no-{option.name}")
            assert getattr(negated, option.name) is False
            assert negated == read("m", f"--no-{option.name.replace('_', '-')}")
        elif kept is None and option.name not in NOT_ALONE:
            for flag in (f"--{option.name}", f"--{option.name.replace('_', '-')}"):
                assert float(getattr(read("m", flag, "7"), option.name)) == 7


def test_swap_space_has_the_name_it_has_elsewhere_too() -> None:
    assert (
        read("m", "--swap-space", "4").swap_space_gib == read("m", "--swap-space-gib=4").swap_space_gib == 4
    )


def test_underscores_in_values_stay() -> None:
    assert read("m", "--served-model-name=my_model", "--tokenizer", "a_b").served_model_name == ("my_model",)
    assert read("my_model").model == "my_model"


def test_several_values_follow_a_flag_or_repeat_it() -> None:
    assert read("m", "--api-key", "a", "b").api_key == ("a", "b")
    assert read("m", "--api-key", "a", "--api-key=b").api_key == ("a", "b")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("32", 32),
        ("32k", 32_000),
        ("32K", 32_768),
        ("1.5k", 1_500),
        ("4GiB", 4 << 30),
        ("4G", 4 << 30),
        ("4GB", 4 * 10**9),
        ("2kB", 2_000),
        ("2KB", 2_000),
        ("2m", 2_000_000),
    ],
)
def test_sizes_are_read_with_their_units(text: str, value: int) -> None:
    assert read("m", "--max-model-len", text).max_model_len == value


@pytest.mark.parametrize("text", ["", "x", "1.5", "k", "3 apples", "1e3", "0x10", "4KK"])
def test_what_is_no_whole_number_is_refused(text: str) -> None:
    assert "--max-model-len" in refusal(["m", f"--max-model-len={text}"])


def test_command_line_goes_before_environment_before_file_before_default(config_file: Path) -> None:
    environ = {"ASYNCSERVE_PORT": "9001", "ASYNCSERVE_MAX_NUM_SEQS": "4", "ASYNCSERVE_API_KEY": "x,y"}
    config = read("--config", str(config_file), "--port", "9002", environ=environ)
    assert (config.port, config.max_num_seqs, config.max_model_len) == (9002, 4, 32_000)
    assert config.served_model_name == ("a", "b")
    assert config.api_key == ("x", "y")
    assert config.enable_prefix_caching is False
    assert config.revision is None
    assert config.block_size == ServerConfig(model="m").block_size


def test_a_list_replaces_the_one_of_a_lesser_source(config_file: Path) -> None:
    assert read("--config", str(config_file), "--served-model-name", "c").served_model_name == ("c",)
    environ = {"ASYNCSERVE_SERVED_MODEL_NAME": "d"}
    assert read("--config", str(config_file), environ=environ).served_model_name == ("d",)


def test_a_switch_can_be_turned_back_on_by_a_greater_source(config_file: Path) -> None:
    config = read("--config", str(config_file), environ={"ASYNCSERVE_ENABLE_PREFIX_CACHING": "on"})
    assert config.enable_prefix_caching is True


def test_the_environment_may_name_the_config_file(config_file: Path) -> None:
    assert read(environ={"ASYNCSERVE_CONFIG": str(config_file)}).model == "from-file"


def test_an_empty_variable_sets_nothing() -> None:
    empty = {"ASYNCSERVE_MAX_MODEL_LEN": "", "ASYNCSERVE_PORT": ""}
    assert read("m", environ=empty) == ServerConfig(model="m")


def test_an_api_key_that_came_out_empty_does_not_open_the_server(tmp_path: Path) -> None:
    """`--api-key $KEY` with KEY unset, and an empty variable, once meant that no key was needed."""
    with pytest.raises(ConfigError, match="api-key"):
        read("m", "--api-key", "--port", "1")
    with pytest.raises(ConfigError, match="api_key may not be empty"):
        read("m", "--api-key", "")
    with pytest.raises(ConfigError, match="api_key may not be empty"):
        read("m", environ={"ASYNCSERVE_API_KEY": ""})
    file = tmp_path / "c.yaml"
    file.write_text("api_key: []")
    with pytest.raises(ConfigError, match="empty list"):
        read("m", "--config", str(file))


def test_an_unknown_variable_is_ignored_with_a_warning_that_names_the_nearest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        read("m", environ={"ASYNCSERVE_MAX_MODEL_LEM": "3"})
    assert "ASYNCSERVE_MAX_MODEL_LEN?" in caplog.text


def test_the_variables_kubernetes_sets_for_a_service_of_our_name_do_no_harm(
    caplog: pytest.LogCaptureFixture,
) -> None:
    environ = {"ASYNCSERVE_PORT": "tcp://10.0.0.1:8000", "ASYNCSERVE_SERVICE_HOST": "10.0.0.1"}
    with caplog.at_level(logging.WARNING):
        assert read("m", environ=environ).port == 8000
    assert "Kubernetes" in caplog.text


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["model is missing"]),
        (["m", "n"], ["n"]),
        (["m", "--model", "n"], ["m", "n", "twice"]),
        (["m", "--prot", "3"], ["--prot", "--port"]),
        (["m", "--port", "x"], ["--port", "'x'"]),
        (["m", "--port"], ["--port"]),
        (["m", "--port", "70000"], ["port", "70000", "65535"]),
        (["m", "--dtype", "int8"], ["--dtype", "int8", "bfloat16"]),
        (["m", "--shutdown-timeout", "soon"], ["--shutdown-timeout", "soon"]),
        (["m", "--gpu-memory-utilization", "nan"], ["gpu_memory_utilization", "nan"]),
        (["m", "--config", "/nowhere.yaml"], ["/nowhere.yaml"]),
    ],
)
def test_a_wrong_command_line_is_one_line_that_names_the_option(argv: list[str], words: list[str]) -> None:
    message = refusal(argv)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("prot: 3", ["'prot'", "port?"]),
        ("config: other.yaml", ["'config'"]),
        ("port: x", ["--port", "x"]),
        ("port: [1, 2]", ["port", "[1, 2]"]),
        ("port: {a: 1}", ["port"]),
        ("port: true", ["port", "True"]),
        ("enable_prefix_caching: 3", ["enable_prefix_caching", "true or false"]),
        ("- model", ["list"]),
        ("model: [", ["YAML"]),
        ("served_model_name: [[a]]", ["served_model_name"]),
    ],
)
def test_a_wrong_file_is_one_line_that_names_file_and_key(
    tmp_path: Path, content: str, words: list[str]
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    message = refusal(["m", "--config", str(path)])
    assert all(word in message for word in [str(path), *words]), message


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in refusal(["m", "--config", str(path)])


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("")
    assert read("m", "--config", str(path)) == ServerConfig(model="m")


def test_a_wrong_variable_is_named_as_such() -> None:
    assert "environment" in refusal(["m"], {"ASYNCSERVE_PORT": "x"})
    message = refusal(["m"], {"ASYNCSERVE_ENABLE_PREFIX_CACHING": "perhaps"})
    assert "ASYNCSERVE_ENABLE_PREFIX_CACHING" in message


def test_the_printed_config_reads_back_as_the_same_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["m: #x", "--served-model-name", "a", "1", "--max-model-len", "1k", "--no-async-scheduling"]
    with pytest.raises(SystemExit) as stop:
        read(*argv, "--print-config")
    assert stop.value.code == 0
    path = tmp_path / "printed.yaml"
    path.write_text(capsys.readouterr().out)
    assert read("--config", str(path)) == read(*argv)


def test_secrets_are_neither_printed_nor_in_the_representation() -> None:
    config = read("m", "--api-key", "hush")
    assert "hush" not in to_yaml(config)
    assert "hush" not in repr(config)


def test_help_shows_every_option_with_its_text_under_its_heading(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        read("--help")
    assert stop.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for option in dataclasses.fields(ServerConfig):
        text = " ".join(option_help()[option.name].split())
        assert f"--{option.name.replace('_', '-')}" in shown
        assert text in shown
    headings = [GROUPS[option.name] for option in dataclasses.fields(ServerConfig) if option.name in GROUPS]
    positions = [shown.index(f"{heading}: --") for heading in headings]
    assert positions == sorted(positions)


def test_every_heading_stands_at_an_option() -> None:
    assert set(GROUPS) <= {option.name for option in dataclasses.fields(BatchConfig)}


def test_a_batch_has_the_servers_options_and_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    config = read_batch("m", "-i", "in", "-o", "-", "--max-num-seqs", "3", "--max-concurrency", "1k")
    assert config == BatchConfig(
        model="m", input_file="in", output_file="-", max_num_seqs=3, max_concurrency=1000
    )
    assert (
        read_batch("--model", "m", "--input-file=in", "--output_file", "-", "--max-num-seqs=3").model == "m"
    )
    environ = {"ASYNCSERVE_INPUT_FILE": "in", "ASYNCSERVE_PORT": "1"}
    assert read_batch("m", "-o", "out", environ=environ).input_file == "in"
    with pytest.raises(SystemExit):
        read_batch("--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert "usage: asyncserve run-batch MODEL -i IN.jsonl -o OUT.jsonl" in shown
    assert "-i FILE, --input-file FILE" in shown
    assert all(text.split()[0] in shown for text in option_help(BatchConfig).values())


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["m", "-i", "in"], ["output_file is missing", "asyncserve run-batch --output-file"]),
        (["m", "-o", "out"], ["input_file is missing", "ASYNCSERVE_INPUT_FILE"]),
        (["-i", "in", "-o", "out"], ["model is missing", "asyncserve run-batch MODEL"]),
        (["m", "in", "-i", "in", "-o", "out"], ["unknown argument in"]),
        (["m", "-i", "in", "-o", "out", "--max-concurrency", "0"], ["max_concurrency is 0"]),
        (["m", "-i", "in", "-o", "out", "--port", "-1"], ["port is -1"]),
    ],
)
def test_a_wrong_batch_is_one_line_that_names_the_option(argv: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_batch(*argv)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_an_option_of_batches_is_none_of_the_servers() -> None:
    assert "--input-file" in refusal(["m", "--input-file", "in"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "status", "stdout", "stderr"),
    [
        (["--version"], 0, "asyncserve 0.1.0\n", ""),
        (["--port", "x", "m"], 2, "", "asyncserve: error: argument --port"),
        (["m", "--max-num-seqs", "0"], 2, "", "asyncserve: error: max_num_seqs is 0"),
    ],
)
def test_the_program_ends_with_the_right_status_and_no_traceback(
    argv: list[str], status: int, stdout: str, stderr: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "asyncserve", *argv], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (status, stdout)
    assert done.stderr.startswith(stderr)
    assert done.stderr.count("\n") == (1 if stderr else 0)


@pytest.mark.slow
def test_faults_that_are_written_wrongly_are_a_wrong_option() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "asyncserve", "m"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "ASYNCSERVE_FAULTS": "fail-step=soon"},
    )
    assert done.returncode == 2
    assert done.stderr.startswith("asyncserve: error: ASYNCSERVE_FAULTS: 'fail-step=soon'")
    assert done.stderr.count("\n") == 1
