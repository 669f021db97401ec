import pytest

from loadtest.gpu.kernel_times import Span, table


def test_kernels_are_added_up_per_step_and_overlaps_counted_once_as_busy() -> None:
    spans = [
        Span("gemm", 0.0, 10.0),
        Span("norm", 8.0, 12.0),  # begins while the product still runs
        Span("gemm", 20.0, 30.0),
        Span("norm", 22.0, 24.0),  # within it
    ]
    figures = table(spans, 2)
    assert figures["device_us"] == pytest.approx(15.0)
    assert figures["busy_us"] == pytest.approx(11.0)
    assert figures["sum_us"] == pytest.approx(13.0)
    gemm, norm = figures["kernels"]
    assert (gemm["name"], gemm["calls"], gemm["us"]) == ("gemm", 1.0, 10.0)
    assert norm["share"] == pytest.approx(6 / 26)


def test_a_profile_without_kernels_is_a_table_without_rows() -> None:
    assert table([], 3)["kernels"] == []
