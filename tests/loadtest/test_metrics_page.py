from loadtest.metrics_page import MetricSample, samples, totals

PAGE = (
    "# HELP a:steps_total Steps.\n# TYPE a:steps_total counter\n"
    'a:steps_total{engine="0",model_name="x, y}\\" z"} 3.0\na:steps_total{engine="1"} 4.5\n'
    "process_cpu_seconds_total 1.25e+01\n"
)


def test_a_page_is_added_up_by_name() -> None:
    found = totals(PAGE)
    assert found["a:steps_total"] == 7.5
    assert found["process_cpu_seconds_total"] == 12.5
    assert "absent" not in found
    assert found["absent"] == 0


def test_a_sample_has_its_labels_whatever_they_hold() -> None:
    assert list(samples(PAGE)) == [
        MetricSample("a:steps_total", {"engine": "0", "model_name": 'x, y}\\" z'}, 3.0),
        MetricSample("a:steps_total", {"engine": "1"}, 4.5),
        MetricSample("process_cpu_seconds_total", {}, 12.5),
    ]
