"""The fixtures of tests/conftest.py, for the tests of the engine and of the launcher."""

from tests.conftest import _no_way_out, _outside_of_any_job, _signals, pytest_configure, rows, run_root

__all__ = ["_no_way_out", "_outside_of_any_job", "_signals", "pytest_configure", "rows", "run_root"]
