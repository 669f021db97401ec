from loadtest.server_process import command


def test_options_are_spelled_as_the_command_line_takes_them() -> None:
    options = {"enforce_eager": True, "enable_prefix_caching": False, "sizes": (1, 2), "max_model_len": 64}
    words = command("model", options, port=81)[3:]
    assert words == [
        "model",
        "--host=127.0.0.1",
        "--port=81",
        "--enforce-eager",
        "--no-enable-prefix-caching",
        "--sizes",
        "1",
        "2",
        "--max-model-len=64",
    ]
