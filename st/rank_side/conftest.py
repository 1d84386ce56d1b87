"""Makes the tests below this folder rank-side tests; see :mod:`st.rank_side.harness`."""

from st.rank_side.harness import (
    pytest_addoption,
    pytest_cmdline_main,
    pytest_collection_finish,
    pytest_configure,
    pytest_itemcollected,
    pytest_runtest_call,
    pytest_runtest_setup,
    pytest_runtest_teardown,
    pytest_sessionfinish,
    pytest_unconfigure,
    shared_folder,
)

__all__ = [
    "pytest_addoption",
    "pytest_cmdline_main",
    "pytest_collection_finish",
    "pytest_configure",
    "pytest_itemcollected",
    "pytest_runtest_call",
    "pytest_runtest_setup",
    "pytest_runtest_teardown",
    "pytest_sessionfinish",
    "pytest_unconfigure",
    "shared_folder",
]
