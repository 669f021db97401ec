from loadtest.gpu.server_process import command, samples


def test_a_metrics_page_is_added_up_by_name() -> None:
    page = (
        "# HELP a:steps_total Steps.\n# TYPE a:steps_total counter\n"
        'a:steps_total{engine="0",model_name="x y}"} 3.0\na:steps_total{engine="1"} 4.5\n'
        "process_cpu_seconds_total 1.25e+01\n"
    )
    found = samples(page)
    assert found["a:steps_total"] == 7.5
    assert found["process_cpu_seconds_total"] == 12.5
    assert found["absent"] == 0


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
