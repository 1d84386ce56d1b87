"""Tests that break their run in one way each, for :mod:`st.rank_side_selftest`; never collected by themselves."""
